"""Routed experts of whole engines equal those of a dense pass over each text, which has no pages, chunks or batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError, RequestError
from jpaged.models import decoder
from jpaged.models.spec import Experts
from jpaged.speculation_config import SpeculationConfig
from tests.support.tiny_engine import FULL, VOCAB_SIZE, make_engine, make_runner, run, sampling_programs

pytestmark = [pytest.mark.slow, pytest.mark.codegen]

SPEC = dataclasses.replace(
    FULL, num_layers=3, experts=Experts(num=6, per_token=2, intermediate_size=48, layers=(True, False, True))
)
OPTION = {"enable_return_routed_experts": True}
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate((1, 9, 40, 70))]
WORK = [
    (prompt, SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, temperature=seed % 2))
    for prompt in PROMPTS for seed in range(3)
]  # fmt: skip


@pytest.fixture(scope="module")
def runner():
    with sampling_programs(SamplerVariant.RANDOM):
        runner = make_runner(SPEC, **OPTION)
    yield runner
    assert runner.compiles_after_ready == 0
    runner.close()


def check(runner, outputs):
    """All answers have the experts of the dense pass, for every token but the last."""

    @jax.jit
    def dense(ids):
        shape = jnp.zeros((1, len(ids)), jnp.int32)
        _, _, choices = decoder.decode(
            SPEC, runner.params, ids, jnp.arange(len(ids)), [None] * SPEC.num_layers, shape,
            decoder.dense_causal_attend,
        )  # fmt: skip
        return jnp.stack(choices, axis=1)

    for output in outputs:
        for answer in output.outputs:
            text = output.prompt_token_ids + answer.token_ids
            padded = np.zeros(128, np.int32)
            padded[: len(text)] = text
            assert answer.routed_experts.dtype == np.int32
            np.testing.assert_array_equal(answer.routed_experts, np.asarray(dense(padded))[: len(text) - 1])


def test_batches_chunks_and_a_full_cache(runner):
    for budget in (64, 20, 8):
        engine = make_engine(runner, budget=budget)
        run(engine, [(prompt, dataclasses.replace(one, return_routed_experts=False)) for prompt, one in WORK])
        done = run(engine, WORK)
        assert all(output.num_cached_tokens == 0 for output in done.values())
        check(runner, done.values())


def test_preemption(runner):
    engine = make_engine(runner, num_blocks=18, budget=12)
    done = run(engine, WORK)
    assert engine.stats().preemptions > 0
    check(runner, done.values())


def test_several_answers(runner):
    """Also if there are more answers than rows, with few blocks: all have the experts of the one prompt."""
    params = SamplingParams(seed=1, n=12, max_tokens=20, ignore_eos=True)
    for blocks in (160, 42):
        check(runner, run(make_engine(runner, num_blocks=blocks), [(prompt, params) for prompt in PROMPTS]).values())


def test_who_has_none(runner):
    params = SamplingParams(seed=1, max_tokens=4)
    done = run(make_engine(runner), [(PROMPTS[1], dataclasses.replace(params, return_routed_experts=False))])
    assert done["0"].outputs[0].routed_experts is None
    beams = SamplingParams(use_beam_search=True, n=2, return_routed_experts=True)
    with pytest.raises(RequestError, match=r"return_routed_experts.*use_beam_search"):
        make_engine(runner).add_request("0", {"prompt_token_ids": [1]}, beams)
    with pytest.raises(ModelLoadError, match="enable_return_routed_experts=True: the model has no experts"):
        make_runner(FULL, **OPTION)


def test_drafts():
    fields = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    runner = make_runner(SPEC, speculative_config=SpeculationConfig.from_fields(fields), **OPTION)
    engine = make_engine(runner, drafts=fields)
    done = run(engine, [(prompt * 2, params) for prompt, params in WORK[:9]])
    assert engine.stats().speculation.draft_tokens > 0
    check(runner, done.values())
    runner.close()
