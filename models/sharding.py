"""Tensor parallelism: how the arrays of a model are split over the devices of an engine.

Every device runs the same program on its part of the arrays, inside `jax.shard_map`. A device has some of the query
heads, KV heads, vocabulary, and columns of the feed-forward networks (or some experts). Every device has the whole
residual stream, so a layer has two sums over devices, after `o` and after `down`.

`AXES` names the logical axes of each leaf, and `SPLIT` the axes that are split. Sizes that the devices do not divide
are padded with zeros, which add nothing to a sum. KV heads may be repeated instead (`split_spec`, `padding.pad_leaf`).

With `parts` > 1, results have the same bits for every number of devices that divides `parts`. Each matmul with split
inputs is then computed as `parts` products, which are added in one fixed tree.

The mesh has a second axis, "context". Its devices have the same weights and pages, and compute different tokens of a
prompt (`jpaged.runtime.step.context`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.models.spec import DecoderSpec, Latent, QKNorm
from pallas_kernels.add_norm.reference import tree_sum

TENSOR, CONTEXT = "tensor", "context"  # names of the mesh axes
PARTS = 8  # `Shards.parts` with `deterministic`: results are equal on 1, 2, 4 and 8 devices

# Logical axes of each leaf. Every device has all other leaves whole. "*" is any number of leading axes, because vectors
# are stacked over layers.
AXES: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "layer_embed": ("vocab", "embed"),
    "qkv": ("kv_heads", "part", "head_dim", "hidden"),
    "qkv_bias": ("kv_heads", "part", "head_dim"),
    "q": ("heads", "hidden"),  # q, k, v and gate: leaves of live arrays (`WeightLayout`), or of layers without values
    "k": ("kv_heads", "hidden"),
    "v": ("kv_heads", "hidden"),
    "o": ("hidden", "heads"),
    "sinks": ("heads",),
    "q_b": ("heads", "head_dim", "latent"),
    "kv_b": ("heads", "head_dim", "latent"),
    "gate_up": ("part", "intermediate", "hidden"),
    "gate": ("intermediate", "hidden"),
    "up": ("intermediate", "hidden"),
    "up_bias": ("*", "intermediate"),
    "down": ("hidden", "intermediate"),
    "expert_gate_up": ("experts", "part", "intermediate", "hidden"),
    "expert_gate_up_bias": ("experts", "part", "intermediate"),
    "expert_down": ("experts", "hidden", "intermediate"),
    "expert_down_bias": ("experts", "hidden"),
    "shared_gate_up": ("part", "intermediate", "hidden"),
    "shared_down": ("hidden", "intermediate"),
    "delta_qkvz": ("state_heads", "part", "head_dim", "hidden"),
    "delta_qkv": ("state_heads", "part", "head_dim", "hidden"),
    "delta_forget": ("state_heads", "head_dim", "low"),
    "delta_gate": ("state_heads", "head_dim", "low"),
    "delta_conv": ("width", "state_heads", "part", "head_dim"),
    "delta_o": ("hidden", "state_heads"),
}
SPLIT = ("vocab", "heads", "kv_heads", "intermediate", "experts", "state_heads")
_OF_EXPERTS = frozenset({"expert_gate_up", "expert_gate_up_bias", "expert_down", "expert_down_bias"})


@dataclasses.dataclass(frozen=True)
class Shards:
    """Split of a model's arrays. Static: a part of compiled programs."""

    count: int = 1                 # devices that arrays are split over
    parts: int = 1                 # products that a matmul with split inputs sums; a multiple of `count`, or 1
    expert_parallel: bool = False  # each device has some of the experts; else a part of every expert
    context: int = 1               # sets of `count` devices that a prompt's tokens are divided over

    @property
    def num_devices(self) -> int:
        """Number of devices of an engine, or of one of its pipeline stages."""
        return self.count * self.context

    @property
    def splits_experts(self) -> bool:
        """True if devices have different experts."""
        return self.expert_parallel and self.count > 1

    @property
    def divisor(self) -> int:
        """Number of parts of a split axis, over all devices."""
        return max(self.count, self.parts)

    @property
    def tile(self) -> int:
        """A part's outputs are a multiple of this. With `parts` > 1 it is the tile of the native CPU kernels, because
        XLA would compute other sizes, with other bits."""
        return 16 if self.parts > 1 else 1

    def units(self, kind: str) -> int:
        """Sizes of the logical axis `kind` are padded to a multiple of this."""
        if kind in ("vocab", "intermediate"):
            return self.divisor * self.tile
        return self.count if kind == "experts" else self.divisor

    def fixed_kernels(self, dtype: DTypeLike) -> bool:
        """True if every program has the same kernels, with the same tiles (`fused_layer`): `deterministic`, 16 bits.

        Split weights are then whole arrays, whose inputs a kernel cuts into parts. In float32, on CPU, they are
        SplitWeights.
        """
        return self.parts > 1 and np.dtype(dtype).itemsize == 2

    @property
    def parts_here(self) -> int:
        """Number of products that a device computes for a matmul with split inputs."""
        return max(1, self.parts // self.count)

    def index(self) -> Int[Array, ""] | int:
        """Index of this device's part of split arrays."""
        return lax.axis_index(TENSOR) if self.count > 1 else 0

    def first(self, size: int) -> Int[Array, ""] | int:
        """First index of this device's part of a split axis. size: of one part."""
        return self.index() * size

    def total(self, products: Sequence[Float[Array, "*shape"]], dtype: DTypeLike) -> Float[Array, "*shape"]:
        """Sum over this device's products and over all devices, in `dtype`.

        products: `parts_here` arrays. With `parts` > 1 they are float32, and the order of the additions is fixed.
        """
        if self.parts == 1:
            (product,) = products
            return (lax.psum(product, TENSOR) if self.count > 1 else product).astype(dtype)
        total = tree_sum(list(products))
        if self.count > 1:
            total = tree_sum(list(lax.all_gather(total, TENSOR)))
        return total.astype(dtype)

    def on_first(self, x: Array) -> Array:
        """x on the first device, zeros on all others. For a term that a sum over devices must contain once."""
        return x if self.count == 1 else jnp.where(self.index() == 0, x, jnp.zeros_like(x))


WHOLE = Shards()


def shards_of(config: EngineConfig) -> Shards:
    """The shards for an engine's options."""
    parts = PARTS if config.deterministic else 1
    return Shards(
        config.tensor_parallel_size, parts, config.enable_expert_parallel, config.prefill_context_parallel_size
    )


def find_devices(
    shards: Shards, stages: int = 1, chosen: Sequence[jax.Device] | None = None
) -> list[list[jax.Device]]:
    """The devices of each pipeline stage of an engine. Raises ModelLoadError if there are too few.

    chosen: the engine's devices, with the right number. None: JAX's first devices, with equal numbers in all processes.
    """
    size = shards.num_devices
    count = size * stages
    if chosen is None:
        chosen = _first_devices(shards, stages, count)
    return [list(chosen[first : first + size]) for first in range(0, count, size)]


def _first_devices(shards: Shards, stages: int, count: int) -> list[jax.Device]:
    devices = jax.devices()
    sizes = {
        "pipeline_parallel_size": stages, "tensor_parallel_size": shards.count,
        "prefill_context_parallel_size": shards.context,
    }  # fmt: skip
    given = [name for name, number in sizes.items() if number > 1]
    asked = " with ".join(f"{name}={sizes[name]}" for name in given)
    if len(devices) < count:
        use = f"sizes whose product is at most {len(devices)}" if given[1:] else f"{given[0]}={len(devices)} or less"
        hint = ""
        if devices[0].platform == "cpu":
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            hint = f". To try it on CPU, set the environment variable {flag}"
        raise ModelLoadError(
            f"{asked} needs {count} devices, there are {len(devices)} ({devices[0].device_kind}): use {use}{hint}"
        )
    processes = jax.process_count()
    each = count // processes
    found = [[device for device in devices if device.process_index == rank][:each] for rank in range(processes)]
    if short := [str(rank) for rank, of_one in enumerate(found) if len(of_one) < each]:
        raise ModelLoadError(
            f"{asked} on {processes} processes needs {each} devices in each, and process {' and '.join(short)} has "
            f"fewer: use sizes whose product is at most {min(map(len, found)) * processes}"
        )
    return [device for of_one in found for device in of_one]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitWeight:
    """A matrix that is split along its inputs, with one array per product on a device (`Shards.parts_here`)."""

    parts: tuple[Any, ...]  # each [..., in / parts]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all parts together."""
        first = self.parts[0].shape
        return (*first[:-1], first[-1] * len(self.parts))

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype


# -- sizes --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeadPadding:
    """KV heads and query heads after padding. Each KV head is repeated, and its copies divide its query heads."""

    repeats: int   # copies of each KV head; 1: not repeated
    kv_heads: int  # after repeats and padding
    q_per_kv: int  # query heads per copy; the last ones may be padding

    def fused(self, spec: DecoderSpec) -> int:
        """Heads of the fused qkv leaf per copy: see `DecoderSpec.qkv_heads`."""
        return self.q_per_kv * (1 + spec.attention_gate) + 2


def head_padding(spec: DecoderSpec, shards: Shards) -> HeadPadding:
    """The cheapest way to make the number of KV heads a multiple of the divisor: heads of zeros, or repeated heads."""
    kv, group, divisor = spec.num_kv_heads, spec.q_per_kv, shards.divisor
    repeats = divisor // math.gcd(kv, divisor)
    padded = HeadPadding(1, -(-kv // divisor) * divisor, group)
    repeated = HeadPadding(repeats, kv * repeats, -(-group // repeats))
    best = min(padded, repeated, key=lambda one: one.kv_heads * one.fused(spec))
    while best.fused(spec) * spec.head_dim % shards.tile:
        best = dataclasses.replace(best, q_per_kv=best.q_per_kv + 1)
    return best


def split_spec(spec: DecoderSpec, shards: Shards) -> DecoderSpec:
    """The model with sizes that can be split. Padding has zero weights, so results are the same.

    The vocabulary and the number of experts are unchanged: only their arrays are padded.
    Raises ModelLoadError if heads can be neither split nor padded.
    """
    divisor = shards.divisor
    if divisor == 1:
        return spec

    def up(size: int, unit: int = divisor) -> int:
        return -(-size // unit) * unit

    for name in ("heads_by_layer", "output_gates", "lm_head_bias"):
        if getattr(spec, name):
            raise ModelLoadError(
                f"the model has {name}={getattr(spec, name)!r}, which cannot be split over devices yet: use "
                "tensor_parallel_size=1" + (", and leave deterministic out" if shards.parts > 1 else "")
            )
    experts, columns = spec.experts, shards.units("intermediate")
    if experts is not None:
        of_one = experts.intermediate_size
        of_one = of_one if shards.expert_parallel else up(of_one, columns)
        shared = up(experts.shared_size, columns)
        experts = dataclasses.replace(experts, intermediate_size=of_one, shared_size=shared)
    changed = {
        "intermediate_size": up(spec.intermediate_size, columns), "experts": experts,
        "intermediate_sizes": tuple(up(width, columns) for width in spec.intermediate_sizes),
    }  # fmt: skip
    if spec.recurrence is not None:
        spec.recurrence.split(divisor)
    if spec.latent is not None:
        return dataclasses.replace(spec, num_heads=up(spec.num_heads, latent_heads(spec.latent, shards)), **changed)
    if any(spec.activation_sparsity) and (shards.parts > 1 or changed["intermediate_sizes"] != spec.intermediate_sizes):
        raise ModelLoadError(
            "the model cuts off gates by their mean over a feed-forward network (activation_sparsity), which "
            + ("has other bits on other numbers of devices: leave deterministic out" if shards.parts > 1 else
               f"cannot have padding: use a tensor_parallel_size that divides {min(spec.intermediate_sizes)}")
        )  # fmt: skip
    if spec.layer_kv:
        return dataclasses.replace(_split_unlike(spec, shards), **changed)
    heads = head_padding(spec, shards)
    made = dataclasses.replace(
        spec, num_heads=heads.kv_heads * heads.q_per_kv, num_kv_heads=heads.kv_heads,
        attention_scale=spec.scale, **changed,
    )  # fmt: skip
    if _adds_heads(spec, heads) and (spec.alibi is not None or spec.qk_norm is QKNorm.PROJECTION):
        why = "slopes (alibi)" if spec.alibi is not None else "a norm over all heads"
        sizes = [n for n in range(1, divisor) if not _adds_heads(spec, head_padding(spec, Shards(n)))]
        advice = f"use tensor_parallel_size {' or '.join(map(str, sizes))}"
        if shards.parts > 1:
            advice = "leave deterministic out"
        raise ModelLoadError(
            f"the model has {spec.num_heads} query heads and {spec.num_kv_heads} KV heads, which cannot be split into "
            f"{divisor} equal parts, and {why}, which heads of padding would change: {advice}"
        )
    return made


def _split_unlike(spec: DecoderSpec, shards: Shards) -> DecoderSpec:
    """The heads of `split_spec` for a model with `layer_kv`: each layer's KV heads are split, repeated or padded alone.

    Raises ModelLoadError if layers get unlike numbers of query heads, or pages that do not share memory.
    """
    padded = [head_padding(spec.of_layer(layer), shards) for layer in range(spec.num_layers)]
    queries = {heads.kv_heads * heads.q_per_kv for heads in padded}
    layer_kv = tuple(
        dataclasses.replace(kv, heads=heads.kv_heads) for kv, heads in zip(spec.layer_kv, padded, strict=True)
    )
    most = max(layer_kv, key=lambda kv: kv.heads * kv.head_dim)
    odd = any(kv.head_dim % shards.tile for kv in layer_kv)
    if odd or len(queries) > 1 or any(most.heads * most.head_dim % (kv.heads * kv.head_dim) for kv in layer_kv):
        kinds = sorted({(kv.heads, kv.head_dim) for kv in spec.layer_kv})
        raise ModelLoadError(
            f"layers with {' and with '.join(f'{heads} KV heads of {dim}' for heads, dim in kinds)}, and "
            f"{spec.num_heads} query heads, cannot be split into {shards.divisor} equal parts: use another "
            "tensor_parallel_size" + (", or leave deterministic out" if shards.parts > 1 else "")
        )
    return dataclasses.replace(
        spec, num_heads=queries.pop(), num_kv_heads=most.heads, head_dim=most.head_dim, layer_kv=layer_kv,
        attention_scale=spec.scale,
    )  # fmt: skip


def latent_heads(latent: Latent, shards: Shards) -> int:
    """Multiple of the query heads with latent attention, so that a device's part of `q_b` has whole tiles."""
    # 64, not 16: XLA on an Intel Xeon with AVX-512 gave 48 outputs other bits than 384. Real models' heads have 192.
    whole = 64 if shards.parts > 1 else 1
    return shards.divisor * (whole // math.gcd(latent.nope_dim + latent.rope_dim, whole))


def _adds_heads(spec: DecoderSpec, heads: HeadPadding) -> bool:
    """True if heads of zeros are added. Repeated heads do not count."""
    all_heads = (heads.kv_heads * heads.q_per_kv, heads.kv_heads)
    return all_heads != (spec.num_heads, spec.num_kv_heads * heads.repeats)


def local_spec(spec: DecoderSpec, shards: Shards) -> DecoderSpec:
    """One device's part of a model of `split_spec`, for the sizes of kernels, pages and temporaries."""
    count = shards.count
    if count == 1:
        return spec
    experts = spec.experts
    if experts is not None:
        of_one = experts.intermediate_size // (1 if shards.expert_parallel else count)
        experts = dataclasses.replace(experts, intermediate_size=of_one, shared_size=experts.shared_size // count)
    return dataclasses.replace(
        spec, num_heads=spec.num_heads // count, num_kv_heads=max(1, spec.num_kv_heads // count),
        intermediate_size=spec.intermediate_size // count, experts=experts,
        layer_kv=tuple(dataclasses.replace(kv, heads=kv.heads // count) for kv in spec.layer_kv),
        intermediate_sizes=tuple(width // count for width in spec.intermediate_sizes),
        recurrence=None if spec.recurrence is None else spec.recurrence.split(count),
    )  # fmt: skip


# -- arrays -------------------------------------------------------------------------------------------------------


def split_axis(name: str, dimensions: int, shards: Shards, spec: DecoderSpec) -> int | None:
    """The split axis of the leaf `name`. None: the leaf is whole on every device."""
    axes = AXES.get(name)
    if name in ("q_norm", "k_norm") and spec.qk_norm is QKNorm.PROJECTION:
        axes = ("heads",)
    if axes is None:
        return None
    wanted = [axis for axis in axes if axis in SPLIT]
    if name in _OF_EXPERTS:
        wanted = ["experts"] if shards.expert_parallel else [axis for axis in wanted if axis != "experts"]
    if not wanted:
        return None
    return axes.index(wanted[0]) + dimensions - len(axes)


def splits_inputs(name: str, shards: Shards) -> bool:
    """True if the inputs of the matrix `name` are split, so that its matmul is summed over devices."""
    if name == "expert_down":
        return not shards.expert_parallel
    return name in ("o", "down", "shared_down", "delta_o")


# -- placing ------------------------------------------------------------------------------------------------------


def make_mesh(devices: Sequence[Any], shards: Shards) -> Mesh:
    """The mesh of an engine, or of one pipeline stage. Neighbouring devices are along the axis "tensor"."""
    return Mesh(np.array(devices).reshape(shards.context, shards.count), (CONTEXT, TENSOR))


def described_mesh(shards: Shards) -> AbstractMesh:
    """A mesh without devices, for shapes."""
    return AbstractMesh((shards.context, shards.count), (CONTEXT, TENSOR))


def sharding_on(mesh: Mesh | AbstractMesh, axis: int | None) -> jax.sharding.Sharding:
    """Sharding of an array with the split axis `axis`. None: whole on every device."""
    if isinstance(mesh, Mesh) and mesh.size == 1:
        return jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TENSOR))


def local_shape(leaf: Any) -> tuple[int, ...]:
    """Shape of one device's part of an array or ShapeDtypeStruct."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def whole_bytes(tree: Any) -> int:
    """Bytes of arrays that are whole on every device. tree: ShapeDtypeStructs with shardings."""
    whole = (leaf for leaf in jax.tree.leaves(tree) if local_shape(leaf) == leaf.shape)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in whole)


def local_shapes(tree: Any) -> Any:
    """ShapeDtypeStructs of one device's parts of a tree of arrays. Static fields stay."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(local_shape(leaf), leaf.dtype), tree)
