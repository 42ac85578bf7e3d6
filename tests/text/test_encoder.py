"""Long texts: the ids of one call, no more ids than needed, and an early error for a text that is too long."""

import gc
import weakref
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from jpaged.engine.input.input_processor import InputProcessor, ModelLimits
from jpaged.errors import RequestError
from jpaged.loading import load_tokenizer
from jpaged.params.sampling import SamplingParams
from jpaged.text import encoder as encoder_module
from jpaged.text.encoder import MAX_PIECE, WHOLE, TextEncoder, TokenisingCancelled, TokenLimit, text_encoder
from tests.text.corpus import CORPUS, DEMO

TEXT = "".join(CORPUS) * 8


@pytest.fixture(scope="module")
def framed() -> Any:
    """The demo tokenizer with a token before and a token after every text."""
    backend = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "</s>"])
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that are tokenised from now on."""
    lengths = []
    for name in ("_whole", "_piece"):
        real = getattr(TextEncoder, name)

        def call(self: TextEncoder, text: str, *, real: Any = real, **options: Any) -> list[int]:
            lengths.append(len(text))
            return real(self, text, **options)

        monkeypatch.setattr(TextEncoder, name, call)
    return lengths


@pytest.mark.parametrize("special_tokens", [True, False])
def test_a_long_text_has_the_ids_of_one_call(framed: Any, special_tokens: bool, monkeypatch: pytest.MonkeyPatch):
    assert len(TEXT) > 2 * WHOLE
    whole = framed.encode(TEXT, add_special_tokens=special_tokens)
    lengths = counted(monkeypatch)
    encoded = text_encoder(framed).encode("prompt", TEXT, special_tokens=special_tokens)
    assert encoded.complete
    assert encoded.token_ids == whole
    assert max(lengths) < 1.1 * encoder_module.PIECE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [1, 500, *(pytest.param(keep, marks=pytest.mark.slow) for keep in (2, 3, 9000))])
def test_truncation_tokenises_only_the_part_that_is_kept(framed: Any, side: str, keep: int, monkeypatch):
    """12 MB that were truncated to some tokens took 67 s."""
    whole = framed.encode(TEXT)
    room = keep - 2
    expected = whole[:keep] if side == "right" else whole[-keep:]
    if room > 0:
        expected = [whole[0], *(whole[1 : room + 1] if side == "right" else whole[-1 - room : -1]), whole[-1]]
    inputs = InputProcessor(ModelLimits(len(framed), 10_000, 5), framed)
    params = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side)
    inputs.process("r", TEXT, params)  # the tokenizer is examined once
    lengths = counted(monkeypatch)
    assert inputs.process("r", TEXT, params).prompt_token_ids == expected
    assert sum(lengths) < 8 * keep + 2 * encoder_module.PIECE


def test_a_text_that_is_too_long_is_refused_early(monkeypatch: pytest.MonkeyPatch):
    """30 MB took 6.6 GB of memory before the error."""
    tokenizer = load_tokenizer(DEMO)
    inputs = InputProcessor(ModelLimits(len(tokenizer), 4096, 5), tokenizer)
    lengths = counted(monkeypatch)
    with pytest.raises(RequestError, match="has more than 4,095 tokens, a prompt takes at most 4,095"):
        inputs.process("r", "A word, " * 12_000, SamplingParams())
    assert sum(lengths) < 4 * encoder_module.PIECE  # three tokens have eight characters
    lengths.clear()
    for text in ("a" * 30_000_000, "A word, " * 4_000_000):
        with pytest.raises(RequestError, match="characters, 4,095 tokens are at most"):
            inputs.process("r", text, SamplingParams())
    with pytest.raises(RequestError, match="characters without a blank") as caught:
        inputs.process("r", "a" * (MAX_PIECE + 1), SamplingParams(truncate_prompt_tokens=5))
    assert caught.value.parameter == "prompt"
    assert not lengths


def test_a_cancelled_text_ends_at_its_next_piece(monkeypatch: pytest.MonkeyPatch):
    tokenizer = load_tokenizer(DEMO)
    encoder = text_encoder(tokenizer)
    encoder.encode("prompt", TEXT)
    lengths = counted(monkeypatch)
    with pytest.raises(TokenisingCancelled):
        encoder.encode("prompt", TEXT, TokenLimit(10**9), cancelled=lambda: len(lengths) == 2)
    assert len(lengths) == 2


def test_a_tokenizer_that_cannot_be_cut_takes_long_texts_in_one_piece(framed: Any):
    class Backwards(PreTrainedTokenizerFast):
        """Its ids are not those of its back end."""

        def encode(self, text: str, **options: Any) -> list[int]:
            return super().encode(text, **options)[::-1]

    tokenizer = Backwards(tokenizer_object=framed.backend_tokenizer)
    encoded = text_encoder(tokenizer).encode("prompt", TEXT, special_tokens=False)
    assert encoded.token_ids == tokenizer.encode(TEXT, add_special_tokens=False)
    with pytest.raises(RequestError, match="takes at most 131,072 at once"):
        text_encoder(tokenizer).encode("prompt", TEXT * 20)


def test_an_encoder_does_not_keep_its_tokenizer():
    tokenizer = load_tokenizer(DEMO)
    text_encoder(tokenizer).encode("prompt", "a")
    reference = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert reference() is None
