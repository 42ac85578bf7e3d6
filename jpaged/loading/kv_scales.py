"""Reads a checkpoint's static scales of keys and values, for fp8 pages."""

import re

import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource
from jpaged.models.kv_scales import KVScales
from jpaged.models.spec import DecoderSpec

# `model.layers.0.self_attn.k_scale`, ModelOpt's `model.layers.0.self_attn.k_proj.k_scale`, and the name that older
# compressed-tensors wrote, `model.layers.0.self_attn.k_proj.output_scale`
KV_SCALE = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:(?:[kv]_proj\.)?(?P<kind>[kv])_scale|(?P<of>[kv])_proj\.output_scale)"
)
_DTYPES = ("F16", "BF16", "F32")
_LARGEST = np.finfo(np.float32).max / np.float32(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def read_kv_scales(checkpoint: TensorSource, spec: DecoderSpec) -> KVScales | None:
    """Return a checkpoint's scales, one per layer or one per KV head; None: the checkpoint has none.

    Raises ModelLoadError for a missing scale, two scales of one layer, a wrong dtype or shape, and a scale that is not
    above 0 or makes keys infinite. It names the tensor.
    """
    names: dict[tuple[int, str], str] = {}
    for name in checkpoint.names:
        if (match := KV_SCALE.fullmatch(name)) is None:
            continue
        layer, kind = int(match[1]), match["kind"] or match["of"]
        if (before := names.setdefault((layer, kind), name)) != name:
            raise ModelLoadError(
                f"{checkpoint.path(name)}: {before} and {name} are both the scale of {kind} in layer {layer}: remove "
                "one, or use another checkpoint of the model"
            )
    if not names:
        return None
    scales = {kind: np.zeros((spec.num_layers, spec.num_kv_heads), np.float32) for kind in ("k", "v")}
    for kind, rows in scales.items():
        for layer, row in enumerate(rows):
            if (layer, kind) not in names:
                raise ModelLoadError(
                    f"{checkpoint.folder}: layers.{layer}.self_attn.{kind}_scale is missing, and other layers have "
                    "scales of the KV cache: the checkpoint is incomplete"
                )
            name = names[layer, kind]
            entry = checkpoint.entry(name)
            if entry.dtype not in _DTYPES:
                raise ModelLoadError(
                    f"{checkpoint.path(name)}: {checkpoint.label(name)} is {entry.dtype}{list(entry.shape)}, but must "
                    f"be {' or '.join(_DTYPES)}: the file is damaged, fetch it again"
                )
            found = np.asarray(checkpoint.array(name), np.float32).reshape(-1)
            if found.size not in (1, spec.num_kv_heads):
                raise ModelLoadError(
                    f"{checkpoint.path(name)}: {checkpoint.label(name)} has {found.size} numbers: must have 1, or one "
                    f"for each of {spec.num_kv_heads} KV heads"
                )
            if not ((found > 0) & (found <= _LARGEST)).all():
                numbers = ", ".join(f"{number:.6g}" for number in found.tolist())
                raise ModelLoadError(
                    f"{checkpoint.path(name)}: {checkpoint.label(name)} is [{numbers}]: must be finite and above 0, "
                    f"and at most {_LARGEST:.3g}, or keys and values are infinite"
                )
            row[:] = found
    return KVScales(scales["k"], scales["v"])
