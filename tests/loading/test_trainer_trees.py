"""Trees of trainers, by their names: the engine's tree has the checkpoint's numbers, and it says what is copied."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.trees import is_engine_tree, read_tree
from jpaged.loading.trees.reader import LeafPlace
from jpaged.models.decoder import decode, dense_causal_attend, lm_head
from jpaged.models.families import spec_of
from jpaged.models.spec import WeightLayout
from tests.golden.checkpoints import BY_NAME, Variant, write_checkpoint
from tests.support import trainer_trees
from tests.support.tiny_engine import sampling_programs
from tests.support.trainer_trees import Checkpoint

CONFIG = EngineConfig(model="live")


def variant(name: str, **changes: Any) -> Variant:
    return dataclasses.replace(BY_NAME[name], config=BY_NAME[name].config | changes)


FAMILIES = {
    "llama": variant("llama"),
    "llama3.1": variant("llama-llama3"),
    "qwen1.5": variant("qwen1.5"),
    "qwen2": variant("qwen2"),
    "qwen3": variant("qwen3"),
    "gemma": variant("gemma", tie_word_embeddings=True),
    "gemma-mha": variant("gemma", tie_word_embeddings=True, num_key_value_heads=4),
    "gemma2": variant("gemma2", tie_word_embeddings=True, num_hidden_layers=4),
    "gemma3": variant("gemma3", tie_word_embeddings=True, num_hidden_layers=8, sliding_window_pattern=6),
}
GEMMAS = [name for name in FAMILIES if name.startswith("gemma")]
MAKERS: dict[str, Callable[[Checkpoint], Any]] = {
    "easydel": trainer_trees.easydel,
    "linen": trainer_trees.linen,
    "linen-scanned": trainer_trees.linen_scanned,
    "tunix": trainer_trees.tunix,
    "maxtext": trainer_trees.maxtext,
    "maxtext-scanned": functools.partial(trainer_trees.maxtext, scanned=True),
    "gemma-linen": trainer_trees.gemma_linen,
    "gemma-linen-turned": functools.partial(trainer_trees.gemma_linen, turned=True),
}
CASES = [
    (maker, family) for maker in MAKERS for family in FAMILIES if "gemma-linen" not in maker or family in GEMMAS
]


# One family of each kind, and every family; all others are slow tests
DEFAULT = {
    ("easydel", "qwen1.5"), ("linen", "llama"), ("linen-scanned", "qwen3"), ("tunix", "qwen2"), ("tunix", "gemma-mha"),
    ("maxtext", "llama3.1"), ("maxtext-scanned", "gemma2"), ("gemma-linen", "gemma"), ("maxtext", "gemma3"),
}  # fmt: skip
IN_ENGINES = (
    ("easydel", "llama"), ("linen", "qwen1.5"), ("tunix", "qwen3"), ("maxtext", "gemma"), ("gemma-linen", "gemma-mha"),
)  # fmt: skip
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}


def cases(default: set[tuple[str, str]], every: Any = CASES) -> list[Any]:
    return [
        pytest.param(*case, id="-".join(case), marks=() if case in default else pytest.mark.slow) for case in every
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LoadedModel, Checkpoint]]:
    @functools.cache
    def get(family: str) -> tuple[LoadedModel, Checkpoint]:
        folder = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(FAMILIES[family], 0, folder)
        model = load_model(EngineConfig(model=str(folder), dtype="float32"))
        return model, Checkpoint(FAMILIES[family].config, load_file(folder / "model.safetensors"))

    return get


def canonical(spec: Any, params: dict[str, Any], layout: WeightLayout) -> dict[str, Any]:
    """The tree with separate q, k, v, gate and up, all [out, in]. In numpy, so that nothing compiles."""
    tree = {name: np.asarray(leaf) for name, leaf in params.items() if name != "layers"}
    if "lm_head" in layout.transposed:
        tree["lm_head"] = tree["lm_head"].T
    for i, layer in enumerate(params["layers"]):
        leaves = {name: np.asarray(leaf) for name, leaf in layer.items()}
        if "qkv" in leaves:
            qkv = leaves.pop("qkv")
            leaves |= {"q": qkv[:, :-2], "k": qkv[:, -2], "v": qkv[:, -1]}
        if "gate_up" in leaves:
            leaves |= dict(zip(("gate", "up"), leaves.pop("gate_up"), strict=True))
        for name, leaf in leaves.items():
            if name in layout.transposed:
                inputs = spec.num_heads * spec.head_dim if name == "o" else leaves[name].shape[0]
                leaf = leaf.reshape(inputs, -1).T
            outputs = {"o": spec.hidden_size, "down": spec.hidden_size}.get(name)
            is_matrix = name in ("q", "k", "v", "o", "gate", "up", "down")
            rows = outputs or (leaf.size // spec.hidden_size)
            tree[f"{i}.{name}"] = leaf.reshape(rows, -1) if is_matrix else leaf
    return tree


@pytest.mark.parametrize(("maker", "family"), cases(DEFAULT))
def test_every_number_of_the_checkpoint(models: Any, maker: str, family: str) -> None:
    """Exactly, except where MaxText's numbers include a factor or the one of Gemma's norms."""
    model, checkpoint = models(family)
    tree = read_tree(model.spec, MAKERS[maker](checkpoint))
    found = canonical(tree.spec, tree.params, tree.layout)
    wanted = canonical(model.spec, model.params, WeightLayout())
    assert found.keys() == wanted.keys()
    embed_factor = np.float32(model.spec.embed_scale / tree.spec.embed_scale)
    for name, leaf in wanted.items():
        exact = "maxtext" not in maker
        leaf = leaf * embed_factor if name == "embed" else leaf
        rtol, atol = (0, 0) if exact else (3e-6, 3e-7)
        np.testing.assert_allclose(found[name], leaf, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(("maker", "family"), cases(set(), IN_ENGINES))
def test_an_engine_generates_the_checkpoints_tokens(models: Any, maker: str, family: str) -> None:
    """The oracle is the checkpoint's own dense forward pass over the prompt and the answer."""
    model, checkpoint = models(family)
    prompt = [5, 9, 200, 17, 33]
    with sampling_programs(), LLM(model.config, params=MAKERS[maker](checkpoint), **SMALL) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tokens = list(output.outputs[0].token_ids)
    ids = jnp.array(prompt + tokens)
    hidden, *_ = decode(
        model.spec, model.params, ids, jnp.arange(len(ids)), [None] * model.spec.num_layers, ids[None],
        dense_causal_attend, layout=model.layout,
    )  # fmt: skip
    best = np.asarray(lm_head(model.spec, model.params, hidden, layout=model.layout)).argmax(-1)
    assert tokens == best[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize(
    ("maker", "family", "copied"),
    [
        # norms of 64 numbers, float32: two a layer are stacked
        ("easydel", "llama", 2 * 2 * 64 * 4),
        ("tunix", "llama", 2 * 2 * 64 * 4),
        ("maxtext", "qwen3", 2 * 2 * 64 * 4),
        # ... and biases of 4 query heads and 2 KV heads of 16
        ("tunix", "qwen2", 2 * (2 * 64 + 8 * 16) * 4),
        # q: its scale is taken out
        ("maxtext", "llama", 2 * (2 * 64 + 64 * 64) * 4),
    ],
)
def test_leaves_that_are_used_without_a_copy(models: Any, maker: str, family: str, copied: int) -> None:
    model, checkpoint = models(family)
    given = MAKERS[maker](checkpoint)
    tree = read_tree(model.spec, given)
    assert tree.copied_bytes == copied
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(given)}
    for path, leaf in tree.leaves.items():
        assert (leaf.make().unsafe_buffer_pointer() in own) == leaf.is_reference, path
        assert leaf.make().shape == leaf.shape
    live = load_model(CONFIG, given, model.config)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(live.params)]
    assert sum(pointer in own for pointer in pointers) == tree.num_by_reference


