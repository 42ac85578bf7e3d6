"""A `RemoteEngine` of the demo model yields what the engine yields: grammars, drafts, masks, budgets, bad requests."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import jpaged
from jpaged import AsyncLLM, SamplingParams
from jpaged.params.sampling import RequestOutputKind
from tests.serving.demo_options import SIZES
from tests.serving.http_client import wait_for
from tests.support.drafting import always_drafting
from tests.support.front_end_pair import front_end, outcome

pytestmark = pytest.mark.slow

PROMPT = "def read_json(path):\n"
TAGS = ("(", "):")
SAMPLED = {"temperature": 0.8, "seed": 5}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": SAMPLED, "no limit": {"max_tokens": None, "stop": ["\n\n"]},
    "several": {**SAMPLED, "n": 3, "stop": ["e", "\n"], "logprobs": 2},
    "stop at the first token": {"stop": [" ", "a", "e", "i", "o", "u", "\n"]},
    "stop with min_tokens": {"stop": ["e"], "min_tokens": 12, "include_stop_str_in_output": True},
    "log-probabilities": {"logprobs": 4, "prompt_logprobs": 2, "stop": ["return"]},
    "ids of log-probabilities": {"logprob_token_ids": [5, 6, 7]}, "stop ids": {"stop_token_ids": list(range(40, 90))},
    "best of": {**SAMPLED, "best_of": 3, "n": 2, "stop": ["\n"]}, "beams": {"use_beam_search": True, "beam_width": 3},
    "a regex": {"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2,4}"}, "stop": ["1"]},
    "json": {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    "a choice": {"structured_outputs": {"choice": ["yes, of course", "no"]}, "n": 2, **SAMPLED},
    "a budget": {"thinking_token_budget": 3, "reasoning_tags": TAGS, "ignore_eos": True},
    "a mask": {"return_sampling_mask": True, "top_k": 5, **SAMPLED, "stop": ["e"]},
    "repetition": {
        "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 2}, "max_tokens": 200,
        "logit_bias": {40: 60}, "ignore_eos": True,
    },
    "no text": {"detokenize": False, "logprobs": 1},
    "penalties": {"presence_penalty": 0.5, "bad_words": [" the", "self"]},
    "truncated": {"truncate_prompt_tokens": 3, "prompt_logprobs": 0},
    "interval": {"stream_interval": 5, "stop": ["zzz"]},
    # wrong parameters
    "a bad id": {"allowed_token_ids": [10**9]}, "too many log-probabilities": {"logprobs": 10**4},
    "a bad bias": {"logit_bias": {10**9: 1.0}}, "a bad regex": {"structured_outputs": {"regex": "("}},
    "a bad stop id": {"stop_token_ids": [10**9]}, "tags that are no text": {"thinking_token_budget": 3},
    "unknown processors": {"logits_processors": {"mine": {"a": 1.0}}}, "routed": {"return_routed_experts": True},
}  # fmt: skip
PROMPTS: dict[str, Any] = {
    "a prediction": {"prompt": PROMPT, "prediction": "    with open(path) as f:\n        return json.load(f)\n"},
    "too long": "a b " * 2000, "empty": "", "a bad prompt id": [10**9], "no prompt": {"cache_salt": "a"},
    "a surrogate": "\ud800",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    fields = {"method": "ngram", "num_speculative_tokens": 4}
    with always_drafting():
        made = jpaged.AsyncLLM(
            "demo", **SIZES, speculative_config=fields, enable_prefix_caching=False, return_sampling_mask=True
        )
    wait_for(lambda: made.is_ready, seconds=120)
    yield made
    made.close()


def check(engine: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    """Compare one request. Returns its outcome."""
    wanted = asyncio.run(outcome(engine, prompt, params, "mine", **options))
    with front_end(engine) as (remote, run):
        found = run(outcome(remote, prompt, params, "mine", **options))
    if isinstance(wanted, dict):  # how many drafts a row has depends on the time
        wanted.pop("drafts")
        found.pop("drafts")
    assert found == wanted
    return wanted


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("case", CASES)
def test_outputs(engine: AsyncLLM, case: str, kind: RequestOutputKind) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "output_kind": kind} | CASES[case])
    check(engine, PROMPT, params)


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(engine: AsyncLLM, case: str) -> None:
    check(engine, PROMPTS[case], SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.DELTA))


def test_a_limit_that_does_not_fit(engine: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1000)
    assert check(engine, PROMPT, params, refuse_cut=True)[0] is jpaged.RequestError
    check(engine, PROMPT, params)
