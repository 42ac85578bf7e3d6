"""Translates a request's `StructuredOutputsParams` to the text of a grammar for llguidance."""

import json
from typing import Any

from llguidance import LLMatcher

from jpaged.engine.grammar import json_schema
from jpaged.engine.grammar.limits import GrammarLimits
from jpaged.engine.grammar.reasoning_prefix import ReasoningPrefix
from jpaged.engine.grammar.regex_dialect import literal, to_rust
from jpaged.engine.grammar.special_text import SpecialTokens
from jpaged.errors import RequestError
from jpaged.params.structured_outputs import StructuredOutputsParams

# White space between two tokens of JSON: none, one blank, or one line break with indentation. Without a bound, models
# write blanks until max_tokens: 6 of 10 prompts did in a bug report against another engine.
BOUNDED_WHITESPACE = r"(?: |\r?\n(?: {0,64}|\t{0,32}))?"

_BLANK_ESCAPE = {r"\s": r"[ \n\r\t]"}  # Rust's \s matches more than JSON's white space

_TAG_FORM = (
    '{"type": "structural_tag", "triggers": [text, ...], "structures": [{"begin": text, "schema": {}, "end": text}]}'
)


class Source:
    """The checked text of a grammar, for any tokenizer. Raises RequestError within milliseconds if it is not valid."""

    def __init__(
        self, params: StructuredOutputsParams, limits: GrammarLimits, reasoning: ReasoningPrefix | None = None
    ):
        self.reasoning = reasoning
        self.parameter = f"structured_outputs.{params.kind}"
        self.value = getattr(params, params.kind)
        self.is_context_free = params.kind == "grammar"  # Lark, or GBNF, which the probe converts to Lark
        self._tags: _StructuralTags | None = None
        self._text = ""
        match params.kind:
            case "json":
                schema = json_schema.prepare(
                    self.value, limits, self.parameter, close_objects=params.disable_additional_properties
                )
                self._text = _json_grammar(schema, params)
            case "json_object":
                self._text = _json_grammar({"type": "object"}, params)
            case "regex":
                json_schema.check_regex(self.value, limits, self.parameter)
                self._text = LLMatcher.grammar_from_regex(to_rust(self.value))
            case "choice":
                self._text = _choice_grammar(self.value, limits, self.parameter)
            case "grammar":
                json_schema.check_size(self.value, limits, self.parameter)
                self._text = self.value
            case "structural_tag":
                self._tags = _StructuralTags(params, limits, self.parameter)
        self._whitespace(params, limits)

    def text(self, special: SpecialTokens) -> str:
        """Return the grammar. The names of special tokens in structural tags are tokens, not text."""
        return self._text if self._tags is None else LLMatcher.grammar_from_lark(self._tags.lark(special))

    def _whitespace(self, params: StructuredOutputsParams, limits: GrammarLimits) -> None:
        if params.whitespace_pattern is not None:
            json_schema.check_regex(params.whitespace_pattern, limits, "structured_outputs.whitespace_pattern")


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {"item_separator": ",", "key_separator": ":", "coerce_one_of": False, "lenient": False}
    if params.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    pattern = params.whitespace_pattern
    if pattern is None:
        pattern = BOUNDED_WHITESPACE
    elif not pattern:
        return options | {"whitespace_flexible": False}
    return options | {"whitespace_pattern": _json_blanks(pattern)}


def _json_blanks(pattern: str) -> str:
    r"""Replace \s in a pattern by JSON's white space, as a nested class, which is valid inside a class too."""
    for escape, blanks in _BLANK_ESCAPE.items():
        pattern = pattern.replace(escape, blanks)
    return pattern


