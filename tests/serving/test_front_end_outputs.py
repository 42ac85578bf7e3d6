"""A `RemoteEngine` yields what its AsyncLLM yields: the front end makes the text, and finds the stop strings."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from jpaged import AsyncLLM, SamplingParams
from jpaged.engine.engine import EngineOptions
from jpaged.errors import JPagedError, RequestError
from jpaged.frontend.remote.remote_engine import RemoteEngine
from jpaged.params.sampling import RequestOutputKind
from tests.engine.fake_runner import FakeRunner, alone
from tests.engine.small_tokenizer import SPECIAL, SmallTokenizer
from tests.serving.served_runner import async_engine
from tests.support.front_end_pair import front_end, joined, outcome
from tests.support.slow_runner import SlowRunner


class Tokenizer(SmallTokenizer):
    """Takes any character, as the text encoder expects."""

    def encode(self, text: str, *, verbose: bool = True, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.get(letter, 20) for letter in text]


TOKENIZER = Tokenizer()
OPTIONS = EngineOptions(eos_token_ids=(SPECIAL,), eos_token_id=SPECIAL)
LETTERS = [letter for letter in TOKENIZER.ids if len(letter) == 1 and letter.isascii()]


def drawn(rng: random.Random) -> tuple[Any, SamplingParams]:
    """A prompt, and parameters for its answers."""
    text = "".join(rng.choices(LETTERS, k=rng.randint(1, 12)))
    ids = [rng.randrange(97) for _ in text]
    prompt: Any = rng.choice([text, {"prompt": text, "cache_salt": rng.choice("ab")}, ids])
    some: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 9, 20])}
    if rng.random() < 0.6:
        strings = ["".join(rng.choices(LETTERS, k=rng.choice([1, 1, 1, 2]))) for _ in range(rng.choice([1, 4, 12]))]
        some |= {"stop": strings, "include_stop_str_in_output": rng.random() < 0.5}
    if rng.random() < 0.4:
        some["n"] = rng.choice([1, 2, 3])
    if rng.random() < 0.3:
        some["stop_token_ids"] = [rng.randrange(97) for _ in range(10)]
    if rng.random() < 0.4:
        some["logprobs"] = rng.choice([0, 1, 3])
    if rng.random() < 0.2:
        some["prompt_logprobs"] = rng.choice([0, 2])
    if rng.random() < 0.3:
        some["min_tokens"] = rng.randint(0, some["max_tokens"])
    if rng.random() < 0.15:
        some["repetition_detection"] = {"min_count": 2, "min_pattern_size": 1, "max_pattern_size": 3}
    if rng.random() < 0.15:
        some["truncate_prompt_tokens"] = rng.randint(1, 6)
    if rng.random() < 0.1:
        some["best_of"] = some.get("n", 1) + 2
    some["ignore_eos"] = rng.random() < 0.5
    some["skip_special_tokens"] = rng.random() < 0.5
    some["temperature"] = rng.choice([0, 1.0])
    some["output_kind"] = rng.choice(list(RequestOutputKind))
    some["stream_interval"] = rng.choice([None, None, 3])
    if rng.random() < 0.1:
        some |= {"detokenize": False, "stop": None}
    try:
        return prompt, SamplingParams(seed=rng.randrange(100), **some)
    except JPagedError:
        return drawn(rng)


def made(**options: Any) -> AsyncLLM:
    return async_engine(FakeRunner(num_blocks=256, max_model_len=64, **options), OPTIONS, TOKENIZER)


def counted(engine: AsyncLLM) -> dict[str, Any]:
    """The engine's counts."""
    stats, metrics = engine.stats(), engine.metrics()
    assert metrics is not None
    requests = metrics.requests
    return {
        "tokens": (stats.prompt_tokens, stats.prefix_hit_tokens, stats.finished_requests, stats.used_blocks),
        "generated": stats.generated_tokens,
        "finished": metrics.finished,
        "lengths": (requests.generation_tokens.counts, requests.max_generation_tokens.counts),
    }


