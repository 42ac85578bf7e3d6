"""One turn of a chat: its prompt, and the reader of its answers. Shared by `LLM.chat` and the server."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jpaged.chat.prompt import RenderOptions, chat_prompt, continued_text, template_text
from jpaged.errors import RequestError, unknown_name
from jpaged.params.reasoning_tags import REASONING_PARSERS, ReasoningTags
from jpaged.params.sampling import SamplingParams
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.definitions import Tool, ToolChoice
from jpaged.parsers.grammar import enforced_format, tool_grammar
from jpaged.parsers.tool_formats import FORMATS, ToolCallFormat, detect_format, tool_call_format
from jpaged.text.encoder import TokenLimit

# Variables that templates of Qwen3, DeepSeek V3.1 and gpt-oss offer to callers. Other variables may set things that the
# operator must control: dates, built-in tools, whole system prompts.
DEFAULT_TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort")

_HARMONY = REASONING_PARSERS["openai_gptoss"]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatFormats:
    """The operator's settings for prompts and answers of a chat model.

    chat_template: Jinja, in place of the tokenizer's own.
    tool_calls:    format of calls; None detects it from the chat template.
    reasoning:     tags of reasoning; None does not separate reasoning from content.
    """

    chat_template: str | None = None
    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningTags | None = None

    @classmethod
    def named(
        cls,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        reasoning_tags: Sequence[str] | None = None,
    ) -> "ChatFormats":
        """Create from vLLM's names of parsers, or tags (start, end). Raises RequestError if one is not valid."""
        if reasoning_tags and reasoning_parser:
            accepted = "reasoning_parser sets the tags already: give one of the two"
            raise RequestError("reasoning_tags", tuple(reasoning_tags), accepted)
        if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
            raise unknown_name("reasoning_parser", reasoning_parser, REASONING_PARSERS, "; or set reasoning_tags")
        reasoning = REASONING_PARSERS[reasoning_parser] if reasoning_parser else None
        if reasoning_tags:
            if isinstance(reasoning_tags, str) or len(reasoning_tags) != 2:
                accepted = "must be two strings: the start tag and the end tag"
                raise RequestError("reasoning_tags", reasoning_tags, accepted)
            reasoning = ReasoningTags(reasoning_tags[0], reasoning_tags[1])
        return cls(chat_template, tool_call_format(tool_call_parser) if tool_call_parser else None, reasoning)


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTurn:
    """A turn, ready to run.

    prompt:  `{"prompt_token_ids": ...}`.
    reader:  reads the answers of this turn.
    grammar: fields of StructuredOutputsParams for a forced call; empty if no call is forced.
    shows_special_tokens: the answer's text must include special tokens, because some tags are special tokens.
    continued: text of the last message, if the answer continues it.
    """

    prompt: dict[str, list[int]]
    reader: AnswerReader
    grammar: dict[str, Any]
    shows_special_tokens: bool
    continued: str = ""

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the settings of this turn. Raises RequestError if they contradict a forced call."""
        if self.shows_special_tokens:
            params = dataclasses.replace(params, skip_special_tokens=False)
        given = cast(ReasoningTags | None, params.reasoning_tags)
        tags = self.reader.reasoning if given is None else given.continuing(self.continued)
        if tags is not None and self.reader.forced:  # the call's own header is part of the grammar
            tags = dataclasses.replace(tags, header="")
        if tags != given:
            params = dataclasses.replace(params, reasoning_tags=tags)
        if not self.grammar:
            return params
        if params.structured_outputs is not None:
            accepted = "the answer must be a tool call, so structured_outputs cannot set its format: leave one out"
            raise RequestError("tool_choice", "required or named", accepted)
        try:
            return dataclasses.replace(params, structured_outputs=self.grammar)
        except RequestError as error:
            raise RequestError("tool_choice", "required or named", error.accepted) from None


def chat_turn(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    formats: ChatFormats,
    *,
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool = True,
    options: RenderOptions | None = None,
    limit: TokenLimit | None = None,
) -> ChatTurn:
    """Render a conversation and prepare to read its answers. limit: as for `chat_prompt`. Raises RequestError.

    If `tool_choice` is none, the template does not receive the tools, so the model cannot call them.
    """
    choice = tool_choice or ToolChoice("auto" if tools else "none")
    if choice.mode == "named" and choice.name not in [tool.name for tool in tools]:
        names = ", ".join(tool.name for tool in tools) or "(there are none)"
        raise RequestError("tool_choice.function.name", choice.name, f"must be one of the tools: {names}")
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice", "required", "needs tools")
    offered = () if choice.mode == "none" else tools
    prompt = chat_prompt(tokenizer, messages, formats.chat_template, tools=offered, options=options, limit=limit)
    found = formats.tool_calls or detect_format(template_text(tokenizer, formats.chat_template, with_tools=True))
    if formats.reasoning is not None and formats.reasoning.start == _HARMONY.start:
        found = FORMATS["openai"]
    tool_format = _tool_format(found, choice, offered) if offered else None
    given = formats.reasoning
    if found is not None and found.reads_reasoning:  # answers have headers, which clients must never see
        tool_format, given = tool_format or found, given or _HARMONY
    continued = continued_text(messages, options)
    reasoning = given.continuing(continued) if given is not None else None
    if reasoning is not None and reasoning.opened_after(tokenizer, prompt["prompt_token_ids"]):
        reasoning = dataclasses.replace(reasoning, opened=True)
    reader = AnswerReader(
        tool_format=tool_format,
        tool_names=frozenset(tool.name for tool in offered),
        parallel=parallel_tool_calls,
        forced=choice.forced,
        schemas={tool.name: tool.parameters for tool in offered},
        reasoning=reasoning,
    )
    tags = tool_format.markers if tool_format else ()
    if given is not None:
        tags = (*tags, *given.starts, *given.ends, *given.stops)
    added = (getattr(tokenizer, "added_tokens_decoder", None) or {}) if tags else {}
    special = {str(token) for token in added.values() if getattr(token, "special", False)}
    names = frozenset(name for name in special if any(name in tag for tag in tags))
    grammar = {}
    if tool_format is not None and offered:
        grammar = tool_grammar(
            offered,
            choice,
            tool_format,
            parallel=parallel_tool_calls,
            added_tokens={str(token): token_id for token_id, token in added.items()},
            special_tokens=special,
        )
    reader = dataclasses.replace(reader, special=names)
    return ChatTurn(prompt, reader, grammar, bool(names), continued)


def _tool_format(found: ToolCallFormat | None, choice: ToolChoice, offered: Sequence[Tool]) -> ToolCallFormat:
    """Return the format of this turn's calls. found: the model's format, if it is known."""
    if choice.forced:
        return enforced_format(found, offered)
    if found is None:
        accepted = (
            "the format of this model's calls is unknown, because its chat template does not show it: set "
            "tool_call_parser (server: --tool-call-parser), or use tool_choice required"
        )
        raise RequestError("tools", f"{len(offered)} tools, tool_choice auto", accepted)
    return found
