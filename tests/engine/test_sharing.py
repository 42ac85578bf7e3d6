"""Savings of shared blocks: the blocks of several answers to one prompt, and the share of wasted slots."""

import random

import pytest

from jpaged.engine.engine import Engine, EngineOptions
from jpaged.outputs import EngineStats
from jpaged.params.sampling import SamplingParams
from tests.engine.fake_runner import FakeRunner

PROMPT = [(7 * i + 3) % 97 for i in range(1024)]


def stats_of(requests: list[tuple[list[int], SamplingParams]], **options) -> EngineStats:
    """The engine's figures after these requests have run in parallel."""
    runner = FakeRunner(
        num_blocks=2000, block_size=16, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048,
        max_logprobs=20,
    )  # fmt: skip
    engine = Engine(runner, options=EngineOptions(**options))
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    while engine.has_work:
        engine.step()
    assert engine.stats().used_blocks == engine.stats().preemptions == 0
    return engine.stats()


def test_four_samples_of_a_long_prompt_need_a_third_of_the_blocks():
    one = {"max_tokens": 64, "ignore_eos": True}
    shared = stats_of([(PROMPT, SamplingParams(**one, n=4))])
    separate = stats_of([(PROMPT, SamplingParams(**one))] * 4, enable_prefix_caching=False)
    assert separate.peak_used_blocks >= 4 * 67  # four at the same time, with 68 blocks each in the end
    assert shared.peak_used_blocks <= 0.35 * separate.peak_used_blocks
    assert shared.generated_tokens == separate.generated_tokens == 4 * 64
    assert (shared.copied_blocks, separate.copied_blocks) == (0, 0)  # the prompt fills its last block


@pytest.mark.parametrize("extra", [1, 9, 15])
def test_a_partly_full_block_is_copied_for_all_answers_but_one(extra: int):
    shared = stats_of([(PROMPT[: 512 + extra], SamplingParams(max_tokens=20, ignore_eos=True, n=4))])
    assert shared.copied_blocks == 3  # the last answer to write keeps the block
    blocks_apart = -(-(extra + 20) // 16)
    assert shared.peak_used_blocks <= 32 + 4 * blocks_apart


def test_a_beam_search_needs_fewer_blocks_than_separate_requests():
    params = SamplingParams(temperature=0.7, use_beam_search=True, best_of=4, max_tokens=16)
    alone = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[*PROMPT[:20], 1, *PROMPT[20:40]], [*PROMPT[:20], 2, *PROMPT[30:45]]]
    shared = stats_of([(prompt, params) for prompt in prompts])
    separate = stats_of([(prompt, alone) for prompt in prompts for _ in range(4)], enable_prefix_caching=False)
    assert shared.peak_used_blocks <= 0.65 * separate.peak_used_blocks


def test_little_is_wasted_on_mixed_lengths():
    rng = random.Random(4)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    requests = [([rng.randrange(97) for _ in range(rng.randint(257, 900))], params) for _ in range(24)]
    assert 0 < stats_of(requests).kv_waste < 0.04


def test_a_prefix_that_a_long_prompt_still_computes_is_computed_once():
    """The first prompt takes three steps. The others share all but 16 of its tokens, and start after it."""
    prompts = [PROMPT[:1008] + [i] * 16 for i in range(8)]
    stats = stats_of([(prompt, SamplingParams(max_tokens=1)) for prompt in prompts])
    assert stats.prefix_hit_tokens == 7 * 1008


def test_a_prompt_that_shares_nothing_passes_one_that_waits_for_a_prefix():
    engine = Engine(FakeRunner(num_blocks=300, max_num_batched_tokens=64, max_model_len=256))
    for name, prompt in {"first": PROMPT[:200], "waits": PROMPT[:201], "other": PROMPT[300:308]}.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=8))
    engine.step()
    assert engine.stats().num_running == 2
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step()]
    assert ended == ["other", "first", "waits"]
