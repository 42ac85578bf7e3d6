"""An update with arrays by Hugging Face's names: a dictionary, or an iterator of (name, array).

A leaf that is one whole array goes into the engine by reference if it fits. All others are assembled on the host, as
those of a checkpoint.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.kv_scales import KV_SCALE
from jpaged.loading.live import refuse_remote
from jpaged.loading.renamed_tensors import may_be_of_mtp, mtp_tensors
from jpaged.loading.safetensors_file import DTYPES, TensorEntry
from jpaged.loading.updates.engine_weights import EngineWeights
from jpaged.loading.updates.tree_update import in_layout
from jpaged.loading.weights import HEAD, LeafPlan, equal_bytes, leaf_of, plan_weights
from jpaged.models.families.base import LeafTensors, NamedRule, Part
from jpaged.models.new_leaves import NewDrafter, NewLeaf
from jpaged.models.spec import HASHED, param_shapes
from pallas_kernels import QuantizedWeight

_FORMAT_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_EMBED = "embed"
# Ends of the names that quantised weights have in GPTQ, AWQ, compressed-tensors, FP8, ModelOpt and MXFP4 checkpoints
_QUANTIZED = (
    "_blocks", "_scales", ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale",
    ".weight_scale_2", ".weight_scale_inv", ".weight_shape", ".weight_zero_point", ".input_scale",
)  # fmt: skip


class ArraySource:
    """Arrays by name, as a `TensorSource`. Nothing is copied."""

    folder = Path("the new weights")
    config_name = "the model's config"

    def __init__(self, arrays: Mapping[str, Any]):
        """Raises ModelLoadError for a value that is not a concrete array."""
        for name, array in arrays.items():
            check_array(name, array)
        self.arrays = arrays

    @property
    def names(self) -> Iterable[str]:
        """Names of all arrays."""
        return self.arrays.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def entry(self, name: str) -> TensorEntry:
        """Shape and dtype of an array."""
        array = self.arrays[name]
        dtype = np.dtype(array.dtype)
        return TensorEntry(name, _FORMAT_NAMES.get(dtype, dtype.name), tuple(array.shape), 0, array.nbytes)

    def path(self, name: str) -> Path:
        """Stands for a file in error messages."""
        return self.folder

    def label(self, name: str) -> str:
        """Name of an array in error messages."""
        return name

    def array(self, name: str) -> np.ndarray:
        """The array on the host; on CPU a view. Raises ModelLoadError if the caller has deleted it."""
        check_array(name, self.arrays[name])
        return np.asarray(self.arrays[name])

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Always None: quantised arrays are not accepted by name."""
        return None

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """Always None."""
        return None

    def release(self, name: str) -> None:
        """Do nothing: the arrays are the caller's."""


def check_array(name: object, array: Any) -> None:
    """Raise ModelLoadError unless `array` is a numpy array or a live jax array, and `name` that of a dense tensor."""
    if not isinstance(name, str):
        raise ModelLoadError(f"the new weights have the name {name!r}: names must be those of Hugging Face's tensors")
    if name.endswith(_QUANTIZED):
        raise ModelLoadError(
            f"{name} is a part of a quantised weight: pass arrays that are not quantised, or the path of the checkpoint"
        )
    if not isinstance(array, (jax.Array, np.ndarray)):
        raise ModelLoadError(f"{name} is a {type(array).__name__}: must be a jax or numpy array")
    if isinstance(array, jax.Array) and array.is_deleted():
        raise ModelLoadError(f"{name} has been deleted, for example by donating it to a jitted function")
    refuse_remote(array, name)


def prepare_names(weights: Mapping[str, Any], engine: EngineWeights) -> list[NewLeaf | NewDrafter]:
    """Check a dictionary of arrays, and list the leaves. Errors as in `prepare`."""
    source = ArraySource(weights)
    plan = plan_weights(engine.family, engine.spec, engine.constants, source)
    if plan.spec != engine.spec:  # the embeddings were tied
        raise ModelLoadError(f"{HEAD} differs from the embedding, but the engine uses one matrix for both")
    leaves = [leaf for leaf_plan in plan.leaves for leaf in _new_leaves(leaf_plan, source, engine)]
    return [*leaves, *(() if engine.mtp is None else engine.mtp.new(source))]


def prepare_iterator(weights: Iterator[Any], engine: EngineWeights) -> Iterator[NewLeaf | NewDrafter]:
    """Yield a leaf when all its arrays have come. Raises ModelLoadError for a wrong array, and at the end for a gap.

    Arrays of incomplete leaves are kept until the others come.
    """
    stream = _Stream(engine)
    for pair in weights:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ModelLoadError(f"the iterator returned a {type(pair).__name__}: must return pairs (name, array)")
        check_array(*pair)
        yield from stream.add(*pair)
    yield from stream.end()


