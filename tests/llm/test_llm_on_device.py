"""LLM and AsyncLLM on the real runner: live arrays, aborted requests, and errors at start-up."""

import asyncio
import dataclasses
import pathlib
import random
import re
import runpy
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jpaged
from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError, RequestError
from jpaged.models.spec import DecoderSpec, Rope, param_shapes
from tests.support.ctrl_c import press_ctrl_c_during_generate
from tests.support.tiny_engine import sampling_programs

SPEC = DecoderSpec(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=256, rope=Rope(),
)  # fmt: skip
NUM_BLOCKS = 40  # of 16 tokens: two and a half of the longest requests
# One row bucket, one token bucket, one pool size: all tests here share their programs.
OPTIONS = {
    "max_num_seqs": 8, "row_buckets": (8,), "max_num_batched_tokens": 64, "token_buckets": (64,), "block_size": 16,
    "kv_cache_memory_bytes": NUM_BLOCKS * 16 * SPEC.num_layers * 2 * SPEC.num_kv_heads * SPEC.head_dim * 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def params() -> Any:
    rng = np.random.default_rng(0)

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        gain = "norm" in jax.tree_util.keystr(path)
        values = np.full(shape.shape, 2.0) if gain else rng.normal(0, shape.shape[-1] ** -0.5, shape.shape)
        return jax.device_put(values.astype(shape.dtype))

    return jax.tree_util.tree_map_with_path(leaf, param_shapes(SPEC, np.float32))


@pytest.fixture(scope="module")
def llm(params: Any) -> Iterator[LLM]:
    with LLM(SPEC, params=params, **OPTIONS) as llm:
        yield llm


@pytest.mark.slow
def test_the_documented_examples_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    """The examples of docs/live_arrays.md: weights of the demo model agree with it, and an answer changes weights."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "live_arrays.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = []
    for number, code in enumerate(examples):
        path = tmp_path / f"example{number}.py"
        path.write_text(code, "utf-8")
        runpy.run_path(str(path))
        printed.append(capsys.readouterr().out)
    with LLM("demo", dtype="float32", max_num_seqs=8, max_num_batched_tokens=32) as demo:
        greedy = SamplingParams(temperature=0, max_tokens=16)
        (output,) = demo.generate("def main():", greedy, use_tqdm=False)
    arrays, updates = printed
    assert f"def main(): {output.outputs[0].text}\n" in arrays
    assert re.fullmatch(r"\(\(0, 0\), \(\d+, 'step-1'\)\)", updates.splitlines()[-1])


def test_errors_of_live_arrays(params: Any):
    with pytest.raises(RequestError, match="live arrays come without a tokenizer"):
        jpaged.generate((SPEC, params), ["text"])
    with pytest.raises(ModelLoadError, match=r"\(config, params\), in this order"):
        jpaged.generate((params, SPEC), [[1, 2]])
    gone = jax.tree.map(lambda a: a, params) | {"final_norm": params["final_norm"].copy()}
    gone["final_norm"].delete()
    with pytest.raises(ModelLoadError, match=r"params\['final_norm'\] has been deleted"):
        jpaged.generate((SPEC, gone), [[1, 2]], **OPTIONS)


def workload(count: int, seed: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Lengths around block borders, shared prefixes, greedy and seeded, with and without log-probabilities."""
    rng = random.Random(seed)
    prompts, params = [], []
    for _ in range(count):
        length = rng.choice([1, 2, 15, 16, 17, 33, 60, 131, 200])
        own = [rng.randrange(512) for _ in range(length)]
        prompts.append({"prompt_token_ids": own if rng.random() < 0.6 else [(7 * j) % 512 for j in range(length)]})
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 0.8, 1.2]),
                top_k=rng.choice([0, 20]),
                top_p=rng.choice([1, 0.9]),
                min_p=rng.choice([0, 0.05]),
                seed=rng.randrange(2**32),
                max_tokens=rng.choice([1, 5, 20, 40]),
                logprobs=rng.choice([None, None, 3]),
            )
        )
    return prompts, params


