"""The KV cache quantisation that a checkpoint specifies: kv_cache_scheme, and the tensors with its scales."""

import dataclasses
import re

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.quantized.config import Values, refused

# k_scale next to the attention's matrices, or inside k_proj (ModelOpt); older files: k_proj.output_scale
_SCALE = re.compile(r"(?:.*\.)?(?:[qkv]_scale|[kv]_proj\.output_scale)")
_ZERO = re.compile(r"(?:.*\.)?(?:[qkv]_zero_point|[kv]_proj\.output_zero_point)")
_DENSE = "delete kv_cache_scheme from config.json to use KV of 16 bits"


@dataclasses.dataclass(frozen=True)
class KvScheme:
    """Quantisation of the KV cache that the checkpoint was calibrated for."""

    kind: str       # "fp8" (e4m3fn) or "int8"
    is_static: bool  # the checkpoint has scales


def read_kv_scheme(config: Values) -> KvScheme | None:
    """Read kv_cache_scheme, or ModelOpt's kv_cache_quant_algo. Raises ModelLoadError for an unsupported value."""
    algorithm = config.choice("kv_cache_quant_algo", accepted=("fp8", "int8", None), remedy=_DENSE)
    if algorithm is not None:
        return KvScheme(algorithm, True)
    if "kv_cache_scheme" not in config:
        return None
    values = config.inner("kv_cache_scheme")
    values.choice("num_bits", accepted=(8,), default=8, remedy=_DENSE)
    values.choice("symmetric", accepted=(True,), default=True, remedy=_DENSE)
    kind = values.choice("type", accepted=("float", "int"), default="int", remedy=_DENSE)
    dynamic = values.get("dynamic", default=False)
    if not isinstance(dynamic, bool):
        raise refused("kv_cache_scheme.dynamic", dynamic, "must be true or false", _DENSE)
    return KvScheme("fp8" if kind == "float" else "int8", not dynamic)


def is_kv_tensor(name: str) -> bool:
    """Return True if a tensor has scales or zeros of the KV cache."""
    return _SCALE.fullmatch(name) is not None or _ZERO.fullmatch(name) is not None


def check_kv_zeros(checkpoint: TensorSource) -> None:
    """Raise ModelLoadError if a zero point of the KV cache is not 0."""
    for name in checkpoint.names:
        if _ZERO.fullmatch(name) and checkpoint.array(name).astype(np.float32).any():
            raise ModelLoadError(
                f"{checkpoint.path(name)}: {name} is not 0; jpaged supports only symmetric quantization of KV: {_DENSE}"
            )
