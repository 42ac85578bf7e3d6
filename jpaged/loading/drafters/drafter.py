"""`load_drafter` loads the drafter that `speculative_config` names. `describe_drafter` gives its shapes for a plan.

A drafter is small, so every device has all of it.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Float, Shaped

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.drafters.draft_model import open_draft_model
from jpaged.loading.drafters.eagle3 import open_eagle3
from jpaged.loading.drafters.mtp import METHOD, OTHER, open_mtp
from jpaged.loading.drafters.stored_drafter import StoredDrafter, Target
from jpaged.loading.model import LoadedModel, quantizer_of
from jpaged.loading.model_description import DescribedModel
from jpaged.models.draft_head import HeadSpec
from jpaged.models.quantization import LeafPlacer, Quantizer, Scheme
from jpaged.models.sharding import sharding_on, shards_of
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.speculation_config import NAME, SpeculationConfig
from pallas_kernels import QuantizedWeight

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter with its weights. Exactly one of the specs is set."""

    name: str                        # for logs and tables
    draft_spec: DecoderSpec | None   # of a draft model
    head_spec: HeadSpec | None       # of an EAGLE-3 head or an MTP layer
    params: Params                   # arrays, whole on every device; ShapeDtypeStructs from `describe_drafter`
    layout: WeightLayout
    dtype: np.dtype                  # of the weights: the model's
    max_model_len: int               # a longer request gets no drafts

    @property
    def spec(self) -> DecoderSpec:
        """Spec of the drafter's layers, for its pages."""
        if self.draft_spec is not None:
            return self.draft_spec
        assert self.head_spec is not None
        return self.head_spec.layer

    @property
    def is_head(self) -> bool:
        """True for an EAGLE-3 head or an MTP layer."""
        return self.head_spec is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on one device."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))


def load_drafter(
    speculation: SpeculationConfig,
    target: LoadedModel,
    config: EngineConfig,
    check: Callable[[LoadedDrafter], None] | None = None,
) -> LoadedDrafter:
    """Load the drafter of a model to the model's devices.

    speculation: with a method that drafts with weights (`has_model`).
    check:       called with the drafter's shapes, before any weight is on the device. It raises an error if the
                 drafter must not be loaded, because it does not fit.
    Raises ModelLoadError for a drafter that jpaged cannot run, or that does not belong to the model. It names files,
    tensors, both figures and the remedy.
    """
    _check(speculation, config, live=target.source == "live arrays")
    count = shards_of(config).count
    wanted = Target(target.spec, target.dtype, target.tokenizer, count)
    platform = next(iter(jax.tree.leaves(target.params)[0].devices())).platform
    placer = placer_of(speculation, config, platform, mesh_of(target.params))
    with _open(speculation, wanted, config, declared=False) as stored:
        if check is not None:
            check(_drafter(stored, stored.shapes(placer), target.dtype))
        started = time.perf_counter()
        drafter = _drafter(stored, stored.load(placer), target.dtype)
    how = stored.format or speculation.quantization
    logger.info(
        "loaded %.1f MB of weights of the drafter %s%s in %.1f s", drafter.num_bytes / 1e6, drafter.name,
        f", quantised ({how})," if how else "", time.perf_counter() - started,
    )  # fmt: skip
    return drafter


def describe_drafter(
    speculation: SpeculationConfig, target: DescribedModel, config: EngineConfig, platform: str,
    mesh: Mesh | AbstractMesh | None = None,
) -> LoadedDrafter:  # fmt: skip
    """The drafter with ShapeDtypeStructs, from its config.json and the headers of its files, if there are some.

    platform: of the devices. mesh: of the model's devices; None: one device.
    Raises ModelLoadError as `load_drafter`, except for errors in bytes and in tokenizers.
    """
    _check(speculation, config, live=False)
    wanted = Target(target.spec, target.dtype, None, shards_of(config).count, checks_tokens=False)
    placer = placer_of(speculation, config, platform, mesh)
    with _open(speculation, wanted, config, declared=True) as stored:
        return _drafter(stored, stored.shapes(placer), target.dtype)


