"""Hostile grammars: refused ones, ones that do not compile, and ones that are slow to compile or to match."""

from tests.structured import corpus


def nested(depth: int) -> corpus.Schema:
    """Return `depth` schemas, one inside the other."""
    schema: corpus.Schema = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def unreadable(depth: int) -> str:
    """Return lists nested in a `const`, where they are not schemas."""
    return '{"const":' + "[" * depth + "]" * depth + "}"


# `submit` raises for these, before a worker runs.
REFUSED = {
    "60 levels": ({"json": nested(60)}, "max_grammar_depth"),
    "33 levels": ({"json": nested(33)}, "max_grammar_depth"),
    "lists in lists": ({"json": unreadable(200)}, "max_grammar_depth"),
    "more lists than the JSON parser takes": ({"json": "[" * 60_000}, "max_grammar_depth"),
    "50,000 words": ({"json": {"enum": [f"w{i:05d}" for i in range(50_000)]}}, "max_grammar_bytes"),
    "10,001 words": ({"json": {"enum": list(range(10_001))}}, "max_grammar_enum"),
    "10,001 words inside": ({"json": corpus.obj({"a": {"enum": list(range(10_001))}})}, "max_grammar_enum"),
    "10,001 choices": ({"choice": [str(i) for i in range(10_001)]}, "max_grammar_enum"),
    "long choices": ({"choice": ["a" * 40_000, "b" * 40_000]}, "max_grammar_bytes"),
    "large schema": ({"json": {"description": "a" * 65_536}}, "max_grammar_bytes"),
    "large grammar": ({"grammar": "start: /a/\n" + "// a\n" * 20_000}, "max_grammar_bytes"),
    "long regex": ({"regex": "a" * 4097}, "max_regex_bytes"),
    "long regex of many bytes": ({"regex": "漢" * 1366}, "max_regex_bytes"),
    "long pattern": ({"json": {"type": "string", "pattern": "a" * 4097}}, "max_regex_bytes"),
    "long name pattern": ({"json": {"type": "object", "patternProperties": {"a" * 4097: {}}}}, "max_regex_bytes"),
    "remote": ({"json": {"$ref": "https://example.com/a.json"}}, "other documents are not read"),
    "remote inside": ({"json": corpus.obj({"a": {"$ref": "file:///etc/passwd"}})}, "other documents are not read"),
    "remote under long names": (
        {"json": {"properties": {"a" * 30_000: corpus.obj({"b" * 15_000: {"$ref": "https://example.com"}})}}},
        "other documents are not read",
    ),
    "no JSON": ({"json": "{"}, "must be JSON"),
    "NaN": ({"json": '{"minimum": NaN}'}, "must be JSON"),
    "no schema": ({"json": "3"}, "must be a JSON schema"),
}
# The worker raises for these, with llguidance's message.
NOT_COMPILED = {
    "a reference to itself": ({"json": {"$ref": "#"}}, "nothing matches it"),
    "references in a circle": (
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        "nothing matches it",
    ),
    "an object that holds itself": ({"json": corpus.obj({"a": {"$ref": "#"}})}, None),
    "a reference to nothing": ({"json": {"$ref": "#/$defs/x"}}, "does not exist"),
    "no such type": ({"json": {"type": "strin"}}, "strin"),
    "contradiction": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    "enum of 3,000 objects": ({"json": {"enum": [{"a": i} for i in range(3000)]}}, "too many alternatives"),
    "3,000 branches": ({"json": {"anyOf": [{"const": [i]} for i in range(3000)]}}, "too many alternatives"),
    "oneOf that overlaps": ({"json": {"oneOf": [{"minimum": 1}, {"maximum": 9}]}}, "oneOf"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences"),
    "word boundary": ({"regex": r"\bab"}, "lookarounds"),
    "unclosed": ({"regex": "(" * 3000}, "unclosed group"),
    "no grammar": ({"grammar": "hello"}, "::="),
    "no such rule": ({"grammar": "start: foo"}, "foo"),
    "endless rule": ({"grammar": "start: start"}, "nothing matches it"),
    "parentheses": ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
    "parentheses of GBNF": ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000 + "\n"}, "recursion"),
}
# Within every limit, but compiling takes minutes unless it is stopped.
ENDLESS = {
    "patterns": {"allOf": [{"type": "string", "pattern": "[a-z]{%d}[0-9].*%d" % (i, i)} for i in range(200)]},  # noqa: UP031
    "multiples": {"type": "integer", "multipleOf": 1_000_003},
    "names": {"type": "object", "patternProperties": {"^[a-z]{%d}[0-9]+$" % i: {} for i in range(300)}},  # noqa: UP031
}
# Cheap to compile. Matching them is expensive, or seems to be.
HEAVY = {
    "repeated repetition": {"regex": "a{1,1000}{1,1000}"},
    "repeated group": {"regex": "(b{1,1000}a){1,1000}"},
    "ambiguous": {"grammar": 'start: s\ns: "a" | s s | s s s'},
    "ambiguous and empty": {"grammar": 'start: s\ns: "a" | "b" | "" | s s | s s s | s s s s'},
    "far back": {"regex": ".*a.{300}b|.*b.{300}a"},
    "many far back": {"regex": "|".join(f".*{chr(97 + i)}.{{{50 + i}}}x" for i in range(26))},
    "all of 10,000": {"json": {"enum": list(range(10_000))}},
    "choice of 10,000": {"choice": [str(i) for i in range(10_000)]},
    "500 optional properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(500)}}},
    "1,200 optional properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1200)}}},
    "many items": {"json": corpus.arr(corpus.arr(corpus.N, 0, 100_000), 1000, 1_000_000)},
    "long texts": {"json": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}},
    "an object that holds itself": {"json": corpus.obj({"a": {"$ref": "#"}})},
}
