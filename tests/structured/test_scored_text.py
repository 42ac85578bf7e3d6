"""`ScoredText`: the masks of a text's tokens are those of a matcher that follows it."""

from typing import Any

import numpy as np
import pytest

from jpaged.engine.grammar import GrammarMatcher
from jpaged.engine.input.input_processor import InputProcessor, ModelLimits
from jpaged.engine.output.scored_text import ScoredText
from jpaged.engine.step_plan import mask_words
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.params.scoring import ScoringParams
from tests.structured.grammar_model import Model
from tests.structured.sampling import bits

GRAMMAR = {"regex": "[ab]{2,4}-[0-9]{1,3}"}
START = 3  # tokens of the prompt


def text(model: Model, answer: list[int], **fields: Any) -> ScoredText:
    limits = ModelLimits(
        vocab_size=model.vocab_size, max_model_len=64, max_logprobs=1, eos_token_ids=model.eos_token_ids,
        processed_logprobs=True,
    )  # fmt: skip
    params = SamplingParams(structured_outputs=GRAMMAR, **fields)
    inputs = InputProcessor(limits, object(), model.compiler)
    group = inputs.process("r", [1] * START + answer, ScoringParams(params, START))
    assert group.grammar is not None
    return ScoredText(group.first, group.grammar.result(60).matcher(), None, model.token_bytes.__getitem__)


def masks_of(scored: ScoredText, chunks: list[int]) -> list[np.ndarray]:
    """Masks of consecutive chunks of the text."""
    masks, position = [], START
    for count in chunks:
        masks += scored.masks(range(position, position + count))
        position += count
    return masks


def allows(mask: np.ndarray, token_id: int, model: Model) -> bool:
    return bool(bits(mask, model.vocab_size)[token_id])


def test_masks_are_those_of_a_matcher(demo: Model):
    followed = demo.matcher(**GRAMMAR)
    answer = demo.write(demo.matcher(**GRAMMAR), seed=1).token_ids
    masks = masks_of(text(demo, answer), [1, 0, len(answer) - 1])
    for token_id, mask in zip(answer, masks, strict=True):
        words = np.zeros(mask_words(demo.vocab_size), np.uint32)
        followed.mask_into(words)
        np.testing.assert_array_equal(mask, words)
        assert followed.accept(token_id)
    assert len(answer) >= 4


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_nothing_can_be_drawn_after_the_answer(demo: Model, ignore_eos: bool):
    """It has ended with an end token, with the grammar, or with a token that the grammar does not allow."""
    end, [letter, dash, digit] = demo.eos_token_ids[0], [demo.token_bytes.index(byte) for byte in (b"a", b"-", b"7")]
    cases = {
        "end token": ([letter, letter, dash, digit, end], [letter, end]),
        "end of the grammar": ([letter, letter, dash, digit, digit, digit, end], [end, digit]),
        "not allowed": ([letter, letter, dash], [letter, dash, digit]),
    }
    for name, (before, after) in cases.items():
        masks = masks_of(text(demo, before + after, ignore_eos=ignore_eos), [len(before + after)])
        allowed = [allows(mask, token_id, demo) for mask, token_id in zip(masks, before + after, strict=True)]
        assert allowed == [True] * len(before) + [False] * len(after), name
        assert all(mask.any() for mask in masks), name


def test_a_grammar_that_fails_ends_its_request(demo: Model, monkeypatch: pytest.MonkeyPatch):
    letter = demo.token_bytes.index(b"a")
    scored = text(demo, [letter] * 4)
    assert masks_of(scored, [2])
    assert scored.error is None

    def fail(matcher: GrammarMatcher, words: np.ndarray) -> None:
        raise RequestError("structured_outputs", GRAMMAR, "cannot continue")

    monkeypatch.setattr(GrammarMatcher, "mask_into", fail)
    masks = scored.masks(range(START + 2, START + 4))
    assert [mask.any() for mask in masks] == [True, True]
    assert isinstance(scored.error, RequestError)
