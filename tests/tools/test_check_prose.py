"""tools/check_prose.py: the texts that it reads from a file, its rules, and sentences."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import check_prose

pytestmark = pytest.mark.slow  # no default test: the engine does not depend on it
LONG = "one two three four five six seven eight nine ten " * 3


def found(source: str, path: str = "jpaged/example.py") -> list[str]:
    """Line and phrase of each finding."""
    return sorted(line.split(":")[1] + line.split(":")[2] for line in check_prose.check(path, source))


def test_docstrings_of_modules_and_fields_and_comments():
    field = 'class A:\n    x: int\n    """\n    Computed\n    anew.\n    """\n'
    source = f'"""Keeps so many."""\n\n{field}# The rows of\n# which two\n'
    assert found(source) == ['1 "so many"', '7 "anew"', '9 "of which"']
    assert not found("a = 1  # int32, of\nb = 2  # which row\n")
    assert not found("# noqa: anew\n#!/usr/bin/anew\nx = '# anew'\n")


@pytest.mark.parametrize("message", ["'the pool has so many'", 'f"the pool {n} has so many blocks"'])
def test_messages_of_the_product_have_four_words(message: str):
    assert found(f"raise ValueError({message})\n") == ['1 "so many"']
    assert not found(f"raise ValueError({message})\n", "tests/example.py")
    assert not found("x = 'has so many'\n")


def test_markdown_without_code_and_links():
    source = "It is anew.\n\n```\nanew\n```\n[words](anew.md) and `anew`, so\nmany.\n"
    assert found(source, "docs/page.md") == ['1 "anew"', '6 "so many"']


@pytest.mark.parametrize("text", [
    "What it holds", "Of all rows", "Most tokens that fit", "nobody waits", "the request who waits", "what it gives.",
    "whatever it is", "that one.", "other than others: other ones", "is not there.", "up to and with", "makes of",
    "thereby", "whilst", "but for", "is had", "seen to: is seen to", "as vLLM has it.", "beside", "behind it",
    "stands in", "lies in", "told", "gives back", "let go", "goes by", "passed over: is passed over", "as far as it",
])  # fmt: skip
def test_a_rule_rejects(text: str):
    assert found(f'"""{text}"""\n')


@pytest.mark.parametrize("text", [
    "so many that it fails", "as far as possible", "far behind", "behind a reverse proxy", "stands for", "told apart",
    "once upon a time", "time goes by", "what it has to do", "lags behind by two", "Use what is next.",
])  # fmt: skip
def test_plain_english_passes(text: str):
    assert not found(f'"""{text}"""\n')


def test_a_sentence_has_at_most_30_words():
    assert not found(f'"""{LONG.strip()}."""\n')
    assert found(f'"""{LONG} more."""\n') == ["1 31 words, at most 30"]
    assert not found(f'"""{LONG}. And `one two three` more."""\n')
    assert not found(f'"""Title.\n\n{LONG}\n- {LONG}\nname: {LONG[4:]}\n| {LONG} |\n\n    code {LONG} {LONG}\n"""\n')
    assert found(f'"""Title.\n\n- {LONG}\n  one {LONG}\n"""\n') == ["3 61 words, at most 30"]
