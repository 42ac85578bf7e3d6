"""One engine computes KV, another one uses it: the answers equal those of one engine, bit for bit."""

import asyncio
import dataclasses
import random
import subprocess
import sys

import numpy as np
import pytest

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.engine.kv_cache.handover import KVHandover
from jpaged.errors import EngineError, RequestError
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.support.random_requests import OPTIONS, answers, workload
from tests.support.slow_runner import collect

HANDOVER = OPTIONS | {"enable_prefix_caching": True, "kv_handover": True}


def requests(count, seed):
    """The sampling parameters of `workload`, for prompts of 40 to 100 tokens. Half of them begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 300) for _ in range(35)]
    prompts = [(shared if i % 2 else []) + [rng.randrange(3, 300) for _ in range(rng.randint(40, 65))]
               for i in range(count)]  # fmt: skip
    return prompts, workload(count, seed)[1]


@pytest.fixture(scope="module")
def pair(checkpoint):
    with LLM(checkpoint, **HANDOVER) as one, LLM(checkpoint, **HANDOVER) as other:
        yield one, other


def test_another_engine_goes_on_with_the_kv_of_a_prompt(pair):
    one, other = pair
    prompts, params = requests(8, seed=4)
    wanted = answers(one.generate(prompts, params, use_tqdm=False))
    for prompt in prompts:
        other.put_kv(one.take_kv(prompt))
    other.engine.check_integrity()
    found = other.generate(prompts, params, use_tqdm=False)
    assert answers(found) == wanted
    block = one.engine.runner.block_size
    for output, prompt in zip(found, prompts, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // block * block > 0
    assert other.stats().compiles_after_ready == one.stats().compiles_after_ready == 0


def test_blocks_are_added_once_and_only_as_far_as_there_is_room(pair):
    one, other = pair
    prompt = list(range(5, 105))
    data = one.take_kv(prompt)
    count = len(KVHandover.from_bytes(data))
    assert count == 99 // one.engine.runner.block_size
    assert (other.put_kv(data), other.put_kv(data)) == (count, 0)
    assert not other.put_kv(one.take_kv([5, 6]))  # has no full block
    salted = one.take_kv({"prompt_token_ids": prompt, "cache_salt": "mine"})
    assert other.put_kv(salted) == count  # not shared with the prompt without salt
    pool = other.engine.scheduler.manager.pool
    held = pool.allocate(pool.num_free - 2)
    fresh = one.take_kv(list(range(150, 250)))
    assert other.put_kv(fresh) == 2
    pool.free(held)
    other.engine.check_integrity()


def test_bad_data_is_refused(pair, checkpoint):
    one, other = pair
    prompt = list(range(30, 90))
    data = one.take_kv(prompt)
    for damaged in (b"", data[:-1], data[:200] + b"?" + data[201:], b"jpaged KV 1\n" + bytes(40), data + data):
        with pytest.raises(RequestError, match=r"is damaged: its checksum|is not KV that LLM\.take_kv returned"):
            other.put_kv(damaged)
    whole = KVHandover.from_bytes(data)
    for changed, message in (
        ({"layout": "checkpoint 12, " + whole.layout.partition(", ")[2]}, "is from another model: this engine has"),
        ({"layout": whole.layout.replace("blocks of", "blocks of 1")}, "is from an engine with .* this engine has"),
        ({"names": tuple(name._replace(kv_group=7) for name in whole.names)}, "a block of an unknown kv_group"),
        ({"names": tuple(name._replace(tokens=bytes(64)) for name in whole.names)}, "has other tokens"),
        ({"blocks": tuple((np.float16(block[0]),) for block in whole.blocks)}, "has blocks with other arrays"),
    ):
        with pytest.raises(RequestError, match=message):
            other.put_kv(dataclasses.replace(whole, **changed).to_bytes())
    other.engine.check_integrity()
    assert other.put_kv(data) == len(whole)  # nothing of the refused data was kept
    with LLM(checkpoint, **OPTIONS) as plain, pytest.raises(EngineError, match="engine with kv_handover=True"):
        plain.take_kv(prompt)


def test_kv_of_other_weights_is_refused(pair, checkpoint):
    one, other = pair
    prompt = list(range(40, 100))
    one.update_weights(checkpoint, version="b, c")
    with pytest.raises(RequestError, match=r"another model: this engine has .*, got .* of version b; c"):
        other.put_kv(one.take_kv(prompt))
    other.update_weights(checkpoint, version="b, c")
    assert other.put_kv(one.take_kv(prompt)) > 0
    for each in pair:
        each.update_weights(checkpoint, version=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {}), ("deepseek-v3", {}), ("deepseek-v32", {}), ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"tensor_parallel_size": 2}),
    ],
)  # fmt: skip
def test_other_kinds_of_kv(name, options, tmp_path):
    """Windows, latent and sparse attention, pages with scales, and KV that is split over devices."""
    write_checkpoint(next(v for v in VARIANTS if v.name == name), 0, tmp_path)
    prompts, params = requests(8, seed=4)
    with LLM(str(tmp_path), **HANDOVER | options) as one, LLM(str(tmp_path), **HANDOVER | options) as other:
        wanted = answers(one.generate(prompts, params, use_tqdm=False))
        assert sum(other.put_kv(one.take_kv(prompt)) for prompt in prompts) > 0
        found = other.generate(prompts, params, use_tqdm=False)
        assert answers(found) == wanted
        assert sum(output.num_cached_tokens or 0 for output in found) > 0


CHILD = """
import pathlib, sys
from jpaged import LLM
folder, out, prompt, options = sys.argv[1], pathlib.Path(sys.argv[2]), eval(sys.argv[3]), eval(sys.argv[4])
with LLM(folder, **options) as llm:
    out.write_bytes(llm.take_kv(prompt))
