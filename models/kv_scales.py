"""KVScales: static scales for 8-bit keys and values, from a checkpoint."""

import dataclasses

import numpy as np

from jpaged.errors import ModelLoadError


@dataclasses.dataclass(frozen=True, eq=False)
class KVScales:
    """Factors of stored keys and values: number = stored * scale. For fp8 pages only."""

    keys: np.ndarray    # float32[layers, kv_heads]
    values: np.ndarray  # float32[layers, kv_heads]

    def __post_init__(self) -> None:
        """Raise ModelLoadError unless both arrays have the same shape, and all scales are finite and above 0."""
        for name, scales, other in (("k_scale", self.keys, self.values), ("v_scale", self.values, self.keys)):
            if scales.ndim != 2 or scales.shape != other.shape:
                raise ModelLoadError(f"{name} {list(scales.shape)}: both must be [layers, kv_heads], of the same shape")
            for layer in np.flatnonzero(~(np.isfinite(scales) & (scales > 0)).all(axis=1)):
                raise ModelLoadError(
                    f"layer {layer}: {name}={scales[layer].tolist()}: must be finite and above 0. The checkpoint's "
                    "scale is broken: start with kv_cache_dtype='int8' or 'auto', which do not use it"
                )
