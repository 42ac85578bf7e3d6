"""The same answers under any load: alone, in a batch, preempted, from a cached prefix. On CPU, bit for bit."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.support.random_requests import OPTIONS, answers, workload

pytestmark = pytest.mark.codegen


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(next(v for v in VARIANTS if v.name == "llama"), 0, folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_64_requests_on_8_rows_answer_as_each_does_alone(checkpoint, llm, dtype):
    prompts, params = workload(64, seed=1)
    if dtype == "bfloat16":
        with LLM(checkpoint, **OPTIONS | {"dtype": dtype}) as half:
            same_together_and_alone(half, prompts, params)
    else:
        same_together_and_alone(llm, prompts, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss", "deepseek-v3", "deepseek-v32", "olmo2", "falcon-rw"])
def test_other_families_answer_as_each_request_does_alone(name, tmp_path):
    """Routers, grouped products, latent and sparse attention, norms over whole projections, ALiBi."""
    write_checkpoint(next(v for v in VARIANTS if v.name == name), 0, tmp_path)
    prompts, params = workload(24, seed=3)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        together = answers(llm.generate(prompts, params, use_tqdm=False))
        alone = [answers(llm.generate(p, s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
    assert together == alone
    assert len({tuple(tokens) for tokens, _, _ in together}) > 20


def same_together_and_alone(llm, prompts, params):
    together = answers(llm.generate(prompts, params, use_tqdm=False))
    alone = [answers(llm.generate(p, s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
    assert together == alone
    assert len({tuple(tokens) for tokens, _, _ in together}) > 50  # the answers are not all alike


@pytest.mark.slow
def test_a_preempted_request_gives_the_same_tokens(checkpoint, llm):
    prompts, params = workload(24, seed=2)
    undisturbed = answers(llm.generate(prompts, params, use_tqdm=False))
    # bytes of a block: keys and values
    block = 2 * 16 * llm.spec.num_kv_heads * llm.spec.head_dim * 4 * llm.spec.num_layers
    for caching in (False, True):
        tight = {"enable_prefix_caching": caching, "kv_cache_memory_bytes": 14 * block, "max_model_len": 200}
        with LLM(checkpoint, **OPTIONS | tight) as small:
            assert answers(small.generate(prompts, params, use_tqdm=False)) == undisturbed
            stats = small.stats()
            assert stats.preemptions > 0
            assert stats.recomputed_tokens > 0
            assert stats.used_blocks == 0


def test_a_cached_prefix_gives_the_same_tokens_and_logprobs(checkpoint, llm):
    prompts, params = workload(12, seed=3)
    prefix = [7 + i % 200 for i in range(100)]
    prompts = [{"prompt_token_ids": prefix[: 5 * i + 33] + p["prompt_token_ids"]} for i, p in enumerate(prompts)]
    cold = answers(llm.generate(prompts, params, use_tqdm=False))
    with LLM(checkpoint, **OPTIONS | {"enable_prefix_caching": True}) as cached:
        for _ in range(2):
            assert answers(cached.generate(prompts, params, use_tqdm=False)) == cold
        outputs = cached.generate(prompts, params, use_tqdm=False)
        assert cached.stats().prefix_hit_tokens > 500
        # only full blocks are shared, and the last token of a prompt is always computed
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.num_cached_tokens == (len(prompt["prompt_token_ids"]) - 1) // 16 * 16


@pytest.fixture(scope="module", params=["gemma2", "mistral-window"])
def windowed(request, tmp_path_factory):
    """A checkpoint with layers of two kinds, and one whose layers all have a window of 20 tokens.

    With each an engine whose pool is large enough for all requests, without prefix caching.
    """
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(next(v for v in VARIANTS if v.name == request.param), 0, folder)
    with LLM(str(folder), **OPTIONS) as llm:
        yield str(folder), llm


def tight_options(llm):
    """The smallest pool for a request of 256 tokens."""
    plan = llm.engine.runner.memory_plan
    # the request only fits because it frees blocks before the window
    assert plan.request_bytes < 0.7 * plan.full_attention_bytes
    return {"kv_cache_memory_bytes": plan.request_bytes, "max_model_len": 256}


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_a_pool_that_is_only_large_enough_with_freed_window_blocks(windowed, caching):
    """Chunked prompts, preemption and prefix hits. All free blocks without a name are filled with NaN."""
    folder, llm = windowed
    prompts, params = workload(24, seed=4, longest=190)
    shared = [7 + i % 200 for i in range(70)]
    prompts = [{"prompt_token_ids": shared[: 10 * (i % 8)] + p["prompt_token_ids"]} for i, p in enumerate(prompts)]
    prompts[0] = {"prompt_token_ids": shared * 2 + [9] * 110}  # 250 tokens, chunks of at most 64
    prompts += [{"prompt_token_ids": [20 + i] * 10} for i in range(8)]  # short prompts, which outgrow the pool together
    params += [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 8
    roomy = answers(llm.generate(prompts, params, use_tqdm=False))
    with LLM(folder, **OPTIONS | tight_options(llm) | {"enable_prefix_caching": caching}) as small:
        engine, done = small.engine, {}
        pool, runner = engine.scheduler.manager.pool, engine.runner
        for i, (prompt, wishes) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, wishes)
        while engine.has_work:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            free = [pool.ref_count(block) == 0 and pool.name(block) is None for block in range(pool.num_blocks)]
            runner._last.state = runner.state.with_pages(_poisoned(runner.state.pages, np.array(free)))
            engine.check_integrity()
        assert answers([done[str(i)] for i in range(len(prompts))]) == roomy
        stats = small.stats()
        assert stats.preemptions > 0
        assert (stats.prefix_hit_tokens > 100) == caching
        assert stats.used_blocks == stats.compiles_after_ready == 0


@jax.jit
def _poisoned(pages, free):
    """Pages with NaN in all free blocks."""
    return jax.tree.map(lambda pool: jnp.where(free[:, None, None, None, None], jnp.nan, pool), pages)


@pytest.mark.slow
def test_a_cached_prefix_of_windows_gives_the_same_tokens_and_logprobs(windowed):
    folder, llm = windowed
    prompts, params = workload(12, seed=3)
    prefix = [7 + i % 200 for i in range(100)]
    prompts = [{"prompt_token_ids": prefix[: 5 * i + 33] + p["prompt_token_ids"]} for i, p in enumerate(prompts)]
    cold = answers(llm.generate(prompts, params, use_tqdm=False))
    with LLM(folder, **OPTIONS | {"enable_prefix_caching": True}) as cached:
        for _ in range(2):
            outputs = cached.generate(prompts, params, use_tqdm=False)
            assert answers(outputs) == cold
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.num_cached_tokens == (len(prompt["prompt_token_ids"]) - 1) // 16 * 16


def test_a_short_request_that_arrives_late_finishes_before_long_ones(llm):
    engine = llm.engine
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for i in range(7):  # of 8 rows
        engine.add_request(f"long {i}", {"prompt_token_ids": [5 + i] * 100}, long)
    for _ in range(30):
        engine.step()
    engine.add_request("short", {"prompt_token_ids": [9] * 10}, SamplingParams(temperature=0, max_tokens=5))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finished]
    assert order[0] == "short"
    assert len(order) == 8
