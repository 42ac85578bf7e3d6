"""Answers with drafts equal those without, bit for bit, with everything that a request or an engine may have."""

import contextlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jpaged
from jpaged import LLM, ModelLoadError, SamplingParams, StructuredOutputsParams
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.support.drafting import Recorded, always_drafting, check_drafts
from tests.support.random_requests import OPTIONS, workload

pytestmark = [pytest.mark.slow, pytest.mark.codegen]

DEMO = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,), "max_model_len": 512,
}  # fmt: skip
MODELS = {"draft_model": "demo_draft", "eagle3": "demo_eagle3"}
CODE = ["def add(a, b):\n    return a + b\n\n", "import os\n", "class A:\n    def __init__(self):\n        self.x = 1"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "ready": {"type": "boolean"},
    },
    "required": ["name", "size", "ready"],
}  # fmt: skip
LEAVES = ("token_ids", "text", "logprobs", "cumulative_logprob", "finish_reason", "stop_reason")


def bits(outputs):
    """Everything of answers that drafts must not change."""
    return [[tuple(getattr(answer, leaf) for leaf in LEAVES) for answer in output.outputs] for output in outputs]


def generate(llm, prompts, params):
    """Answers. Requests without a seed get the same ones each time."""
    llm.engine.seeds.seed(0)
    return llm.generate(prompts, params, use_tqdm=False)


def learn(drafter, outputs):
    """Let a drafter know the answers of a plain engine, with its mistakes. It looks at the newest ones first."""
    for output in outputs:
        drafter.sequences[:0] = [[*output.prompt_token_ids, *answer.token_ids] for answer in output.outputs]


@contextlib.contextmanager
def drafting_llm(model, method="custom", **options):
    """An LLM that drafts in most steps, and its drafter if the method is custom."""
    drafter = Recorded([], vocab_size=1 << 30)
    fields = {"method": method, "num_speculative_tokens": 5}
    if method == "custom":
        fields["function"] = drafter
    elif method == "ngram":
        fields["prompt_lookup_min"] = 1
    elif method in MODELS:
        fields["model"] = str(pathlib.Path(jpaged.__file__).parent / MODELS[method])
    with always_drafting(), LLM(model, speculative_config=fields, **options) as llm:
        drafter.vocab_size = llm.spec.vocab_size
        llm.wait_until_ready()
        yield llm, drafter


@pytest.fixture(scope="module")
def plain():
    with LLM("demo", **DEMO) as llm:
        yield llm


@pytest.fixture(scope="module", params=["custom", "ngram", "suffix", "draft_model", "eagle3"])
def drafting(request):
    with drafting_llm("demo", request.param, **DEMO) as made:
        yield made


def both(plain, drafting, prompts, params, *, checks=True, rejects=True):
    """The answers of a plain engine, after a check that an engine with drafts gives the same, twice."""
    llm, drafter = drafting
    expected = generate(plain, prompts, params)
    learn(drafter, expected)
    llm.reset_stats()
    for _ in range(2):  # the second time from the prefix cache, and with a suffix tree that knows the answers
        assert bits(generate(llm, prompts, params)) == bits(expected)
    if checks:
        check_drafts(llm.stats().speculation, rejects=rejects)
    else:
        assert llm.stats().speculation.draft_tokens > 0
    assert llm.stats().used_blocks == 0
    assert llm.stats().compiles_after_ready == 0
    return expected


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 3},
        {"bad_words": ["self", "return", " a + b"], "logprobs": 1},
        {"min_tokens": 40, "stop": ["\n"]},
        {"n": 3, "logprobs": 2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logprobs": 1},
        {"logit_bias": {40: 5.0, 41: -100.0}, "top_p": 0.95},
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 90, "logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(regex=r"(abc|abd){3,9}[0-9]{4} end")},
        {"structured_outputs": StructuredOutputsParams(choice=["positive words", "positively", "negative"])},
        {"thinking_token_budget": 7, "reasoning_tags": ("<think>", "</think>"), "bad_words": ["x"], "logprobs": 1},
        {"prompt_logprobs": 2},
    ],
    ids=lambda fields: "-".join(fields),
)  # fmt: skip
def test_parameters(plain, drafting, fields, sampling):
    if fields.get("n", 1) > 1 and not sampling["temperature"]:
        sampling = {"temperature": 0.7}  # the engine's seeds
    params = SamplingParams(**{"max_tokens": 60, "ignore_eos": "structured_outputs" not in fields} | sampling | fields)
    prompts = [text + "<think>\n" for text in CODE] if "reasoning_tags" in fields else CODE
    # a model that drafts does not know the grammar, and short answers may have no accepted draft
    both(plain, drafting, prompts, params, checks="structured_outputs" not in fields)


