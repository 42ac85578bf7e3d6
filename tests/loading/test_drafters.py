"""Drafters from small random checkpoints in the published formats, compared with float64 formulas."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import JPagedError, ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.drafters import describe_drafter, load_drafter
from jpaged.loading.model_description import describe
from jpaged.models import decoder, draft_head
from jpaged.models.spec import LayerKV
from jpaged.speculation_config import SpeculationConfig
from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors
from tests.support.added_tokens import tokenizer
from tests.support.checkpoint_files import tensors_of

HIDDEN, VOCAB, DRAFTS, HEADS, KV_HEADS, DIM, INTER, TOKENS, LAYERS = 16, 40, 11, 4, 2, 8, 20, 5, 6
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "vocab_size": VOCAB,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
TARGET = CONFIG | {"architectures": ["LlamaForCausalLM"]}
EAGLE = CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFTS,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
}  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFTS,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 4], "norm_before_residual": True, "norm_before_fc": True,
    "speculators_config": {"algorithm": "eagle3"},
    "transformer_layer_config": CONFIG | {"num_hidden_layers": 1},
}  # fmt: skip


def layer_shapes(prefix, width=HIDDEN):
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, width),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, width),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (INTER, HIDDEN), f"{prefix}mlp.up_proj.weight": (INTER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INTER), f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip


def target_shapes():
    of_layers = [layer_shapes(f"model.layers.{i}.") for i in range(LAYERS)]
    whole = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    whole |= {"lm_head.weight": (VOCAB, HIDDEN)}
    return {name: shape for each in (*of_layers, whole) for name, shape in each.items()}


def eagle_shapes(layer="midlayer."):
    return layer_shapes(layer, 2 * HIDDEN) | {
        f"{layer}hidden_norm.weight": (HIDDEN,), "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFTS, HIDDEN),
    }  # fmt: skip


MTP = {
    "deepseek": layer_shapes(f"model.layers.{LAYERS}.") | {
        f"model.layers.{LAYERS}.enorm.weight": (HIDDEN,), f"model.layers.{LAYERS}.hnorm.weight": (HIDDEN,),
        f"model.layers.{LAYERS}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"model.layers.{LAYERS}.shared_head.norm.weight": (HIDDEN,),
    },
    "qwen": layer_shapes("mtp.layers.0.") | {
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,), "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.norm.weight": (HIDDEN,),
    },
}  # fmt: skip
PARTS = {  # of the oracle, by format: embedding norm, hidden norm, fc, final norm, layer
    "deepseek": [f"model.layers.{LAYERS}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")],
    "qwen": ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."],
}


def random_tensors(shapes, seed):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return str(folder)


def eagle_tensors(layer="midlayer.", **more):
    rng = np.random.default_rng(5)
    ids = np.sort(rng.choice(VOCAB, DRAFTS, replace=False))
    t2d = np.isin(np.arange(VOCAB), ids)
    shapes = eagle_shapes(layer) | more
    return random_tensors(shapes, 4) | {"d2t": ids - np.arange(DRAFTS), "t2d": t2d}


def engine(folder, **options):
    return EngineConfig(model=folder, dtype="float32", skip_tokenizer_init=True, **options)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    tensors = random_tensors(target_shapes(), 1)
    folder = write(tmp_path_factory.mktemp("target"), TARGET, tensors)
    return tensors, load_model(engine(folder)), engine(folder)


def load(target, **options):
    _, model, config = target
    return load_drafter(SpeculationConfig(**options), model, config)


# -- formulas ---------------------------------------------------------------------------------------------------------


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)


def rotated(x, position):
    half = DIM // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * position * 100.0 ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], -1)


def layer_output(w, prefix, residual, normed):
    """A Llama layer after its first norm, from the checkpoint's own tensors. Row t attends to the rows up to t."""
    w = {name.removeprefix(prefix): np.float64(value) for name, value in w.items() if name.startswith(prefix)}
    q, k, v = (
        (normed @ w[f"self_attn.{name}_proj.weight"].T).reshape(TOKENS, -1, DIM) for name in "qkv"
    )
    q, k = (np.stack([rotated(row, t) for t, row in enumerate(each)]) for each in (q, k))
    out = np.zeros((TOKENS, HEADS, DIM))
    for t in range(TOKENS):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = np.exp(k[: t + 1, kv] @ q[t, head] / np.sqrt(DIM))
            out[t, head] = scores / scores.sum() @ v[: t + 1, kv]
    x = residual + out.reshape(TOKENS, -1) @ w["self_attn.o_proj.weight"].T
    y = rms(x, w["post_attention_layernorm.weight"])
    gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
    return x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T


