"""StructuredOutputsParams: a format that the text of an answer must match. Checked when created, then immutable.

These checks need no engine. `jpaged.engine.grammar` checks a grammar's content, and its limits of size and depth.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Self

from jpaged.errors import RequestError, unknown_field

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_WITH_JSON = ("json", "json_object", "structural_tag")  # kinds with white space between tokens of JSON

# White space of JSON, as characters, escapes or classes, with groups, alternatives and repetitions. JSON allows all
# text that such a pattern matches between any two tokens.
_BLANK = r"(?:[ \n\r\t]|\\[nrts]|\\x(?:20|0[9aAdD]))"
_WHITESPACE = re.compile(rf"(?:{_BLANK}|\[{_BLANK}+\]|\(\?:|[()|?*+]|\{{\d{{0,4}},?\d{{0,4}}\}})*")
MAX_WHITESPACE_PATTERN = 256  # characters; compiling 60,000 digits takes 33 s

# Keywords of JSON Schema, draft 4 to 2020-12, that restrict the answer and cannot be enforced.
REFUSED_KEYWORDS = frozenset(
    {
        "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies",
        "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames",
        "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "x-guidance",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The format of one answer: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`.

    Names are vLLM's. Raises RequestError that names the field as `structured_outputs.FIELD`.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema that the answer follows, as a mapping or as text. Stored as text."""

    regex: str | None = None
    """A regular expression that the whole answer matches."""

    choice: tuple[str, ...] | list[str] | None = None
    """The answer is one of these strings, at least one. Stored as a tuple."""

    grammar: str | None = None
    """A context-free grammar: Lark (with a rule `start:`) or GBNF (with a rule `root ::=`)."""

    json_object: bool | None = None
    """True: the answer is any JSON object."""

    disable_any_whitespace: bool = False
    """Allow no white space between tokens of JSON. The default allows a blank, or a line break with indentation."""

    disable_additional_properties: bool = False
    """Treat `additionalProperties` as false in every object of the schema that does not set it."""

    whitespace_pattern: str | None = None
    """White space allowed between the tokens of JSON: a regular expression of white space, in place of the default."""

    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with tags: each trigger starts a tag, and the content of the tag follows a JSON schema.
    {"type": "structural_tag", "triggers": [text, ...], "structures": [{"begin": text, "schema": {...}, "end": text}]},
    as a mapping or as text. Stored as text."""

    @classmethod
    def from_fields(cls, fields: object) -> Self:
        """Create from a mapping of fields; return an instance unchanged. Raises RequestError for an unknown field."""
        if isinstance(fields, cls):
            return fields
        if not isinstance(fields, Mapping):
            raise RequestError("structured_outputs", fields, "must be StructuredOutputsParams, or its fields as a dict")
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise unknown_field("structured_outputs", name, fields[name], cls.__dataclass_fields__)
        return cls(**fields)

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "must be True or False")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _error("json_object", self.json_object, "must be True, or None")
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        for name in ("json", "structural_tag"):
            self._document(name)
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _text(name, value))
        self._choices()
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = ", ".join(KINDS)
            raise RequestError("structured_outputs", given, f"set exactly one of {kinds}")
        self._check_options()

    @property
    def kind(self) -> str:
        """Name of the field that is set, one of KINDS."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _document(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, Mapping):
            try:
                value = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            except (TypeError, ValueError) as error:
                raise _error(name, type(value).__name__, f"cannot be written as JSON: {error}") from None
            except RecursionError:
                raise _error(name, type(value).__name__, "is nested too deep") from None
        kind = "a JSON schema" if name == "json" else "a structural tag"
        object.__setattr__(self, name, _text(name, value, f"{kind}, as a mapping or as a string"))

    def _choices(self) -> None:
        if self.choice is None:
            return
        if not isinstance(self.choice, (list, tuple)) or not self.choice:
            raise _error("choice", self.choice, "must be a list of at least one string")
        object.__setattr__(self, "choice", tuple(_text("choice", text) for text in self.choice))

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and self.kind not in _WITH_JSON:
                raise _error(name, getattr(self, name), f"works only with {', '.join(_WITH_JSON)}: leave it out")
        if self.disable_additional_properties and self.kind not in ("json", "structural_tag"):
            raise _error("disable_additional_properties", True, "works only with json, structural_tag: leave it out")
        if self.whitespace_pattern is None:
            return
        if self.disable_any_whitespace:
            raise _error("whitespace_pattern", self.whitespace_pattern, "contradicts disable_any_whitespace")
        if len(self.whitespace_pattern) > MAX_WHITESPACE_PATTERN:
            accepted = f"must have at most {MAX_WHITESPACE_PATTERN} characters"
            raise _error("whitespace_pattern", self.whitespace_pattern, accepted)
        try:
            re.compile(self.whitespace_pattern)
            blank = _WHITESPACE.fullmatch(self.whitespace_pattern) is not None
        except (re.error, RecursionError, OverflowError, ValueError):
            blank = False
        if not blank:
            accepted = r"must be a regular expression of blanks, \n, \r, \t and \s, in classes, groups and repetitions"
            raise _error("whitespace_pattern", self.whitespace_pattern, accepted)


def _text(name: str, value: object, expected: str = "a string") -> str:
    if not isinstance(value, str):
        raise _error(name, value, f"must be {expected}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _error(name, value, "has half of a surrogate pair, which is not valid in UTF-8") from None
    return value


def _error(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(f"structured_outputs.{name}", value, accepted)