def test_a_stop_string_in_the_middle_of_accepted_drafts(plain, drafting):
    prompts = CODE[::2]
    whole = generate(plain, prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    texts = [output.outputs[0].text for output in whole]
    learn(drafting[1], whole)
    for place in range(3, 33, 5):
        stops = [[text[place : place + 3]] for text in texts]
        params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stop) for stop in stops]
        both(plain, drafting, prompts, params, rejects=False)


def test_no_jump_forward():
    fixed = StructuredOutputsParams(regex="(yes|no), because all of this text is written by the grammar[.!]")
    params = SamplingParams(temperature=0, max_tokens=90, structured_outputs=fixed)
    with LLM("demo", jump_forward=False, **DEMO) as llm:
        expected = generate(llm, CODE, params)
    with drafting_llm("demo", jump_forward=False, **DEMO) as (llm, _):
        assert bits(generate(llm, CODE, params)) == bits(expected)
        stats = llm.stats().speculation
    assert stats.draft_tokens == stats.accepted_tokens > 0  # forced by the grammar


def test_beams_run_without_drafts(plain, drafting):
    params = SamplingParams(use_beam_search=True, n=2, max_tokens=20, temperature=0)
    expected = generate(plain, CODE, params)
    drafting[0].engine.flush()  # the last step of the test before has drafts
    drafting[0].reset_stats()
    assert bits(generate(drafting[0], CODE, params)) == bits(expected)
    assert drafting[0].stats().speculation.draft_tokens == 0