def test_from_trainer(models: Any, tmp_path: Path) -> None:
    """The public name, with a spec, a dictionary or a folder."""
    model, checkpoint = models("qwen2")
    given = trainer_trees.tunix(checkpoint)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    for config in (model.spec, model.config, tmp_path):
        tree = jpaged.from_trainer(given, config)
        assert tree.kind == "tunix"
        assert tree.spec == model.spec
        assert tree.leaves[LeafPlace("q", 1)].names == ("layers.1.attn.q_proj.w",)
        assert tree.layout.transposed == {"q", "k", "v", "o", "gate", "up", "down"}


def test_the_embedding_of_gemma_in_maxtext(models: Any) -> None:
    """It is not copied if the spec may change, and converted if not. Padding of the vocabulary is cut off."""
    model, checkpoint = models("gemma")
    given = trainer_trees.maxtext(checkpoint)
    folded, fixed = (read_tree(model.spec, given, fold=fold) for fold in (True, False))
    assert folded.leaves[LeafPlace("embed")].is_reference
    assert folded.spec.logit_divisor == 8
    assert read_tree(folded.spec, given).spec == folded.spec
    assert fixed.spec == model.spec
    np.testing.assert_allclose(fixed.params["embed"], model.params["embed"], rtol=1e-6)
    padded = read_tree(model.spec, trainer_trees.maxtext(checkpoint, padding=5), fold=False)
    np.testing.assert_allclose(padded.params["embed"], model.params["embed"], rtol=1e-6)


