"""The tools of a chat request: functions, custom tools, OpenAI's older `functions`, and which of them may be called.

The model sees a custom tool as a function with one text parameter, `input`. If a call of a custom
tool with a grammar is forced, the whole answer is its input and follows the grammar.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.chat.turn import ChatTurn
from jpaged.errors import RequestError
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.definitions import Tool, ToolChoice, checked_tools
from jpaged.serving.schemas.requests import ChatRequest, NamedFunction, ToolChoiceObject

INPUT = "input"
EXAMPLE = '{"type": "custom", "custom": {"name": "f"}}'


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools that a request offers.

    choice:  which of them the model may or must call.
    custom:  names of custom tools.
    legacy:  the request uses `functions`, so answers have `function_call`.
    named:   the request names the tool to call. As in OpenAI's API, the answer then ends with 'stop'.
    raw:     the custom tool whose input is the whole answer; None if there is no such call.
    grammar: fields of StructuredOutputsParams for that input.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = dataclasses.field(default_factory=lambda: ToolChoice("none"))
    custom: frozenset[str] = frozenset()
    legacy: bool = False
    named: bool = False
    raw: str | None = None
    grammar: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def of_turn(self, turn: ChatTurn) -> ChatTurn:
        """Return `turn`. With `raw`, its reader parses no calls, and its grammar is `grammar`."""
        if self.raw is None:
            return turn
        headers = turn.reader.tool_format
        if headers is not None and not headers.reads_reasoning:
            headers = None
        plain = AnswerReader(tool_format=headers, reasoning=turn.reader.reasoning, special=turn.reader.special)
        return dataclasses.replace(turn, reader=plain, grammar=dict(self.grammar))


def tools_of(body: ChatRequest) -> ChatTools:
    """Return the tools of a request. Raises RequestError that names the field."""
    if body.functions or isinstance(body.function_call, NamedFunction):  # else the fields have no effect
        return _legacy(body)
    definitions: list[Any] = []
    grammars: dict[str, Mapping[str, Any]] = {}  # by the name of a custom tool; empty: any text
    for i, given in enumerate(body.tools or []):
        if given.get("type") == "custom":
            definition, grammar = _custom(f"tools[{i}]", given)
            grammars[definition["function"]["name"]] = grammar
            given = definition
        definitions.append(given)
    tools = _checked(definitions, body.tools or [])
    choice, tools = _choice(body.tool_choice, tools, frozenset(grammars))
    named = choice.mode == "named"
    one = choice.name if named else tools[0].name if choice.mode == "required" and len(tools) == 1 else None
    grammar = grammars.get(one or "", {})
    if not grammar:
        _refuse_grammars(tools, choice, grammars)
    return ChatTools(tools, choice, frozenset(grammars), named=named, raw=one if grammar else None, grammar=grammar)


def _checked(definitions: Sequence[Any], sent: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check the definitions. An error in a custom tool names the field as it was sent."""
    try:
        return checked_tools(definitions)
    except RequestError as error:
        where = re.match(r"tools\[(\d+)\]\.", error.parameter)
        if where is None or sent[int(where[1])].get("type") != "custom":
            raise
        raise RequestError(error.parameter.replace(".function", ".custom", 1), error.value, error.accepted) from None


