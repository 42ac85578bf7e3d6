"""`jpaged.from_trainer`: the engine's tree of a trainer's weights, for a look at it before an engine has it."""

from pathlib import Path
from typing import Any

from jpaged.loading.checkpoint import read_json
from jpaged.loading.hub import CONFIG, find_config
from jpaged.loading.live import config_values
from jpaged.loading.trees.reader import TrainerTree, read_tree
from jpaged.models.families import spec_of
from jpaged.models.spec import DecoderSpec


def from_trainer(tree: Any, config: Any) -> TrainerTree:
    """Plan the engine's tree of a trainer's tree. `LLM(config, params=tree)` and `update_weights(tree)` do the same.

    tree:   any pytree with the names of flax nnx or linen modules, MaxText, tunix, EasyDeL or Gemma.
    config: a Hugging Face config, its dictionary, a folder or hub id, or a DecoderSpec.

    The result has `params` for `LLM(tree.spec, params=tree.params, layout=tree.layout)`, `copied_bytes`, and for each
    leaf the names of the trainer's arrays and whether it is one of them. Nothing is copied before `params` is read.
    Raises ModelLoadError that names the leaf.
    """
    if isinstance(config, DecoderSpec):
        return read_tree(config, tree)
    if isinstance(config, str | Path):
        path = find_config(str(config), None, None)
        config = read_json(path if path.name == CONFIG else path / CONFIG, required=True)
    return read_tree(spec_of(config_values(config)), tree)