def _check(speculation: SpeculationConfig, config: EngineConfig, *, live: bool) -> None:
    if live and speculation.method == "mtp":
        raise ModelLoadError(
            f"{METHOD}='mtp': the MTP layer is read from the model's checkpoint, and the model is live arrays: {OTHER}"
        )
    if config.pipeline_parallel_size > 1:
        raise RequestError(
            f"{NAME}.method", speculation.method, "needs pipeline_parallel_size=1: use ngram or suffix, or one stage"
        )
    devices, allowed = speculation.draft_tensor_parallel_size, (1, config.tensor_parallel_size)
    if devices is not None and devices not in allowed:
        accepted = f"must be 1 or tensor_parallel_size={config.tensor_parallel_size}"
        raise RequestError(f"{NAME}.draft_tensor_parallel_size", devices, accepted)


def _open(
    speculation: SpeculationConfig, target: Target, config: EngineConfig, *, declared: bool
) -> contextlib.AbstractContextManager[StoredDrafter]:
    """Open and check the files of the drafter."""
    if speculation.method == "mtp":
        return open_mtp(target, config, declared=declared)
    if speculation.method == "eagle3":
        assert speculation.model is not None, "SpeculationConfig has checked it"
        return open_eagle3(speculation.model, target, config, declared=declared)
    assert speculation.method == "draft_model"
    return open_draft_model(speculation, target, config, declared=declared)


def _drafter(stored: StoredDrafter, params: Params, dtype: np.dtype) -> LoadedDrafter:
    return LoadedDrafter(
        stored.name, stored.draft_spec, stored.head_spec, params, WeightLayout(), dtype, stored.max_model_len
    )


def mesh_of(params: Any) -> Mesh | None:
    """The mesh of the model's devices; None: one device."""
    shardings = (leaf.sharding for leaf in jax.tree.leaves(params))
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)


def placer_of(
    speculation: SpeculationConfig, config: EngineConfig, platform: str, mesh: Mesh | AbstractMesh | None
) -> LeafPlacer:
    """The placer of the drafter's leaves. An MTP layer is quantised at load like the model."""
    wanted = config.quantization if speculation.method == "mtp" else speculation.quantization
    quantizer = quantizer_of(dataclasses.replace(config, quantization=wanted), platform)
    return quantizer if mesh is None else WholePlacer(quantizer, mesh)


@dataclasses.dataclass(frozen=True)
class WholePlacer(LeafPlacer):
    """Puts every leaf whole on every device of a mesh."""

    quantizer: Quantizer
    mesh: Mesh | AbstractMesh  # AbstractMesh: for shapes only

    def __call__(self, name: str, leaf: Shaped[Any, "*shape"]) -> Any:
        """The leaf `name` on the devices."""
        return self._everywhere(lambda: self.quantizer(name, leaf))

    def part(self, name: str, leaf: Float[Any, "*shape"]) -> Array:
        """A dense part of a JoinedWeight."""
        return self._everywhere(lambda: self.quantizer.part(name, leaf))

    def packed(self, name: str, weight: QuantizedWeight) -> Any:
        """A leaf that is quantised in the checkpoint, on the devices."""
        return self._everywhere(lambda: self.quantizer.packed(name, weight))

    def packed_shape(self, name: str, weight: QuantizedWeight) -> Any:
        """As `packed`, for ShapeDtypeStructs."""
        return self._described(self.quantizer.packed_shape(name, weight))

    def shapes(self, shapes: Params) -> Params:
        """The tree of dense leaves after quantisation."""
        return self._described(self.quantizer.shapes(shapes))

    def reads_views(self, name: str, shape: tuple[int, ...]) -> bool:
        """As for `Quantizer`."""
        return self.quantizer.reads_views(name, shape)

    def scheme_of_leaf(self, name: str, shape: tuple[int, ...]) -> Scheme | None:
        """The scheme of the leaf `name`; None if it keeps its dtype."""
        return self.quantizer.scheme_of_leaf(name, shape)

    def _everywhere(self, make: Callable[[], Any]) -> Any:
        """Make a leaf on this process's first device, and copy it to its other devices."""
        sharding = sharding_on(self.mesh, None)
        devices = sorted(sharding.addressable_devices, key=lambda device: device.id)
        with jax.default_device(devices[0]):
            made = make()

        def copied(array: Array) -> Array:
            parts = [jax.device_put(array, device) for device in devices]
            return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

        return jax.tree.map(copied, made)

    def _described(self, tree: Any) -> Any:
        sharding = sharding_on(self.mesh, None)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
