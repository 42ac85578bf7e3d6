"""Pipeline parallelism: the layers of a model are divided into stages, and each stage has its own devices.

The first stage embeds the tokens, and the last stage applies the `lm_head`. A stage computes its layers and sends the
hidden states to the next stage. `StagedPlacer` loads each leaf directly to the devices of its stage.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.models.decoder import LAYER_VECTORS
from jpaged.models.quantization import LeafPlacer, Quantizer, Scheme
from jpaged.models.resharding import on_auto_mesh
from jpaged.models.shard_weights import ShardedQuantizer
from jpaged.models.sharding import find_devices, make_mesh, shards_of
from jpaged.models.spec import ALONE, DecoderSpec, Params, Stage, WeightLayout
from pallas_kernels import QuantizedWeight

_OF_FIRST = ("embed", "pos_embed", "project_in", "embed_norm", "embed_norm_bias")  # all others: see `_part_of`


def stages_of(spec: DecoderSpec, count: int) -> tuple[Stage, ...]:
    """Divide the layers of a model into `count` stages. If sizes differ, the first stages have one layer more.

    Raises ModelLoadError if there are more stages than layers.
    """
    layers = spec.num_layers
    if count == 1:
        return (ALONE,)
    if count > layers:
        raise ModelLoadError(f"pipeline_parallel_size={count}: the model has {layers} layers: use {layers} or less")
    sizes = [layers // count + (index < layers % count) for index in range(count)]
    return tuple(Stage(index, count, sum(sizes[:index]), sizes[index]) for index in range(count))


@dataclasses.dataclass(frozen=True)
class PerStage:
    """A leaf outside of layers, by stage. None: the stage does not have it."""

    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StagedPlacer:
    """LeafPlacer for several stages. `finish` returns a tree per stage."""

    placers: tuple[ShardedQuantizer, ...]  # by stage
    stages: tuple[Stage, ...]
    spec: DecoderSpec

    def of_layer(self, layer: int | None) -> Any:
        """The placer for a layer's leaves. None: for leaves outside of layers, which `finish` divides among stages."""
        return self if layer is None else self.placers[next(s.index for s in self.stages if layer in s.layers)]

    def __call__(self, name: str, leaf: Any) -> Any:
        """Place a leaf outside of layers."""
        return self._place(name, leaf, lambda placer, part: placer(name, part))

    def part(self, name: str, leaf: Any) -> Array:
        """Not used: only matrices of layers are joined."""
        raise NotImplementedError(name)

    def packed(self, name: str, weight: QuantizedWeight) -> Any:
        """Place a leaf outside of layers that is quantised in the checkpoint."""
        return self._place(name, weight, lambda placer, part: placer.packed(name, part))

    def packed_shape(self, name: str, weight: QuantizedWeight) -> Any:
        """As `packed`, for ShapeDtypeStructs."""
        return self._place(name, weight, lambda placer, part: placer.packed_shape(name, part))

    def shapes(self, shapes: Params) -> Params:
        """The tree `param_shapes(spec, dtype)`, for `finish`."""
        layers = tuple(self.of_layer(i).shapes(leaves) for i, leaves in enumerate(shapes["layers"]))

        def place(name: str, leaf: jax.ShapeDtypeStruct) -> Any:
            return self._place(name, leaf, lambda placer, part: placer.shape(name, part))

        return {name: layers if name == "layers" else place(name, leaf) for name, leaf in shapes.items()}

    def reads_views(self, name: str, shape: tuple[int, ...]) -> bool:
        """True, as for `ShardedQuantizer`."""
        return True

    def scheme_of_leaf(self, name: str, shape: tuple[int, ...]) -> Scheme | None:
        """The scheme of the leaf `name`; None if it keeps its dtype."""
        return self.placers[0].scheme_of_leaf(name, shape)

    def finish(self, tree: Params) -> tuple[Params, ...]:
        """The tree of each stage. tree: the whole model's, with the leaves that this placer has placed."""
        return tuple(
            {"layers": tuple(tree["layers"][i] for i in stage.layers)}
            | {
                name: part
                for name, leaf in tree.items()
                if name != "layers" and (part := leaf.parts[stage.index]) is not None
            }
            for stage in self.stages
        )

    def parts_of(self, name: str, leaf: Any) -> tuple[Any, ...]:
        """Each stage's part of a leaf outside of layers, on the devices of the leaf. None: the stage needs none."""
        return tuple(self._part_of(stage, name, leaf) for stage in self.stages)

    def _place(self, name: str, leaf: Any, place: Callable[[ShardedQuantizer, Any], Any]) -> PerStage:
        parts = zip(self.parts_of(name, leaf), self.placers, strict=True)
        return PerStage(tuple(None if part is None else place(placer, part) for part, placer in parts))

    def _part_of(self, stage: Stage, name: str, leaf: Any) -> Any:
        """A stage's part of a leaf; None if the stage does not need it."""
        if name in LAYER_VECTORS:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((len(stage.layers), *leaf.shape[1:]), leaf.dtype)
            leaf = on_auto_mesh(leaf) if isinstance(leaf, jax.Array) else leaf
            return leaf[stage.layers.start : stage.layers.stop]
        tied = name == "embed" and self.spec.tie_embeddings and not self.spec.pools
        wanted = (stage.is_first and name in _OF_FIRST) or (stage.is_last and (tied or name not in _OF_FIRST))
        return leaf if wanted else None


def placer_for(
    quantizer: Quantizer, config: EngineConfig, spec: DecoderSpec, meshes: Sequence[Mesh | AbstractMesh] | None = None,
    *, chosen: Sequence[jax.Device] | None = None, layout: WeightLayout = WeightLayout(),
) -> LeafPlacer:  # fmt: skip
    """The placer of a model's leaves on an engine's devices; `quantizer` itself if nothing is split.

    spec: before `split_spec`. meshes: one per stage; None: of the devices of `find_devices`. layout: of live arrays.
    Raises ModelLoadError if there are too few devices or layers.
    """
    shards, count = shards_of(config), config.pipeline_parallel_size
    if shards.divisor == shards.num_devices == count == 1:
        return quantizer
    stages = stages_of(spec, count)
    if meshes is None:
        meshes = [make_mesh(devices, shards) for devices in find_devices(shards, count, chosen)]
    placers = tuple(ShardedQuantizer(quantizer, mesh, shards, spec, layout) for mesh in meshes)
    return placers[0] if count == 1 else StagedPlacer(placers, stages, spec)