def run(drafter, model, ids, states):
    """Logits and next states of a loaded head over a sequence."""
    spec, params = drafter.head_spec, drafter.params
    of_model = (model.spec, model.params)
    state = draft_head.target_state(spec, params, *of_model, tuple(jnp.asarray(each, jnp.float32) for each in states))
    embeddings = draft_head.embed_for_head(spec, params, *of_model, jnp.asarray(ids))
    x = draft_head.head_input(spec, params, embeddings, state)
    hidden, _ = draft_head.head_layer(
        spec, params, x, jnp.arange(TOKENS), None, jnp.zeros((1, TOKENS), jnp.int32), decoder.dense_causal_attend
    )
    logits = draft_head.head_logits(spec, params, hidden, model.params)
    return np.asarray(logits), np.asarray(draft_head.next_state(spec, params, model.params, hidden))


def inputs(count, seed=9):
    rng = np.random.default_rng(seed)
    return rng.integers(VOCAB, size=TOKENS), rng.standard_normal((count, TOKENS, HIDDEN))


# -- EAGLE-3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_embed", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "speculators"])
def test_an_eagle3_head_computes_the_formulas(target, tmp_path, kind, own_embed):
    layer, config = ("midlayer.", EAGLE) if kind == "eagle3" else ("layers.0.", SPECULATORS)
    more = {"embed_tokens.weight": (VOCAB, HIDDEN)} if own_embed else {}
    more |= {"input_norm.weight": (3 * HIDDEN,)} if kind == "speculators" else {}
    w = eagle_tensors(layer, **more)
    drafter = load(target, method="eagle3", model=write(tmp_path, config, w))
    assert drafter.draft_spec is None
    assert drafter.head_spec.aux_layers == (2, 3, 4)  # eagle_config counts outputs, the other format inputs
    assert (drafter.max_model_len, drafter.name) == (64, str(tmp_path))
    assert drafter.num_bytes == 4 * sum(a.size for name, a in w.items() if name != "t2d")
    ids, states = inputs(3)
    logits, state = run(drafter, target[1], ids, states)
    joined = np.concatenate(list(states), -1)
    joined = rms(joined, w["input_norm.weight"]) if kind == "speculators" else joined
    x = joined @ w["fc.weight"].T.astype(np.float64)
    normed = rms(x, w[f"{layer}hidden_norm.weight"])
    embed = w["embed_tokens.weight"] if own_embed else target[0]["model.embed_tokens.weight"]
    both = np.concatenate([rms(np.float64(embed[ids]), w[f"{layer}input_layernorm.weight"]), normed], -1)
    hidden = layer_output(w, layer, normed if kind == "speculators" else x, both)
    np.testing.assert_allclose(state, hidden, rtol=1e-4, atol=1e-4)
    want = rms(hidden, w["norm.weight"]) @ w["lm_head.weight"].T.astype(np.float64)
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)
    found = draft_head.to_target_ids(drafter.params, jnp.arange(DRAFTS))
    np.testing.assert_array_equal(found, np.flatnonzero(w["t2d"]))


def test_a_head_without_layers_in_its_config_reads_those_of_vllm(tmp_path):
    folder = write(tmp_path / "target", TARGET | {"num_hidden_layers": 12}, {"none": np.zeros(1, np.float32)})
    config = {key: value for key, value in EAGLE.items() if key != "eagle_config"}
    head = write(tmp_path / "head", config, eagle_tensors())
    (tmp_path / "target/model.safetensors").unlink()
    options = engine(folder)
    described = describe(options, "cpu")
    drafter = describe_drafter(SpeculationConfig(method="eagle3", model=head), described, options, "cpu")
    assert drafter.head_spec.aux_layers == (2, 6, 9)


