"""Loads a checkpoint's tensors into the parameter tree on the device.

1. `plan_weights` reads headers, and compares tied embeddings. Every leaf must have its tensors, in the right shape and
   a convertible dtype, and no tensor may be left over. So nearly all errors come before device memory is allocated.
2. `load_weights` assembles one leaf at a time on the host, in its final dtype. Leaves that are quantised in the
   checkpoint keep their codes, one byte each on the host. Leaves that are quantised at load go to the device in parts.
   A thread reads the next leaf meanwhile, so peak host memory is two leaves plus the mapped files. Values too large for
   float16 are found only here.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.kv_scales import KV_SCALE
from jpaged.loading.renamed_tensors import mtp_tensors
from jpaged.loading.safetensors_file import DTYPES
from jpaged.models.families.base import Family, LeafTensors, NamedRule, Part
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.kv_scales import KVScales
from jpaged.models.new_leaves import NewLeaf
from jpaged.models.quantization import LEAVES, PART_AXES, UNCHANGED, JoinedWeight, LeafPlacer
from jpaged.models.spec import HASHED, DecoderSpec, leaf_dtype, param_shapes
from pallas_kernels import QuantizedWeight
from pallas_kernels.quantized_dot.weight import ARRAYS

logger = logging.getLogger(__name__)

_CONVERTIBLE = ("F64", "F32", "F16", "BF16")
HEAD = "lm_head.weight"
_EMBED = "embed"
_BEYOND_MEMORY = 2**48  # elements of one leaf; numpy cannot address 2**61 of them
# Slices of a fused leaf along its axis in PART_AXES, in their order
_SLICES = {
    Part.Q: slice(0, -2), Part.K: slice(-2, -1), Part.V: slice(-1, None), Part.GATE: slice(0, 1), Part.UP: slice(1, 2),
}  # fmt: skip
_ALIGNMENT = 64  # bytes; JAX on CPU uses a buffer with this alignment without a copy


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One leaf of the parameter tree and its source."""

    leaf: LeafTensors
    shape: tuple[int, ...]
    files: tuple[str, ...]  # names in the checkpoint, one for each of leaf.tensors
    constant: float | None  # value of a leaf that has no tensor
    # one for each of leaf.tensors, with ShapeDtypeStructs; None: not quantised. (): the leaf is a dense array
    packed: tuple[QuantizedWeight | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """A checked assignment of all tensors to leaves. `spec.tie_embeddings` may differ from the config's."""

    spec: DecoderSpec
    leaves: tuple[LeafPlan, ...]
    copies: tuple[str, ...] = ()  # tensors of the checkpoint that repeat the tied embedding
    # dtype -> the tree as ShapeDtypeStructs; None: `param_shapes` of the spec. A draft head has other leaves
    make_tree: Callable[[Any], dict[str, Any]] | None = None

    def tree(self, dtype: Any) -> dict[str, Any]:
        """The parameter tree of dense leaves, as ShapeDtypeStructs."""
        return param_shapes(self.spec, dtype) if self.make_tree is None else self.make_tree(dtype)


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Weights of a checkpoint, checked against the config, not on the device yet."""

    spec: DecoderSpec
    dtype: np.dtype | None  # the checkpoint's dtype; None: unknown
    num_bytes: int          # size of its files
    # load(dtype, quantizer): the tree of `param_shapes(spec, dtype)` on the default device. Leaves may be quantised, by
    # the checkpoint or by the quantizer
    load: Callable[[np.dtype, LeafPlacer], dict[str, Any]]
    # shapes(dtype, quantizer): the tree of `load`, as ShapeDtypeStructs
    shapes: Callable[[np.dtype, LeafPlacer], dict[str, Any]]
    # leaves(dtype, quantizer): the leaves of `load`, each read when it is made, for an update of a running engine
    leaves: Callable[[np.dtype, LeafPlacer], Iterable[NewLeaf]]
    format: str | None = None  # of the quantised leaves, in `config.QUANTIZED_FORMATS`; None: there are none
    kv_scales: KVScales | None = None  # static scales of keys and values; None: the checkpoint has none


def check_depth(config: CheckpointConfig, tensors: int) -> None:
    """Refuse a config with more layers than tensors, before anything of that size is allocated."""
    for key in ("num_hidden_layers", "n_layer"):
        layers = config.get(key)
        if isinstance(layers, int) and layers > tensors:
            raise ModelLoadError(
                f"config.json: {key}={layers}, but the weights have only {tensors} tensors: "
                "config and weights are from different models"
            )


def plan_weights(
    family: Family, spec: DecoderSpec, constants: Mapping[str, float], checkpoint: TensorSource
) -> WeightPlan:
    """Assign every tensor of the checkpoint to a leaf. Raises ModelLoadError with file, tensor and remedy."""
    names = _Names(family, checkpoint)
    if spec.tie_embeddings:
        spec = _check_tied(names, family, spec, checkpoint)
    leaves = plan_leaves(family, param_shapes(spec, np.float32), constants, checkpoint, names.find)
    used = {name for plan in leaves for name in plan.files}
    extra = [n for n in checkpoint.names if n not in used and not family.ignored.fullmatch(n)]
    extra = [n for n in extra if not is_kv_scale(n, spec)]  # read_kv_scales reads them
    if extra:
        of_mtp = mtp_tensors(checkpoint.names, spec.num_layers)  # loading/drafters reads them
        extra = [n for n in extra if n not in of_mtp]
    copies: tuple[str, ...] = ()
    if spec.pools:
        extra = [n for n in extra if n != HEAD]  # a pooling model does not use its lm_head
    elif spec.tie_embeddings:
        copies = tuple(n for n in extra if n == HEAD)  # _check_tied found it equal to the embedding
        extra = [n for n in extra if n not in copies]
    refuse_extra(checkpoint, extra)
    return WeightPlan(spec, leaves, copies)


def plan_leaves(
    family: Family, tree: dict[str, Any], constants: Mapping[str, float], checkpoint: TensorSource,
    find: Callable[[str], str | None],
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """Assign tensors to the leaves of a tree of ShapeDtypeStructs. find: name in the family's table -> in the file.

    Raises ModelLoadError for missing tensors, and for a wrong shape or dtype.
    """
    leaves, missing = [], []
    for leaf in family.tensors(tree):
        shape = (tree["layers"][leaf.layer] if leaf.layer is not None else tree)[leaf.leaf].shape
        if leaf.leaf in constants:
            leaves.append(LeafPlan(dataclasses.replace(leaf, tensors=()), shape, (), constants[leaf.leaf]))
            continue
        if math.prod(shape) >= _BEYOND_MEMORY:
            raise ModelLoadError(
                f"{checkpoint.config_name} calls for {leaf.leaf} of shape {list(shape)}, which fits no memory: "
                "config and weights are from different models"
            )
        single = leaf.of_single_experts(shape[0])
        if any(find(name) is not None for tensor in single.tensors[:1] for name in tensor.names):
            leaf = single
        blank = np.broadcast_to(np.float32(0), shape)  # gives views their shapes; needs no memory
        files = []
        for tensor in leaf.tensors:
            name = next((found for n in tensor.names if (found := find(n)) is not None), None)
            if name is None:
                missing.append(checkpoint.label(tensor.name))
            else:
                _check_tensor(checkpoint, name, tensor.rule.shape(leaf.block(blank, tensor)), leaf.leaf)
                files.append(name)
        packed = _packed(leaf, checkpoint, files) if len(files) == len(leaf.tensors) else ()
        leaves.append(LeafPlan(leaf, shape, tuple(files), None, packed))
    if missing:
        remedy = ": to embed with it, start with runner='pooling'" if missing == [checkpoint.label(HEAD)] else ""
        raise ModelLoadError(
            f"{checkpoint.folder}: {_some(missing)} missing, which {checkpoint.config_name} calls for: "
            f"the checkpoint is incomplete, or {checkpoint.config_name} is from another model{remedy}"
        )
    return tuple(leaves)


def refuse_extra(checkpoint: TensorSource, extra: list[str]) -> None:
    """Raise ModelLoadError if there are tensors that nothing reads."""
    if extra:
        raise ModelLoadError(
            f"{checkpoint.path(extra[0])}: {_some([checkpoint.label(n) for n in extra])} more than "
            f"{checkpoint.config_name} calls for: {checkpoint.config_name} is from another model, or jpaged does not "
            "support a part of the checkpoint"
        )


def is_kv_scale(name: str, spec: DecoderSpec) -> bool:
    """True if a tensor is the scale of keys or values in one of the model's layers."""
    match = KV_SCALE.fullmatch(name)
    return match is not None and int(match[1]) < spec.num_layers


def planned_shapes(plan: WeightPlan, dtype: np.dtype, quantizer: LeafPlacer) -> dict[str, Any]:
    """The tree of `load_weights`, as ShapeDtypeStructs."""
    dense = plan.tree(dtype)
    tree = quantizer.shapes(dense)
    for leaf_plan in plan.leaves:
        if leaf_plan.packed:
            leaf = leaf_plan.leaf
            place, shapes = (t if leaf.layer is None else t["layers"][leaf.layer] for t in (tree, dense))
            place[leaf.leaf] = _packed_shape(leaf_plan, shapes[leaf.leaf], quantizer.of_layer(leaf.layer))
    return quantizer.finish(tree)


def load_weights(
    plan: WeightPlan, checkpoint: TensorSource, dtype: np.dtype, quantizer: LeafPlacer = UNCHANGED
) -> dict[str, Any]:
    """Load the parameter tree of `param_shapes(plan.spec, dtype)` to the default device. See `StoredWeights.load`."""
    tree: dict[str, Any] = {"layers": [{} for _ in range(plan.spec.num_layers)]}
    total = checkpoint.num_bytes
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", delay=2, disable=None) as progress:
        in_file = functools.partial(_is_in_file, checkpoint=checkpoint, dtype=dtype, quantizer=quantizer)
        read = functools.partial(
            _read, checkpoint=checkpoint, dtype=dtype, in_file=in_file, on_read=progress.update
        )  # fmt: skip
        for leaf_plan, host in _one_ahead(read, plan.leaves):
            leaf = leaf_plan.leaf
            place = tree["layers"][leaf.layer] if leaf.layer is not None else tree
            place[leaf.leaf] = _on_device(leaf_plan, host, quantizer.of_layer(leaf.layer))
            del host
            if in_file(leaf_plan):
                _done(checkpoint, leaf_plan.files[0], progress.update)
    tree["layers"] = tuple(tree["layers"])
    return quantizer.finish(tree)


def planned_leaves(
    plan: WeightPlan, checkpoint: TensorSource, dtype: np.dtype, quantizer: LeafPlacer = UNCHANGED
) -> Iterator[NewLeaf]:
    """The leaves of `load_weights`. Each is read when it is made."""
    return (leaf_of(leaf_plan, checkpoint, dtype, quantizer) for leaf_plan in plan.leaves)


def leaf_of(plan: LeafPlan, checkpoint: TensorSource, dtype: np.dtype, quantizer: LeafPlacer) -> NewLeaf:
    """One leaf of `load_weights`."""
    of_layer = quantizer.of_layer(plan.leaf.layer)

    def make() -> Any:
        in_file = functools.partial(_is_in_file, checkpoint=checkpoint, dtype=dtype, quantizer=quantizer)
        return _on_device(plan, _read(plan, checkpoint, dtype, in_file, lambda _: None), of_layer)

    return NewLeaf(plan.leaf.layer, plan.leaf.leaf, make, owned=True)


def _one_ahead(read: Callable[[LeafPlan], Any], plans: tuple[LeafPlan, ...]) -> Iterator[tuple[LeafPlan, Any]]:
    """Yield each plan with read(plan). A thread reads the next leaf while the caller uses this one."""
    with concurrent.futures.ThreadPoolExecutor(1, "read weights") as thread:
        following = iter(plans[1:])
        ahead = thread.submit(read, plans[0]) if plans else None
        try:
            for plan in plans:
                assert ahead is not None
                host, later = ahead.result(), next(following, None)
                ahead = None if later is None else thread.submit(read, later)
                yield plan, host
                del host  # before the next read: two leaves are in memory, not three
        finally:
            ahead = None  # its error would keep this frame, and the mapped file, until the next garbage collection


def _read(
    plan: LeafPlan, checkpoint: TensorSource, dtype: np.dtype, in_file: Callable[[LeafPlan], bool],
    on_read: Callable[[int], Any],
) -> Any:  # fmt: skip
    """Read a leaf to the host: an array, a QuantizedWeight, or a list of both, the parts of a JoinedWeight in order."""
    if in_file(plan):
        return checkpoint.array(plan.files[0])
    if not plan.packed:
        return assemble(plan, checkpoint, dtype, on_read)
    if _alike(plan.packed):
        return _assemble_packed(plan, checkpoint, dtype, on_read)
    parts = []
    for tensor, file in zip(plan.leaf.tensors, plan.files, strict=True):
        shape, weight = _part_of(plan.leaf, tensor, plan.shape), checkpoint.quantized(file)
        dense = weight is None
        parts.append(checkpoint.array(file).reshape(shape).astype(dtype) if dense else _on_axes(weight, shape, dtype))
        _done(checkpoint, file, on_read)
    return list(_in_order(plan.leaf, parts))


def _on_device(plan: LeafPlan, host: Any, quantizer: LeafPlacer) -> Any:
    """Put a leaf from `_read` on the default device: an array, a QuantizedWeight or a JoinedWeight."""
    name = plan.leaf.leaf
    if isinstance(host, list):
        parts = (quantizer.packed(name, p) if isinstance(p, QuantizedWeight) else quantizer.part(name, p) for p in host)
        return JoinedWeight(tuple(parts), PART_AXES[name])
    return quantizer.packed(name, host) if isinstance(host, QuantizedWeight) else quantizer(name, host)


def _is_in_file(plan: LeafPlan, checkpoint: TensorSource, dtype: np.dtype, quantizer: LeafPlacer) -> bool:
    """True if a leaf to quantise or split equals a tensor of the file, so that its parts are read from the mapped file.

    A copy of the lm_head, which may be larger than two layers, would set the load's peak memory. A process reads only
    its own part of a leaf that is split over processes.
    """
    if plan.packed or len(plan.files) != 1 or not quantizer.reads_views(plan.leaf.leaf, plan.shape):
        return False
    rule, entry = plan.leaf.tensors[0].rule, checkpoint.entry(plan.files[0])
    stored = DTYPES.get(entry.dtype)
    return rule.parts == (Part.WHOLE,) and not rule.transposed and (entry.shape, stored) == (plan.shape, dtype)


def assemble(
    leaf_plan: LeafPlan, checkpoint: TensorSource, dtype: np.dtype, on_read: Callable[[int], Any] = lambda _: None
) -> np.ndarray:
    """Assemble one leaf on the host, in its final dtype. on_read: called after each tensor with its size in bytes."""
    leaf = leaf_plan.leaf
    dtype = leaf_dtype(leaf_plan.leaf.leaf, dtype)
    host = aligned_empty(leaf_plan.shape, dtype)
    if leaf_plan.constant is not None:
        host[...] = leaf_plan.constant
    elif any(tensor.rule.first_layer for tensor in leaf.tensors):
        host[...] = 0  # rows of layers that have no tensor
    for tensor, name in zip(leaf.tensors, leaf_plan.files, strict=True):
        with np.errstate(over="ignore"):  # overflow is checked below
            tensor.rule.store(checkpoint.array(name), leaf.block(host, tensor))
        _done(checkpoint, name, on_read)
    if dtype == np.float16 and not np.isfinite(host).all():
        first = leaf_plan.files[0]
        raise ModelLoadError(
            f"{checkpoint.path(first)}: {checkpoint.label(first)} has values beyond the range of float16 (65,504): "
            "use dtype bfloat16 or float32"
        )
    return host


def _packed(leaf: LeafTensors, checkpoint: TensorSource, files: list[str]) -> tuple[QuantizedWeight | None, ...]:
    """Return the tensors of a leaf that stay quantised, as ShapeDtypeStructs. (): the leaf becomes a dense array."""
    if leaf.leaf not in LEAVES:
        return ()
    found = tuple(checkpoint.quantized_shape(name) for name in files)
    if not any(found) or _alike(found) or _is_joined(leaf):
        return found if any(found) else ()
    logger.warning(
        "%s: the tensors of %s are quantised in different ways: they are dequantised",
        checkpoint.folder, leaf.leaf if leaf.layer is None else f"{leaf.leaf} of layer {leaf.layer}",
    )  # fmt: skip
    return ()


def _alike(found: tuple[QuantizedWeight | None, ...]) -> bool:
    """True if the tensors of a leaf can be one QuantizedWeight: they differ in their outputs only."""
    first = found[0]
    if first is None or (len(found) > 1 and first.order is not None):  # each tensor has its own order
        return False
    return all(one is not None and _facts(one) == _facts(first) for one in found)


def _facts(weight: QuantizedWeight) -> tuple[Any, ...]:
    widths = [(a.shape[-1], a.dtype) if (a := getattr(weight, name)) is not None else None for name in ARRAYS]
    return weight.kind, weight.activations, weight.divides, *widths


def _is_joined(leaf: LeafTensors) -> bool:
    """True if every tensor fills its own part of the leaf in its order, so that the parts can be stored separately."""
    rules = [tensor.rule for tensor in leaf.tensors]
    return leaf.leaf in PART_AXES and all(
        len(rule.parts) == 1 and rule.parts[0] in _SLICES and not rule.pairs for rule in rules
    )


def _part_of(leaf: LeafTensors, tensor: NamedRule, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the part of a fused leaf that a tensor fills."""
    axis, part = PART_AXES[leaf.leaf], _SLICES[tensor.rule.parts[0]]
    return (*shape[:axis], len(range(*part.indices(shape[axis]))), *shape[axis + 1 :])


def _packed_shape(plan: LeafPlan, leaf: jax.ShapeDtypeStruct, quantizer: LeafPlacer) -> Any:
    """A leaf that is quantised in the checkpoint, as ShapeDtypeStructs."""
    name, packed = plan.leaf.leaf, plan.packed

    def placed(weight: QuantizedWeight, shape: tuple[int, ...]) -> Any:
        return quantizer.packed_shape(name, _on_axes(weight, shape, leaf.dtype))

    if _alike(packed) and packed[0] is not None:
        return placed(packed[0], plan.shape)
    shapes = [_part_of(plan.leaf, tensor, plan.shape) for tensor in plan.leaf.tensors]
    parts = [
        jax.ShapeDtypeStruct(shape, leaf.dtype) if weight is None else placed(weight, shape)
        for weight, shape in zip(packed, shapes, strict=True)
    ]
    return JoinedWeight(_in_order(plan.leaf, parts), PART_AXES[name])


def _in_order(leaf: LeafTensors, parts: list[Any]) -> tuple[Any, ...]:
    """The parts in the order of their slices of the leaf."""
    order = list(_SLICES)
    indices = sorted(range(len(parts)), key=lambda i: order.index(leaf.tensors[i].rule.parts[0]))
    return tuple(parts[i] for i in indices)


def _assemble_packed(
    plan: LeafPlan, checkpoint: TensorSource, dtype: np.dtype, on_read: Callable[[int], Any]
) -> QuantizedWeight:
    """Assemble one leaf from tensors that are quantised alike, on the host, in the layout "plain"."""
    arrays: dict[str, np.ndarray] = {}
    weight = None
    for tensor, file in zip(plan.leaf.tensors, plan.files, strict=True):
        weight = checkpoint.quantized(file)
        for name in ARRAYS[:-1]:
            array = getattr(weight, name)
            if array is None:
                continue
            if name not in arrays:
                arrays[name] = aligned_empty((*plan.shape[:-1], array.shape[-1]), array.dtype)
            turned = np.swapaxes(array, -1, -2) if tensor.rule.transposed else array
            tensor.rule.store(turned, plan.leaf.block(arrays[name], tensor))
        _done(checkpoint, file, on_read)
    assert weight is not None, "a plan of packed tensors has at least one"
    return dataclasses.replace(weight, shape=plan.shape, dtype=dtype, **arrays)


def _on_axes(weight: QuantizedWeight, shape: tuple[int, ...], dtype: np.dtype) -> QuantizedWeight:
    """Weights [..., out, in] in the layout "plain", with the outputs on the axes of `shape`. dtype: of activations."""
    return dataclasses.replace(weight.with_shape(shape), dtype=np.dtype(dtype))


def _done(checkpoint: TensorSource, name: str, on_read: Callable[[int], Any]) -> None:
    """Release a tensor that was read, and report its bytes."""
    checkpoint.release(name)
    entry = checkpoint.entry(name)
    on_read(entry.end - entry.begin)


def is_bare(family: Family, checkpoint: TensorSource) -> bool:
    """Return True if the files were saved from the base model: no name has the causal language model's prefix."""
    return not any(name.startswith(family.prefix) for name in checkpoint.names)


class _Names:
    """Maps names of tensors in the family's table to names in the checkpoint."""

    def __init__(self, family: Family, checkpoint: TensorSource):
        self._checkpoint = checkpoint
        self._bare = family.prefix if is_bare(family, checkpoint) else ""
        self._renamed: dict[str, str] = {}

    def find(self, name: str) -> str | None:
        """The name in the checkpoint, or None if it has no such tensor."""
        name = self._renamed.get(name, name.removeprefix(self._bare))
        return name if name in self._checkpoint else None

    def rename(self, name: str, to: str) -> None:
        """From now on, find the tensor `to` under `name`."""
        self._renamed[name] = to


def _check_tied(names: _Names, family: Family, spec: DecoderSpec, checkpoint: TensorSource) -> DecoderSpec:
    """Decide whether embeddings are tied in this checkpoint, as Transformers does.

    If only one of the two matrices exists, it is used for both. If both exist and differ, they are not tied.
    """
    embed_rule = next(rule.name for rule in family.rules if rule.leaf == _EMBED)
    head, embed = names.find(HEAD), names.find(embed_rule)
    if head is not None and embed is None:
        names.rename(embed_rule, head)
    if head is None or embed is None or spec.pools:
        return spec
    a, b = checkpoint.entry(head), checkpoint.entry(embed)
    if (a.dtype, a.shape) == (b.dtype, b.shape) and len(a.shape) == 2:
        same = equal_bytes(checkpoint.array(head), checkpoint.array(embed))
        checkpoint.release(head)
        checkpoint.release(embed)
        if same:
            return spec
    logger.warning(
        "%s ties the embeddings, but %s and %s differ: both matrices are used",
        checkpoint.config_name, a.name, b.name,
    )  # fmt: skip
    return dataclasses.replace(spec, tie_embeddings=False)


def equal_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two arrays have the same bytes."""
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))


def _check_tensor(checkpoint: TensorSource, name: str, shape: tuple[int, ...], leaf: str) -> None:
    entry = checkpoint.entry(name)
    if entry.shape != shape:
        raise ModelLoadError(
            f"{checkpoint.path(name)}: {checkpoint.label(name)} has shape {list(entry.shape)}, "
            f"{checkpoint.config_name} calls for {list(shape)}: config and weights are from different models"
        )
    accepted = ("I64", "I32") if leaf == HASHED else _CONVERTIBLE
    if entry.dtype not in accepted:
        raise ModelLoadError(
            f"{checkpoint.path(name)}: {checkpoint.label(name)} is {entry.dtype}; supported are "
            f"{', '.join(accepted)}: use a checkpoint that is not quantized"
        )


def _some(names: list[str]) -> str:
    """Return 'tensor x is' or 'tensors x, y, z and 7 others are'."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    others = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return f"tensors {', '.join(names[:3])}{others} are"


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an uninitialised array whose address is a multiple of _ALIGNMENT bytes."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)
