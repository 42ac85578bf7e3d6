"""Text of an engine's answers: whole or in deltas, cut at stop strings, with offsets and bytes of tokens.

The fake runner's tokens are nearly random, with many half characters, special tokens and unknown ids.
"""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import AsyncLLM, RequestError, RequestOutput, SamplingParams
from jpaged.engine.engine import Engine, EngineOptions
from jpaged.engine.input.input_processor import InputProcessor, ModelLimits
from jpaged.engine.output.answer_text import AnswerText
from jpaged.engine.output.detokenizer import text_decoder
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.params.sampling import RequestOutputKind
from tests.engine.fake_runner import FakeRunner, alone
from tests.engine.small_tokenizer import SPECIAL, SmallTokenizer

TOKENIZER = SmallTokenizer()
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPTS = [[3, 10, 17], [5], [60, 61, 62, 63], [1, 2, 3, 4, 5, 6], [90], [11, 7]]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | fields)


def tokens_of(prompt: list[int], count: int = 24) -> list[int]:
    return alone(prompt, count, 97)


def text_of(token_ids: list[int], *, skip: bool = True) -> str:
    return TOKENIZER.decode([token_id for token_id in token_ids if token_id < len(TOKENIZER)], skip)


def run(
    prompt: list[int], sampling: SamplingParams, *, stream: bool = False, interval: int = 1
) -> list[RequestOutput]:
    engine = Engine(FakeRunner(num_blocks=128), TOKENIZER, EngineOptions(stream_interval=interval))
    engine.add_request("a", prompt, sampling, stream=stream)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def answer(prompt: list[int], **fields: Any):
    (output,) = run(prompt, params(**fields))
    return output.outputs[0]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("skip", [True, False])
def test_the_text_is_what_the_tokens_add_to_the_text_of_the_prompt(prompt: list[int], skip: bool):
    got = answer(prompt, skip_special_tokens=skip)
    assert got.token_ids == tokens_of(prompt)
    before, whole = text_of(prompt, skip=skip), text_of([*prompt, *got.token_ids], skip=skip)
    # A character that the prompt begins and the answer ends is text of the answer.
    assert whole in {before + got.text, before.removesuffix("\ufffd") + got.text}


def expected_stop(prompt: list[int], stops: list[str], include: bool) -> tuple[str, str, int] | None:
    """Return the cut text, the stop string and the number of tokens, from decodes of ever longer prefixes."""
    ids = tokens_of(prompt)
    whole = text_of(ids)
    ends = [(whole.find(stop) + len(stop), index, stop) for index, stop in enumerate(stops) if stop in whole]
    if not ends:
        return None
    end, _, stop = min(ends)
    prefixes = (count for count in range(1, len(ids) + 1) if text_of(ids[:count])[:end] == whole[:end])
    return whole[: end if include else end - len(stop)], stop, next(prefixes)


@pytest.mark.parametrize("include", [False, True])
def test_every_part_of_a_text_works_as_a_stop_string(include: bool):
    """Even parts that begin or end inside a token, or consist of half characters."""
    prompt = PROMPTS[0]
    whole = text_of(tokens_of(prompt))
    for start in range(len(whole)):
        for length in (1, 4):
            stops = ["\x00", whole[start : start + length], whole[start + 1 : start + 4] or "\x00"]
            text, stop, count = expected_stop(prompt, stops, include) or pytest.fail("the text has it")
            for stream in (False, True):
                last = run(prompt, params(stop=stops, include_stop_str_in_output=include), stream=stream)[-1].outputs[0]
                assert (last.text, last.finish_reason, last.stop_reason) == (text, "stop", stop)
                assert len(last.token_ids) == count
                assert last.token_ids == tokens_of(prompt)[:count]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("cut", [0, 5, 11])
