"""Drafts of MTP layers in an engine: those of the float64 formulas, and the same answers as without them."""

import contextlib
import dataclasses
import json
from unittest import mock

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.runtime.drafting.draft_head import num_rows_of
from jpaged.runtime.drafting.drafters import DraftHead
from jpaged.runtime.state import Field
from tests.support.drafting import always_drafting, check_drafts
from tests.support.mtp_checkpoints import PUBLISHED, write_with_mtp
from tests.support.mtp_oracle import Oracle
from tests.support.random_requests import OPTIONS, workload
from tests.support.tiny_engine import sampling_programs

pytestmark = [pytest.mark.slow, pytest.mark.codegen, pytest.mark.timeout(900)]

DRAFTING = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
VARIED = SamplingParams(temperature=1.5, top_k=3, seed=1, max_tokens=40, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=1)
ENGINE = OPTIONS | {"enable_prefix_caching": True}
IN_THE_GATE = (("Qwen3-Next", 1), ("GLM-4.5", 1), ("Qwen3.5", 2))
CLOSE = 1e-3  # of two logits: the likelier id may be another one in float32


def bits(outputs):
    return [[(answer.token_ids, answer.logprobs, answer.finish_reason) for answer in each.outputs] for each in outputs]


@contextlib.contextmanager
def recorded():
    """Inputs and drafts of an MTP layer for row 0: model states by position, and (states, drafts) of each step."""
    states, proposed = {}, []
    absorb, propose = DraftHead.absorb, DraftHead.propose

    def watch_absorb(head, drafts, step_tokens, hidden, target, max_query_len):
        joined, tokens = np.asarray(step_tokens), len(hidden)  # as `StepTokens`
        rows = num_rows_of(joined, tokens)
        positions, count = joined[tokens : 2 * tokens], joined[2 * tokens + rows + 1]
        states.update(zip(positions[:count].tolist(), np.asarray(hidden)[:count], strict=True))
        absorb(head, drafts, step_tokens, hidden, target, max_query_len)

    def watch_propose(head, plan, num_drafts, updates, target, num_rows):
        found = propose(head, plan, num_drafts, updates, target, num_rows)
        length = int(np.asarray(target.table)[plan.rows[0], Field.LENGTH])
        known = np.array([states[p] for p in range(length)])
        proposed.append((known, [draft for draft in np.asarray(found)[0].tolist() if draft >= 0]))
        return found

    with mock.patch.multiple(DraftHead, absorb=watch_absorb, propose=watch_propose):
        yield proposed


def check_against_formulas(oracle, ids, proposed):
    """Compare each draft with the oracle's. Returns the numbers of drafts, and of those that are the answer's ids."""
    count = accepted = compared = 0
    for states, drafts in proposed:
        state, known = oracle.model_state(np.float64(states)), list(ids[: len(states) + 1])
        rest, is_accepted = ids[len(states) + 1 :], True
        for j, draft in enumerate(drafts):
            logits, after = oracle.run(np.array(known[1:]), state)
            second, best = np.sort(logits[-1])[-2:]
            if best - second > CLOSE:
                assert draft == logits[-1].argmax()
                compared += 1
            is_accepted &= j < len(rest) and rest[j] == draft
            accepted += is_accepted
            count += 1
            known.append(draft)
            state = np.concatenate([state, after[-1:]])
    assert compared > 0.9 * count
    return count, accepted


@pytest.mark.parametrize(
    ("name", "devices"),  # test_mtp_layers.py compares the formulas of all families. The gate has three engines
    [pytest.param(name, devices, marks=[pytest.mark.soak] * ((name, devices) not in IN_THE_GATE))
     for name, devices in (*((name, 1) for name in PUBLISHED), ("Qwen3.5", 2))],
    ids=lambda value: str(value),
)  # fmt: skip
def test_drafts_are_those_of_the_formulas_and_change_no_answer(name, devices, tmp_path):
    tensors = write_with_mtp(name, tmp_path, likely=3)
    oracle = Oracle(name, json.loads((tmp_path / "config.json").read_text()), tensors)
    prompts, _ = workload(12, seed=3)
    params = [GREEDY if i % 2 else dataclasses.replace(SEEDED, seed=i) for i in range(len(prompts))]

    def answers(llm):
        llm.engine.seeds.seed(0)
        return bits(llm.generate(prompts, params, use_tqdm=False))

    engine = ENGINE | {"tensor_parallel_size": devices}
    with sampling_programs(SamplerVariant.FULL), LLM(str(tmp_path), **engine) as llm:
        wanted, alone = answers(llm), llm.generate(prompts[:1], VARIED, use_tqdm=False)
    with always_drafting(), LLM(str(tmp_path), **engine | DRAFTING) as llm:
        llm.wait_until_ready()
        llm.reset_stats()
        with recorded() as proposed:
            assert bits(llm.generate(prompts[:1], VARIED, use_tqdm=False)) == bits(alone)
        stats = llm.stats().speculation
        check_drafts(stats)
        ids = [*alone[0].prompt_token_ids, *alone[0].outputs[0].token_ids]
        assert check_against_formulas(oracle, ids, proposed) == (stats.draft_tokens, stats.accepted_tokens)
        for _ in range(2):  # the second time from the prefix cache
            assert answers(llm) == wanted
        check_drafts(llm.stats().speculation)
        assert llm.stats().compiles_after_ready == 0
