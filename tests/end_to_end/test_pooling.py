"""Embeddings and classifiers: results equal Transformers' and do not depend on the load. Refused calls. On CPU."""

import asyncio
import dataclasses
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, AsyncLLM, ModelLoadError, PoolingParams, RequestError, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant
from jpaged.loading import load_model
from jpaged.models.decoder import lm_head
from jpaged.models.spec import DecoderSpec
from tests.golden.checkpoints import BY_NAME, prompts, write_checkpoint
from tests.golden.pooling import BARE_QWEN3, CLASSIFIERS, EMBEDDERS, QWEN3_CLASSIFIER, SEED, recorded, sha256_of
from tests.support.tiny_engine import sampling_programs

pytestmark = pytest.mark.codegen

TOLERANCE = 1e-4
OPTIONS = {"dtype": "float32", "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}
SCORES = PoolingParams(activation=False)


def golden_prompts(variant):
    return [{"prompt_token_ids": ids} for ids in prompts(variant.config["vocab_size"])]


def largest_difference(outputs, variant):
    wanted = recorded(variant)
    assert len(outputs) == len(wanted)
    return max(np.abs(np.array(ours[: len(row)]) - row).max() for ours, row in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize(
    "variant",  # by default the first one; all of them in .ci/run
    [pytest.param(v, id=v.name, marks=[pytest.mark.slow] * (i > 0)) for i, v in enumerate(CLASSIFIERS)],
)
def test_a_classifier_gives_transformers_scores(variant, tmp_path):
    """All prompts in one batch, prefilled in chunks: first without prefix hits, then with them in reverse order."""
    assert write_checkpoint(variant, SEED, tmp_path) == sha256_of(variant)
    asked = golden_prompts(variant)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        cold = llm.classify(asked, pooling_params=SCORES, use_tqdm=False)
        warm = llm.classify(asked[::-1], pooling_params=SCORES, use_tqdm=False)[::-1]
        assert llm.spec.num_labels == len(cold[0].outputs.probs)
        for outputs in (cold, warm):
            assert largest_difference([o.outputs.probs for o in outputs], variant) < TOLERANCE
        assert [o.outputs for o in warm] == [o.outputs for o in cold]
        assert [o.prompt_token_ids for o in cold] == [p["prompt_token_ids"] for p in asked]
        assert llm.stats().compiles_after_ready == llm.stats().used_blocks == 0


@pytest.mark.parametrize(
    "variant",  # by default the bare base model; all of them in .ci/run
    [pytest.param(v, id=v.name, marks=[pytest.mark.slow] * (i > 0)) for i, v in enumerate(EMBEDDERS)],
)
def test_an_embedding_is_transformers_last_hidden_state(variant, tmp_path):
    """Several causal models, and a bare base model, whose file has no tensor prefix and no lm_head."""
    assert write_checkpoint(variant, SEED, tmp_path) == sha256_of(variant)
    asked = golden_prompts(variant)
    with LLM(str(tmp_path), runner="pooling", **OPTIONS) as llm:
        cold = llm.embed(asked, use_tqdm=False)
        warm = llm.embed(asked[::-1], use_tqdm=False)[::-1]
        for outputs in (cold, warm):
            assert largest_difference([o.outputs.embedding for o in outputs], variant) < TOLERANCE
        assert [o.outputs for o in warm] == [o.outputs for o in cold]
        for output in cold:
            assert output.outputs.hidden_size == llm.spec.output_size
            assert abs(np.linalg.norm(output.outputs.embedding) - 1) < 1e-5
        assert [o.num_cached_tokens for o in warm] == [(len(o.prompt_token_ids) - 1) // 16 * 16 for o in warm]
        assert llm.stats().generated_tokens == llm.stats().compiles_after_ready == 0


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    write_checkpoint(BARE_QWEN3, SEED, folder)
    return str(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    write_checkpoint(QWEN3_CLASSIFIER, SEED, folder)
    return str(folder)


@pytest.fixture(scope="module")
def embedder(bare):
    with LLM(bare, runner="pooling", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def judge(classifier):
    with LLM(classifier, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(BY_NAME["qwen3"], SEED, folder)
    with sampling_programs(SamplerVariant.GREEDY), LLM(str(folder), row_buckets=(8,), **OPTIONS) as llm:
        yield llm


def workload(count, seed):
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 15, 16, 17, rng.randint(3, 200)]) for _ in range(count)]
    return [{"prompt_token_ids": [rng.randrange(3, 300) for _ in range(length)]} for length in lengths]


def pooled(llm, asked):
    outputs = llm.classify(asked, use_tqdm=False) if llm.spec.num_labels else llm.embed(asked, use_tqdm=False)
    return [output.outputs for output in outputs]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param("bare", "float32", marks=pytest.mark.slow), ("classifier", "float32"),
        pytest.param("bare", "bfloat16", marks=pytest.mark.slow),
        pytest.param("classifier", "bfloat16", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_answer_does_not_depend_on_the_batch(model, dtype, request):
    """The same bits alone, in a batch, and with KV blocks for one long prompt only."""
    folder, asked = request.getfixturevalue(model), workload(40, seed=1)
    options = OPTIONS | {"runner": "pooling", "dtype": dtype, "enable_prefix_caching": False}
    with LLM(folder, **options) as llm:
        together = pooled(llm, asked)
        assert [pooled(llm, prompt)[0] for prompt in asked] == together
        assert len({tuple(map(str, [answer])) for answer in together}) > 30
    with LLM(folder, **options, kv_cache_memory_bytes=14 * 12_288, max_model_len=210) as small:
        assert pooled(small, asked) == together
        assert small.stats().used_blocks == small.stats().compiles_after_ready == 0


@pytest.mark.parametrize("labels", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3, 9))])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_score_does_not_depend_on_the_row(labels, dtype):
    """At the hidden size of real models: the tiny models above do not show the difference."""
    spec = DecoderSpec(
        vocab_size=32, hidden_size=1024, intermediate_size=32, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=128,
        max_position=16, pools=True, num_labels=labels,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = {"final_norm": np.ones(1024), "score": rng.normal(size=(labels, 1024))}
    put = lambda value: jax.device_put(value.astype(jnp.dtype(dtype)))  # noqa: E731
    params = {name: put(value) for name, value in params.items()}
    run = jax.jit(lambda hidden: lm_head(spec, params, hidden))
    for rows in (8, 9, 13, 33):
        for _ in range(4):
            scores = np.asarray(run(put(np.tile(rng.normal(size=1024), (rows, 1)))))
            assert scores.shape == (rows, labels)
            assert (scores == scores[0]).all()


@pytest.mark.slow
def test_a_pooling_engine_has_one_program_per_token_bucket_and_one_pool_program(bare):
    with LLM(bare, runner="pooling", dtype="float32", max_num_seqs=64, max_num_batched_tokens=512) as llm:
        llm.wait_until_ready()
        names = [str(program.shape) for program in llm.engine.runner.programs.programs]
        assert names == ["mixed 256 tokens", "mixed 512 tokens", "pool 128 rows"]
        assert "lm_head" not in llm.engine.runner.params
    with pytest.raises(ModelLoadError, match="row_buckets: with runner='pooling' there are no decode programs"):
        LLM(bare, runner="pooling", row_buckets=(8,), **OPTIONS)


@pytest.mark.slow
def test_random_requests_compile_nothing_and_leak_no_blocks(bare):
    rng = random.Random(3)
    with LLM(bare, runner="pooling", **OPTIONS | {"max_model_len": 256}, kv_cache_memory_bytes=400_000) as llm:
        engine, finished = llm.engine, 0
        for i, prompt in enumerate(workload(200, seed=4)):
            engine.add_request(str(i), prompt, PoolingParams(dimensions=rng.choice([None, 1, 5, 64])))
            for _ in range(rng.choice([0, 0, 1, 3])):
                finished += len(engine.step())
            if rng.random() < 0.1:
                aborted = engine.abort([str(i)])
                assert [output.outputs for output in aborted] in ([], [None])
                finished += len(aborted)
        while engine.has_work:
            finished += len(engine.step())
            engine.check_integrity()
        assert finished == 200
        assert llm.stats().used_blocks == llm.stats().compiles_after_ready == 0


def test_a_prompt_may_have_max_model_len_tokens(embedder):
    [output] = embedder.embed({"prompt_token_ids": [7] * 256}, use_tqdm=False)
    assert len(output.outputs.embedding) == 64
    with pytest.raises(RequestError, match="has 257 tokens, a prompt takes at most 256"):
        embedder.embed({"prompt_token_ids": [7] * 257})


@pytest.mark.parametrize("model", ["embedder", "judge"])
def test_each_token_has_the_vector_that_it_has_as_the_last_one(model, request):
    """Prompts in chunks, and KV of earlier prompts in the cache. The same bits as for prompts that end there."""
    llm = request.getfixturevalue(model)
    asked = [{"prompt_token_ids": each["prompt_token_ids"]} for each in workload(6, seed=3)]
    pooled(llm, asked)
    task = "token_classify" if llm.spec.num_labels else "token_embed"
    outputs = llm.encode(asked, PoolingParams(task=task), use_tqdm=False)
    with pytest.raises(RequestError, match=f"^task must be '.*' or None in this call, got '{task}'"):
        (llm.classify if llm.spec.num_labels else llm.embed)(asked, pooling_params=PoolingParams(task=task))
    cut = [{"prompt_token_ids": each["prompt_token_ids"][: i + 1]} for each in asked
           for i in range(0, len(each["prompt_token_ids"]), 7)]  # fmt: skip
    wanted = iter(pooled(llm, cut))
    for output in outputs:
        data = output.outputs.data
        assert (data.dtype, data.shape) == (np.float32, (len(output.prompt_token_ids), llm.spec.output_size))
        assert output.num_cached_tokens == 0
        for row in data[::7].tolist():
            one = next(wanted)
            assert row == (one.probs if llm.spec.num_labels else one.embedding)
    assert llm.stats().compiles_after_ready == llm.stats().used_blocks == 0
    [raw] = llm.encode(asked[-1], PoolingParams(use_activation=False), pooling_task=task, use_tqdm=False)
    assert np.abs(raw.outputs.data).max() > 1


def test_dimensions_and_length_of_an_embedding(embedder):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    raw, full, short = embedder.embed(
        [prompt] * 3,
        use_tqdm=False,
        pooling_params=[PoolingParams(normalize=False), PoolingParams(), PoolingParams(dimensions=5)],
    )
    state = np.array(raw.outputs.embedding)
    [same] = embedder.embed(prompt, use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    assert same.outputs == raw.outputs
    assert np.allclose(full.outputs.embedding, state / np.linalg.norm(state), atol=1e-6)
    assert np.allclose(short.outputs.embedding, state[:5] / np.linalg.norm(state[:5]), atol=1e-6)


@pytest.mark.slow
def test_probabilities_follow_problem_type(classifier, tmp_path):
    """Softmax of several labels and sigmoid of one, as in Transformers' pipeline, unless problem_type is set."""
    prompt, rows = {"prompt_token_ids": prompts(320)[3]}, {}
    config = json.loads((Path(classifier) / "config.json").read_text())
    for problem in (None, "single_label_classification", "multi_label_classification", "regression"):
        folder = tmp_path / str(problem)
        write_checkpoint(QWEN3_CLASSIFIER, SEED, folder)
        (folder / "config.json").write_text(json.dumps(config | {"problem_type": problem}))
        with LLM(str(folder), **OPTIONS) as llm:
            rows[problem] = llm.classify(prompt, use_tqdm=False)[0].outputs.probs
    scores = np.array(recorded(QWEN3_CLASSIFIER)[3])
    softmax, sigmoid = np.exp(scores) / np.exp(scores).sum(), 1 / (1 + np.exp(-scores))
    for problem, wanted in zip(rows, (softmax, softmax, sigmoid, scores), strict=True):
        assert np.abs(rows[problem] - wanted).max() < TOLERANCE
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": "ranking"}))
    with pytest.raises(ModelLoadError, match="problem_type='ranking' is not supported by jpaged; supported: single_"):
        LLM(str(folder), **OPTIONS)
    variant = next(v for v in CLASSIFIERS if v.name == "llama-classifier")  # one label
    write_checkpoint(variant, SEED, tmp_path / "one")
    with LLM(str(tmp_path / "one"), **OPTIONS) as llm:
        [output] = llm.classify(prompt, use_tqdm=False)
    assert output.outputs.num_classes == 1
    assert abs(output.outputs.probs[0] - 1 / (1 + np.exp(-recorded(variant)[3][0]))) < TOLERANCE


@pytest.mark.slow
def test_calls_of_the_other_runner_are_refused(embedder, judge, generator):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    with pytest.raises(RequestError, match=r"the engine does not generate: call embed\(\), or start without runner="):
        embedder.generate(prompt)
    with pytest.raises(RequestError, match=r"^runner: the engine does not generate: call classify\(\), got "):
        judge.generate(prompt)
    with pytest.raises(RequestError, match="the engine generates: to embed or classify, start with runner='pooling'"):
        generator.embed([prompt, prompt])
    with pytest.raises(RequestError, match="the engine generates"):
        generator.classify(prompt)
    with pytest.raises(RequestError, match="the model has no score matrix: call embed"):
        embedder.classify(prompt)
    with pytest.raises(RequestError, match=r"the model is a sequence classifier: call classify\(\)"):
        judge.embed(prompt)


def test_parameters_without_effect_are_refused(embedder, judge):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    for values, message in (
        ({"dimensions": 0}, r"^dimensions must be a whole number of at least 1.*, got 0"),
        ({"dimensions": True}, r"^dimensions must be .*, got True"),
        ({"normalize": None}, r"^normalize must be True or False, got None"),
        ({"task": "score"}, r"^task must be embed, classify, token_embed.*, got 'score'"),
    ):
        with pytest.raises(RequestError, match=message):
            PoolingParams(**values)
    with pytest.raises(RequestError, match=r"^dimensions: the model's embeddings have 64, got 65"):
        embedder.embed(prompt, pooling_params=PoolingParams(dimensions=65))
    with pytest.raises(RequestError, match=r"^activation is for classifiers.*, got False"):
        embedder.embed(prompt, pooling_params=SCORES)
    with pytest.raises(RequestError, match=r"^dimensions is for embeddings.*, got 2"):
        judge.classify(prompt, pooling_params=PoolingParams(dimensions=2))
    with pytest.raises(RequestError, match=r"^normalize is for embeddings.*, got False"):
        judge.classify(prompt, pooling_params=PoolingParams(normalize=False))
    with pytest.raises(RequestError, match=r"^pooling_params must be a jpaged\.PoolingParams, got "):
        embedder.embed(prompt, pooling_params=SamplingParams())
    with pytest.raises(RequestError, match="1 values for 2 prompts"):
        embedder.embed([prompt, prompt], pooling_params=[PoolingParams()])
    with pytest.raises(RequestError, match=r"must not be empty, in prompt 1 of 2"):
        embedder.embed([prompt, {"prompt_token_ids": []}])
    assert embedder.embed([], use_tqdm=False) == []


def test_runner_that_the_model_does_not_support(bare, classifier):
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is missing.*to embed with it, start with runner='pool"):
        LLM(bare, **OPTIONS)
    with pytest.raises(ModelLoadError, match="runner='generate': the model is a sequence classifier"):
        LLM(classifier, runner="generate", **OPTIONS)
    with pytest.raises(RequestError, match=r"^runner must be auto, generate, pooling, got 'embed'"):
        LLM(bare, runner="embed", **OPTIONS)
    with pytest.raises(RequestError, match=r"^task goes with runner='pooling', got 'embed'"):
        LLM(bare, runner="generate", task="embed", **OPTIONS)


def test_other_pooling_methods_are_refused(tmp_path):
    """Sentence Transformers' 1_Pooling/config.json, in the old and the new format."""
    write_checkpoint(BARE_QWEN3, SEED, tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling/config.json"
    for values, says in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "pooling by mean_tokens is not"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "pooling by mean_tokens, lasttoken is"),
        ({"pooling_mode": "cls"}, "pooling by cls is not supported"),
    ):
        file.write_text(json.dumps({"word_embedding_dimension": 64, **values}))
        with pytest.raises(ModelLoadError, match=f"1_Pooling/config.json: {says}"):
            LLM(str(tmp_path), runner="pooling", **OPTIONS)
    for values in ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, {"pooling_mode": "lasttoken"}):
        file.write_text(json.dumps({"word_embedding_dimension": 64, "include_prompt": True, **values}))
        assert load_model(EngineConfig(model=str(tmp_path), runner="pooling")).spec.pools


@pytest.mark.slow
def test_live_arrays_are_pooled_with_or_without_lm_head(generator):
    """Pooling does not need an untied lm_head, and ignores one. Uses `task`, vLLM's older option."""
    spec, params = generator.spec, generator.engine.runner.params
    asked, results = {"prompt_token_ids": prompts(320)[4]}, []
    for tied, tree in ((True, params), (False, params), (False, params | {"lm_head": params["embed"]})):
        with LLM(dataclasses.replace(spec, tie_embeddings=tied), params=tree, task="embed", **OPTIONS) as llm:
            results.append(llm.embed(asked, use_tqdm=False)[0].outputs)
            assert "lm_head" not in llm.engine.runner.params
    assert results[0] == results[1] == results[2]
    assert np.abs(np.array(results[0].embedding[:8]) - recorded(BY_NAME["qwen3"])[4]).max() < TOLERANCE


def test_a_missing_score_matrix_is_named(classifier, tmp_path):
    write_checkpoint(BY_NAME["qwen3"], SEED, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"tensor score\.weight is missing"):
        LLM(str(tmp_path), **OPTIONS)
    write_checkpoint(QWEN3_CLASSIFIER, SEED, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))  # a config without id2label: 2 labels
    with pytest.raises(ModelLoadError, match=r"score\.weight has shape \[3, 64\], config.json calls for \[2, 64\]"):
        LLM(str(tmp_path), **OPTIONS)
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": ["a"]}))
    with pytest.raises(ModelLoadError, match=r"id2label=\['a'\] must be an object"):
        LLM(str(tmp_path), **OPTIONS)


@pytest.mark.slow
def test_async_encode_gives_what_embed_gives(bare, embedder):
    asked = golden_prompts(BARE_QWEN3)
    wanted = [output.outputs for output in embedder.embed(asked, use_tqdm=False)]

    async def ask(engine, prompt):
        outputs = [output async for output in engine.encode(prompt)]
        assert [output.finished for output in outputs] == [True]
        return outputs[0].outputs

    async def run(engine):
        got = await asyncio.gather(*(ask(engine, prompt) for prompt in asked))
        with pytest.raises(RequestError, match="the engine does not generate"):
            await anext(engine.generate(asked[0]))
        return got

    engine = AsyncLLM(bare, runner="pooling", **OPTIONS)
    try:
        assert asyncio.run(run(engine)) == wanted
    finally:
        engine.close()


def test_a_classifier_has_no_drafts(classifier):
    with pytest.raises(RequestError, match=r"^speculative_config is for models that generate; this one does not"):
        LLM(classifier, speculative_config={"method": "ngram"}, **OPTIONS)