@pytest.mark.parametrize("interval", [None, 1, 2, 5, 100])
def test_deltas_joined_are_the_answer(prompt: list[int], cut: int, interval: int | None):
    whole = text_of(tokens_of(prompt))
    common = {"stop": [whole[cut : cut + 4]] if cut else [], "logprobs": 2, "stream_interval": interval}
    common["skip_special_tokens"] = cut != 11
    once = run(prompt, params(**common, output_kind=FINAL_ONLY), stream=True)
    assert len(once) == 1
    cumulative = run(prompt, params(**common), stream=True)
    deltas = run(prompt, params(**common, output_kind=DELTA), stream=True)
    assert once[0].outputs == cumulative[-1].outputs
    joined = deltas[0]
    for later in deltas[1:]:
        joined = joined.followed_by(later)
    assert joined.outputs == once[0].outputs
    sizes = [len(delta.outputs[0].token_ids) for delta in deltas]
    assert sizes[0] == 1
    assert set(sizes[1:-1]) <= {interval or 1}
    before = ""
    for output in cumulative:
        assert output.outputs[0].text.startswith(before)
        before = output.outputs[0].text
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]


def test_the_interval_of_the_engine():
    """For requests without one of their own."""
    for asked, sizes in ((None, [1, 5, 5, 5, 5, 3]), (7, [1, 7, 7, 7, 2]), (1, [1] * 24)):
        deltas = run(PROMPTS[0], params(stream_interval=asked, output_kind=DELTA), stream=True, interval=5)
        assert [len(delta.outputs[0].token_ids) for delta in deltas] == sizes


def test_several_answers_in_deltas():
    """Each answer has its own text and end. An output has only the answers with new tokens or an end."""
    sampling = params(n=3, temperature=1, seed=5, logprobs=0, stop=["E", "a", "q"])
    (whole,) = run(PROMPTS[1], sampling)
    deltas = run(PROMPTS[1], dataclasses.replace(sampling, output_kind=DELTA), stream=True)
    joined = deltas[0]
    for later in deltas[1:]:
        joined = joined.followed_by(later)
    assert joined.outputs == whole.outputs
    assert len({len(got.token_ids) for got in whole.outputs}) > 1, "the answers must end at different lengths"
    ends = [got.index for delta in deltas for got in delta.outputs if got.finish_reason]
    assert sorted(ends) == [0, 1, 2], "each answer has one end"
    assert all(got.token_ids or got.finish_reason for delta in deltas for got in delta.outputs)


def test_best_of_returns_everything_at_the_end_for_any_output_kind():
    for kind in RequestOutputKind:
        (output,) = run(PROMPTS[1], params(best_of=3, temperature=1, seed=1, output_kind=kind), stream=True)
        assert len(output.outputs[0].token_ids) == 24


def test_held_back_text_comes_with_the_end():
    prompt = PROMPTS[0]
    ids = tokens_of(prompt)
    for count in range(1, 24):
        text = text_of(ids[:count])
        got = answer(prompt, max_tokens=count, stop=[text[-3:] + "\x00"])
        assert (got.text, got.finish_reason, got.stop_reason) == (text, "length", None)
    engine = Engine(FakeRunner(), tokenizer=TOKENIZER)
    engine.add_request("a", prompt, params(stop=[text_of(ids)[2:12] + "\x00"]), stream=True)
    for _ in range(9):
        engine.step()
    (last,) = engine.abort(["a"])
    assert last.outputs[0].text == text_of(last.outputs[0].token_ids)
    assert last.outputs[0].finish_reason == "abort"


def test_a_stop_token_is_text_only_with_include_stop_str_in_output():
    prompt = PROMPTS[2]
    ids = tokens_of(prompt)
    place = next(i for i, token_id in enumerate(ids) if i > 3 and TOKENIZER.decode([token_id], True).isascii())
    for include in (False, True):
        got = answer(prompt, stop_token_ids=[ids[place]], include_stop_str_in_output=include, logprobs=0)
        first = ids.index(ids[place])
        assert got.token_ids == ids[: first + 1]
        assert (got.finish_reason, got.stop_reason) == ("stop", ids[place])
        assert got.text == text_of(ids[: first + include])
        assert len(got.text_offsets) == len(got.token_ids)