def shapes_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_the_description_of_a_drafter_has_the_shapes_of_its_weights(target, tmp_path, method):
    folder = target[2].model
    if method == "eagle3":
        folder = write(tmp_path, EAGLE, eagle_tensors())
    if method == "mtp":
        tensors = target[0] | random_tensors(MTP["deepseek"], 3)
        folder = write(tmp_path, TARGET | {"num_nextn_predict_layers": 1}, tensors)
    config = engine(folder) if method == "mtp" else target[2]
    given = SpeculationConfig(method=method, model=None if method == "mtp" else folder)
    loaded = load_drafter(given, load_model(config), config)
    described = describe_drafter(given, describe(config, "cpu"), config, "cpu")
    assert shapes_of(described.params) == shapes_of(loaded.params)
    assert described.num_bytes == loaded.num_bytes
    (tmp_path / "alone").mkdir()
    alone = (tmp_path / "alone" / "config.json")
    alone.write_text(pathlib.Path(folder, "config.json").read_text())
    given = dataclasses.replace(given, model=None if method == "mtp" else str(alone))
    config = engine(str(alone)) if method == "mtp" else config
    described = describe_drafter(given, describe(config, "cpu"), config, "cpu")
    assert shapes_of(described.params) == shapes_of(loaded.params)


CHANGES = {
    "another hidden size": ({"target_hidden_size": 24}, {}, "states of 24 numbers (target_hidden_size), and the "
                            "model's have 16: use a head"),
    "another vocabulary": ({"vocab_size": 50}, {}, "a vocabulary of 50 tokens, and the model's has 40: use a head"),
    "an architecture": ({"architectures": ["LlamaForCausalLM"]}, {}, "architectures=['LlamaForCausalLM'] is not an "
                        "EAGLE-3 head"),
    "two layers": ({"num_hidden_layers": 2}, {}, "num_hidden_layers=2: jpaged supports heads of one layer"),
    "too deep": ({"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, {}, "[2, 3, 7] must be different layers of the "
                 "model, which has 6"),
    "a missing tensor": ({}, {"midlayer.self_attn.q_proj.weight": None}, "midlayer.self_attn.q_proj.weight is missing"),
    "a missing norm": ({}, {"norm.weight": None}, "tensor norm.weight is missing"),
    "a missing head": ({}, {"lm_head.weight": None}, "tensor lm_head.weight is missing"),
    "no d2t": ({}, {"d2t": None}, "tensor d2t is missing, which draft_vocab_size=11 calls for"),
    "a tensor more": ({}, {"fc.bias": np.zeros(HIDDEN, np.float32)}, "tensor fc.bias is more than"),
    "a tensor of no head": ({}, {"mask_hidden": np.zeros(3, np.float32)}, "tensor mask_hidden is more than"),
    "ids out of range": ({}, {"d2t": np.full(DRAFTS, VOCAB)}, "maps draft id 0 to the token id 40, and the model's "
                         "vocabulary has 40 tokens"),
    "another t2d": ({}, {"t2d": np.ones(41, bool)}, "t2d has shape [41], the model's vocabulary has 40 tokens"),
    "a transposed matrix": ({}, {"fc.weight": np.zeros((3 * HIDDEN, HIDDEN), np.float32)}, "fc.weight has shape [48, "
                            "16], config.json calls for [16, 48]"),
    "an option": ({"eagle_config": {"parallel_draft_step": 4}}, {}, "parallel_draft_step=4 is not supported"),
    "an algorithm": ({"speculators_model_type": "peagle"}, {}, "speculators_model_type='peagle' is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_head_that_does_not_fit_is_refused(target, tmp_path, name):
    changes, tensors, message = CHANGES[name]
    all_tensors = {key: value for key, value in (eagle_tensors() | tensors).items() if value is not None}
    folder = write(tmp_path, EAGLE | changes, all_tensors)
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load(target, method="eagle3", model=folder)


def test_a_head_for_a_model_with_unlike_layers_is_refused(target, tmp_path):
    spec = dataclasses.replace(target[1].spec, layer_kv=(LayerKV(2, 8),) * 6)
    model = dataclasses.replace(target[1], spec=spec)
    folder = write(tmp_path, EAGLE, eagle_tensors())
    with pytest.raises(ModelLoadError, match="an EAGLE-3 head, and the model's layers have unlike keys and values"):
        load((target[0], model, target[2]), method="eagle3", model=folder)


def test_a_pickle_is_refused_by_name(target, tmp_path):
    folder = write(tmp_path, EAGLE, {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no safetensors file, only pytorch_model.bin, a pickle"):
        load(target, method="eagle3", model=folder)


# -- MTP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("kind", MTP)
def test_an_mtp_layer_computes_the_formulas(target, tmp_path, kind, shares):
    """Also the model loads, without these tensors. Copies of its embedding and output matrix are not loaded."""
    w = random_tensors(MTP[kind], 3)
    prefix, head = (f"model.layers.{LAYERS}.", "shared_head.head") if kind == "deepseek" else ("mtp.", "lm_head")
    matrices = {"embed_tokens": "model.embed_tokens.weight", head: "lm_head.weight"}
    for name, of_model in matrices.items():
        w[f"{prefix}{name}.weight"] = target[0][of_model] * np.float32(1 if shares else 2)
    folder = write(tmp_path, TARGET | {"num_nextn_predict_layers": 1}, target[0] | w)
    model = load_model(engine(folder))
    jax.tree.map(np.testing.assert_array_equal, model.params, target[1].params)
    drafter = load_drafter(SpeculationConfig(method="mtp"), model, engine(folder))
    assert (drafter.head_spec.own_embed, drafter.head_spec.own_head) == (not shares, not shares)
    ids, states = inputs(1)
    logits, state = run(drafter, model, ids, states)
    embedding_norm, hidden_norm, fc, norm, layer = PARTS[kind]
    embed = np.float64(w[f"{prefix}embed_tokens.weight"][ids])
    of_target = rms(states[0], target[0]["model.norm.weight"])
    both = np.concatenate([
        rms(embed, w[f"{embedding_norm}.weight"]), rms(of_target, w[f"{hidden_norm}.weight"])
    ], -1)  # fmt: skip
    x = both @ w[f"{fc}.weight"].T.astype(np.float64)
    hidden = layer_output(w, layer, x, rms(x, w[f"{layer}input_layernorm.weight"]))
    normed = rms(hidden, w[f"{norm}.weight"])
    np.testing.assert_allclose(state, normed if kind == "qwen" else hidden, rtol=1e-4, atol=1e-4)
    want = normed @ w[f"{prefix}{head}.weight"].T.astype(np.float64)
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("deepseek-v32", marks=pytest.mark.slow)])
def test_the_mtp_layer_of_deepseek_is_a_layer_of_the_model(name, tmp_path):
    """Latent attention, an indexer, experts. Its tensors are copies of the last layer's, so its leaves are, too."""
    variant = BY_NAME[name]
    write_checkpoint(variant, 1, tmp_path)
    tensors, count = tensors_of(tmp_path), variant.config["num_hidden_layers"]
    hidden, last = variant.config["hidden_size"], f"model.layers.{count - 1}."
    first = f"model.layers.{count}."
    copies = {first + name.removeprefix(last): value for name, value in tensors.items() if name.startswith(last)}
    own = random_tensors({
        f"{first}enorm.weight": (hidden,), f"{first}hnorm.weight": (hidden,),
        f"{first}shared_head.norm.weight": (hidden,), f"{first}eh_proj.weight": (hidden, 2 * hidden),
    }, 7)  # fmt: skip
    folder = write(tmp_path, variant.config | {"num_nextn_predict_layers": 1}, tensors | copies | own)
    model = load_model(engine(folder))
    drafter = load_drafter(SpeculationConfig(method="mtp"), model, engine(folder))
    assert drafter.spec.latent is not None
    assert drafter.spec.experts.layers == (True,)
    jax.tree.map(np.testing.assert_array_equal, drafter.params["layers"][0], model.params["layers"][-1])
    np.testing.assert_array_equal(drafter.params["attn_norm"][0], model.params["attn_norm"][-1])
    np.testing.assert_array_equal(drafter.params["fc"], own[f"{first}eh_proj.weight"])
    assert not drafter.head_spec.norm_output


def test_a_model_without_mtp_layers_is_refused(target, tmp_path):
    with pytest.raises(ModelLoadError, match=r"\(LlamaForCausalLM\) has no MTP layer: no tensor is of layer 6"):
        load(target, method="mtp")
    alone = write(tmp_path, TARGET, {})
    (tmp_path / "model.safetensors").unlink()
    described = describe(engine(alone), "cpu")
    with pytest.raises(ModelLoadError, match=r"no MTP layer: config.json has no num_nextn_predict_layers or mtp_"):
        describe_drafter(SpeculationConfig(method="mtp"), described, engine(alone), "cpu")


def test_missing_tensors_of_an_mtp_layer_are_named(target, tmp_path):
    w = random_tensors(MTP["deepseek"], 3)
    del w["model.layers.6.hnorm.weight"]
    folder = write(tmp_path, TARGET, target[0] | w)
    with pytest.raises(ModelLoadError, match=r"tensor model.layers.6.hnorm.weight is missing"):
        load_drafter(SpeculationConfig(method="mtp"), load_model(engine(folder)), engine(folder))


# -- draft models -----------------------------------------------------------------------------------------------------


def test_a_draft_model_is_a_model(target, tmp_path):
    tensors, model, _ = target
    few = {name: value for name, value in tensors.items() if not re.search(r"layers\.[1-9]", name)}
    folder = write(tmp_path, TARGET | {"num_hidden_layers": 1, "max_position_embeddings": 32}, few)
    drafter = load(target, method="draft_model", model=folder, max_model_len=20)
    assert drafter.head_spec is None
    assert (drafter.draft_spec.num_layers, drafter.max_model_len) == (1, 20)
    jax.tree.map(np.testing.assert_array_equal, drafter.params["layers"][0], model.params["layers"][0])
    quantized = load(target, method="draft_model", model=folder, quantization="int8")
    assert quantized.num_bytes < drafter.num_bytes
    with pytest.raises(ModelLoadError, match="a vocabulary of 39 tokens, and the model's has 40"):
        load(target, method="draft_model", model=write(tmp_path, TARGET | {"vocab_size": 39}, tensors | {
            name: tensors[name][:39] for name in ("model.embed_tokens.weight", "lm_head.weight")
        }))  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "message"), [
    (None, 384, None), ("qwen3", 384, None), ("qwen3", 400, None),  # the embedding may have more rows
    ("llama3", 384, r"ids are different tokens. Id 300 is '<|begin_of_text|>', and '<|endoftext|>' in the model"),
    (None, 320, "has an embedding of 320 rows, and the model's tokenizer has ids up to 325"),
])  # fmt: skip
def test_the_vocabulary_of_a_draft_model(target, tmp_path, name, rows, message):
    _, model, _ = target
    model = dataclasses.replace(
        model, tokenizer=tokenizer("qwen3"), spec=dataclasses.replace(model.spec, vocab_size=384)
    )
    shapes = target_shapes() | dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (rows, HIDDEN))
    folder = write(tmp_path, TARGET | {"vocab_size": rows}, random_tensors(shapes, 2))
    if name is not None:
        tokenizer(name).save_pretrained(folder)
    given = SpeculationConfig(method="draft_model", model=folder)
    if message is None:
        assert load_drafter(given, model, target[2]).draft_spec.vocab_size == rows
        return
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load_drafter(given, model, target[2])


