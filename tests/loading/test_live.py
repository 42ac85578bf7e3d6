"""Live arrays: used without a copy in every supported layout. Other trees are refused, and the error names the leaf."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.live import check_live, layout_shapes
from jpaged.models.decoder import decode, dense_causal_attend, lm_head
from jpaged.models.spec import DecoderSpec, WeightLayout
from tests.golden.checkpoints import BY_NAME, Variant, write_checkpoint
from tests.support.live_trees import split

CONFIG = EngineConfig(model="live")


def loaded(variant: Variant, folder: Path) -> LoadedModel:
    write_checkpoint(variant, 0, folder)
    return load_model(EngineConfig(model=str(folder), dtype="float32"))


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return loaded(BY_NAME["llama"], tmp_path)


def logits(model: LoadedModel) -> np.ndarray:
    ids = jnp.arange(3, 20)
    hidden, *_ = decode(
        model.spec, model.params, ids, jnp.arange(len(ids)), [None] * model.spec.num_layers, ids[None],
        dense_causal_attend, layout=model.layout,
    )  # fmt: skip
    return np.asarray(lm_head(model.spec, model.params, hidden, layout=model.layout))


def pointers(params: dict[str, Any]) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("as_config", ["spec", "dict", "object"])
def test_the_tree_of_param_shapes_is_used_without_a_copy(model: LoadedModel, as_config: str) -> None:
    class HuggingFaceConfig:
        def to_dict(self) -> dict[str, Any]:
            return model.config

    config = {"spec": model.spec, "dict": model.config, "object": HuggingFaceConfig()}[as_config]
    live = load_model(CONFIG, model.params, config)
    assert live.spec == model.spec
    assert live.layout == WeightLayout()
    assert pointers(live.params) == pointers(model.params)
    assert live.eos_token_ids == (() if as_config == "spec" else (2,))


@pytest.mark.parametrize("turn", [pytest.param(False, marks=pytest.mark.slow), True], ids=["out_in", "in_out"])
def test_split_and_turned_trees_give_the_same_logits_without_a_copy(model: LoadedModel, turn: bool) -> None:
    """`o` and `q` are square here: they have the orientation of the other matrices."""
    params = split(model.spec, model.params, turn)
    live = load_model(CONFIG, params, model.spec)
    assert live.layout.split_qkv
    assert live.layout.split_gate_up
    assert live.layout.transposed == (frozenset({"q", "k", "v", "o", "gate", "up", "down"}) if turn else frozenset())
    assert pointers(live.params) == pointers(params)
    np.testing.assert_allclose(logits(live), logits(model), atol=1e-4)


def test_an_lm_head_of_the_other_orientation(model: LoadedModel) -> None:
    params = model.params | {"lm_head": jnp.array(model.params["lm_head"].T), "layers": list(model.params["layers"])}
    live = load_model(CONFIG, params, model.spec)
    assert live.layout.transposed == {"lm_head"}
    np.testing.assert_allclose(logits(live), logits(model), atol=1e-4)


def test_square_matrices_between_two_orientations_need_a_layout(model: LoadedModel) -> None:
    params = split(model.spec, model.params)
    layers = tuple(layer | {"down": jnp.array(layer["down"].T)} for layer in params["layers"])
    with pytest.raises(ModelLoadError, match="is square, and the layers' other matrices are stored in both"):
        load_model(CONFIG, params | {"layers": layers}, model.spec)
    layout = WeightLayout(split_qkv=True, split_gate_up=True, transposed=frozenset({"down"}))
    live = load_model(CONFIG, params | {"layers": layers}, model.spec, layout)
    np.testing.assert_allclose(logits(live), logits(model), atol=1e-4)


# Multi-head attention with a feed-forward layer as wide as the model: all matrices of a layer are square.
SQUARE = DecoderSpec(
    vocab_size=40, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8,
    max_position=16,
)  # fmt: skip


def zeros(spec: DecoderSpec, layout: WeightLayout) -> dict[str, Any]:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layout_shapes(spec, jnp.float32, layout))


def test_layers_of_square_matrices_need_a_layout() -> None:
    layout = WeightLayout(split_qkv=True, split_gate_up=True, transposed=frozenset({"q", "k", "v", "o"}))
    params = zeros(SQUARE, layout)
    with pytest.raises(ModelLoadError, match=r"\['q'\] and all other matrices of a layer are square.* pass layout="):
        check_live(SQUARE, params)
    assert check_live(SQUARE, params, layout).layout == layout


def test_a_fused_leaf_decides_the_orientation_of_square_matrices() -> None:
    for layout in (WeightLayout(), WeightLayout(split_qkv=True), WeightLayout(split_gate_up=True)):
        assert check_live(SQUARE, zeros(SQUARE, layout)).layout == layout
    wide = dataclasses.replace(SQUARE, intermediate_size=48)
    with pytest.raises(ModelLoadError, match=r"\['o'\] is square, and .* in both orientations"):
        check_live(wide, zeros(wide, WeightLayout(transposed=frozenset({"down"}))))


def test_a_square_lm_head_needs_a_layout_unless_layers_are_out_in() -> None:
    spec = dataclasses.replace(SQUARE, vocab_size=32, intermediate_size=48)
    split_up = WeightLayout(split_qkv=True, split_gate_up=True)
    assert check_live(spec, zeros(spec, split_up)).layout == split_up
    turned = dataclasses.replace(split_up, transposed=frozenset({"q", "k", "v", "o", "gate", "up", "down"}))
    with pytest.raises(ModelLoadError, match=r"params\['lm_head'\] is square.* pass layout="):
        check_live(spec, zeros(spec, turned))


def test_a_layout_that_names_no_matrix_is_refused(model: LoadedModel) -> None:
    for layout, message in [
        (WeightLayout(transposed=frozenset({"Q"})), "Q cannot be stored"),
        (WeightLayout(transposed=frozenset({"qkv"})), "qkv cannot be stored"),
    ]:
        with pytest.raises(RequestError, match=rf"^layout.*{message}.*, got "):
            check_live(model.spec, model.params, layout)


def test_leaves_that_are_trees(model: LoadedModel) -> None:
    with pytest.raises(ModelLoadError, match=r"params\['layers'\]\[1\]\['o'\] is a dict, not a JAX array"):
        check_live(model.spec, change(model.params, "layers.o", {"kernel": model.params["layers"][1]["o"]}))


def test_config_of_a_folder(model: LoadedModel, tmp_path: Path) -> None:
    live = load_model(EngineConfig(model=str(tmp_path)), model.params)
    assert live.spec == model.spec
    assert live.config == model.config


def change(params: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of the tree with one leaf changed: "NAME", or "layers.NAME" in layer 1. None removes the leaf."""
    *where, leaf = path.split(".")
    tree = params["layers"][1] if where else params
    changed = {k: v for k, v in (tree | {leaf: value}).items() if v is not None}
    return params | {"layers": (params["layers"][0], changed)} if where else changed


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("embed", None, r"params\.embed is missing"),
        ("layers.down", None, r"params\.layers\[1\]\.down is missing"),
        ("layers.down", jnp.zeros((3, 4)), r"\.layers\[1\]\.down has shape \[3, 4\], the config calls for \[64, 96\]"),
        ("final_norm", jnp.zeros(63), r"params\.final_norm has shape \[63\]"),
        ("surplus", jnp.zeros(3), r"params\.surplus \(3 elements\) is not a parameter"),
        ("layers.surplus", jnp.zeros(3), r"params\.layers\[1\]\.surplus \(3 elements\)"),
        ("final_norm", jnp.zeros(64, jnp.bfloat16), "all arrays must have one dtype"),
        ("embed", np.zeros((320, 64), np.float32), r"params\['embed'\] is a ndarray, not a JAX array"),
        ("embed", jnp.zeros((320, 64), jnp.int32), r"params\['embed'\] is int32; supported are"),
    ],
)
def test_refused_by_leaf(model: LoadedModel, path: str, value: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(CONFIG, change(model.params, path, value), model.spec)


def test_refused_trees(model: LoadedModel) -> None:
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *model.params["layers"])
    for layers, message in [
        (stacked, "stacked over layers: pass a tuple"),
        (model.params["layers"][:1], "has 1 layers, the config calls for 2"),
        ((1, 2), "a tuple with one dictionary of arrays per layer"),
        (None, "a tuple with one dictionary of arrays per layer"),
    ]:
        with pytest.raises(ModelLoadError, match=message):
            load_model(CONFIG, model.params | {"layers": layers}, model.spec)
    with pytest.raises(ModelLoadError, match="num_hidden_layers=1000000000000, but the weights have only 13 tensors"):
        load_model(CONFIG, model.params, model.config | {"num_hidden_layers": 10**12})
    with pytest.raises(ModelLoadError, match="must be a dictionary of arrays"):
        load_model(CONFIG, [1], model.spec)
    with pytest.raises(ModelLoadError, match="must be a DecoderSpec, a Hugging Face config"):
        load_model(CONFIG, model.params, 7)


def test_another_dtype_than_the_arrays_have_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ModelLoadError, match="dtype='bfloat16', but the arrays are float32"):
        load_model(EngineConfig(model="live", dtype="bfloat16"), model.params, model.spec)
    with pytest.raises(RequestError, match=r"dtype .*, got 'int4'"):
        load_model(EngineConfig(model="live", dtype="int4"), model.params, model.spec)
