"""Incremental text equals one decode of all tokens, for every kind of tokenizer, and never takes back what it gave."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jpaged.engine.detokenizer import ByteLevelDecoder, Detokenizer, TextDecoder, WindowDecoder, text_decoder

CORPUS = [
    "def read_json(path):\n    with open(path) as file:\n        return json.load(file)\n",
    "Größe, naïve café — „Zitat“, 漢字とかな, 한국어, العربية, हिन्दी, 👩‍👩‍👧‍👦🏳️‍🌈 z̸͓̀a",
]


class Wrapped:
    """The part of a transformers tokenizer that the engine uses, over a tokenizer of `tokenizers`."""

    def __init__(self, backend: Tokenizer):
        self.backend_tokenizer = backend

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.backend_tokenizer.id_to_token(token_id)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen; with added tokens that are special, plain, and outside the byte alphabet."""
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


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: characters without a token are bytes, and the space before the first word is stripped."""
    tokens = [*"▁abcde", "▁a", "▁the", "中", "<s>"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocabulary |= {token: len(vocabulary) + i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex("▁"), " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and other Unigram models."""
    pieces = ["<unk>", "▁", "a", "▁b", "▁the", "é", "▁中", "</s>"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


TOKENIZERS = {make.__name__: Wrapped(make()) for make in (byte_level, byte_fallback, metaspace)}
DECODERS: dict[str, TextDecoder] = {
    "byte_level": text_decoder(TOKENIZERS["byte_level"]),
    "byte_level by windows": WindowDecoder(TOKENIZERS["byte_level"]),
    "byte_fallback": text_decoder(TOKENIZERS["byte_fallback"]),
    "metaspace": text_decoder(TOKENIZERS["metaspace"]),
}


def feed(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    """All tokens one by one; what was given out stays."""
    for token_id in token_ids:
        before = detokenizer.text
        detokenizer.add(token_id)
        assert detokenizer.text.startswith(before)
    before = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text.startswith(before)
    return detokenizer.text


def test_the_fast_way_is_taken_for_byte_level_tokenizers():
    assert isinstance(DECODERS["byte_level"], ByteLevelDecoder)
    assert isinstance(DECODERS["byte_fallback"], WindowDecoder)


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150)
def test_any_tokens_give_what_one_decode_gives(kind: str, data: st.DataObject, skip: bool):
    tokenizer = TOKENIZERS[kind.split(" ")[0]]
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=24))
    known = [token_id for token_id in token_ids if token_id < len(tokenizer)]
    whole = tokenizer.backend_tokenizer.decode(known, skip_special_tokens=skip)
    assert feed(DECODERS[kind].new(skip_special_tokens=skip), token_ids) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=30))
@example("👩‍👩‍👧‍👦 中文")
@settings(max_examples=100)
def test_text_comes_back_and_no_half_character_on_the_way(kind: str, text: str):
    tokenizer = TOKENIZERS[kind].backend_tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = DECODERS[kind].new(skip_special_tokens=True)
    for token_id in token_ids:
        detokenizer.add(token_id)
        assert "\ufffd" not in detokenizer.text or "\ufffd" in text
    assert feed(DECODERS[kind].new(skip_special_tokens=True), token_ids) == tokenizer.decode(token_ids)


def test_text_is_given_out_as_soon_as_it_is_certain():
    tokenizer = TOKENIZERS["byte_level"].backend_tokenizer
    token_ids = tokenizer.encode("return json ").ids
    detokenizer = DECODERS["byte_level"].new(skip_special_tokens=True)
    for count, token_id in enumerate(token_ids, start=1):
        detokenizer.add(token_id)
        assert detokenizer.text == tokenizer.decode(token_ids[:count])


@pytest.mark.parametrize("kind", DECODERS)
def test_a_long_run_of_broken_characters_is_complete(kind: str):
    tokenizer = TOKENIZERS[kind.split(" ")[0]]
    lead = {"byte_level": "ð", "byte_fallback": "<0xF0>", "metaspace": "é"}[kind.split(" ")[0]]
    token_ids = [tokenizer.backend_tokenizer.token_to_id(lead)] * 500
    whole = tokenizer.backend_tokenizer.decode(token_ids)
    assert feed(DECODERS[kind].new(skip_special_tokens=True), token_ids) == whole


def test_one_token_by_itself():
    tokenizer = TOKENIZERS["byte_level"].backend_tokenizer
    decoder = DECODERS["byte_level"]
    assert decoder.token_text(tokenizer.token_to_id("<|end|>")) == "<|end|>"
    assert decoder.token_text(tokenizer.token_to_id("<|im start|>")) == "<|im start|>"
    assert decoder.token_text(tokenizer.token_to_id("ð")) == "\ufffd"
    assert decoder.token_text(10_000) == ""
    fallback = TOKENIZERS["byte_fallback"].backend_tokenizer
    assert DECODERS["byte_fallback"].token_text(fallback.token_to_id("▁the")) == "the"
    assert DECODERS["byte_fallback"].token_text(10_000) == ""
