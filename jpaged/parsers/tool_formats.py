"""The formats of tool calls: their names, and how to detect the format of a chat template."""

import dataclasses
import secrets
import string
import uuid
from collections.abc import Callable

from jpaged.errors import RequestError
from jpaged.parsers import mistral, pythonic
from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import JsonTags, Known
from jpaged.parsers.scanner import Scanner, Steps

Read = Callable[[Scanner, AnswerSink, Known], Steps[None]]


def call_id() -> str:
    """Return a new id in OpenAI's format."""
    return f"call_{uuid.uuid4().hex}"


def short_call_id() -> str:
    """Return a new id of nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A format of tool calls.

    read:    parses an answer into a sink, until the answer ends or no more calls can follow.
    markers: texts around calls. If they are special tokens of the tokenizer, the answer's text must include them.
    """

    name: str
    read: Read
    markers: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id


_FORMATS = (
    ToolCallFormat("hermes", JsonTags("<tool_call>", "</tool_call>").read, ("<tool_call>", "</tool_call>")),
    ToolCallFormat("llama3_json", JsonTags("<|python_tag|>", bare=True).read, ("<|python_tag|>",)),
    ToolCallFormat(
        "mistral", mistral.read, (mistral.BEGIN, mistral.CALL_ID, mistral.ARGUMENTS), new_id=short_call_id
    ),
    ToolCallFormat("pythonic", pythonic.read, (*pythonic.TAGS, pythonic.END_TAG)),
    ToolCallFormat("json", JsonTags("```json", "```", bare=True).read),
)
FORMATS = {one.name: one for one in _FORMATS}


def tool_call_format(name: str) -> ToolCallFormat:
    """Return the format with this name. Raises RequestError for an unknown name."""
    if name not in FORMATS:
        raise RequestError("tool_call_parser", name, f"must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def detect_format(chat_template: str) -> ToolCallFormat | None:
    """Return the format in which a chat template writes calls, or None if it is not recognised."""
    if "[TOOL_CALLS]" in chat_template:
        return FORMATS["mistral"]
    if "<tool_call>" in chat_template:
        # Qwen3-Coder and GLM write XML between these tags instead of JSON.
        others = ("<function=", "<arg_key>", "<parameter=")
        return None if any(other in chat_template for other in others) else FORMATS["hermes"]
    if "<|python_start|>" in chat_template or "[func_name1(" in chat_template:
        return FORMATS["pythonic"]
    if "<|python_tag|>" in chat_template or '{"name": function name, "parameters":' in chat_template:
        return FORMATS["llama3_json"]
    return None
