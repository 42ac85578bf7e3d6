"""Trees of live arrays of models with unlike layers (Gemma 3n, Gemma 4): KV heads, widths and keys differ by layer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.trees import read_tree
from jpaged.loading.updates import EngineWeights, prepare
from jpaged.models.families import spec_of
from jpaged.models.spec import WeightLayout
from jpaged.runtime.weight_update import replace_leaves
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.support import trainer_trees
from tests.support.checkpoint_files import assert_same
from tests.support.live_trees import Stage
from tests.support.trainer_trees import Checkpoint

MAKERS: dict[str, Callable[[Checkpoint], Any]] = {
    "hugging face": trainer_trees.hugging_face, "easydel": trainer_trees.easydel,
}  # fmt: skip
NAMES = ("gemma4", "gemma4-moe", "gemma4-unified", "gemma3n", "gemma3n-second")
# Leaves that no array of a tree with Transformers' names can be
STACKED = {
    "attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "layer_out_norm", "layer_scalar", "router_norm",
    "dense_out_norm", "sparse_norm", "sparse_out_norm", "altup_scale", "altup_router_norm", "laurel_norm",
    "altup_predict",
}  # fmt: skip
# And those that kernels [in, out] cannot be
TURNED = {
    "layer_in", "layer_out", "layer_embed_in", "router", "laurel_left", "laurel_right", "altup_router", "altup_correct",
    *(f"altup_{kind}_{i}" for kind in ("in", "out") for i in range(3)),
}  # fmt: skip
LIVE = EngineConfig(model="live")


def written(name: str, folder: Path) -> tuple[list[LoadedModel], list[Checkpoint]]:
    """Two checkpoints of a model, with different numbers."""
    models, checkpoints = [], []
    for seed in range(2):
        write_checkpoint(BY_NAME[name], seed, folder / str(seed))
        models.append(load_model(EngineConfig(model=str(folder / str(seed)), dtype="float32")))
        checkpoints.append(Checkpoint(BY_NAME[name].config, load_file(folder / str(seed) / "model.safetensors")))
    return models, checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_tree_is_used_without_a_copy_and_updated(tmp_path: Path, name: str, maker: str) -> None:
    """Matrices are the trainer's own. Updates by tree, by names and by folder bring the other checkpoint's numbers."""
    models, checkpoints = written(name, tmp_path)
    first, second = (MAKERS[maker](checkpoint) for checkpoint in checkpoints)
    live = load_model(LIVE, first, models[0].config)
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(first)}
    copied = {
        name for tree in (live.params, *live.params["layers"]) for name, leaf in tree.items()
        if name != "layers" and leaf.unsafe_buffer_pointer() not in own
    }  # fmt: skip
    assert copied <= STACKED | (set() if maker == "hugging face" else TURNED)
    stages = [Stage(live.params)]
    weights = EngineWeights.of(live, LIVE, [stages[0].slots], jax.devices()[0])
    wanted = [read_tree(models[0].spec, tree).params for tree in (first, second)]
    for number, given in ((1, second), (0, dict(checkpoints[0].tensors)), (1, str(tmp_path / "1"))):
        replace_leaves(stages, prepare(given, weights)())
        assert_same(stages[0].params, wanted[number])
    # a tree goes into an engine that was started with the checkpoint, and that engine's tree into one of a trainer
    stages = [Stage(models[0].params)]
    fused = EngineWeights.of(models[0], LIVE, [stages[0].slots], jax.devices()[0])
    replace_leaves(stages, prepare(second, fused)())
    assert_same(stages[0].params, models[1].params)
    stages = [Stage(live.params)]
    replace_leaves(stages, prepare(models[1].params, weights)())
    assert_same(stages[0].params, wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("maker", ["engine", "hugging face"])
def test_an_engine_answers_as_with_the_checkpoint(tmp_path: Path, name: str, maker: str) -> None:
    """Bit for bit, before and after an update."""
    models, checkpoints = written(name, tmp_path)
    trees = [model.params for model in models]
    if maker != "engine":
        trees = [MAKERS[maker](checkpoint) for checkpoint in checkpoints]
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}

    def answers(llm: LLM) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
        outputs = llm.generate([[5, 9, 200, 17, 33], list(range(3, 50))], params)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

    wanted = []
    for seed in range(2):
        with LLM(str(tmp_path / str(seed)), dtype="float32", **small) as llm:
            wanted.append(answers(llm))
    with LLM(models[0].config, params=trees[0], **small) as llm:
        assert answers(llm) == wanted[0]
        llm.update_weights(trees[1])
        assert answers(llm) == wanted[1]


def test_refused_by_leaf(tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["gemma4"], 0, tmp_path)
    spec = spec_of(BY_NAME["gemma4"].config)
    tensors = jax.device_put(load_file(tmp_path / "model.safetensors"))
    zeros = lambda *shape: jax.device_put(np.zeros(shape, np.float32))  # noqa: E731
    v = "model.layers.1.self_attn.v_proj.weight"
    for changed, message in [
        ({"model.layers.self_attn.q_proj.weight": zeros(6, 64, 64)}, r"q_proj\.weight is stacked over layers"),
        ({v: zeros(64, 64)}, r"v_proj\.weight \(v\), which layer 1 has not"),
        ({"model.layers.0.layer_scalar": None}, r"no layer_scalar of layer 0: layers\.0\.layer_scalar is missing"),
        ({"model.layers.1.self_attn.q_proj.weight": zeros(3, 64)}, r"q_proj\.weight has shape \[3, 64\]"),
    ]:
        tree = {name: array for name, array in (tensors | changed).items() if array is not None}
        with pytest.raises(ModelLoadError, match=message):
            load_model(LIVE, tree, spec)
    with pytest.raises(ModelLoadError, match=r"tunix's names, and trees of a model whose layers have unlike keys"):
        load_model(LIVE, {"layers": {"0": {"attn": {"q_proj": {"w": zeros(64, 4, 16)}}}}}, spec)
    lora = dataclasses.replace(LIVE, enable_lora=True)
    with pytest.raises(ModelLoadError, match="enable_lora=True with live arrays of a model whose layers have unlike"):
        load_model(lora, tensors, spec)


@pytest.mark.slow
def test_adapters_need_the_engine_s_own_tree_and_unused_keys_are_left(tmp_path: Path) -> None:
    models, (checkpoint, _) = written("gemma4", tmp_path)
    tensors = jax.device_put(checkpoint.tensors)
    tensors["model.layers.5.self_attn.k_proj.weight"] = jnp.zeros((2, 2))  # no layer reads these keys
    assert read_tree(models[0].spec, tensors).num_by_reference
    live = load_model(dataclasses.replace(LIVE, enable_lora=True), models[0].params, models[0].spec)
    assert live.layout == WeightLayout()
    np.testing.assert_array_equal(live.params["embed"], models[0].params["embed"])