@pytest.mark.parametrize("implementation", ["triton", pytest.param("mosaic_tpu", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_kernels_give_the_answers_of_xla(llm: LLM, params: Any, implementation: str):
    """The kernels run in the engine, in interpret mode on CPU: chunks and decodes in one step, and preemptions."""
    prompts, _ = workload(12, seed=7)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    one = sampling_programs(SamplerVariant.GREEDY)
    with one, LLM(SPEC, params=params, attention_implementation=implementation, **OPTIONS) as kernels:
        ours = [output.outputs[0].token_ids for output in kernels.generate(prompts, greedy, use_tqdm=False)]
    theirs = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    assert ours == theirs


def tokens_of(outputs: list[jpaged.RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_live_arrays_are_used_without_a_copy(llm: LLM, params: Any):
    held = llm.engine.runner.params
    assert all(one is other for one, other in zip(jax.tree.leaves(held), jax.tree.leaves(params), strict=True))


def test_generate_with_config_and_params(llm: LLM, params: Any):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    assert tokens_of(jpaged.generate((SPEC, params), [1, 2, 3], greedy, use_tqdm=False, **OPTIONS)) == tokens_of(
        llm.generate([1, 2, 3], greedy, use_tqdm=False)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("default_sigint")
def test_after_ctrl_c_answers_are_those_of_a_fresh_engine(llm: LLM):
    prompts, sampling = workload(12, seed=3)
    llm.reset_prefix_cache()
    expected = tokens_of(llm.generate(prompts, sampling, use_tqdm=False))
    llm.reset_prefix_cache()
    moments = random.Random(0)
    for _ in range(4):
        press_ctrl_c_during_generate(llm, prompts, sampling, moments.random() * 0.2)
        assert tokens_of(llm.generate(prompts, sampling, use_tqdm=False)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["forwards", "samplers"])
def test_an_interrupt_during_a_program_does_not_lose_the_state(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, programs: str
):
    """The state was donated to the program, and the program's result was never assigned."""
    prompts, sampling = workload(6, seed=4)
    expected = tokens_of(llm.generate(prompts, sampling, use_tqdm=False))

    def cut(run: Any) -> Any:
        def interrupted(*args: Any) -> None:
            run(*args)
            raise KeyboardInterrupt

        return interrupted

    with monkeypatch.context() as patch:
        table = llm.engine.runner.programs
        patch.setattr(table, programs, [dataclasses.replace(p, run=cut(p.run)) for p in getattr(table, programs)])
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, sampling, use_tqdm=False)
    assert tokens_of(llm.generate(prompts, sampling, use_tqdm=False)) == expected


@pytest.mark.slow
def test_async_requests_with_aborts_answer_as_each_does_alone(llm: LLM, params: Any):
    prompts, sampling = workload(24, seed=2)
    expected = tokens_of(llm.generate(prompts, sampling, use_tqdm=False))

    async def read(engine: AsyncLLM, index: int) -> list[int]:
        await asyncio.sleep(0.01 * index)
        tokens: list[int] = []
        async for output in engine.generate(prompts[index], sampling[index]):
            tokens = output.outputs[0].token_ids
            if index % 5 == 4 and len(tokens) > 2:
                break
        return tokens

    async def main(engine: AsyncLLM) -> list[list[int]]:
        return await asyncio.gather(*(read(engine, index) for index in range(len(prompts))))

    engine = AsyncLLM(SPEC, params=params, **OPTIONS)
    try:
        for got, whole in zip(asyncio.run(main(engine)), expected, strict=True):
            assert got
            assert got == whole[: len(got)]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory_bytes": 200_000, "max_model_len": 2048}, "lower max_model_len to at most 32"),
        ({"kv_cache_memory_bytes": 1000}, "not one block"),
        ({"attention_implementation": "cuda"}, "attention_implementation='cuda'"),
        ({"max_model_len": 10**6}, "at most 2048"),
    ],
)
def test_impossible_options_are_refused_before_weights_are_on_the_device(options, message):
    before = len(jax.live_arrays())
    with pytest.raises(ModelLoadError, match=message):
        LLM("demo", dtype="float32", **options)
    assert len(jax.live_arrays()) == before