# -- devices ----------------------------------------------------------------------------------------------------------


def test_a_drafter_is_whole_on_every_device_of_the_model(target, tmp_path):
    folder = write(tmp_path, EAGLE, eagle_tensors())
    config = engine(target[2].model, tensor_parallel_size=2)
    model, given = load_model(config), SpeculationConfig(method="eagle3", model=folder)
    drafter = load_drafter(given, model, config)
    alone = load_drafter(given, target[1], target[2])
    for leaf, wanted in zip(jax.tree.leaves(drafter.params), jax.tree.leaves(alone.params), strict=True):
        assert len(leaf.sharding.device_set) == 2
        for part in leaf.addressable_shards:
            np.testing.assert_array_equal(part.data, wanted)


def test_options_that_do_not_fit_are_refused(target, tmp_path):
    folder = write(tmp_path, EAGLE, eagle_tensors())
    with pytest.raises(JPagedError, match="must be 1 or tensor_parallel_size=1, got 2"):
        load(target, method="eagle3", model=folder, draft_tensor_parallel_size=2)

    def too_large(drafter):
        raise ModelLoadError(f"{drafter.num_bytes} bytes")

    with pytest.raises(ModelLoadError, match=r"^[0-9]+ bytes$"):
        load_drafter(SpeculationConfig(method="eagle3", model=folder), *target[1:], check=too_large)
