"""The formats of tool calls: their names, and how to detect the format of a chat template."""

import dataclasses
import secrets
import string
import uuid
from collections.abc import Callable

from jpaged.errors import unknown_name
from jpaged.parsers import gemma4, harmony, mistral, pythonic, tagged_json, xml_dialects
from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.call_frame import CallFrame
from jpaged.parsers.frames import FRAMES
from jpaged.parsers.json_calls import JsonTags
from jpaged.parsers.known_tools import KnownTools
from jpaged.parsers.scanner import Scanner, Steps

Read = Callable[[Scanner, AnswerSink, KnownTools], Steps[None]]


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
    new_id:  returns a new id for a call.
    reads_reasoning: `read` parses the reasoning as well, and is needed for answers without calls too.
    """

    name: str
    read: Read
    markers: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id
    reads_reasoning: bool = False

    @property
    def frames(self) -> tuple[CallFrame, ...]:
        """Texts of forced calls: the first frame whose token the tokenizer has is used. None: JSON is used."""
        return FRAMES.get(self.name, ())


def _tagged_json(name: str) -> ToolCallFormat:
    made = tagged_json.DIALECTS[name]
    tags = (made.section.begin, made.section.end, made.section.call, made.separator, made.call_end)
    return ToolCallFormat(name, made.read, tags)


def _xml(name: str) -> ToolCallFormat:
    made = xml_dialects.DIALECTS[name]
    tags = (made.section.begin, made.section.end, made.call_end, made.key, made.value, made.value_end)
    return ToolCallFormat(name, made.read, (*tags, *xml_dialects.TOKENS.get(name, ())))


_PYTHON_TAGS = (*pythonic.TAGS, pythonic.END_TAG)
_GRANITE = JsonTags("<|tool_call|>", "</tool_call>", bare=True, others=("<tool_call>",))
_FORMATS = (
    ToolCallFormat("hermes", JsonTags("<tool_call>", "</tool_call>").read, ("<tool_call>", "</tool_call>")),
    ToolCallFormat("llama3_json", JsonTags("<|python_tag|>", bare=True).read, ("<|python_tag|>",)),
    ToolCallFormat(
        "mistral", mistral.read, (mistral.BEGIN, mistral.CALL_ID, mistral.ARGUMENTS), new_id=short_call_id
    ),
    ToolCallFormat("pythonic", pythonic.read, _PYTHON_TAGS),
    ToolCallFormat("llama4_pythonic", pythonic.read, _PYTHON_TAGS),
    ToolCallFormat("granite", _GRANITE.read, ("<|tool_call|>", "<tool_call>", "</tool_call>")),
    *map(_xml, xml_dialects.DIALECTS),
    *map(_tagged_json, tagged_json.DIALECTS),
    ToolCallFormat("gemma4", gemma4.read, (gemma4.BEGIN, gemma4.END, gemma4.QUOTE)),
    ToolCallFormat("openai", harmony.read, harmony.MARKERS, reads_reasoning=True),
    ToolCallFormat("json", JsonTags("```json", "```", bare=True).read),
)
FORMATS = {one.name: one for one in _FORMATS}
# Other names of vLLM for the same formats.
ALIASES = {"qwen3_xml": "qwen3_coder", "mimo": "qwen3_coder", "granite4": "hermes", "llama4_json": "llama3_json"}

# Texts of chat templates that only one format has, in the order in which they are searched for. None: a format that no
# parser here reads, although a later text is in it.
_DETECTED: tuple[tuple[str, str | None], ...] = (
    ("<|channel|>", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call|>", "granite"),
    ("]<]minimax[>[", None),
    ("<parameter=", "qwen3_coder"),
    ("</arg_key>\n", "glm45"),
    ("</arg_key>\\n", "glm45"),
    ("<arg_key>", "glm47"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4_pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)


def tool_call_format(name: str) -> ToolCallFormat:
    """Return the format with this name. Raises RequestError for an unknown name."""
    known = ALIASES.get(name, name)
    if known not in FORMATS:
        raise unknown_name("tool_call_parser", name, (*FORMATS, *ALIASES))
    return FORMATS[known]


def detect_format(chat_template: str) -> ToolCallFormat | None:
    """Return the format in which a chat template writes calls, or None if it is not recognised."""
    if "｜DSML｜" in chat_template:
        return FORMATS["deepseek_v32" if "function_calls>" in chat_template else "deepseek_v4"]
    if "<｜tool▁calls▁begin｜>" in chat_template:
        return FORMATS["deepseek_v3" if "```json" in chat_template else "deepseek_v31"]
    name = next((name for text, name in _DETECTED if text in chat_template), None)
    return None if name is None else FORMATS[name]