"""


@pytest.mark.slow
def test_another_process_computes_the_kv(pair, checkpoint, tmp_path):
    prompt, file = list(range(100, 190)), tmp_path / "kv"
    command = [sys.executable, "-c", CHILD, checkpoint, file, repr(prompt), repr(HANDOVER)]
    subprocess.run(command, check=True, capture_output=True)
    one, other = pair
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=3, ignore_eos=True)
    wanted = answers(one.generate(prompt, params, use_tqdm=False))
    assert other.put_kv(file.read_bytes()) == 5
    [found] = other.generate(prompt, params, use_tqdm=False)
    assert found.num_cached_tokens == 80
    assert answers([found]) == wanted


@pytest.mark.slow
def test_a_prefill_engine_computes_prompts_for_another_one(checkpoint, pair):
    prompts, params = requests(12, seed=5)
    wanted = answers(pair[0].generate(prompts, params, use_tqdm=False))
    options = OPTIONS | {"enable_prefix_caching": True, "data_parallel_size": 2, "prefill_engines": 1}
    engine = AsyncLLM(checkpoint, **options)

    async def main():
        return await asyncio.gather(*(collect(engine, *each) for each in zip(prompts, params, strict=True)))

    try:
        found = [outputs[-1] for outputs in asyncio.run(main())]
        assert answers(found) == wanted
        first, second = (engine.stats(index) for index in (0, 1))
        assert (first.finished_requests, second.finished_requests) == (len(prompts), len(prompts))
        block = engine.engine.runner.block_size
        assert second.prefix_hit_tokens == sum((len(prompt) - 1) // block * block for prompt in prompts)
        assert first.compiles_after_ready == second.compiles_after_ready == 0
    finally:
        engine.close()


def test_bad_options():
    for options, message in (
        ({"prefill_engines": 1}, "from 0 to data_parallel_size - 1 = 0"),
        ({"prefill_engines": 2, "data_parallel_size": 2}, "from 0 to data_parallel_size - 1 = 1"),
        ({"kv_handover": True, "enable_prefix_caching": False}, "prefix cache, which is off"),
    ):
        with pytest.raises(RequestError, match=message):
            AsyncLLM("demo", **options)
    with pytest.raises(RequestError, match="is for AsyncLLM and the server"):
        LLM("demo", prefill_engines=1, data_parallel_size=2)
