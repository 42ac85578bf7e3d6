"""From a checkpoint's tensors to the parameter tree on the device.

1. `plan_weights` goes by the headers alone: every leaf's tensors must be there in the right shape and in a dtype that
   can be converted, and nothing may be left over. Whatever is wrong is found here, before device memory is taken.
2. `load_weights` assembles one leaf at a time on the host, in the dtype it will have, and puts it on the device before
   it begins the next: host memory holds one fused leaf above the mapped files.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource
from jpaged.models.families.base import Family, LeafTensors
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, leaf_dtype, param_shapes

logger = logging.getLogger(__name__)

_CONVERTIBLE = ("F64", "F32", "F16", "BF16")
HEAD = "lm_head.weight"
_EMBED = "embed"
_BEYOND_MEMORY = 2**48  # elements of one leaf; numpy cannot address 2**61 of them
_ALIGNMENT = 64  # bytes; from here JAX on CPU uses a buffer as it is instead of copying it


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One leaf of the parameter tree and where it comes from."""

    leaf: LeafTensors
    shape: tuple[int, ...]
    files: tuple[str, ...]  # names in the checkpoint, one for each of leaf.tensors
    constant: float | None  # value of a leaf that has no tensor


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """A checked assignment of all tensors. `spec` may differ from the config's in whether embeddings are tied."""

    spec: DecoderSpec
    leaves: tuple[LeafPlan, ...]
    copies: tuple[str, ...] = ()  # names in the checkpoint of the tied embedding's own copies


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Weights that were checked against the config and are not on the device yet."""

    spec: DecoderSpec
    dtype: np.dtype | None  # the checkpoint's own
    num_bytes: int          # of its files
    load: Callable[[np.dtype], dict[str, Any]]  # the tree of `param_shapes(spec, dtype)` on the default device


def check_depth(config: CheckpointConfig, tensors: int) -> None:
    """Refuse more layers than there are tensors, before anything of that size is made."""
    for key in ("num_hidden_layers", "n_layer"):
        layers = config.get(key)
        if isinstance(layers, int) and layers > tensors:
            raise ModelLoadError(
                f"config.json: {key}={layers}, but the weights are {tensors} tensors: "
                "config and weights are of different models"
            )


def plan_weights(
    family: Family, spec: DecoderSpec, constants: Mapping[str, float], checkpoint: TensorSource
) -> WeightPlan:
    """Assign every tensor of the checkpoint to a leaf. Raises ModelLoadError that names file, tensor and remedy."""
    names = _Names(family, checkpoint)
    if spec.tie_embeddings:
        spec = _check_tied(names, family, spec, checkpoint)
    leaves, missing = [], []
    tree = param_shapes(spec, np.float32)
    for leaf in family.tensors(tree):
        shape = (tree["layers"][leaf.layer] if leaf.layer is not None else tree)[leaf.leaf].shape
        if leaf.leaf in constants:
            leaves.append(LeafPlan(dataclasses.replace(leaf, tensors=()), shape, (), constants[leaf.leaf]))
            continue
        if math.prod(shape) >= _BEYOND_MEMORY:
            raise ModelLoadError(
                f"{checkpoint.config_name} calls for {leaf.leaf} of shape {list(shape)}, more than any memory holds: "
                "config and weights are of different models"
            )
        blank = np.broadcast_to(np.float32(0), shape)  # a shape to cut views from, without memory
        files = []
        for tensor in leaf.tensors:
            name = next((found for n in tensor.names if (found := names.find(n)) is not None), None)
            if name is None:
                missing.append(checkpoint.label(tensor.name))
            else:
                _check_tensor(checkpoint, name, tensor.rule.shape(leaf.block(blank, tensor)))
                files.append(name)
        leaves.append(LeafPlan(leaf, shape, tuple(files), None))
    if missing:
        remedy = ": to embed with it, start with runner='pooling'" if missing == [checkpoint.label(HEAD)] else ""
        raise ModelLoadError(
            f"{checkpoint.folder}: {_some(missing)} missing, which {checkpoint.config_name} calls for: "
            f"the checkpoint is incomplete or {checkpoint.config_name} is of another model{remedy}"
        )
    used = {name for plan in leaves for name in plan.files}
    extra = [n for n in checkpoint.names if n not in used and not family.ignored.fullmatch(n)]
    copies: tuple[str, ...] = ()
    if spec.pools:
        extra = [n for n in extra if n != HEAD]  # an output matrix that nobody asks
    elif spec.tie_embeddings:
        copies = tuple(n for n in extra if n == HEAD)  # checked to be the embedding's own
        extra = [n for n in extra if n not in copies]
    if extra:
        raise ModelLoadError(
            f"{checkpoint.path(extra[0])}: {_some([checkpoint.label(n) for n in extra])} more than "
            f"{checkpoint.config_name} calls for: {checkpoint.config_name} is of another model, or the checkpoint has "
            "a part that jpaged does not know"
        )
    return WeightPlan(spec, tuple(leaves), copies)


def load_weights(plan: WeightPlan, checkpoint: TensorSource, dtype: np.dtype) -> dict[str, Any]:
    """The parameter tree of `param_shapes(plan.spec, dtype)` on the default device."""
    tree: dict[str, Any] = {"layers": [{} for _ in range(plan.spec.num_layers)]}
    with tqdm(total=checkpoint.num_bytes, unit="B", unit_scale=True, desc="loading weights", delay=2) as progress:
        for leaf_plan in plan.leaves:
            leaf = leaf_plan.leaf
            host = assemble(leaf_plan, checkpoint, dtype, progress.update)
            place = tree["layers"][leaf.layer] if leaf.layer is not None else tree
            place[leaf.leaf] = jax.block_until_ready(jax.device_put(host))
            del host
    tree["layers"] = tuple(tree["layers"])
    return tree


def assemble(
    leaf_plan: LeafPlan, checkpoint: TensorSource, dtype: np.dtype, on_read: Callable[[int], Any] = lambda _: None
) -> np.ndarray:
    """One leaf on the host, in its dtype. on_read: called with the bytes of each tensor that is done."""
    leaf = leaf_plan.leaf
    dtype = leaf_dtype(leaf_plan.leaf.leaf, dtype)
    host = aligned_empty(leaf_plan.shape, dtype)
    if leaf_plan.constant is not None:
        host[...] = leaf_plan.constant
    for tensor, name in zip(leaf.tensors, leaf_plan.files, strict=True):
        with np.errstate(over="ignore"):  # looked for below
            tensor.rule.store(checkpoint.array(name), leaf.block(host, tensor))
        checkpoint.release(name)
        entry = checkpoint.entry(name)
        on_read(entry.end - entry.begin)
    if dtype == np.float16 and not np.isfinite(host).all():
        first = leaf_plan.files[0]
        raise ModelLoadError(
            f"{checkpoint.path(first)}: {checkpoint.label(first)} has values beyond the range of float16 (65,504): "
            "use dtype bfloat16 or float32"
        )
    return host


def is_bare(family: Family, checkpoint: TensorSource) -> bool:
    """Whether the files were saved from the bare base model: their names lack the causal language model's prefix."""
    return not any(name.startswith(family.prefix) for name in checkpoint.names)


