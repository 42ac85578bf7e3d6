"""Weight updates give the weights of a fresh load: from trees, arrays by name, and files. Others are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.convert import convert
from jpaged.loading.live import check_live
from jpaged.loading.updates import EngineWeights, prepare
from jpaged.models.spec import WeightLayout
from jpaged.runtime.weight_update import replace_leaves
from tests.golden.checkpoints import BY_NAME, VARIANTS, Variant, write_checkpoint
from tests.loading.gguf_files import write_gguf
from tests.support import trainer_trees
from tests.support.checkpoint_files import assert_same, tensors_of
from tests.support.live_trees import Stage
from tests.support.trainer_trees import Checkpoint

FAMILIES = ["llama", "llama-tied", "qwen2", "gemma2", "mixtral", "gpt2", "gpt-neox", "deepseek-v2", "opt-350m"]


class Model:
    """A loaded model whose weights are replaced. No program runs."""

    def __init__(self, folder: Path, **options: Any):
        self.config = EngineConfig(model=str(folder), dtype="float32", **options)
        self.loaded = load_model(self.config)
        trees = self.loaded.params if isinstance(self.loaded.params, tuple) else (self.loaded.params,)
        self.stages = [Stage(tree) for tree in trees]
        slots = [stage.slots for stage in self.stages]
        self.weights = EngineWeights.of(self.loaded, self.config, slots, jax.devices()[0])

    def update(self, weights: Any, layout: Any = None) -> Any:
        return replace_leaves(self.stages, prepare(weights, self.weights, layout)())

    @property
    def params(self) -> Any:
        trees = tuple(stage.params for stage in self.stages)
        return trees if len(trees) > 1 else trees[0]


def written(variant: Variant, folder: Path) -> tuple[Path, Path]:
    """Two checkpoints of a model, with different numbers."""
    for seed in range(2):
        write_checkpoint(variant, seed, folder / str(seed))
    return folder / "0", folder / "1"


def fresh(folder: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), dtype="float32", **options))


def differ(a: Any, b: Any) -> bool:
    return any(not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(variant.name, marks=() if variant.name in FAMILIES else pytest.mark.slow)
        for variant in VARIANTS if not variant.name.endswith(("fp8", "mxfp4"))
    ],
)  # fmt: skip
def test_arrays_by_name(tmp_path: Path, name: str):
    """A dictionary, an iterator in another order, and the folder give the same weights as loading."""
    first, second = written(BY_NAME[name], tmp_path)
    model, wanted = Model(first), fresh(second).params
    assert differ(model.params, wanted)
    tensors = tensors_of(second)
    for weights in (tensors, iter(reversed(tensors.items())), second):
        model.update(tensors_of(first))
        assert differ(model.params, wanted)
        result = model.update(weights)
        assert_same(model.params, wanted)
        assert (result.num_by_reference, result.copied_bytes > 0, model.stages[0].owned) == (0, True, True)


def test_jax_arrays_by_name_are_used_without_a_copy(tmp_path: Path):
    first, second = written(BY_NAME["llama"], tmp_path)
    model = Model(first)
    arrays = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tensors_of(second))
    result = model.update(arrays)
    assert_same(model.params, fresh(second).params)
    layers = model.loaded.spec.num_layers
    assert result.num_by_reference == 3 + 2 * layers  # embed, lm_head, final_norm; o and down of each layer
    assert not model.stages[0].owned
    pointer = arrays["model.layers.1.mlp.down_proj.weight"].unsafe_buffer_pointer()
    assert model.params["layers"][1]["down"].unsafe_buffer_pointer() == pointer


def split_tree(spec: Any, params: Any, turn: bool) -> Any:
    """The same weights with separate q, k, v and gate, up. turn: store matrices as [in, out]."""
    layers = []
    for layer in params["layers"]:
        qkv, gate_up = layer["qkv"], layer["gate_up"]
        out = {"q": qkv[:, :-2], "k": qkv[:, -2], "v": qkv[:, -1], "gate": gate_up[0], "up": gate_up[1]}
        out = {name: leaf.reshape(-1, spec.hidden_size) for name, leaf in out.items()}
        out |= {name: leaf for name, leaf in layer.items() if name not in ("qkv", "gate_up")}
        layers.append({name: jnp.array(a.T) if turn and a.ndim == 2 else a for name, a in out.items()})
    return params | {"layers": tuple(layers)}


@pytest.mark.parametrize("turn", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["out_in", "in_out"])
def test_trees_of_every_layout(tmp_path: Path, turn: bool):
    """Each layout goes into an engine of each layout."""
    first, second = written(BY_NAME["llama"], tmp_path)
    spec, fused = fresh(first).spec, [fresh(folder).params for folder in (first, second)]
    trees = [[tree, split_tree(spec, tree, turn)] for tree in fused]
    for engine in range(2):
        start, wanted = trees[0][engine], trees[1][engine]
        live = check_live(spec, start)
        stages = [Stage(live.params)]
        loaded = dataclasses.replace(fresh(first), layout=live.layout, stored_spec=None)
        weights = EngineWeights.of(loaded, EngineConfig(model="live"), [stages[0].slots], jax.devices()[0])
        for given in (trees[1][0], trees[1][1], tensors_of(second), iter(tensors_of(second).items()), str(second)):
            stages[0].params = live.params
            result = replace_leaves(stages, prepare(given, weights)())
            assert_same(stages[0].params, wanted)
            if given is wanted:
                assert result.num_by_reference == result.num_leaves


def test_an_array_that_is_deleted_while_the_update_waits(tmp_path: Path):
    """The old weights stay: no leaf of them is dropped before all new ones are known to live."""
    model = Model(written(BY_NAME["llama"], tmp_path)[0])
    before = model.params
    by_name = {name: jnp.asarray(array) for name, array in tensors_of(tmp_path / "1").items()}
    for weights in (jax.tree.map(jnp.array, before), by_name):
        leaves = prepare(weights, model.weights)
        jax.tree.leaves(weights)[-1].delete()
        with pytest.raises(ModelLoadError, match="was deleted before the update began"):
            replace_leaves(model.stages, leaves())
        assert model.params is before


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"quantization": "int8"}, marks=pytest.mark.slow), {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "quantization": "int4"}, marks=pytest.mark.slow
        ),
    ],
    ids=["int8", "tensor", "pipeline", "all"],
)  # fmt: skip
def test_quantised_and_split_engines(tmp_path: Path, options: dict[str, Any]):
    """The new weights are rounded and split as those of the start."""
    first, second = written(BY_NAME["llama"], tmp_path)
    model, wanted = Model(first, **options), fresh(second, **options).params
    dense = fresh(second).params
    for weights in (dense, tensors_of(second), iter(tensors_of(second).items()), second):
        model.update(first)
        model.update(weights)
        assert jax.tree.structure(model.params) == jax.tree.structure(wanted)
        assert_same(model.params, wanted)
        shardings = [[leaf.sharding for leaf in jax.tree.leaves(tree)] for tree in (model.params, wanted)]
        assert shardings[0] == shardings[1]


@pytest.mark.slow
def test_converted_folders_and_gguf_files(tmp_path: Path):
    first, second = written(BY_NAME["llama"], tmp_path)
    convert(str(second), tmp_path / "orbax")
    config = json.loads((second / "config.json").read_text())
    write_gguf(tmp_path / "model.gguf", config, tensors_of(second))
    model, wanted = Model(first), fresh(second).params
    model.update(tmp_path / "orbax")
    assert_same(model.params, wanted)
    model.update(first)
    assert differ(model.params, wanted)
    gguf = Model(tmp_path / "model.gguf")
    gguf.update(first)
    gguf.update(tmp_path / "model.gguf")
    assert_same(gguf.params, fresh(tmp_path / "model.gguf").params)


def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("model.norm", "model.nrom"): array for name, array in tensors.items()}


REFUSED = {
    "missing": (lambda t: {n: a for n, a in t.items() if n != "model.norm.weight"}, "model.norm.weight"),
    "unknown": (renamed, "model.n"),
    "shape": (lambda t: t | {"model.norm.weight": np.ones(3, np.float32)}, r"model.norm.weight .*\[3\]"),
    "dtype": (lambda t: t | {"model.norm.weight": np.ones(64, np.int32)}, r"model.norm.weight is (I32|int32)"),
    "kind": (lambda t: t | {"model.norm.weight": [1.0] * 64}, "model.norm.weight is a list"),
}


@pytest.fixture
def llama(tmp_path: Path) -> Model:
    return Model(written(BY_NAME["llama"], tmp_path)[0])


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_do_not_fit(llama: Model, tmp_path: Path, name: str):
    """A dictionary is refused before a leaf is replaced. An iterator is refused when the wrong array comes."""
    change, message = REFUSED[name]
    tensors = change(tensors_of(tmp_path / "1"))
    before = llama.params
    with pytest.raises(ModelLoadError, match=message):
        llama.update(tensors)
    assert llama.params is before
    with pytest.raises(ModelLoadError, match=message):
        llama.update(iter(tensors.items()))
    assert llama.params is None


def test_iterators_that_are_wrong(llama: Model, tmp_path: Path):
    pairs = list(tensors_of(tmp_path / "1").items())
    for wrong, message in (
        ([*pairs[:3], pairs[1]], "has come twice"), ([*pairs[:3], "name"], "must return pairs"),
        (pairs[:-1], "the iterator has ended without"), ([(1, pairs[0][1])], "have the name 1"),
        ([("model.layers.0.mlp.down_proj.qweight", pairs[0][1])], "a part of a quantised weight"),
    ):  # fmt: skip
        model = Model(tmp_path / "0")
        with pytest.raises(ModelLoadError, match=message):
            model.update(iter(wrong))


def test_a_tied_head_must_equal_the_embedding(tmp_path: Path):
    first, second = written(BY_NAME["llama-tied"], tmp_path)
    tensors = tensors_of(second)
    embed = tensors["model.embed_tokens.weight"]
    for head in (embed, embed + 1):
        for weights in (tensors | {"lm_head.weight": head}, iter((tensors | {"lm_head.weight": head}).items())):
            model = Model(first)
            if head is embed:
                model.update(weights)
                assert_same(model.params, fresh(second).params)
                continue
            with pytest.raises(ModelLoadError, match=r"lm_head.weight differs from the embedding"):
                model.update(weights)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-mqa", "of another model than the engine's: num_kv_heads 1 instead of 2"),
        ("nowhere", r"no such file or folder: .* not from a hub id"),
        ("qwen2", "another model than the engine's"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit(llama: Model, tmp_path: Path, name: str, message: str):
    if name in BY_NAME:
        write_checkpoint(BY_NAME[name], 0, tmp_path / name)
    before = llama.params
    with pytest.raises(ModelLoadError, match=message):
        llama.update(tmp_path / name)
    assert llama.params is before


def test_arguments(llama: Model, tmp_path: Path):
    with pytest.raises(RequestError, match=r"weights must be a tree of arrays, .* or a path"):
        llama.update(3)
    with pytest.raises(RequestError, match=r"for a list of pairs: iter\(pairs\)"):
        llama.update(list(tensors_of(tmp_path / "1").items()))
    with pytest.raises(ModelLoadError, match=r"model.safetensors is a file: pass the folder of the checkpoint"):
        llama.update(tmp_path / "1" / "model.safetensors")
    with pytest.raises(RequestError, match="goes with a tree"):
        llama.update(tensors_of(tmp_path / "1"), WeightLayout())
    with pytest.raises(ModelLoadError, match="must be a tuple with one dictionary"):
        llama.update({"embed": llama.params["embed"]})


@pytest.mark.parametrize(
    "separator", ["/", pytest.param(".", marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
def test_flat_dictionaries_of_a_trainer(tmp_path: Path, separator: str | None):
    """Names with dots, with slashes, or as tuples: all that an engine starts with. Engines may share what is made."""
    first, second = written(BY_NAME["llama"], tmp_path)
    model = Model(first)
    nested = trainer_trees.easydel(Checkpoint(json.loads((second / "config.json").read_text()), tensors_of(second)))
    paths = jax.tree_util.tree_flatten_with_path(nested)[0]
    keys = [tuple(str(entry.key) for entry in path) for path, _ in paths]
    names = keys if separator is None else [separator.join(key) for key in keys]
    tree = {name: jnp.asarray(array) for name, (_, array) in zip(names, paths, strict=True)}
    model.update(tree)
    assert_same(model.params, fresh(second).params)
    shared = dataclasses.replace(model.weights, shared=True)
    assert not any(leaf.owned for leaf in prepare(tree, shared)())
