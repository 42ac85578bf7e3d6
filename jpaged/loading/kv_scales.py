"""Reads a checkpoint's static scales of keys and values, for fp8 pages."""

import re

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


def read_kv_scales(checkpoint: TensorSource, spec: DecoderSpec) -> KVScales | None:
    """The scales in a checkpoint: one number a layer, or one a KV head. None: the checkpoint has none.

    Raises ModelLoadError, which names the tensor, for a missing one, a wrong shape, or a scale that is not above 0.
    """
    matches = [(name, found) for name in checkpoint.names if (found := KV_SCALE.fullmatch(name))]
    names = {(int(found[1]), found["kind"] or found["of"]): name for name, found in matches}
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
            found = np.asarray(checkpoint.array(name), np.float32).reshape(-1)
            if found.size not in (1, spec.num_kv_heads):
                raise ModelLoadError(
                    f"{checkpoint.path(name)}: {checkpoint.label(name)} has {found.size} numbers: must have 1, or one "
                    f"for each of {spec.num_kv_heads} KV heads"
                )
            if not (np.isfinite(found) & (found > 0)).all():
                raise ModelLoadError(
                    f"{checkpoint.path(name)}: {checkpoint.label(name)} is {found.tolist()}: must be finite and above 0"
                )
            row[:] = found
    return KVScales(scales["k"], scales["v"])