def compare(local: AsyncLLM, behind: AsyncLLM, count: int, seed: int) -> None:
    """One request after the other, so that both engines find the same prefixes."""
    rng = random.Random(seed)
    with front_end(behind) as (remote, run):
        for number in range(count):
            prompt, params = drawn(rng)
            wanted = asyncio.run(outcome(local, prompt, params, str(number)))
            found = run(outcome(remote, prompt, params, str(number)))
            assert found == wanted, f"{found}\n{wanted}\n{prompt} {params}"
        found, wanted = counted(behind), counted(local)
        for each in (found, wanted):  # a step may end before the front end has found a stop string
            each["finished"] = sum(each["finished"].values())
            del each["generated"], each["lengths"]
        assert found == wanted


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_drawn_requests(seed: int) -> None:
    local, behind = made(), made()
    compare(local, behind, 60 if seed else 15, seed)
    local.close()
    behind.close()


def test_a_model_without_a_tokenizer() -> None:
    """The front end makes no text, so each output of a stream crosses."""
    engine = async_engine(FakeRunner())
    params = SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
    with front_end(engine) as (remote, run):
        output = run(joined(remote.generate([1, 2, 3], params), deltas=True))
    engine.close()
    assert output.outputs[0].token_ids == alone([1, 2, 3], 6, 97)


def test_an_id_in_use_is_refused_and_its_request_goes_on() -> None:
    """The engine's thread ended when two requests had the same id."""
    engine = async_engine(SlowRunner(max_model_len=2000, num_blocks=2000))
    params = SamplingParams(temperature=0, max_tokens=60, output_kind=RequestOutputKind.DELTA)

    async def main(remote: RemoteEngine) -> Any:
        first = remote.generate([1, 2, 3], params, "mine")
        begun = await anext(first)
        refused = await outcome(remote, [4, 5, 6], params, "mine")
        return refused, begun.followed_by(await joined(first, deltas=True))

    with front_end(engine) as (remote, run):
        refused, output = run(main(remote))
    engine.close()
    assert refused[0] is RequestError
    assert "is in use by a running request" in refused[2]
    assert output.outputs[0].token_ids == alone([1, 2, 3], 60, 97)


def test_a_refused_request_is_not_admitted() -> None:
    """A response in the background was stored as queued, and failed later, when the queue was full."""
    engine, admitted = made(), []

    async def main(remote: RemoteEngine) -> None:
        for name, token in (("refused", 9_999), ("served", 9)):
            params = SamplingParams(max_tokens=2, logit_bias={token: 1.0})
            await outcome(remote, [1, 2, 3], params, name, on_admitted=partial(admitted.append, name))

    with front_end(engine) as (remote, run):
        run(main(remote))
    engine.close()
    assert admitted == ["served"]


@pytest.mark.slow
def test_tokens_after_a_stop_string_do_not_count() -> None:
    """The engine's counts are those of an engine that finds the stop strings itself."""
    engines = [
        async_engine(SlowRunner(num_blocks=256, max_model_len=64), OPTIONS, TOKENIZER) for _ in ("local", "behind")
    ]
    fields = {"temperature": 0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA, "max_tokens": 50}
    whole = asyncio.run(outcome(engines[0], "abc", SamplingParams(**fields), "whole"))["outputs"][0]["text"]
    params = SamplingParams(stop=[whole[9:11]], **fields)
    with front_end(engines[1]) as (remote, run):
        run(outcome(remote, "abc", SamplingParams(**fields), "whole"))
        wanted = asyncio.run(outcome(engines[0], "abc", params, "stopped"))
        assert run(outcome(remote, "abc", params, "stopped")) == wanted
    assert wanted["outputs"][0]["stop_reason"] == whole[9:11]
    assert counted(engines[1]) == counted(engines[0])
    for engine in engines:
        engine.close()
