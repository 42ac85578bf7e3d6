"""Grammars of answers that must be calls, as fields of StructuredOutputsParams: so their arguments always parse."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.answers import mistral
from jpaged.answers.definitions import Tool, ToolChoice, check_enforced, without_notes
from jpaged.answers.formats import FORMATS, ToolCallFormat

# White space as templates and `json.dumps` write it: what models were trained on, and none that goes on for ever.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LIST_COMMA = '", "'


def enforced_format(parser: ToolCallFormat | None) -> ToolCallFormat:
    """The format that a forced call is written in: Python's syntax has no grammar made from a JSON schema."""
    return FORMATS["json"] if parser is None or parser.name == "pythonic" else parser


def tool_grammar(
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    parser: ToolCallFormat,
    *,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """`{"grammar": ...}` (Lark, as llguidance reads it) for a forced call; nothing where none is forced.

    Raises RequestError for a schema that cannot be enforced.

    parser:   an `enforced_format`: what it reads is what the grammar writes.
    parallel: whether there may be several calls.
    special_tokens: ids of the tokenizer's special tokens: as these, and not as their letters, a format's tags are known
        to the model.
    """
    if not tool_choice.forced:
        return {}
    special = special_tokens or {}
    chosen = [
        (f"tools[{i}].function.parameters", tool)
        for i, tool in enumerate(tools)
        if tool_choice.mode == "required" or tool.name == tool_choice.name
    ]
    several = parallel and tool_choice.mode == "required"
    rules: list[str] = []
    start = _calls(parser, several, special)
    key = "parameters" if parser.name == "llama3_json" else "arguments"
    named = parser.name == "mistral" and mistral.ARGUMENTS in special
    alternatives = []
    for i, (where, tool) in enumerate(chosen):
        check_enforced(where, tool.parameters)
        schema = json.dumps({**without_notes(tool.parameters), "x-guidance": SPACING})
        rules.append(f"arguments_{i}: %json {schema}")
        if named:
            alternatives.append(f"{_text(tool.name)} {_token(mistral.ARGUMENTS, special)} arguments_{i}")
        else:
            head = f'{{"name": "{tool.name}", "{key}": '
            alternatives.append(f'{_text(head)} arguments_{i} "}}"')
    lines = [f"start: {start}", f"call: {' | '.join(f'call_{i}' for i in range(len(chosen)))}"]
    lines += [f"call_{i}: {alternative}" for i, alternative in enumerate(alternatives)]
    return {"grammar": "\n".join([*lines, *rules]) + "\n"}


def _calls(parser: ToolCallFormat, several: bool, special: Mapping[str, int]) -> str:
    """One call or several, with a format's tags around them."""
    match parser.name:
        case "hermes":
            begin, end = (_token(tag, special) for tag in parser.markers)
            return _repeated(f'{begin} "\\n" call "\\n" {end}', '"\\n"', several)
        case "llama3_json":
            return _repeated("call", '"; "', several)
        case "mistral":
            begin = _token(mistral.BEGIN, special)
            if mistral.ARGUMENTS in special:
                return _repeated(f"{begin} call", "", several)
            return f'{begin} " [" {_repeated("call", LIST_COMMA, several)} "]"'
        case _:
            return f'"[" {_repeated("call", LIST_COMMA, several)} "]"'


def _repeated(one: str, between: str, several: bool) -> str:
    return f"{one} ({between} {one})*" if several else one


def _token(tag: str, special: Mapping[str, int]) -> str:
    return f"<[{special[tag]}]>" if tag in special else _text(tag)


def _text(literal: str) -> str:
    """A literal of a grammar: its strings are JSON's."""
    return json.dumps(literal, ensure_ascii=False)