class _Stream:
    """Collects arrays until a leaf has all of its own."""

    def __init__(self, engine: EngineWeights):
        self._engine = engine
        tree = param_shapes(engine.spec, np.float32)
        self._left: dict[LeafTensors, dict[NamedRule, str]] = {}  # leaf -> names of its arrays that have come
        self._target: dict[str, tuple[LeafTensors, NamedRule]] = {}
        self._shape: dict[LeafTensors, tuple[int, ...]] = {}
        self._arrays: dict[str, Any] = {}
        self._of_mtp: dict[str, Any] = {}  # all arrays of MTP layers, by name
        self._for_mtp: dict[str, Any] = {}  # arrays of the model that an MTP layer may have a copy of
        self._constants: list[LeafTensors] = []
        for leaf in engine.family.tensors(tree):
            self._shape[leaf] = (tree if leaf.layer is None else tree["layers"][leaf.layer])[leaf.leaf].shape
            if leaf.leaf in engine.constants:
                self._constants.append(leaf)
                continue
            self._left[leaf] = {}
            for tensor in leaf.tensors:
                for name in tensor.names:
                    self._target[name] = self._target[name.removeprefix(engine.family.prefix)] = leaf, tensor
        self._tied_head: Any = None  # a copy of the embedding, until that has come
        self._embed: Any = None

    def add(self, name: str, array: Any) -> list[NewLeaf]:
        """Add an array. Returns the leaves that it completes. Raises ModelLoadError."""
        if self._engine.mtp is not None and name in self._engine.mtp.of_model:
            self._for_mtp[name] = array
        if name not in self._target:
            self._skip(name, array)
            return []
        leaf, tensor = self._target[name]
        if leaf not in self._left or tensor in self._left[leaf]:
            raise ModelLoadError(f"{name} has come twice")
        wanted = tensor.rule.shape(leaf.block(np.broadcast_to(np.float32(0), self._shape[leaf]), tensor))
        whole = leaf.leaf == HASHED
        if tuple(array.shape) != wanted or not (np.issubdtype(array.dtype, np.integer) if whole else _is_real(array)):
            found, numbers = f"{array.dtype}{list(array.shape)}", f"{'whole' if whole else 'real'} numbers"
            raise ModelLoadError(f"{name} is {found}, the model calls for {numbers} of the shape {list(wanted)}")
        self._arrays[name] = array
        self._left[leaf][tensor] = name
        if leaf.leaf == _EMBED:
            self._embed = array
            self._check_tied()
        if len(self._left[leaf]) < len(leaf.tensors):
            return []
        names = self._left.pop(leaf)
        arrays = {each: self._arrays.pop(each) for each in names.values()}
        plan = LeafPlan(leaf, self._shape[leaf], tuple(names[each] for each in leaf.tensors), None)
        return _new_leaves(plan, ArraySource(arrays), self._engine)

    def end(self) -> Iterator[NewLeaf | NewDrafter]:
        """Leaves that have no array, and the MTP layer. Raises ModelLoadError if an array is missing."""
        missing = [
            tensor.name for leaf, found in self._left.items() for tensor in leaf.tensors if tensor not in found
        ]
        if missing:
            more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
            raise ModelLoadError(f"the iterator has ended without {', '.join(missing[:3])}{more}")
        for leaf in self._constants:
            constant = self._engine.constants[leaf.leaf]
            plan = LeafPlan(LeafTensors(leaf.leaf, leaf.layer, ()), self._shape[leaf], (), constant)
            yield from _new_leaves(plan, ArraySource({}), self._engine)
        unknown = self._of_mtp.keys() - mtp_tensors(self._of_mtp, self._engine.spec.num_layers)
        if unknown := {name for name in unknown if not self._engine.family.ignored.fullmatch(name)}:
            raise ModelLoadError(f"{min(unknown)} is not a tensor of the model")
        if self._engine.mtp is not None:
            yield from self._engine.mtp.new(ArraySource(self._of_mtp | self._for_mtp))

    def _skip(self, name: str, array: Any) -> None:
        """Raise ModelLoadError unless an array without a leaf may be left out."""
        if name == HEAD and self._engine.spec.tie_embeddings:
            self._tied_head = array
            self._check_tied()
        elif may_be_of_mtp(name, self._engine.spec.num_layers):
            self._of_mtp[name] = array
        elif not (name == HEAD or self._engine.family.ignored.fullmatch(name) or KV_SCALE.fullmatch(name)):
            raise ModelLoadError(f"{name} is not a tensor of the model")

    def _check_tied(self) -> None:
        head, embed = self._tied_head, self._embed
        if head is None or embed is None:
            return
        if head.shape != embed.shape or head.dtype != embed.dtype or not equal_bytes(*map(np.asarray, (head, embed))):
            raise ModelLoadError(f"{HEAD} differs from the embedding, but the engine uses one matrix for both")


def _is_real(array: Any) -> bool:
    return np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16


def _new_leaves(plan: LeafPlan, source: ArraySource, engine: EngineWeights) -> list[NewLeaf]:
    """The engine's leaves that a leaf of the default layout becomes."""
    whole = engine.on_device(leaf_of(plan, source, engine.dtype, engine.placer))
    leaves = in_layout(whole, engine)
    return [_by_reference(leaf, plan, source, engine) or leaf for leaf in leaves]


def _by_reference(leaf: NewLeaf, plan: LeafPlan, source: ArraySource, engine: EngineWeights) -> NewLeaf | None:
    """The same leaf, if it is one of the caller's arrays."""
    turned = leaf.name in engine.layout.transposed
    for tensor, name in zip(plan.leaf.tensors, plan.files, strict=True):
        rule, array = tensor.rule, source.arrays[name]
        is_leaf = rule.parts == ((Part.WHOLE,) if leaf.name == plan.leaf.leaf else (Part(leaf.name),))
        alone = tensor.expert is None and (leaf.layer is not None or tensor.layer is None) and not rule.pairs
        if is_leaf and alone and rule.transposed == turned and engine.fits(leaf.layer, leaf.name, array):
            return NewLeaf(leaf.layer, leaf.name, functools.partial(_same, name, array), by_reference=True)
    return None


def _same(name: str, array: jax.Array) -> jax.Array:
    check_array(name, array)
    return array