def test_stop_strings_wait_for_min_tokens():
    """A stop string within the first `min_tokens` is text. The first one after them ends the answer."""
    ids = tokens_of(PROMPTS[0])
    whole = text_of(ids)
    decoder = text_decoder(TOKENIZER)
    for least in range(8):
        sampling = params(stop=["E"], min_tokens=least)
        text = AnswerText(decoder.new(skip_special_tokens=True), sampling)
        count = next((n for n, token_id in enumerate(ids, start=1) if text.add(token_id)), None)
        found = whole.find("E", len(text_of(ids[:least])))
        assert (count is None) == (found < 0)
        if count is not None:
            assert count > least
            assert text.whole() == whole[:found]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("skip", [True, False])
def test_offsets_are_the_starts_of_tokens(prompt: list[int], skip: bool):
    got = answer(prompt, logprobs=0, skip_special_tokens=skip)
    offsets = [*got.text_offsets, len(got.text)]
    assert len(offsets) == len(got.token_ids) + 1
    assert offsets == sorted(offsets)
    if skip:
        assert got.special_offsets is None
    else:  # an incomplete character before a special token ends there
        ends = [offset for offset, token_id in zip(offsets[1:], got.token_ids, strict=True) if token_id == SPECIAL]
        assert [offset + len("<|end|>") for offset in got.special_offsets] == ends
    for index, token_id in enumerate(got.token_ids):
        entry, own = got.logprobs[index][token_id], got.text[offsets[index] : offsets[index + 1]]
        if token_id == SPECIAL and skip:
            assert entry.decoded_token == "<|end|>"
            assert own in ("", "\ufffd")
        elif "\ufffd" not in entry.decoded_token:
            assert own.endswith(entry.decoded_token)  # the rest of a broken character comes before it


def test_bytes_of_half_characters():
    sampling = params(logprobs=3)
    (output,) = run(PROMPTS[0], sampling)
    seen = {token_id: entry for entries in output.outputs[0].logprobs for token_id, entry in entries.items()}
    halves = {token_id: seen[token_id].token_bytes for token_id in seen if token_id < 9}
    assert len(halves) > 2
    for token_id, exact in halves.items():
        assert exact == "è漢👩".encode()[token_id : token_id + 1]
        assert seen[token_id].decoded_token == "\ufffd"


def test_detokenize_false_has_no_text_and_a_stop_string_needs_a_tokenizer():
    got = answer(PROMPTS[0], detokenize=False, logprobs=0)
    assert (got.text, got.text_offsets, got.logprobs[0][got.token_ids[0]].token_bytes) == ("", None, None)
    inputs = InputProcessor(ModelLimits(97, 64, 3))
    with pytest.raises(RequestError, match="has no tokenizer") as caught:
        inputs.process("a", [1], params(stop="x"))
    assert caught.value.parameter == "stop"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    def build(model: Any, given: Any, options: Any, **how: Any) -> BuiltEngine:
        built = Engine(FakeRunner(max_model_len=400, num_blocks=400), tokenizer=TOKENIZER)
        return BuiltEngine(built, engine_config(model, options), None, None, params())

    monkeypatch.setattr("jpaged.async_llm.build_engine", build)
    made = AsyncLLM("model")
    yield made
    made.close()


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_slow_client_misses_nothing(served: AsyncLLM, kind: RequestOutputKind):
    """Unread outputs are merged, and the engine does not wait."""

    async def main() -> list[RequestOutput]:
        outputs = []
        async for output in served.generate(PROMPTS[0], params(max_tokens=300, logprobs=1, output_kind=kind)):
            outputs.append(output)
            await asyncio.sleep(0.01)
        return outputs

    outputs = asyncio.run(main())
    assert len(outputs) < 250
    assert (len(outputs) == 1) == (kind is FINAL_ONLY)
    joined = outputs[0]
    for later in outputs[1:]:
        joined = joined.followed_by(later) if kind is DELTA else later
    got = joined.outputs[0]
    engine = Engine(FakeRunner(max_model_len=400, num_blocks=400), tokenizer=TOKENIZER)
    engine.add_request("a", PROMPTS[0], params(max_tokens=300, logprobs=1))
    while engine.has_work:
        for output in engine.step():
            assert got == output.outputs[0]