class _Names:
    """Names of tensors as the family's table has them -> as the checkpoint has them."""

    def __init__(self, family: Family, checkpoint: TensorSource):
        self._checkpoint = checkpoint
        self._bare = family.prefix if is_bare(family, checkpoint) else ""
        self._renamed: dict[str, str] = {}

    def find(self, name: str) -> str | None:
        """The checkpoint's name, or None where it has no such tensor."""
        name = self._renamed.get(name, name.removeprefix(self._bare))
        return name if name in self._checkpoint else None

    def rename(self, name: str, to: str) -> None:
        """Take `to` for `name` from now on."""
        self._renamed[name] = to


def _check_tied(names: _Names, family: Family, spec: DecoderSpec, checkpoint: TensorSource) -> DecoderSpec:
    """Settle what tied embeddings mean for this file, as Transformers does.

    One of the two matrices serves for both, whichever is there. Where both are there and differ, they are not tied.
    """
    embed_rule = next(rule.name for rule in family.rules if rule.leaf == _EMBED)
    head, embed = names.find(HEAD), names.find(embed_rule)
    if head is not None and embed is None:
        names.rename(embed_rule, head)
    if head is None or embed is None or spec.pools:
        return spec
    a, b = checkpoint.entry(head), checkpoint.entry(embed)
    if (a.dtype, a.shape) == (b.dtype, b.shape):
        same = _equal(checkpoint.array(head), checkpoint.array(embed))
        checkpoint.release(head)
        checkpoint.release(embed)
        if same:
            return spec
    logger.warning(
        "%s ties the embeddings, but %s and %s differ: they are used as two matrices",
        checkpoint.config_name, a.name, b.name,
    )  # fmt: skip
    return dataclasses.replace(spec, tie_embeddings=False)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same bytes."""
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))


def _check_tensor(checkpoint: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    entry = checkpoint.entry(name)
    if entry.shape != shape:
        raise ModelLoadError(
            f"{checkpoint.path(name)}: {checkpoint.label(name)} has shape {list(entry.shape)}, "
            f"{checkpoint.config_name} calls for {list(shape)}: config and weights are of different models"
        )
    if entry.dtype not in _CONVERTIBLE:
        raise ModelLoadError(
            f"{checkpoint.path(name)}: {checkpoint.label(name)} is {entry.dtype}; supported are "
            f"{', '.join(_CONVERTIBLE)}: use a checkpoint that is not quantized"
        )


def _some(names: list[str]) -> str:
    """'x is' or 'x, y, z and 7 others are'."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    others = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return f"tensors {', '.join(names[:3])}{others} are"


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that begins at a multiple of _ALIGNMENT bytes."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)
