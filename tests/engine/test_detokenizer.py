"""Incremental text equals one decode of all tokens, for every kind of tokenizer, and returned text never changes.

Three kinds are trained here: byte-level BPE, BPE with byte fallback, and Unigram with SentencePiece's spaces. Each is
tested with its table, and with `WindowDecoder`, which works for any tokenizer.
"""

import json
import types

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jpaged.engine.output.detokenizer import (
    ByteLevelDecoder,
    Detokenizer,
    PieceDecoder,
    TextDecoder,
    WindowDecoder,
    text_decoder,
)

CORPUS = [
    "def read_json(path):\n    with open(path) as file:\n        return json.load(file)\n",
    "Größe, naïve café — „Zitat“, 漢字とかな, 한국어, العربية, हिन्दी, 👩‍👩‍👧‍👦🏳️‍🌈 z̸͓̀a",
    "the cat and the other cat sat on the mat,  and  the  hat",
]
CASES = 375  # for each of eight decoders: 3,000 together


class Wrapped:
    """The part of a transformers tokenizer that the engine uses, around a tokenizer of `tokenizers`."""

    def __init__(self, backend: Tokenizer):
        self.backend_tokenizer = backend

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.backend_tokenizer.id_to_token(token_id)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen, with added tokens: special, plain, and outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "é", "日本"])
    tokenizer.add_special_tokens([AddedToken("<|im start|>", special=True)])
    return tokenizer


