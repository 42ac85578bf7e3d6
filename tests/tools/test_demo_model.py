"""The demo model that ships with jpaged: its folder, its training record, and weights that match the record."""

import ast
import functools
import hashlib
import json
import pathlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from jpaged import LLM, SamplingParams
from jpaged.cli.common.demo_prompts import BUILT_IN_PROMPTS
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant
from jpaged.loading import load_model
from jpaged.models import decoder
from jpaged.models.spec import AttentionOptions
from tests.support.tiny_engine import sampling_programs
from tests.support.tool_scripts import DEMO_MODEL as FOLDER
from tests.support.tool_scripts import ROOT, load_tool

complete_python = load_tool("complete_python").complete_python
demo_corpus = load_tool("demo_corpus")


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((FOLDER / "training_curve.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_folder_is_small_and_complete():
    assert {f.name for f in FOLDER.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "held_out.txt", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "training_curve.json",
    }  # fmt: skip
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 12_000_000


def test_tensors_are_a_llama_in_bfloat16():
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(FOLDER / "model.safetensors", "numpy") as tensors:
        names = set(tensors.keys())
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"BF16"}
        shape = tensors.get_slice("model.embed_tokens.weight").get_shape()
        parameters = sum(int(np.prod(tensors.get_slice(name).get_shape())) for name in names)
    assert shape == [config["vocab_size"], config["hidden_size"]]
    assert len(names) == 2 + 9 * config["num_hidden_layers"]
    assert 4_500_000 < parameters < 6_000_000


def test_generation_config_names_the_end_and_leaves_sampling_alone():
    config = json.loads((FOLDER / "generation_config.json").read_text("utf-8"))
    assert set(config) == {"bos_token_id", "eos_token_id", "pad_token_id"}


@pytest.mark.parametrize(
    "text", [*BUILT_IN_PROMPTS[:3], "\tx = {'ä': 1_000}\r\n\n\n", "if x:  \n        y", "日本 🐍\0"]
)
def test_tokenizer_gives_text_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_tokenizer_breaks_at_newlines(tokenizer):
    """A prompt may end in a newline: the text before it has the same tokens as in the middle of a file."""
    text = "def f(x):\n    return x\n"
    assert tokenizer(text).input_ids[: len(tokenizer("def f(x):\n").input_ids)] == tokenizer("def f(x):\n").input_ids


def test_chat_template_writes_a_file(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief.\nBe right."},
        {"role": "user", "content": "def f(x):"},
        {"role": "assistant", "content": "    return x"},
        {"role": "user", "content": "def g(x):"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# Be brief.\n# Be right.\ndef f(x):\n    return x\ndef g(x):\n"


def test_training_is_recorded(record):
    curve = record["curve"]
    assert [point["step"] for point in curve] == sorted({point["step"] for point in curve})
    assert curve[-1]["step"] == record["steps_done"] == record["recipe"]["steps"]
    assert all(
        set(point) == {"step", "tokens", "seconds", "cpu_seconds", "train_loss", "held_out_loss"} for point in curve
    )
    assert abs(curve[-1]["held_out_loss"] - record["held_out"]["loss"]) < 0.3  # on a part of the text
    assert f"{record['held_out']['loss']:.4f}" in (FOLDER / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_recorded_loss_is_the_loss(record, tokenizer):
    """The shipped weights have the recorded loss on a text of this repository."""
    noted = record["check_text"]
    text = (ROOT / "tests" / "golden" / noted["file"]).read_text("utf-8")
    assert hashlib.sha256(text.encode()).hexdigest() == noted["sha256"]
    model = load_model(EngineConfig(model=str(FOLDER), dtype="float32"))
    ids = np.array(tokenizer(text).input_ids[: noted["tokens"] + 1], np.int32)
    inputs, targets = jnp.asarray(ids[:-1]), jnp.asarray(ids[1:])
    hidden, *_ = decoder.decode(
        model.spec, model.params, inputs, jnp.arange(len(inputs)), [None] * model.spec.num_layers,
        inputs[None], decoder.dense_causal_attend,
    )  # fmt: skip
    logits = np.asarray(decoder.lm_head(model.spec, model.params, hidden), np.float64)
    chosen = np.take_along_axis(logits, np.asarray(targets)[:, None], 1)[:, 0]
    losses = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - chosen
    assert losses.mean() == pytest.approx(noted["loss"], abs=1e-3)
    assert losses[512:].mean() < losses[:128].mean()  # context helps, also beyond the usual training length


@pytest.mark.slow
def test_writes_python():
    """At least half of the greedy completions of the built-in prompts are valid Python until they are cut off."""
    params = SamplingParams(temperature=0.0, max_tokens=128)
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    sizes |= {"row_buckets": (8,), "token_buckets": (64,)}  # those of other tests: the programs are cached
    with sampling_programs(SamplerVariant.GREEDY), LLM(str(FOLDER), **sizes) as llm:
        outputs = llm.generate(list(BUILT_IN_PROMPTS), params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    python = [complete_python(prompt, text) for prompt, text in zip(BUILT_IN_PROMPTS, texts, strict=True)]
    assert sum(text is not None for text in python) >= 10, texts
    assert len(set(texts)) > 15  # the completions differ


def test_prompts_are_twenty_beginnings():
    assert len(set(BUILT_IN_PROMPTS)) == len(BUILT_IN_PROMPTS) == 20
    for prompt in BUILT_IN_PROMPTS:
        assert complete_python(prompt, "") is None


@pytest.mark.parametrize(
    ("prompt", "continuation", "kept"),
    [
        ("def f(x):", "\n    return x\n\ndef g(y):\n    retu", "def f(x):\n    return x\n"),
        ("def f(x):", "\n    return x", None),  # the last line may be cut off
        ("def f(x):", "\n    return (x\n", None),
        ("import os\n", "import sys\nx = [\n1,", "import os\nimport sys"),
        ("import os\n", "# nothing\n\n", None),  # no statement beyond the prompt
        ("x = 'ä'; y = 'ö'\n", "z = 1\n", "x = 'ä'; y = 'ö'\nz = 1"),
        ("def f(x):", " pass\n", "def f(x): pass"),
        ("def f(x):", "\n    \0\n", None),
    ],
)
def test_complete_python(prompt, continuation, kept):
    assert complete_python(prompt, continuation) == kept
    if kept is not None:
        ast.parse(kept)


DOCUMENTED = '''"""A module."""

import os


class A:
    """A class.

    With more to say, ä and ö.
    """

    x = "kept"

    def f(self):
        """Nothing else."""

    async def g(self):
        "short"; return 1

    def h(self):
        # a comment
        """With a comment before."""

        def inner(): "same line"
        return """not a docstring"""
'''
BARE = '''import os


class A:
    x = "kept"

    def f(self):
        pass

    async def g(self):
        "short"; return 1

    def h(self):
        # a comment
        def inner(): pass
        return """not a docstring"""
'''


def test_docstrings_are_left_out_of_the_corpus():
    assert demo_corpus.without_docstrings(DOCUMENTED) == BARE
    assert demo_corpus.without_docstrings(BARE) == BARE
    assert demo_corpus.without_docstrings('"""Only this."""\n') == ""
    assert demo_corpus.without_docstrings("print 'no Python 3'\n") == "print 'no Python 3'\n"
    source = pathlib.Path(ast.__file__).read_text("utf-8")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    assert ast.dump(ast.parse(demo_corpus.without_docstrings(source))) == ast.dump(tree)


@pytest.mark.slow
def test_attention_in_training_equals_the_decoders():
    """Attention in blocks of queries, recomputed in the backward pass, gives plain attention and its gradients."""
    with mock.patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]):
        blocked = load_tool("train_demo").blocked_causal_attend
    rng = np.random.default_rng(0)
    tokens = 2 * 300  # not a whole number of blocks
    q, k, v, weight = (jnp.asarray(rng.standard_normal((tokens, n, 16)), jnp.float32) for n in (4, 2, 2, 4))
    shape = jnp.zeros((2, 300), jnp.int32)

    def attended(attend, q, k, v):
        projection = decoder.Projection((q, k, v), *(None,) * 5, 1e-6)
        return attend(projection, None, shape, AttentionOptions(0.25), None)[0]

    def total(attend, q, k, v):
        return (attended(attend, q, k, v) * weight).sum()

    for attend in (blocked, decoder.dense_causal_attend):
        assert attended(attend, q, k, v).shape == q.shape
    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(total, attend), argnums=(0, 1, 2)))(q, k, v)
        for attend in (blocked, decoder.dense_causal_attend)
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)
