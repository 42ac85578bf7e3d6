"""Nothing compiles after ready, and a second start compiles nothing at all. JAX's own events count."""

import collections
import json
import os
import random
import subprocess
import sys

import jax
import pytest

from jpaged import LLM, RequestError, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.support.tiny_engine import SPECS, make_runner, sampling_programs

COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles():
    """Names of all programs compiled, or read from the disk cache, in this process while the test runs."""
    seen = []

    def listen(event, duration, **kwargs):
        if event == COMPILE:
            seen.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
def test_500_fuzzed_requests_compile_nothing(tmp_path, compiles):
    """Random lengths, sampling parameters, bad requests and aborts, with a pool so small that it preempts."""
    write_checkpoint(next(v for v in VARIANTS if v.name == "llama"), 0, tmp_path)
    rng = random.Random(5)
    with LLM(
        str(tmp_path), dtype="float32", max_num_seqs=12, max_num_batched_tokens=96, max_model_len=256,
        kv_cache_memory_bytes=1_000_000,
    ) as llm:  # fmt: skip
        llm.wait_until_ready()
        assert compiles  # the listener works
        compiles.clear()
        engine, alive, finished, refused = llm.engine, set(), 0, 0
        for i in range(520):
            length = rng.choice([0, 1, 2, 15, 16, 17, 255, 256, rng.randint(3, 250)])
            sampling = {
                "temperature": rng.choice([0, 0.7, 1.3]),
                "top_p": rng.choice([1, 0.9]),
                "top_k": rng.choice([0, -1, 5]),
                "min_p": rng.choice([0, 0.1]),
                "logprobs": rng.choice([None, None, 0, 5]),
                "seed": rng.choice([None, i]),
                "max_tokens": rng.choice([1, 2, 30, None]),
            }
            prompt = {"prompt_token_ids": [rng.randrange(-1 if i % 50 == 0 else 0, 320) for _ in range(length)]}
            try:
                engine.add_request(str(i), prompt, SamplingParams(**sampling))
                alive.add(str(i))
            except RequestError:
                refused += 1
            for _ in range(rng.choice([0, 0, 1, 5])):
                ended = {o.request_id for o in engine.step() if o.finished}
                finished += len(ended)
                alive -= ended
            if alive and rng.random() < 0.1:
                victim = rng.choice(sorted(alive))
                engine.abort([victim])
                alive.discard(victim)
                finished += 1
        while engine.has_work:
            finished += sum(output.finished for output in engine.step())
        engine.check_integrity()
        stats = llm.stats()
        assert finished + refused == 520
        assert finished > 400
        assert stats.preemptions > 0
        assert stats.used_blocks == stats.compiles_after_ready == 0
    assert compiles == []


START = """
import json, sys, jax
counts = {}
def listen(event, **kwargs):
    counts[event] = counts.get(event, 0) + 1
jax.monitoring.register_event_listener(listen)
from jpaged import LLM, SamplingParams
sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,)}
with LLM(sys.argv[1], dtype="float32", compilation_cache_dir=sys.argv[2], **sizes) as llm:
    llm.wait_until_ready()
    [output] = llm.generate("x" if llm.get_tokenizer() else {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0.8, seed=1))
print(json.dumps({"counts": counts, "tokens": output.outputs[0].token_ids}))
"""  # noqa: E501


@pytest.fixture
def cache_events():
    """How often the disk cache had a program, and had it not, while the test runs."""
    counts = collections.Counter()

    def listen(event, **_):
        counts[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(listen)
    yield counts
    jax.monitoring.unregister_event_listener(listen)


@pytest.mark.usefixtures("own_programs")
def test_a_second_runner_takes_every_program_from_the_cache(tmp_path, cache_events):
    """In one process, with one sampling program; the gate starts two processes."""
    counts = []
    for _ in range(2):
        jax.clear_caches()
        cache_events.clear()
        with sampling_programs(SamplerVariant.GREEDY):
            make_runner(SPECS["full"], compilation_cache_dir=str(tmp_path)).close()
        counts.append((cache_events["cache_hits"], cache_events["cache_misses"]))
    (_, compiled), (read, missing) = counts
    assert compiled > 5
    assert read > 5
    assert missing == 0


@pytest.mark.slow
def test_a_second_start_reads_every_program_from_the_cache(tmp_path):
    write_checkpoint(next(v for v in VARIANTS if v.name == "qwen3"), 0, tmp_path / "model")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def start():
        command = [sys.executable, "-c", START, str(tmp_path / "model"), str(tmp_path / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm = start(), start()
    assert cold["counts"]["/jax/compilation_cache/cache_misses"] > 5  # others are compiled by a child process
    assert warm["counts"].get("/jax/compilation_cache/cache_misses", 0) == 0
    assert warm["counts"]["/jax/compilation_cache/cache_hits"] > 10
    assert warm["tokens"] == cold["tokens"]