def _refuse_grammars(tools: Sequence[Tool], choice: ToolChoice, grammars: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise RequestError if a tool with a grammar may be called, and its grammar would not be enforced."""
    if choice.mode == "none":
        return
    for tool in tools:
        if grammars.get(tool.name) and choice.name in (None, tool.name):
            accepted = (
                f"a grammar is enforced only where the call is forced: name the tool {tool.name} in tool_choice, or "
                "give it no format"
            )
            raise RequestError("tool_choice", choice.mode, accepted)


def _choice(
    given: str | ToolChoiceObject | None, tools: tuple[Tool, ...], custom: frozenset[str]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return the choice, and the tools that the model sees."""
    if given is None or (given == "auto" and not tools):
        return ToolChoice("auto" if tools else "none"), tools
    if isinstance(given, str):
        return ToolChoice(given), tools
    field = getattr(given, given.type)
    if field is None:
        raise RequestError(f"tool_choice.{given.type}", None, f"is missing: type is {given.type}")
    if given.type != "allowed_tools":
        if any(tool.name == field.name for tool in tools) and (field.name in custom) != (given.type == "custom"):
            other = "custom" if field.name in custom else "function"
            raise RequestError("tool_choice.type", given.type, f"{field.name} is a tool of type {other}")
        return ToolChoice("named", field.name), tools
    names = [_allowed_name(f"tool_choice.allowed_tools.tools[{i}]", one) for i, one in enumerate(field.tools)]
    for i, name in enumerate(names):
        if all(tool.name != name for tool in tools):
            known = ", ".join(tool.name for tool in tools) or "(there are none)"
            where = f"tool_choice.allowed_tools.tools[{i}]"
            raise RequestError(where, name, f"must be one of the tools: {known}")
    if not names:
        raise RequestError("tool_choice.allowed_tools.tools", [], "must name at least one tool")
    return ToolChoice(field.mode), tuple(tool for tool in tools if tool.name in names)


def _allowed_name(where: str, given: Mapping[str, Any]) -> str:
    named = given.get(str(given.get("type")))
    if given.get("type") not in ("function", "custom") or not isinstance(named, Mapping):
        accepted = f'must be {{"type": "function", "function": {{"name": "f"}}}} or {EXAMPLE}'
        raise RequestError(where, given, accepted)
    if not isinstance(named.get("name"), str):
        raise RequestError(f"{where}.{given['type']}.name", named.get("name"), "must be a string")
    return named["name"]


def _custom(where: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return a custom tool as a function, and the fields of StructuredOutputsParams for its input."""
    tool = given.get("custom")
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where}.custom", tool, f"must be an object: a tool is like {EXAMPLE}")
    for key in (given.keys() - {"type", "custom"}) | (tool.keys() - {"name", "description", "format"}):
        raise RequestError(f"{where}.{key}", given.get(key, tool.get(key)), "unknown field of a custom tool")
    text = {"type": "string", "description": "The input of the tool: any text."}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function = {"name": tool.get("name"), "parameters": parameters}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}, _format(f"{where}.custom.format", tool.get("format"))


def _format(where: str, given: Any) -> Mapping[str, Any]:
    if given is None or given == {"type": "text"}:
        return {}
    grammar = given.get("grammar") if isinstance(given, Mapping) and given.get("type") == "grammar" else None
    if not isinstance(grammar, Mapping):
        accepted = 'must be {"type": "text"} or {"type": "grammar", "grammar": {"syntax": ..., "definition": ...}}'
        raise RequestError(where, given, accepted)
    if grammar.get("syntax") not in ("lark", "regex"):
        raise RequestError(f"{where}.grammar.syntax", grammar.get("syntax"), "must be lark or regex")
    if not isinstance(grammar.get("definition"), str):
        raise RequestError(f"{where}.grammar.definition", grammar.get("definition"), "must be a string")
    return {"grammar" if grammar["syntax"] == "lark" else "regex": grammar["definition"]}


def _legacy(body: ChatRequest) -> ChatTools:
    """Return the tools of a request with `functions`, the format before `tools`. An answer has at most one call."""
    for new, old in (("tools", "functions"), ("tool_choice", "function_call")):
        if getattr(body, new) and getattr(body, new) != "none":
            raise RequestError(old, getattr(body, old), f"{new} replaces it: send one of them")
    try:
        tools = checked_tools([{"type": "function", "function": one} for one in body.functions or []])
    except RequestError as error:
        parameter = error.parameter.replace("tools", "functions", 1).replace(".function", "", 1)
        raise RequestError(parameter, error.value, error.accepted) from None
    call = body.function_call
    if isinstance(call, NamedFunction):
        if all(tool.name != call.name for tool in tools):
            names = ", ".join(tool.name for tool in tools) or "(there are none)"
            raise RequestError("function_call.name", call.name, f"must be one of the functions: {names}")
        return ChatTools(tools, ToolChoice("named", call.name), legacy=True, named=True)
    mode = "none" if call == "none" or not tools else "auto"
    return ChatTools(tools, ToolChoice(mode), legacy=True)
