"""Plans and loads the weights of a draft head: the leaves of `head_param_shapes`, from renamed tensors."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.renamed_tensors import RenamedTensors
from jpaged.loading.weights import WeightPlan, is_kv_scale, load_weights, plan_leaves, planned_shapes, refuse_extra
from jpaged.models.draft_head import HeadSpec, head_param_shapes
from jpaged.models.families.base import Family, TensorRule
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.quantization import LeafPlacer
from jpaged.models.spec import Params

D2T, T2D = "d2t", "t2d"
# Tensors of a head that a model's layer does not have, by their names in `RenamedTensors`.
HEAD_RULES = (
    TensorRule("head.fc.weight", "fc"),
    TensorRule("head.hidden_norm.weight", "hidden_norm"),
    TensorRule("head.embedding_norm.weight", "embedding_norm"),
    TensorRule("head.input_norm.weight", "input_norm"),
    TensorRule("head.fc_norm.{layer}.weight", "fc_norm"),
)


def plan_head(family: Family, spec: HeadSpec, values: Mapping[str, Any], tensors: RenamedTensors) -> WeightPlan:
    """Assign the tensors of a head to its leaves. family: of its layer. values: of the config.

    Raises ModelLoadError for missing tensors, for tensors that nothing reads, and for a wrong shape or dtype.
    """
    of_head = dataclasses.replace(family, rules=(*family.rules, *HEAD_RULES))
    make_tree = functools.partial(float_shapes, spec)
    constants = family.constants(CheckpointConfig(values))
    find = {name: name for name in tensors.names}.get
    leaves = plan_leaves(of_head, make_tree(np.float32), constants, tensors, find)
    read = {name for plan in leaves for name in plan.files}
    extra = [n for n in tensors.names if n not in read and not family.ignored.fullmatch(n)]
    refuse_extra(tensors, [n for n in extra if not is_kv_scale(n, spec.layer)])
    return WeightPlan(spec.layer, leaves, make_tree=make_tree)


def float_shapes(spec: HeadSpec, dtype: Any) -> Params:
    """The tree of a head without `d2t`, as ShapeDtypeStructs."""
    return {name: leaf for name, leaf in head_param_shapes(spec, dtype).items() if name != D2T}


def load_head(
    plan: WeightPlan, tensors: TensorSource, dtype: np.dtype, d2t: np.ndarray | None, placer: LeafPlacer
) -> Params:
    """Load the tree of `head_param_shapes` to the devices of `placer`. d2t: int32[draft vocabulary]."""
    tree = load_weights(plan, tensors, dtype, placer)
    return tree if d2t is None else tree | {D2T: placer(D2T, d2t)}


def head_shapes(plan: WeightPlan, dtype: np.dtype, num_drafts: int | None, placer: LeafPlacer) -> Params:
    """The tree of `load_head`, as ShapeDtypeStructs. num_drafts: size of the draft vocabulary; None: without `d2t`."""
    tree = planned_shapes(plan, dtype, placer)
    return tree | _d2t_shape(num_drafts, placer)


def declared_shapes(spec: HeadSpec, dtype: np.dtype, placer: LeafPlacer) -> Params:
    """The tree of a head that has a config and no weights, as ShapeDtypeStructs."""
    return placer.shapes(float_shapes(spec, dtype)) | _d2t_shape(spec.draft_vocab_size, placer)


def _d2t_shape(size: int | None, placer: LeafPlacer) -> Params:
    return {} if size is None else placer.shapes({D2T: jax.ShapeDtypeStruct((size,), np.dtype(np.int32))})


def random_head(spec: HeadSpec, dtype: np.dtype, placer: LeafPlacer) -> Params:
    """Random weights of a head, for load_format="dummy". Draft ids are the first ids of the target."""

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        name = path[-1].key
        if name == D2T:
            return placer(name, np.zeros(leaf.shape, np.int32))
        key = jax.random.key(len(jax.tree_util.keystr(path)))
        return placer(name, jax.random.uniform(key, leaf.shape, jnp.float32, -1e-3, 1e-3).astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, head_param_shapes(spec, dtype))


def read_d2t(source: TensorSource, spec: HeadSpec) -> np.ndarray | None:
    """The tensor `d2t`, checked, as int32[draft vocabulary]: target id - draft id. None: the head has none.

    Raises ModelLoadError if its length or an id is wrong, and if `t2d` is for another vocabulary.
    """
    vocab, drafts = spec.layer.vocab_size, spec.draft_vocab_size
    if T2D in source and source.entry(T2D).shape != (vocab,):
        raise ModelLoadError(
            f"{source.path(T2D)}: {T2D} has shape {list(source.entry(T2D).shape)}, the model's vocabulary has "
            f"{vocab:,} tokens: use a head that was trained for this model"
        )
    if drafts is None:
        return None
    entry = source.entry(D2T)
    if entry.shape != (drafts,) or entry.dtype not in ("I64", "I32"):
        raise ModelLoadError(
            f"{source.path(D2T)}: {D2T} is {entry.dtype}{list(entry.shape)}, {source.config_name} calls for "
            f"{drafts:,} integers (draft_vocab_size): config and weights are from different models"
        )
    offsets = np.array(source.array(D2T))
    targets = np.arange(drafts) + offsets
    if targets.min() < 0 or targets.max() >= vocab:
        wrong = int(np.argmax((targets < 0) | (targets >= vocab)))
        raise ModelLoadError(
            f"{source.path(D2T)}: {D2T} maps draft id {wrong} to the token id {int(targets[wrong]):,}, and the model's "
            f"vocabulary has {vocab:,} tokens: use a head that was trained for this model"
        )
    return offsets.astype(np.int32)
