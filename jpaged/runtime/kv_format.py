"""KVFormat: the dtype of an engine's KV pages (`EngineConfig.kv_cache_dtype`), and the static scales of fp8 pages."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import KV_CACHE_DTYPE_ALIASES, KV_CACHE_DTYPES
from jpaged.errors import ModelLoadError
from jpaged.kv_groups import KVGroups
from jpaged.models.kv_scales import KVScales
from jpaged.models.spec import DecoderSpec
from pallas_kernels import KVPages
from pallas_kernels.platforms import nvidia_capability

logger = logging.getLogger(__name__)

FP8 = np.dtype(jnp.float8_e4m3fn)
_TYPES = {"int8": np.dtype(np.int8), "fp8_e4m3": FP8}


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """Dtype and scales of the KV pages of every layer. Make it with `choose`."""

    dtype: np.dtype
    scales: KVScales | None = None  # static scales of fp8 pages; None: 1.0

    @classmethod
    def choose(
        cls, spec: DecoderSpec, name: str, dtype: np.dtype, device: Any, scales: KVScales | None = None
    ) -> "KVFormat":
        """The format of `kv_cache_dtype=name`.

        dtype: of the weights; pages of `auto` have it. device: a jax Device or a Target. scales: the checkpoint's. Only
        fp8 pages use them. Raises ModelLoadError for an unknown name, and if model or device cannot have such pages.
        """
        name = KV_CACHE_DTYPE_ALIASES.get(name, name)
        if name not in KV_CACHE_DTYPES:
            raise ModelLoadError(f"kv_cache_dtype={name!r}: must be one of {', '.join(KV_CACHE_DTYPES)}")
        if name == "auto":
            return cls(dtype)
        if spec.page_v_dim is not None:
            raise ModelLoadError(
                f"kv_cache_dtype={name!r}: the model has latent attention, whose pages keep the type of the weights: "
                "leave it at auto"
            )
        if spec.layer_kv and name == "fp8_e4m3" and scales is not None:
            raise ModelLoadError(
                f"kv_cache_dtype={name!r}: the checkpoint has scales of keys and values, which are not read yet for a "
                "model with unlike layers: leave it at auto"
            )
        if name == "int8" and len({(kv.heads, kv.head_dim) for kv in spec.layer_kv}) > 1:
            raise ModelLoadError(
                f"kv_cache_dtype={name!r}: the model's layers have KV heads of unlike sizes, which share pages without "
                "the scales that int8 has for each token: use kv_cache_dtype='fp8_e4m3', or leave it at auto"
            )
        if name != "fp8_e4m3":
            return cls(_TYPES[name])
        capability = nvidia_capability(device)
        if device.platform == "gpu" and (capability is None or capability < (8, 9)):
            has = "is not from NVIDIA" if capability is None else f"has {'.'.join(map(str, capability))}"
            raise ModelLoadError(
                f"kv_cache_dtype={name!r} needs an NVIDIA card of compute capability 8.9 (Ada) or newer, and "
                f"{device.device_kind} {has}: use kv_cache_dtype='int8', or leave it at auto"
            )
        shape = (spec.num_layers, spec.num_kv_heads)
        if scales is not None and scales.keys.shape != shape:
            raise ModelLoadError(
                f"kv_scales {list(scales.keys.shape)}: must be [layers, kv_heads], {list(shape)} for this model"
            )
        return cls(FP8, scales)

    def of_layers(self, layers: range) -> "KVFormat":
        """The format of a pipeline stage: the scales of its layers."""
        if self.scales is None:
            return self
        first, end = layers.start, layers.stop
        return dataclasses.replace(self, scales=KVScales(self.scales.keys[first:end], self.scales.values[first:end]))

    def log(self) -> None:
        """Warn if the checkpoint has no scales for fp8 pages."""
        if self.dtype == FP8 and self.scales is None:
            logger.warning(
                "kv_cache_dtype='fp8_e4m3': the checkpoint has no scales of keys and values, so they are 1.0. Numbers "
                "above 448 are clipped. int8 has a scale for each token and needs none"
            )

    def page_shapes(
        self, spec: DecoderSpec, block_size: int, num_blocks: int = 1, sharding: jax.sharding.Sharding | None = None
    ) -> KVPages:
        """One page array, as ShapeDtypeStructs."""
        return KVPages.shapes(
            num_blocks, spec.lines(block_size), spec.num_kv_heads, spec.head_dim, self.dtype, v_dim=spec.page_v_dim,
            sharding=sharding,
        )  # fmt: skip

    def create_pages(
        self, spec: DecoderSpec, kv_groups: KVGroups, block_size: int, num_blocks: int, sharding: Any
    ) -> list[KVPages]:
        """Allocate all page arrays, empty."""
        scales = self._array_scales(kv_groups)
        return [
            KVPages.create(
                num_blocks, spec.lines(block_size), spec.num_kv_heads, spec.head_dim, self.dtype, v_dim=spec.page_v_dim,
                fp8_scales=None if scales is None else scales[index], device=sharding,
            )
            for index in range(kv_groups.num_arrays)
        ]  # fmt: skip

    def _array_scales(self, kv_groups: KVGroups) -> np.ndarray | None:
        """Scales of each page array, float32[arrays, 2, kv_heads], or None.

        Layers of different KV groups share an array. It has their largest scale, so no layer clips more. A larger scale
        does not change the relative precision of a float.
        """
        if self.scales is None:
            return None
        both = np.stack([self.scales.keys, self.scales.values], axis=1).astype(np.float32)  # [layers, 2, kv_heads]
        arrays = np.zeros((kv_groups.num_arrays, *both.shape[1:]), np.float32)
        for layer, places in enumerate(kv_groups.places):
            for place in places:
                if place.page_array < len(arrays):  # not a place of recurrent state
                    arrays[place.page_array] = np.maximum(arrays[place.page_array], both[layer])
        return arrays
