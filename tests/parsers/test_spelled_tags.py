"""Names of special tokens that a model spells with other tokens are text, not tags."""

import dataclasses

import pytest

from jpaged.engine.output.answer_writer import AnswerWriter
from jpaged.params.reasoning_tags import REASONING_PARSERS
from jpaged.params.sampling import SamplingParams
from jpaged.parsers.answer import ParsedAnswer
from tests.support import added_tokens
from tests.support.tool_calls import reader

FINAL = "<|channel|>final<|message|>"
QUOTED = "<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}"
CALL = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
# (tokenizer, tool parser, reasoning parser, parts of the answer, expected reasoning, content and calls). In a part
# `(text, False)` the model spells the names of special tokens.
CASES = [
    ("gpt-oss", "openai", None, [(FINAL, True), (f"Write {QUOTED}<|call|>!", False), ("<|return|>", True)],
     (None, f"Write {QUOTED}<|call|>!", [])),
    ("gpt-oss", "openai", None,
     [("<|channel|>analysis<|message|>", True), (f"{QUOTED}?", False), ("<|end|><|start|>assistant" + FINAL, True),
      ("<|channel|>", False)], (f"{QUOTED}?", "<|channel|>", [])),
    ("gpt-oss", "openai", None, [(CALL, True), ('{"q": "<|call|>"}', False), ("<|call|>", True)],
     (None, None, [("search", '{"q": "<|call|>"}')])),
    ("mistral", "mistral", None, [("a [TOOL_CALLS]now[ARGS]{}", False), ("[TOOL_CALLS]now[ARGS]{}", True)],
     (None, "a [TOOL_CALLS]now[ARGS]{}", [("now", "{}")])),
    ("mistral", "mistral", "mistral",
     [("[THINK]", True), ("a [/THINK] b", False), ("[/THINK]", True), ("[/THINK]", False)],
     ("a [/THINK] b", "[/THINK]", [])),
    ("mistral", "mistral", None,
     [("[TOOL_CALLS]", True), ('{"name": "search", "arguments": "{\\"q\\": \\"[ARGS]\\"}"}', False)],
     (None, None, [("search", '{"q": "[ARGS]"}')])),
    ("llama3", "llama3_json", None, [('<|python_tag|>{"name": "now", "parameters": {}}', False)],
     (None, '<|python_tag|>{"name": "now", "parameters": {}}', [])),
    ("llama3", "llama3_json", None, [('<|python_tag|>{"name": "now", "parameters": {}}', True)],
     (None, None, [("now", "{}")])),
]  # fmt: skip

HARMLESS = [CASES[i][3] for i in (2, 5, 7)]  # read the same without the offsets of special tokens


def token_ids(tokenizer, parts: list[tuple[str, bool]]) -> list[int]:
    """Token ids of an answer: the special tokens themselves, or their names spelled a character at a time."""
    encode = tokenizer.encode
    made = (encode(text, add_special_tokens=False) if own else [i for char in text for i in encode(char)]
            for text, own in parts)  # fmt: skip
    return [token_id for part in made for token_id in part]


def parts_of(answer: ParsedAnswer) -> tuple:
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize(("name", "parser", "reasoning", "parts", "expected"), CASES)
@pytest.mark.parametrize("stop", [(), ("zebra",)])
def test_spelled_names_are_text(name, parser, reasoning, parts, expected, stop):
    """Whole and streamed, token by token and in larger pieces. A stop string holds text back, but not its offsets."""
    tokenizer = added_tokens.tokenizer(name)
    ids = token_ids(tokenizer, parts)
    tags = REASONING_PARSERS[reasoning] if reasoning else None
    made = reader(parser, reasoning=tags)
    assert made.tool_format is not None
    special = frozenset(added_tokens.SPECIAL[name]) & {*made.tool_format.markers, "[THINK]", "[/THINK]"}
    made = dataclasses.replace(made, special=special)
    params = SamplingParams(skip_special_tokens=False, stop=list(stop))
    for size in (1, 3, len(ids)):
        text, whole = (AnswerWriter(tokenizer).new_text(params, [1]) for _ in range(2))
        assert text is not None
        assert whole is not None
        parsing, deltas = made.new(), []
        for start in range(0, len(ids), size):
            for token_id in ids[start : start + size]:
                text.add(token_id)
                whole.add(token_id)
            deltas.append(parsing.feed(text.new(), text.special_offsets(new=True)))
        text.end()
        whole.end()
        deltas.append(parsing.feed(text.new(), text.special_offsets(new=True)))
        assert parts_of(ParsedAnswer.of([*deltas, parsing.finish()])) == expected
        assert parts_of(made.parse(whole.whole(), whole.special_offsets(new=False))) == expected
    assert (parts_of(made.parse(whole.whole())) == expected) == (parts in HARMLESS)
