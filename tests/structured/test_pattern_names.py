"""Patterns of property names: no name is written twice, and no answer fails because all names are written."""

import json
import re
from typing import Any

import pytest

from jpaged.engine.grammar.pattern_names import MAX_NAMES, expand_finite_patterns, finite_names
from jpaged.errors import RequestError
from tests.structured.grammar_model import Model

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^score$", ["score"]),
        ("^(x|y|z)$", ["x", "y", "z"]),
        ("^a$|^b$", ["a", "b"]),
        ("^(?:a|b?c)$", ["a", "c", "bc"]),
        ("^p[1-3x]$", ["p1", "p2", "p3", "px"]),
        ("^(ab){1,2}$", ["ab", "abab"]),
        (r"^a\.b$", ["a.b"]),
        ("^$", [""]),
        ("^[a-b]{2}$", ["aa", "ab", "ba", "bb"]),
        ("^x|y$", None),  # x and anything after it
        ("x", None),
        ("^x", None),
        ("x$", None),
        ("^x*$", None),
        ("^.$", None),
        ("^[^a]$", None),
        (r"^\d$", None),
        (r"^(?!a)b$", None),
        ("(?i)^a$", None),
        ("^a$b$", None),
        ("^[a-z]{2}$", None),  # 676 names
        ("^(", None),
        ("^(a{250}){300}$", None),
    ],
)
def test_the_names_of_a_pattern(pattern: str, names: list[str] | None):
    assert finite_names(pattern) == names
    if names is not None:
        assert all(re.search(pattern, name) for name in names)


def test_many_names_stay_a_pattern():
    assert len(finite_names(f"^({'|'.join(f'n{i}' for i in range(MAX_NAMES))})$") or ()) == MAX_NAMES
    assert finite_names(f"^({'|'.join(f'n{i}' for i in range(MAX_NAMES + 1))})$") is None


def test_a_property_follows_the_schemas_of_its_pattern_too():
    schema = {"properties": {"x": DIGIT}, "patternProperties": {"^(x|y)$": {"maximum": 3}, "^z": {}}}
    expand_finite_patterns(schema)
    assert schema == {
        "properties": {"x": {"allOf": [DIGIT, {"maximum": 3}]}, "y": {"maximum": 3}}, "patternProperties": {"^z": {}}
    }  # fmt: skip


ANSWERED: dict[str, dict[str, Any]] = {
    "covered by properties": {"properties": {"a": DIGIT}, "required": ["a"], "patternProperties": {"^a$": {}}},
    "covers a property": {"properties": {"a": DIGIT}, "patternProperties": {"^(a|b)$": {"minimum": 5}}},
    "all names": {"patternProperties": {"^(x|y|z)$": DIGIT}, "minProperties": 3},
    "all names, one of them a property": {
        "properties": {"x": {"const": 1}}, "required": ["x"], "patternProperties": {"^(x|y|z)$": DIGIT},
        "minProperties": 3,
    },
    "one name": {"patternProperties": {"^(x|y)$": DIGIT}, "minProperties": 1, "maxProperties": 1},
    "at most three of many": {"patternProperties": {"^n_[a-f]$": DIGIT}, "required": ["n_b"], "maxProperties": 3},
    "required name of a pattern": {"patternProperties": {"^(x|y)$": DIGIT}, "required": ["y"]},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "the only name, twice": {"patternProperties": {"^x$": DIGIT}, "minProperties": 2},
    "some of three names": {"patternProperties": {"^(x|y|z)$": DIGIT}, "minProperties": 2},
}


@pytest.mark.parametrize("name", ANSWERED)
def test_no_name_is_written_twice(demo: Model, name: str):
    schema = {"type": "object", "additionalProperties": False, **ANSWERED[name]}
    for seed in range(6):
        matcher = demo.matcher(json=schema, disable_any_whitespace=True)
        answer = demo.write(matcher, seed, strength=0.0, max_tokens=80)
        pairs = json.loads(demo.decode(answer.token_ids), object_pairs_hook=list)
        made = dict(pairs)
        assert len(made) == len(pairs) or "maxProperties" in ANSWERED[name]
        assert len(pairs) <= ANSWERED[name].get("maxProperties", 9)
        assert set(ANSWERED[name].get("required", ())) <= made.keys()
        assert len(made) >= ANSWERED[name].get("minProperties", 0)


@pytest.mark.parametrize("name", REFUSED)
def test_counts_that_cannot_be_enforced_raise(demo: Model, name: str):
    with pytest.raises(RequestError, match="cannot be compiled"):
        demo.matcher(json={"type": "object", "additionalProperties": False, **REFUSED[name]})