def test_states_and_flat_trees(models: Any) -> None:
    """`nnx.State`, keys with dots or slashes, keys that are tuples, and state that is no weight."""
    from flax import nnx

    model, checkpoint = models("qwen2")
    given = trainer_trees.tunix(checkpoint)
    wanted = read_tree(model.spec, given).params
    flat = {tuple(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(given)[0]}
    layers = {int(i): layer for i, layer in given["layers"].items()}
    state = nnx.State(jax.tree.map(nnx.Param, given | {"layers": layers}))
    rng = {"rngs": {"count": jnp.zeros((), jnp.uint32), "key": jax.random.key(0)}}
    for tree in (
        state, flat, {".".join(key): leaf for key, leaf in flat.items()},
        {"/".join(key): leaf for key, leaf in flat.items()}, given | rng, {"params": given},
        given | {"layers": [layers[i] for i in sorted(layers)]},
    ):  # fmt: skip
        assert not is_engine_tree(tree)
        jax.tree.map(np.testing.assert_array_equal, read_tree(model.spec, tree).params, wanted)


def test_an_nnx_module_with_easydel_names(models: Any) -> None:
    """The state of a real module, whose variables flax makes."""
    from flax import nnx

    model, checkpoint = models("qwen1.5")
    tree, module = trainer_trees.easydel(checkpoint), trainer_trees.nnx_module
    wanted = read_tree(model.spec, tree).params
    for given in (nnx.state(module(tree)), nnx.state(module(tree), nnx.Param).to_pure_dict()):
        jax.tree.map(np.testing.assert_array_equal, read_tree(model.spec, given).params, wanted)


def test_another_dtype_of_the_norms(models: Any) -> None:
    """Trainers keep norms in float32: they are converted, and matrices are not copied."""
    model, checkpoint = models("qwen3")
    given = trainer_trees.easydel(checkpoint)
    half = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf.astype(jnp.bfloat16), given)
    live = load_model(CONFIG, half, model.config)
    assert {leaf.dtype for leaf in jax.tree.leaves(live.params)} == {jnp.dtype(jnp.bfloat16)}


def _change(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    if rest:
        return tree | {key: _change(tree.get(key, {}), rest, value)}
    return {name: leaf for name, leaf in (tree | {key: value}).items() if leaf is not None}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layers.1.mlp.up_proj.kernel", None, r"no up of layer 1: layers\.1\.mlp\.up_proj\.kernel is missing"),
        ("lm_head.w", None, r"tunix's names, but no lm_head: lm_head\.w is missing"),
        ("layers.1.attn.q_proj.w", jnp.zeros((64, 4, 8)), r"q_proj\.w has shape \[64, 4, 8\], the config calls"),
        ("layers.0.attn.q_proj.w_lora_a", jnp.zeros((64, 4)), r"leaf layers\.0\.attn\.q_proj\.w_lora_a, which is no"),
        ("layers.0.attn.q_norm.w", jnp.zeros(16), r"q_norm\.w \(q_norm\), which a model with this config"),
        ("layers.2.attn.q_proj.w", jnp.zeros((64, 4, 16)), r"q_proj\.w is of layer 2, and the config has 2 layers"),
    ],
)
def test_refused_by_leaf(models: Any, path: str, value: Any, message: str) -> None:
    model, checkpoint = models("llama")
    with pytest.raises(ModelLoadError, match=message):
        load_model(CONFIG, _change(trainer_trees.tunix(checkpoint), path, value), model.config)


def test_refused_trees(models: Any) -> None:
    model, checkpoint = models("llama")
    with pytest.raises(ModelLoadError, match=r"leaf a\.b, which is no name of a known tree.* tunix: layers\.0\.attn"):
        load_model(CONFIG, {"a": {"b": jnp.zeros(3)}}, model.spec)
    stacked = trainer_trees.linen_scanned(checkpoint)
    q = stacked["params"]["model"]["layers"]["self_attn"]["q_proj"]
    q["kernel"] = q["kernel"][:1]
    with pytest.raises(ModelLoadError, match=r"no q of layer 1"):
        load_model(CONFIG, stacked, model.spec)
    sparse = spec_of(BY_NAME["qwen3-moe"].config)
    with pytest.raises(ModelLoadError, match="for Llama, Qwen 2 and 3, and Gemma only"):
        read_tree(sparse, trainer_trees.tunix(checkpoint))
