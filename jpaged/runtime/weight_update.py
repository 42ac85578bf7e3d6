"""Replaces the weights of a runner's stages, leaf by leaf.

Called by: `ModelRunner.update_params`, between two steps.
Owns: nothing. The stages have no weights while `replace_leaves` runs, and after it has failed.
Never: compiles, or reads the numbers of a leaf.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jpaged.engine.step_plan import ReplacedLeaves
from jpaged.errors import ModelLoadError
from jpaged.models.new_leaves import LeafSlot, NewLeaf, find_layer
from jpaged.models.spec import Params
from jpaged.models.stages import PerStage
from jpaged.runtime.stage_runner import StageRunner


def replace_leaves(stages: Sequence[StageRunner], leaves: Iterable[NewLeaf]) -> ReplacedLeaves:
    """Replace all weights of an engine. No step may be in flight.

    A stage drops its old leaf before the new one is made, so the memory needs room for at most one more leaf. Raises
    ModelLoadError if a leaf is missing, or does not fit its slot. Then the stages have no weights.
    """
    slots = [stage.slots for stage in stages]
    old = [stage.take_params() for stage in stages]
    new: list[Params] = [{"layers": tuple({} for _ in tree["layers"])} for tree in slots]
    num_leaves = num_by_reference = copied_bytes = num_owned = 0
    for leaf in leaves:
        where = _stages_with(leaf, slots)
        for stage, layer in where:
            _place(old[stage], layer).pop(leaf.name, None)
        made = leaf.make()
        for stage, layer in where:
            part = made.parts[stage] if isinstance(made, PerStage) else made
            _check(leaf, _place(slots[stage], layer).get(leaf.name), part)
            _place(new[stage], layer)[leaf.name] = part
        num_leaves += 1
        num_by_reference += leaf.by_reference
        num_owned += leaf.owned
        copied_bytes += 0 if leaf.by_reference else _bytes(made)
    missing = sum(len(jax.tree.leaves(tree)) for tree in slots) - sum(len(jax.tree.leaves(tree)) for tree in new)
    if missing:
        raise ModelLoadError(f"{missing} arrays of the model are missing")
    for stage, tree in zip(stages, new, strict=True):
        stage.use_params(tree, owned=num_owned == num_leaves)
    return ReplacedLeaves(num_leaves, num_by_reference, copied_bytes)


def _stages_with(leaf: NewLeaf, slots: Sequence[Params]) -> list[tuple[int, int | None]]:
    """The stages that have a leaf, and the index of its layer in the stage."""
    if leaf.layer is None:
        return [(stage, None) for stage, tree in enumerate(slots) if leaf.name in tree]
    place = find_layer(slots, leaf.layer)
    if place is None:
        raise ModelLoadError(f"the weights have a layer {leaf.layer}, which the model does not have")
    return [place]


def _place(tree: Params, layer: int | None) -> dict[str, Any]:
    return tree if layer is None else tree["layers"][layer]


def _check(leaf: NewLeaf, slot: Any, made: Any) -> None:
    """Raise ModelLoadError unless the programs accept a leaf."""
    name = leaf.name if leaf.layer is None else f"layers[{leaf.layer}].{leaf.name}"
    if jax.tree.structure(made) != jax.tree.structure(slot):
        raise ModelLoadError(f"{name} has another form than the weights that the programs were compiled for")
    wanted: list[LeafSlot] = jax.tree.leaves(slot)
    for one, array in zip(wanted, jax.tree.leaves(made), strict=True):
        if not one.fits(array):
            found = "has been deleted" if array.is_deleted() else f"is {array.dtype}{list(array.shape)}"
            raise ModelLoadError(
                f"{name} {found} on {array.sharding}: must be {one.dtype}{list(one.shape)} on {one.sharding}"
            )


def _bytes(made: Any) -> int:
    parts = made.parts if isinstance(made, PerStage) else [made]
    return sum(array.nbytes for array in jax.tree.leaves(parts))