def test_sleep(plain):
    params = SamplingParams(temperature=0.5, seed=2, max_tokens=50, logprobs=1)
    expected = generate(plain, CODE, params)
    with drafting_llm("demo", **DEMO) as (llm, drafter):
        learn(drafter, expected)
        assert bits(generate(llm, CODE, params)) == bits(expected)
        llm.sleep(level=1)
        llm.wake_up()
        assert bits(generate(llm, CODE, params)) == bits(expected)
        check_drafts(llm.stats().speculation)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write_checkpoint(BY_NAME[name], 0, made[name])
        return str(made[name])

    return folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("llama", {"enable_prefix_caching": True, "swap_space": 0.01}),
        ("deepseek-v3", {}),
        ("deepseek-v32", {}),
        ("mistral-window", {}),
        ("gemma2", {}),
        ("gpt-oss", {}),
        ("llama", {"tensor_parallel_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)  # fmt: skip
def test_models_and_engines(folders, name, options):
    """Greedy and seeded requests in chunks of at most 64 tokens, on 8 rows."""
    prompts, params = workload(24, seed=3)
    options = OPTIONS | options
    with LLM(folders(name), **options) as llm:
        expected = generate(llm, prompts, params)
    with drafting_llm(folders(name), **options) as (llm, drafter):
        learn(drafter, expected)
        for _ in range(2):
            assert bits(generate(llm, prompts, params)) == bits(expected)
        check_drafts(llm.stats().speculation)
        assert llm.stats().compiles_after_ready == 0


def test_preempted(folders):
    prompts, params = workload(24, seed=2)
    with LLM(folders("llama"), **OPTIONS) as llm:
        expected = generate(llm, prompts, params)
        block = 2 * 16 * llm.spec.num_kv_heads * llm.spec.head_dim * 4 * llm.spec.num_layers
    for caching in (False, True):
        tight = {"enable_prefix_caching": caching, "kv_cache_memory_bytes": 14 * block, "max_model_len": 200}
        with drafting_llm(folders("llama"), **OPTIONS | tight) as (llm, drafter):
            learn(drafter, expected)
            assert bits(generate(llm, prompts, params)) == bits(expected)
            assert llm.stats().preemptions > 0
            check_drafts(llm.stats().speculation)


def test_new_weights(folders):
    """The drafter knows answers of the old weights."""
    prompts, params = workload(8, seed=6)
    answers = []
    for drafts in (False, True):
        with contextlib.ExitStack() as stack:
            if drafts:
                llm, drafter = stack.enter_context(drafting_llm(folders("llama"), **OPTIONS))
            else:
                llm, drafter = stack.enter_context(LLM(folders("llama"), **OPTIONS)), None
            expected = generate(llm, prompts, params)
            if drafter is not None:
                learn(drafter, expected)
            other = jax.tree.map(lambda leaf: leaf * np.asarray(0.98, leaf.dtype), llm.engine.runner.params)
            llm.update_weights(other)
            answers.append((bits(expected), bits(generate(llm, prompts, params))))
            if drafts:
                check_drafts(llm.stats().speculation)
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_new_weights_of_an_engine_with_a_drafter(tmp_path, method):
    """Answers, and the drafts that are accepted, are those of a fresh engine with the new weights.

    An EAGLE-3 head reads the model's embedding, and the hidden states of its layers.
    """
    demo = pathlib.Path(jpaged.__file__).parent / "demo_model"
    shutil.copytree(demo, tmp_path / "new")
    tensors = load_file(demo / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, tensor in tensors.items():
        if "proj" in name or "embed" in name:
            tensors[name] = tensor * rng.uniform(0.9, 1.1, tensor.shape).astype(tensor.dtype)
    save_file(tensors, tmp_path / "new" / "model.safetensors")
    params = [SamplingParams(temperature=t, seed=1, max_tokens=60, ignore_eos=True, logprobs=0) for t in (0, 0.6, 0)]

    def answers(llm):
        return bits(generate(llm, CODE, params))

    with LLM(str(tmp_path / "new"), **DEMO) as llm:
        wanted = answers(llm)
    with drafting_llm(str(tmp_path / "new"), method, **DEMO) as (llm, _):
        assert answers(llm) == wanted
        fresh = llm.stats().speculation
    with drafting_llm("demo", method, **DEMO) as (llm, _):
        llm.update_weights(tmp_path / "new")
        assert answers(llm) == wanted
        stats = llm.stats().speculation
        assert (stats.draft_tokens, stats.accepted_tokens) == (fresh.draft_tokens, fresh.accepted_tokens)
        check_drafts(stats)
        llm.update_weights(demo)
        old = answers(llm)
    with LLM("demo", **DEMO) as llm:
        assert answers(llm) == old
    assert all(a != b for a, b in zip(old, wanted, strict=True))


def mtp_folder(folder, seed):
    """A tiny Llama with an MTP layer of Qwen3-Next's names, and its tensors."""
    variant = BY_NAME["llama"]
    write_checkpoint(variant, seed, folder)
    tensors, hidden = load_file(folder / "model.safetensors"), variant.config["hidden_size"]
    last = f"model.layers.{variant.config['num_hidden_layers'] - 1}."
    layer = {f"mtp.layers.0.{n.removeprefix(last)}": 0.9 * t for n, t in tensors.items() if n.startswith(last)}
    rng = np.random.default_rng(seed)
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    own = {f"{name}.weight": 1 + rng.uniform(-0.1, 0.1, hidden) for name in norms}
    own["mtp.fc.weight"] = rng.uniform(-0.2, 0.2, (hidden, 2 * hidden))
    tensors |= {name: np.asarray(tensor, np.float32) for name, tensor in (layer | own).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(variant.config | {"num_nextn_predict_layers": 1}))
    return tensors


def test_new_weights_with_an_mtp_layer(tmp_path):
    """It is replaced by the new one: of a folder, a dictionary or an iterator. Without one, the old layer stays."""
    _, new = (mtp_folder(tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    prompts, params = workload(8, seed=6)
    with LLM(str(tmp_path / "new"), **OPTIONS) as llm:
        wanted = bits(generate(llm, prompts, params))

    def layer(llm):
        return [np.array(leaf) for leaf in jax.tree.leaves(llm.engine.runner.drafter_params)]

    def same(some, others):
        return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))

    with drafting_llm(str(tmp_path / "new"), "mtp", **OPTIONS) as (llm, _):
        assert bits(generate(llm, prompts, params)) == wanted
        fresh, stats = layer(llm), llm.stats().speculation
    of_model = {name: array for name, array in new.items() if not name.startswith("mtp.")}
    ways = {
        "folder": lambda: tmp_path / "new", "dictionary": lambda: new, "iterator": lambda: iter(new.items()),
        "two engines": lambda: tmp_path / "new",
    }
    for way, weights in ways.items():
        more = {"data_parallel_size": 2} if way == "two engines" else {}
        with drafting_llm(str(tmp_path / "old"), "mtp", **OPTIONS, **more) as (llm, _):
            old = layer(llm)
            llm.update_weights(of_model)
            assert same(layer(llm), old), way
            llm.update_weights(weights())
            assert not same(layer(llm), old), way
            assert all(same(jax.tree.leaves(engine.runner.drafter_params), fresh) for engine in llm.engines), way
            if not more:
                assert bits(generate(llm, prompts, params)) == wanted, way
                again = llm.stats().speculation
                assert (again.draft_tokens, again.accepted_tokens) == (stats.draft_tokens, stats.accepted_tokens), way
            if way == "dictionary":
                with pytest.raises(ModelLoadError, match=r"fc.*shape|shape.*fc"):
                    llm.update_weights(new | {"mtp.fc.weight": new["mtp.fc.weight"][:, 1:]})
                with pytest.raises(ModelLoadError, match="nothing is not a tensor of the model"):
                    llm.update_weights(iter([*of_model.items(), ("mtp.nothing", new["mtp.norm.weight"])]))