def byte_fallback(prefix: bool = True) -> Tokenizer:
    """Like Llama 2 and Mistral: characters without a token are bytes, and the first word loses its space.

    Without a prefix: like Gemma.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=120, limit_alphabet=40, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocabulary |= {token: 257 + i for i, token in enumerate(model["vocab"])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    before, after = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    tokenizer.add_tokens(["<tool call>", "▁▁x"])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Like T5 and other Unigram models."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>"])
    return tokenizer


def spaced_words() -> Tokenizer:
    """Like BERT: a space before every token that does not continue a word, even a special one."""
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "the", "cat", "##s", "é", ",", "[SEP]", "[CLS]"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[SEP]", "[CLS]"])
    return tokenizer


TOKENIZERS = {
    "byte_level": Wrapped(byte_level()),
    "byte_fallback": Wrapped(byte_fallback()),
    "no_prefix": Wrapped(byte_fallback(prefix=False)),
    "metaspace": Wrapped(metaspace()),
    "spaced_words": Wrapped(spaced_words()),
}
DECODERS: dict[str, TextDecoder] = {
    "byte_level": text_decoder(TOKENIZERS["byte_level"]),
    "byte_level by windows": WindowDecoder(TOKENIZERS["byte_level"]),
    "byte_fallback": text_decoder(TOKENIZERS["byte_fallback"]),
    "byte_fallback by windows": WindowDecoder(TOKENIZERS["byte_fallback"]),
    "metaspace": text_decoder(TOKENIZERS["metaspace"]),
    "metaspace by windows": WindowDecoder(TOKENIZERS["metaspace"]),
}
FURTHER = {name: text_decoder(TOKENIZERS[name]) for name in ("no_prefix", "spaced_words")}


def feed(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    """Add all tokens one by one, and return the text."""
    return "".join([detokenizer.add(token_id) for token_id in token_ids]) + detokenizer.finish()


def test_the_decoder_for_each_tokenizer():
    assert isinstance(DECODERS["byte_level"], ByteLevelDecoder)
    assert isinstance(DECODERS["byte_fallback"], PieceDecoder)
    assert isinstance(FURTHER["no_prefix"], PieceDecoder)
    assert isinstance(DECODERS["metaspace"], PieceDecoder)
    assert isinstance(FURTHER["spaced_words"], WindowDecoder)


def token_ids_of(kind: str, drawn: bytes) -> list[int]:
    """Make one token id from two bytes, with a few unknown ids. Byte tokens and some others are more frequent."""
    size = len(TOKENIZERS[kind])
    often = [0, 1, size - 1, size - 2, *range(195, 240), *(i for i in range(257, 262) if i < size)]
    pairs = zip(drawn[::2], drawn[1::2], strict=False)
    return [often[low % len(often)] if high < 100 else (high * 256 + low) % (size + 4) for high, low in pairs]


@pytest.mark.parametrize("kind", [*DECODERS, *FURTHER])
@given(drawn=st.binary(max_size=60), skip=st.booleans())
@settings(max_examples=CASES)
def test_any_tokens_have_the_text_of_one_decode(kind: str, drawn: bytes, skip: bool):
    name = kind.split(" ")[0]
    tokenizer = TOKENIZERS[name]
    token_ids = token_ids_of(name, drawn)
    known = [token_id for token_id in token_ids if token_id < len(tokenizer)]
    whole = tokenizer.backend_tokenizer.decode(known, skip_special_tokens=skip)
    assert feed((DECODERS | FURTHER)[kind].new(skip_special_tokens=skip), token_ids) == whole


@pytest.mark.parametrize("kind", [*DECODERS, *FURTHER])
@given(drawn=st.binary(max_size=40), cut=st.integers(0, 20), text=st.text(alphabet="ø漢 the cat", max_size=12))
@example(b"", 0, "the cat")
@example(b"", 1, "漢漢 the")
@settings(max_examples=100)
def test_an_answer_has_the_text_that_it_adds_to_its_prompt(kind: str, drawn: bytes, cut: int, text: str):
    """A character that the prompt begins is text of the answer: it adds to the text of up to three tokens less."""
    name = kind.split(" ")[0]
    backend = TOKENIZERS[name].backend_tokenizer
    for skip, ids in ((True, token_ids_of(name, drawn)), (False, backend.encode(text).ids)):
        ids = [token_id for token_id in ids if token_id < len(TOKENIZERS[name])]
        cut = min(cut, len(ids))
        prompt, whole = (backend.decode(some, skip_special_tokens=skip) for some in (ids[:cut], ids))
        if skip and ("\ufffd" in prompt or not whole.startswith(prompt)):
            continue  # one wrong byte changes the text of the whole run, here and in the answer
        added = feed((DECODERS | FURTHER)[kind].new(skip_special_tokens=skip, after=ids[:cut]), ids[cut:])
        before = [backend.decode(ids[: max(cut - less, 0)], skip_special_tokens=skip) for less in range(4)]
        assert whole in [text + added for text in (prompt.rstrip("\ufffd"), *before)], (prompt, added)


@pytest.mark.parametrize("kind", [*DECODERS, "no_prefix"])
@given(text=st.text(max_size=30) | st.text(alphabet="é漢👩▁ a\u0300", max_size=20))
@example("👩‍👩‍👧‍👦 中文")
@settings(max_examples=40)
def test_encoded_text_is_restored_without_half_characters(kind: str, text: str):
    tokenizer = TOKENIZERS[kind.split(" ")[0]].backend_tokenizer
    decoder = (DECODERS | FURTHER)[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = decoder.new(skip_special_tokens=True)
    broken = "\ufffd" in tokenizer.decode(token_ids)  # in byte-level BPE, the added token é is one byte
    assert broken or not any("\ufffd" in detokenizer.add(token_id) for token_id in token_ids)
    assert feed(decoder.new(skip_special_tokens=True), token_ids) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_text_is_returned_as_soon_as_it_is_certain(kind: str):
    tokenizer = TOKENIZERS[kind].backend_tokenizer
    token_ids = tokenizer.encode("the cat and the other cat").ids
    detokenizer = DECODERS[kind].new(skip_special_tokens=True)
    text = ""
    for count, token_id in enumerate(token_ids, start=1):
        text += detokenizer.add(token_id)
        assert text == tokenizer.decode(token_ids[:count])


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("lead", ["ð", "<0xF0>", "�"])
def test_a_long_run_of_broken_characters_is_complete(kind: str, lead: str):
    name = kind.split(" ")[0]
    tokenizer = TOKENIZERS[name].backend_tokenizer
    broken = tokenizer.token_to_id(lead)
    token_ids = [5, *[1 if broken is None else broken] * 500, 3]
    whole = tokenizer.decode(token_ids)
    assert feed(DECODERS[kind].new(skip_special_tokens=True), token_ids) == whole


@pytest.mark.parametrize("kind", DECODERS)
def test_a_run_of_half_characters_is_returned_in_linear_time(kind: str):
    """Counts decoded tokens instead of time: a window does not grow with the run."""
    name = kind.split(" ")[0]
    tokenizer = TOKENIZERS[name].backend_tokenizer
    lead = tokenizer.token_to_id({"byte_level": "ð", "byte_fallback": "<0xF0>"}.get(name, "é"))
    decoder = DECODERS[kind]
    decoded = []
    if isinstance(decoder, WindowDecoder):
        decoder = WindowDecoder(TOKENIZERS[name])
        decode = decoder.decode
        decoder.decode = lambda ids, skip_special_tokens: decoded.append(len(ids)) or decode(ids, skip_special_tokens)
    detokenizer = decoder.new(skip_special_tokens=True)
    pieces = [detokenizer.add(lead) for _ in range(2000)]
    given = len("".join(pieces))
    assert given >= 1990 or (name == "byte_fallback" and given == 0)
    assert sum(decoded) <= 2000 * 150


def test_the_text_and_bytes_of_one_token():
    tokenizer = TOKENIZERS["byte_level"].backend_tokenizer
    decoder = DECODERS["byte_level"]
    assert decoder.token_text(tokenizer.token_to_id("<|end|>")) == "<|end|>"
    assert decoder.token_text(tokenizer.token_to_id("<|im start|>")) == "<|im start|>"
    assert decoder.token_text(tokenizer.token_to_id("ð")) == "\ufffd"
    assert decoder.token_bytes(tokenizer.token_to_id("ð")) == b"\xf0"
    assert (decoder.token_text(10_000), decoder.token_bytes(10_000)) == ("", b"")
    fallback = TOKENIZERS["byte_fallback"].backend_tokenizer
    for kind in ("byte_fallback", "byte_fallback by windows"):
        decoder = DECODERS[kind]
        byte, word = fallback.token_to_id("<0xE6>"), fallback.token_to_id("▁the")
        assert (decoder.token_text(byte), decoder.token_bytes(byte)) == ("\ufffd", b"\xe6")
        assert (decoder.token_text(10_000), decoder.token_bytes(10_000)) == ("", b"")
        assert decoder.token_text(word) == (" the" if kind == "byte_fallback" else "the")
    assert DECODERS["byte_level by windows"].token_bytes(tokenizer.token_to_id("ð")) is None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=20))
@settings(max_examples=40)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind: str, text: str):
    tokenizer = TOKENIZERS[kind].backend_tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(DECODERS[kind].token_bytes(token_id) for token_id in token_ids)
    written = tokenizer.decode(token_ids, skip_special_tokens=False)
    joined = joined.decode(errors="replace")
    assert joined == written or (kind == "byte_fallback" and joined == " " + written)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "no_prefix"])
@given(text=st.text(max_size=20) | st.text(alphabet="漢👩 aø", max_size=20))
@example("漢字かな👩‍👩 x")
@settings(max_examples=150)
def test_the_offset_of_a_token_is_that_of_its_first_character(kind: str, text: str):
    tokenizer = TOKENIZERS[kind].backend_tokenizer
    decoder = (DECODERS | FURTHER)[kind]
    token_ids = tokenizer.encode(text.replace("é", "e"), add_special_tokens=False).ids
    detokenizer = decoder.new(skip_special_tokens=False)
    before, length = b"", 0
    stripped = int(kind == "byte_fallback" and bool(token_ids))
    for token_id in token_ids:
        begins = length + detokenizer.offset_of_next(token_id)
        assert begins == max(len(before.decode(errors="ignore")) - stripped, 0)
        length += len(detokenizer.add(token_id))
        before += decoder.token_bytes(token_id)


def test_no_space_between_special_tokens_if_switched_off():
    """As in vLLM, there is no space between two added tokens in a row."""
    tokenizer, decoder = TOKENIZERS["spaced_words"].backend_tokenizer, FURTHER["spaced_words"]
    ids = [tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]", "the", "[SEP]", "[CLS]", "cat", "##s")]
    texts = [
        feed(decoder.new(skip_special_tokens=skip, spaces_between_special_tokens=spaces), ids)
        for skip, spaces in ((False, True), (False, False), (True, True), (True, False))
    ]
    assert texts == ["[CLS] [SEP] the [SEP] [CLS] cats", "[CLS][SEP] the [SEP][CLS] cats", "the cats", "the cats"]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_other_decoders_use_windows(decoder: decoders.Decoder | None):
    backend = byte_fallback()
    backend.decoder = decoder
    assert isinstance(text_decoder(Wrapped(backend)), WindowDecoder)


def test_a_tokenizer_that_overrides_decode_uses_windows():
    """The tokenizer's class may change the text after its decoder."""
    tokenizer = Wrapped(byte_level())
    plain = tokenizer.decode
    tokenizer.decode = types.MethodType(lambda self, *args, **options: plain(*args, **options).upper(), tokenizer)
    decoder = text_decoder(tokenizer)
    assert isinstance(decoder, WindowDecoder)
    ids = tokenizer.backend_tokenizer.encode("the cat").ids
    assert feed(decoder.new(skip_special_tokens=True), ids) == "THE CAT"
