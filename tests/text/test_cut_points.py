"""The pieces of a text have the token ids of the whole text, for tokenizers of every kind that has cut points."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jpaged.loading import gguf_tokenizer, load_tokenizer
from jpaged.text.cut_points import SPACE, alternatives, describe
from tests.text.corpus import CORPUS, DEMO

DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def trained(normalizer: Any, pre_tokenizer: Any, **options: Any) -> Tokenizer:
    """A BPE tokenizer of 700 tokens."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), SPACE]
    first = [f"<0x{byte:02X}>" for byte in range(256)] if options.get("byte_fallback") else []
    trainer = trainers.BpeTrainer(
        vocab_size=700 + len(first), special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(*steps: Any, normalizer: Any = None, use_regex: bool = False, **options: Any) -> Tokenizer:
    steps = [step if not isinstance(step, str) else pre_tokenizers.Split(Regex(step), "isolated") for step in steps]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=use_regex, use_regex=use_regex)
    made = trained(normalizer, pre_tokenizers.Sequence([*steps, to_bytes]), **options)
    made.decoder = decoders.ByteLevel()
    return made


def sentencepiece(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """SentencePiece's BPE: trained on words, used on whole texts."""
    made = trained(normalizers.Replace(" ", SPACE), pre_tokenizers.Metaspace(), byte_fallback=True, fuse_unk=True)
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    return made


def with_added(tokenizer: Tokenizer, *added: AddedToken | str) -> Tokenizer:
    tokenizer.add_tokens(list(added))
    return tokenizer


LLAMA2 = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: load_tokenizer(DEMO).backend_tokenizer,
    "gpt-2": lambda: byte_level(use_regex=True),
    "starcoder": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-3": lambda: byte_level(gguf_tokenizer.LLAMA3, ignore_merges=True),
    "qwen": lambda: byte_level(gguf_tokenizer.QWEN2, normalizer=normalizers.NFC()),
    "tekken": lambda: byte_level(gguf_tokenizer.TEKKEN),
    "gpt-4o": lambda: byte_level(gguf_tokenizer.GPT4O),
    "deepseek": lambda: byte_level(*DEEPSEEK),
    "llama-2": lambda: sentencepiece(LLAMA2, None),
    "metaspace": lambda: sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "mistral": lambda: sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "gemma": lambda: sentencepiece(
        normalizers.Replace(" ", SPACE), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "qwen with added tokens": lambda: with_added(
        byte_level(gguf_tokenizer.QWEN2, normalizer=normalizers.NFC()),
        AddedToken("<|im_start|>", special=True),
        AddedToken("<tool>", normalized=False),
        AddedToken("user, now", normalized=True),  # a comma after a letter: texts are not cut before commas
        AddedToken("  ", normalized=False),
        AddedToken("of", single_word=True),
        AddedToken("<mask>", lstrip=True, rstrip=True),
    ),
    "llama-2 with added tokens": lambda: with_added(
        sentencepiece(LLAMA2, None), AddedToken("<s>", special=True), AddedToken("<|user|>", rstrip=True), "  ", "\n\n"
    ),
}
FRAGMENTS = [
    *"aZé9ß你のカ한я \n\t\r,.!'/_-ǅ\u0301\u200d\u00a0\u3000，。、🙂", "the", " of", "don't", "'s", "'LL", "  ", "\r\n",
    "\n\n", "3.14", "1,000", "user, now", "<|im_start|>", "<tool>", "<mask>", "<s>", "<|user|>", "▁", "中文", "，中",
    "e\u0301", "/etc", "hello world", "x y", ", a", "I'm ", "\u1112\u1161\u11ab",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.characters(codec="utf-8"), max_size=30).map("".join)


@functools.cache
def made(name: str) -> tuple[Tokenizer, Any]:
    tokenizer = TOKENIZERS[name]()
    return tokenizer, describe(tokenizer)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_have_the_ids_of_the_whole_text(name: str):
    tokenizer, description = made(name)
    cut_points = description.cut_points
    assert cut_points is not None
    assert " " in cut_points.separators
    assert len(list(cut_points.pieces("one two three", 1, 100))) == 3

    @settings(max_examples=60)
    @given(texts, st.integers(1, 8), st.booleans())
    def check(text: str, size: int, from_end: bool):
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = list(cut_points.pieces(text, size, len(text) + 1, from_end=from_end))
        ids = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
        assert [one for part in (reversed(ids) if from_end else ids) for one in part] == whole
        if description.characters_per_token is not None:
            assert len(text) <= len(whole) * description.characters_per_token

    check()


def test_most_texts_are_cut_often():
    for name in TOKENIZERS:
        pieces = list(made(name)[1].cut_points.pieces("A sentence of some words, and one more. " * 50, 100, 200))
        assert 15 <= len(pieces) <= 25, name


def unknown_words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize(
    "tokenizer",
    [
        unknown_words,
        lambda: Tokenizer(models.Unigram([("a", -1.0), ("b", -1.0)], unk_id=0, byte_fallback=False)),
        lambda: byte_level(r"\w+ \w+|\s+|."),  # words in pairs: a cut would change the pairs after it
        lambda: byte_level(gguf_tokenizer.QWEN2, normalizer=normalizers.Lowercase()),
        lambda: trained(normalizers.Replace(" ", SPACE), None, byte_fallback=True),  # has tokens of several words
        lambda: with_added(byte_level(gguf_tokenizer.QWEN2), *(f"a{mark}" for mark in " \n,.，。、")),
    ],
)
def test_tokenizers_without_cut_points(tokenizer: Callable[[], Tokenizer]):
    assert describe(tokenizer()).cut_points is None


@pytest.mark.parametrize(
    "tokenizer",
    [
        unknown_words,  # a long unknown word is one token
        lambda: with_added(byte_level(gguf_tokenizer.QWEN2), AddedToken("<mask>", lstrip=True)),  # takes all blanks
        lambda: Tokenizer(models.BPE({"a": 0}, [])),  # drops what it does not know
    ],
)
def test_tokenizers_without_a_bound_of_characters(tokenizer: Callable[[], Tokenizer]):
    assert describe(tokenizer()).characters_per_token is None


def test_a_text_without_cut_points_is_one_piece_up_to_a_length():
    cut_points = made("demo")[1].cut_points
    assert list(cut_points.pieces("a" * 50, 10, 50)) == ["a" * 50]
    for from_end in (False, True):
        with pytest.raises(ValueError, match="no cut point"):
            list(cut_points.pieces("a b " + "a" * 51 + " c d", 10, 50, from_end=from_end))


def test_alternatives_of_a_regular_expression():
    assert alternatives(r"(?:a|b)|[|\]|]|\||c") == ["(?:a|b)", r"[|\]|]", r"\|", "c"]