def _json_grammar(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    text = json.dumps({"x-guidance": _json_options(params)} | schema, ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text)


def _choice_grammar(choices: tuple[str, ...], limits: GrammarLimits, parameter: str) -> str:
    if len(choices) > limits.max_grammar_enum:
        accepted = f"must have at most {limits.max_grammar_enum:,} strings (max_grammar_enum)"
        raise RequestError(parameter, len(choices), accepted)
    size = sum(len(choice.encode()) for choice in choices)
    if size > limits.max_grammar_bytes:
        accepted = f"must have at most {limits.max_grammar_bytes:,} bytes (max_grammar_bytes)"
        raise RequestError(parameter, size, accepted)
    # One expression, because 10,000 alternatives of a rule exceed the row size of llguidance's parser.
    return LLMatcher.grammar_from_regex("|".join(f"(?:{literal(choice)})" for choice in dict.fromkeys(choices)))


class _StructuralTags:
    """Free text with tags. A trigger in the text starts one of the tags that begin with it."""

    def __init__(self, params: StructuredOutputsParams, limits: GrammarLimits, parameter: str):
        text = params.structural_tag
        assert isinstance(text, str)
        json_schema.check_size(text, limits, parameter)
        document = json_schema.parse(text, limits, parameter)
        if not isinstance(document, dict) or document.get("type") != "structural_tag":
            raise RequestError(parameter, document, f"must be {_TAG_FORM}")
        for key in document.keys() - {"type", "triggers", "structures"}:
            raise RequestError(f"{parameter}.{key}", document[key], f"unknown field; must be {_TAG_FORM}")
        self._triggers = document.get("triggers")
        structures = document.get("structures")
        if not _are_strings(self._triggers) or not all(self._triggers):
            raise RequestError(f"{parameter}.triggers", self._triggers, "must be a list of strings, none of them empty")
        if not isinstance(structures, list) or not structures:
            raise RequestError(f"{parameter}.structures", structures, "must be a list of tags")
        self._tags: dict[str, list[tuple[str, str, str]]] = {}  # trigger -> (rest of the begin, schema, end)
        for index, structure in enumerate(structures):
            self._add(structure, f"{parameter}.structures[{index}]", params, limits)

    def _add(
        self, structure: Any, parameter: str, params: StructuredOutputsParams, limits: GrammarLimits
    ) -> None:
        if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
            raise RequestError(parameter, structure, "must have begin, schema and end")
        begin, end = structure["begin"], structure["end"]
        if not _are_strings([begin, end]):
            raise RequestError(parameter, structure, "begin and end must be strings")
        trigger = next((trigger for trigger in self._triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise RequestError(f"{parameter}.begin", begin, f"must begin with one of the triggers {self._triggers}")
        schema = json_schema.prepare_document(
            structure["schema"], limits, f"{parameter}.schema", close_objects=params.disable_additional_properties
        )
        body = json.dumps({"x-guidance": _json_options(params)} | schema, ensure_ascii=False)
        self._tags.setdefault(trigger, []).append((begin[len(trigger) :], body, end))

    def lark(self, special: SpecialTokens) -> str:
        """Return the tags as a Lark grammar. Free text may have special tokens, as it does without a grammar."""
        triggers = [special.split(trigger) for trigger in self._tags]
        lines = [r"TEXT: /(.|\n)*/"]
        for i, tags in enumerate(self._tags.values()):
            lines.append(f"tag_{i}: head_{i} (" + " | ".join(f"body_{i}_{j}" for j in range(len(tags))) + ")")
            for j, (rest, schema, end) in enumerate(tags):
                lines.append(f"body_{i}_{j}: {special.lark(rest)} %json {schema} {special.lark(end)}")
        tags = [f"tag_{i}" for i in range(len(triggers))]
        free = special.free({part for parts in triggers for part in parts})
        if all(parts[0] in special.ids for parts in triggers):
            lines += [f"head_{i}: {special.lark(trigger)}" for i, trigger in enumerate(self._tags)]
            pieces = [f"{tag} TEXT" for tag in tags] + ([f"{free} TEXT"] if free else [])
            return _grammar(f"start: TEXT ({' | '.join([*pieces, *_other_uses(triggers, special, lines)])})*", lines)
        for i, (first, *after) in enumerate(triggers):
            if first in special.ids:
                lines.append(f"head_{i}: TEXT {special.lark(''.join([first, *after]))}")
            elif after:
                lines.append(f"BEFORE_{i}: TEXT {special.lark(first)}")
                lines.append(f"head_{i}: BEFORE_{i} {special.lark(''.join(after))}")
            else:
                lines.append(f"head_{i}[lazy]: TEXT {special.lark(first)}")
        pieces = tags + ([f"TEXT {free}"] if free else [])
        return _grammar(f"start: ({' | '.join(pieces)})* rest", ["rest: TEXT", *lines])


def _other_uses(triggers: list[list[str]], special: SpecialTokens, lines: list[str]) -> list[str]:
    """Return Lark for the special tokens that begin triggers, followed by text that completes no trigger.

    So gpt-oss may write `<|channel|>analysis`, although `<|channel|>commentary to=` is a trigger. Appends to `lines`.
    """
    pieces = []
    for i, begin in enumerate(sorted({parts[0] for parts in triggers})):
        after = [parts[1] if len(parts) > 1 else "" for parts in triggers if parts[0] == begin]
        if all(text and text not in special.ids for text in after):
            lines.append(rf"OTHER_{i}: TEXT & ~/({'|'.join(map(literal, after))})(.|\n)*/")
            pieces.append(f"{special.lark(begin)} OTHER_{i}")
    return pieces


def _grammar(start: str, lines: list[str]) -> str:
    return "%llguidance {}\n" + "\n".join([start, *lines])


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
