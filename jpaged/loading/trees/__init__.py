"""Reads the parameter trees of JAX trainers: finds the kind of tree from its names, and makes the engine's tree of it.

Called by: `load_model` and weight updates, with any tree that is not the engine's own; `jpaged.from_trainer`.
Owns: the tables of names, one file a kind, and the one reader that all of them use.
Never: imports flax, or a trainer.
"""

from jpaged.loading.trees.from_trainer import from_trainer
from jpaged.loading.trees.kinds import KINDS
from jpaged.loading.trees.reader import TrainerTree, is_engine_tree, is_trainer_tree, read_tree, refuse_layout

__all__ = ["KINDS", "TrainerTree", "from_trainer", "is_engine_tree", "is_trainer_tree", "read_tree", "refuse_layout"]
