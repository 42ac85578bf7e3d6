"""Grammars for forced tool calls, as fields of StructuredOutputsParams. The arguments of a forced call always parse."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from jpaged.parsers.argument_grammar import TEXT_RULE, json_rule
from jpaged.parsers.call_frame import NAME, NUMBER, CallFrame, Tags
from jpaged.parsers.definitions import Tool, ToolChoice, check_enforced, without_annotations
from jpaged.parsers.tool_formats import FORMATS, ToolCallFormat


def enforced_format(detected: ToolCallFormat | None, tools: Sequence[Tool] = ()) -> ToolCallFormat:
    """Return the format of forced calls of these tools: the detected one, or JSON if it cannot enforce a schema."""
    if detected is None or not detected.frames:
        return FORMATS["json"]
    arguments = detected.frames[0].arguments
    if arguments is not None and any(arguments("arguments", tool.parameters, Tags()) is None for tool in tools):
        return FORMATS["json"]
    return detected


def tool_grammar(
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    tool_format: ToolCallFormat,
    *,
    parallel: bool = True,
    added_tokens: Mapping[str, int] | None = None,
    special_tokens: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Return `{"grammar": ...}` (Lark, for llguidance) for a forced call, or {} if no call is forced.

    tool_format:    an `enforced_format` of these tools; the grammar writes calls in this format.
    parallel:       allow several calls.
    added_tokens:   ids of the tokenizer's added tokens, special or not. A tag among them is written as its token, as
                    models were trained to write it.
    special_tokens: those of them that are special.

    Raises RequestError for a schema that cannot be enforced.
    """
    if not tool_choice.forced:
        return {}
    tags = Tags(added_tokens or {}, special_tokens)
    frame = next(one for one in tool_format.frames if not one.needs or one.needs in tags.ids)
    chosen = [
        (f"tools[{i}].function.parameters", tool)
        for i, tool in enumerate(tools)
        if tool_choice.mode == "required" or tool.name == tool_choice.name
    ]
    several = parallel and tool_choice.mode == "required" and frame.between is not None
    rules: list[str] = []
    alternatives = []
    for i, (where, tool) in enumerate(chosen):
        check_enforced(where, tool.parameters)
        rules += _arguments(frame, f"arguments_{i}", tool, tags)
        head = " /[0-9]{1,3}/ ".join(map(tags.lark, frame.head.replace(NAME, tool.name).split(NUMBER)))
        alternatives.append(_joined(head, f"arguments_{i}", tags.lark(frame.tail)))
    lines = [f"start: {_calls(frame, several, tags)}", f"call: {' | '.join(f'call_{i}' for i in range(len(chosen)))}"]
    lines += [f"call_{i}: {alternative}" for i, alternative in enumerate(alternatives)]
    if any(": TEXT " in rule for rule in rules):
        rules.append(TEXT_RULE)
    return {"grammar": "\n".join([*lines, *rules]) + "\n"}


def _arguments(frame: CallFrame, rule: str, tool: Tool, tags: Tags) -> list[str]:
    if frame.arguments is None:
        return [f"{rule}: {json_rule(without_annotations(tool.parameters))}"]
    return frame.arguments(rule, tool.parameters, tags) or []


def _calls(frame: CallFrame, several: bool, tags: Tags) -> str:
    """Return the rule for one or several calls, with the format's texts around them."""
    begin = tags.lark(frame.begin)
    if frame.optional:  # models write it before calls of some tools, not of all; as text it would be part of a call
        begin = f"{begin}?" if frame.begin in tags.ids else ""
    one = _joined(tags.lark(frame.before), "call", tags.lark(frame.after))
    more = _joined(tags.lark(frame.between or ""), one)
    return _joined(begin, f"{one} ({more})*" if several else one, tags.lark(frame.finish))


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
