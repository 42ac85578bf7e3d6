"""`sleep` and `wake_up` with compiled programs: memory is freed, answers stay the same, and nothing compiles."""

import asyncio
import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest

import jpaged
from jpaged import EngineError, NoWeightsError, RequestError, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.runtime.memory.host_memory import return_free_memory
from jpaged.runtime.memory.sleeping import HostWeights
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.support.tiny_engine import sampling_programs

SIZES = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32, "row_buckets": (8,),
    "token_buckets": (32,), "kv_cache_memory_bytes": 2_000_000,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(BY_NAME["llama"], 0, folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with sampling_programs(SamplerVariant.GREEDY), jpaged.LLM(checkpoint, **SIZES) as made:
        made.wait_until_ready()
        yield made


def device_bytes() -> int:
    """Bytes in use by the device's own counter, or on CPU, which has none, by all arrays."""
    stats = jax.devices()[0].memory_stats()
    return sum(array.nbytes for array in jax.live_arrays()) if stats is None else stats["bytes_in_use"]


def answers(llm) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.slow
def test_answers_are_the_same_and_nothing_compiles(llm):
    before, awake = answers(llm), device_bytes()
    for _ in range(2):
        llm.sleep(level=1)
        assert awake - device_bytes() >= 1_900_000  # the KV pool
        with pytest.raises(EngineError, match=r"call wake_up\(\) first"):
            answers(llm)
        llm.wake_up(tags=["weights"])
        with pytest.raises(EngineError, match="kv_cache"):
            answers(llm)
        llm.wake_up()
        assert device_bytes() == awake
        assert answers(llm) == before
    assert llm.stats().compiles_after_ready == 0
    with pytest.raises(RequestError, match="level must be 0"):
        llm.sleep(level=3)


def test_level_0_frees_nothing(llm):
    awake = device_bytes()
    llm.sleep(level=0)
    assert (device_bytes(), llm.is_sleeping()) == (awake, True)
    llm.wake_up()
    assert answers(llm)


def test_level_2_discards_the_weights(llm):
    before, awake, runner = answers(llm), device_bytes(), llm.engine.runner
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(runner.params)}.values()
    weights = sum(leaf.nbytes for leaf in leaves)
    kept = jax.tree.map(np.array, runner.params)
    llm.sleep(level=1)
    asleep = device_bytes()
    llm.sleep(level=2)  # an engine that sleeps already
    assert asleep - device_bytes() == weights
    assert all(leaf.is_deleted() for leaf in leaves)
    assert awake - device_bytes() >= 1_900_000 + weights
    llm.wake_up()
    assert awake - device_bytes() == weights
    with pytest.raises(NoWeightsError, match=r"sleep\(level=2\) discarded them: call update_weights"):
        answers(llm)
    llm.update_weights(jax.tree.map(jax.device_put, kept))
    assert (answers(llm), device_bytes()) == (before, awake)
    assert llm.stats().compiles_after_ready == 0


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu" or sys.platform != "linux", reason="reads the process's own memory")
def test_the_operating_system_gets_the_memory_back(tmp_path):
    """A model of 236 MiB and a pool of 64 MiB. The process has nothing else to free."""
    config = {**BY_NAME["llama"].config, "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048,
              "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = SIZES | {"kv_cache_memory_bytes": 2**26, "load_format": "dummy"}
    with sampling_programs(SamplerVariant.GREEDY), jpaged.LLM(str(tmp_path), **sizes) as llm:
        llm.wait_until_ready()
        answers(llm)
        return_free_memory()
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner.params))
        awake, arrays = resident_bytes(), device_bytes()
        llm.sleep(level=2)
        assert arrays - device_bytes() >= weights + 0.95 * 2**26
        assert awake - resident_bytes() == pytest.approx(weights + 2**26, rel=0.1)


def resident_bytes() -> int:
    """Physical memory of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_requests_that_run_recompute_their_kv(checkpoint):
    """The engine sleeps in the middle of an answer. The answer is the same as without a break."""

    async def main() -> tuple[list[int], list[int], int]:
        async def answer() -> list[int]:
            async for output in engine.generate(PROMPTS[0], GREEDY):
                if len(output.outputs[0].token_ids) >= 4:
                    begun.set()
            return output.outputs[0].token_ids

        begun = asyncio.Event()
        whole = await answer()
        begun.clear()
        running = asyncio.create_task(answer())
        await begun.wait()
        await engine.sleep(mode="keep")
        await engine.wake_up()
        return whole, await running, engine.stats().compiles_after_ready

    with sampling_programs(SamplerVariant.GREEDY):
        engine = jpaged.AsyncLLM(checkpoint, **SIZES)
    try:
        engine.wait_until_ready()
        whole, broken, compiled = asyncio.run(main())
    finally:
        engine.close()
    assert (broken, len(broken), compiled) == (whole, 16, 0)


def test_weights_go_to_the_host_and_back():
    """On GPU and TPU, where the device has its own memory, a runner moves its weights like this."""
    shared = jax.numpy.arange(12, dtype="bfloat16").reshape(3, 4)
    tree = {"a": shared, "b": [jax.numpy.ones(5, "int8"), shared]}
    host = HostWeights.take(tree)
    assert shared.is_deleted()
    back = host.put()
    assert back["a"] is back["b"][1]
    np.testing.assert_array_equal(np.asarray(back["a"], "float32"), np.arange(12).reshape(3, 4))
    assert (back["a"].dtype, back["b"][0].dtype) == (shared.dtype, np.int8)
    assert back["a"].sharding == shared.sharding


@pytest.mark.slow
def test_a_profile_is_written_into_the_folder(llm, tmp_path):
    llm.start_profile(tmp_path)
    with pytest.raises(EngineError, match="cannot start"):
        llm.start_profile(tmp_path)
    answers(llm)
    llm.stop_profile()
    with pytest.raises(EngineError, match="no profile"):
        llm.stop_profile()
    assert [path.suffix for path in pathlib.Path(tmp_path).rglob("*.xplane.pb")] == [".pb"]
