"""Patterns of property names: no name is written twice, and no answer fails because all names are written."""

import json
import re
from typing import Any

import pytest

from jpaged.engine.grammar.json_schema import prepare
from jpaged.engine.grammar.limits import GrammarLimits
from jpaged.engine.grammar.pattern_names import MAX_NAMES, WORK, Budget, expand_finite_patterns, finite_names
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
        ("^(a{200}){2}$", None),  # a name of 400 characters
        ("^(a|(b|(c)){2})$", ["a", "bb", "bc", "cb", "cc"]),
        ("^" + "(?:a|" * 100 + "b" + ")" * 100 + "$", ["a", "b"]),
        ("^\ufdd0$", None),
        ("^[\ufdcf-\ufdd2]$", None),
    ],
)
def test_the_names_of_a_pattern(pattern: str, names: list[str] | None):
    assert finite_names(pattern, Budget()) == names
    if names is not None:
        assert all(re.search(pattern, name) for name in names)


def test_many_names_stay_a_pattern():
    assert len(finite_names(f"^({'|'.join(f'n{i}' for i in range(MAX_NAMES))})$", Budget()) or ()) == MAX_NAMES
    assert finite_names(f"^({'|'.join(f'n{i}' for i in range(MAX_NAMES + 1))})$", Budget()) is None


@pytest.mark.parametrize("pattern", [
    "^" + "(?:" * 20 + "a" + "{255}){255}" * 20 + "$", "^" + "(?:" * 20 + "){255}" * 20 + "$", "^(?:[ab]{7}){1}a{240}$",
])  # fmt: skip
def test_patterns_of_a_document_take_bounded_work(pattern: str):
    budget = Budget()
    for _ in range(200):
        finite_names(pattern, budget)
    assert 0 <= budget.left < WORK // 10
    assert finite_names("^" + "a?" * 50 + "$", budget) is None  # it stays a pattern


def test_schemas_of_patterns_are_copied_within_bounds():
    """32 patterns of 256 names, each inside the other, would make 256 ** 32 schemas."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(31):
        schema = {"patternProperties": {"^[0-9a-f]{2}$": schema}}
    assert len(json.dumps(prepare(json.dumps(schema), GrammarLimits(), "json"))) < 100_000
    large = {"patternProperties": {"^[0-9a-f]{2}$": {"enum": ["a" * 1_000]}, "^x$": {"enum": ["b" * 40_000]}}}
    expand_finite_patterns(large, Budget())
    assert (list(large["patternProperties"]), list(large["properties"])) == (["^[0-9a-f]{2}$"], ["x"])


def test_an_object_has_as_many_names_as_can_be_compiled(demo: Model):
    patterns = {f"^{letter}[0-9a-f]{{2}}$": DIGIT for letter in "ab"}
    schema = {"patternProperties": dict(patterns)}
    expand_finite_patterns(schema, Budget())
    assert (len(schema["properties"]), len(schema["patternProperties"])) == (256, 1)
    demo.matcher(json={"type": "object", "additionalProperties": False, "patternProperties": patterns})


def test_a_property_follows_the_schemas_of_its_pattern_too():
    schema = {"properties": {"x": DIGIT}, "patternProperties": {"^(x|y)$": {"maximum": 3}, "^z": {}}}
    expand_finite_patterns(schema, Budget())
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
