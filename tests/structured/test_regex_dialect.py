"""A translated expression matches only text that Python's `re` matches, and all text that the dialects agree on."""

import re
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.grammar import GrammarCompiler
from jpaged.engine.grammar.regex_dialect import literal, to_rust
from jpaged.engine.output.detokenizer import ByteLevelDecoder
from tests.structured.grammar_model import Model
from tests.structured.sampling import Wrapped, byte_level

# Pieces that dialects read differently, and plain pieces.
PIECES = (
    "a", "b", "-", "~", "&&", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\-", r"\]", r"\[", ".", "é", "½", r"\.",
    r"[\d]", r"[^\d]", r"[\w-]", r"[^\w]", "[a-f&&b]", "[[a]", "[^[a]", "[]a]", "[^]a]", "[~~a]", r"[\s\S]", r"[^\W]",
    "[&]", r"[^\S]", r"[^\D]", r"[^\s-]",
)  # fmt: skip
TEXTS = "ab-~&[]^. \t\n5٣½éZ_\x0b\x1c\u00a0\ufeff‿\u0301"


def accepted(model: Model, regex: str, text: str) -> bool:
    """True if the compiled expression matches a text, byte by byte."""
    matcher = model.matcher(regex=regex)
    for byte in text.encode():
        token_id = BYTES[byte]
        if not matcher.accept(token_id):
            return False
    return matcher.is_accepting


BYTES: dict[int, int] = {}


@pytest.fixture(scope="module")
def byte_model() -> Iterator[Model]:
    """A model with a token for every byte."""
    backend = byte_level()
    decoder = ByteLevelDecoder(backend)
    table = [decoder.token_bytes(token_id) for token_id in range(backend.get_vocab_size())]
    BYTES.update({text[0]: token_id for token_id, text in enumerate(table) if len(text) == 1})
    assert len(BYTES) == 256
    made = Model(GrammarCompiler(Wrapped(backend), len(table), (0,)), len(table), (0,), backend.decode, table)
    yield made
    made.compiler.close()


@settings(max_examples=150)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=3), text=st.text(TEXTS, max_size=4))
def test_python_matches_all_text_that_a_translation_matches(byte_model: Model, pieces: list[str], text: str):
    regex = "".join(pieces)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            expected = re.fullmatch(regex, text) is not None
        except re.error:
            return
    if accepted(byte_model, regex, text):
        assert expected, (regex, text)
    elif expected and text.isascii():  # the dialects disagree about these two ASCII characters only
        assert re.search(r"[\x0b\x1c]", text), (regex, text)


@pytest.mark.parametrize("text", ["", "a", ".*", "a\\b[c]{2}\n\t\"'", "é漢👍", "\x00\x7f", "^$|()"])
def test_a_literal_matches_only_its_text(byte_model: Model, text: str):
    assert accepted(byte_model, literal(text), text)
    assert not accepted(byte_model, literal(text), text + "x")
    matcher = byte_model.matcher(choice=[text, "other"])
    assert all(matcher.accept(BYTES[byte]) for byte in text.encode())
    assert matcher.is_accepting


def test_common_syntax_is_not_changed():
    for regex in (r"a[b-d]{2}(?:e|f)*", r"\p{L}+", r"\x41\u0042", r"\n\t\.", "(?i)a"):
        assert to_rust(regex) == regex
