"""Grammars for forced tool calls, as fields of StructuredOutputsParams. The arguments of a forced call always parse."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.parsers import mistral
from jpaged.parsers.definitions import Tool, ToolChoice, check_enforced, without_annotations
from jpaged.parsers.tool_formats import FORMATS, ToolCallFormat

# White space as chat templates and `json.dumps` write it. Models were trained on it, and it is bounded.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LIST_COMMA = '", "'


def enforced_format(detected: ToolCallFormat | None) -> ToolCallFormat:
    """Return the format of forced calls: JSON if none was detected, or for Python, which llguidance cannot enforce."""
    return FORMATS["json"] if detected is None or detected.name == "pythonic" else detected


def tool_grammar(
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    tool_format: ToolCallFormat,
    *,
    parallel: bool = True,
    added_tokens: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return `{"grammar": ...}` (Lark, for llguidance) for a forced call, or {} if no call is forced.

    tool_format:  an `enforced_format`; the grammar writes calls in this format.
    parallel:     allow several calls.
    added_tokens: ids of the tokenizer's added tokens, special or not. A tag among them is written as its token, as
                  models were trained to write it.

    Raises RequestError for a schema that cannot be enforced.
    """
    if not tool_choice.forced:
        return {}
    added = added_tokens or {}
    chosen = [
        (f"tools[{i}].function.parameters", tool)
        for i, tool in enumerate(tools)
        if tool_choice.mode == "required" or tool.name == tool_choice.name
    ]
    several = parallel and tool_choice.mode == "required"
    rules: list[str] = []
    start = _calls(tool_format, several, added)
    key = "parameters" if tool_format.name == "llama3_json" else "arguments"
    named = tool_format.name == "mistral" and mistral.ARGUMENTS in added
    alternatives = []
    for i, (where, tool) in enumerate(chosen):
        check_enforced(where, tool.parameters)
        schema = json.dumps({**without_annotations(tool.parameters), "x-guidance": SPACING})
        rules.append(f"arguments_{i}: %json {schema}")
        if named:
            alternatives.append(f"{_text(tool.name)} {_token(mistral.ARGUMENTS, added)} arguments_{i}")
        else:
            head = f'{{"name": "{tool.name}", "{key}": '
            alternatives.append(f'{_text(head)} arguments_{i} "}}"')
    lines = [f"start: {start}", f"call: {' | '.join(f'call_{i}' for i in range(len(chosen)))}"]
    lines += [f"call_{i}: {alternative}" for i, alternative in enumerate(alternatives)]
    return {"grammar": "\n".join([*lines, *rules]) + "\n"}


def _calls(tool_format: ToolCallFormat, several: bool, added: Mapping[str, int]) -> str:
    """Return the rule for one or several calls, with the format's tags around them."""
    match tool_format.name:
        case "hermes":
            begin, end = (_token(tag, added) for tag in tool_format.markers)
            return _repeated(f'{begin} "\\n" call "\\n" {end}', '"\\n"', several)
        case "llama3_json":
            (begin,) = tool_format.markers  # models write it before calls of some tools, not of all
            before = f"{_token(begin, added)}? " if begin in added else ""
            return before + _repeated("call", '"; "', several)
        case "mistral":
            begin = _token(mistral.BEGIN, added)
            if mistral.ARGUMENTS in added:
                return _repeated(f"{begin} call", "", several)
            return f'{begin} " [" {_repeated("call", LIST_COMMA, several)} "]"'
        case _:
            return f'"[" {_repeated("call", LIST_COMMA, several)} "]"'


def _repeated(one: str, between: str, several: bool) -> str:
    return f"{one} ({between} {one})*" if several else one


def _token(tag: str, added: Mapping[str, int]) -> str:
    return f"<[{added[tag]}]>" if tag in added else _text(tag)


def _text(literal: str) -> str:
    """Return a literal of a Lark grammar. Its strings have JSON's syntax."""
    return json.dumps(literal, ensure_ascii=False)
