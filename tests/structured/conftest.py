"""Grammar compilers over three kinds of tokenizers."""

import json
from collections.abc import Iterator

import pytest

from jpaged.loading.tokenizer import load_tokenizer
from tests.structured import sampling
from tests.structured.grammar_model import DEMO, Model, model


@pytest.fixture(scope="session", params=["demo", "byte-level", "sentencepiece-like"])
def any_model(request: pytest.FixtureRequest) -> Iterator[Model]:
    """The demo model's tokenizer, a small byte-level one, and one with byte fallback."""
    if request.param == "demo":
        tokenizer = load_tokenizer(DEMO)
        assert tokenizer is not None
        eos = json.loads((DEMO / "config.json").read_text())["eos_token_id"]
        made = model(tokenizer, len(tokenizer), (eos,), tokenizer.decode)
    else:
        backend = sampling.byte_level() if request.param == "byte-level" else sampling.sentencepiece_like()
        eos = backend.token_to_id("<|end|>" if request.param == "byte-level" else "</s>")
        made = model(sampling.Wrapped(backend), backend.get_vocab_size(), (eos,), backend.decode)
        made.drops_leading_blank = request.param == "sentencepiece-like"
    yield made
    made.compiler.close()


@pytest.fixture(scope="session")
def demo() -> Iterator[Model]:
    """The demo model's tokenizer."""
    tokenizer = load_tokenizer(DEMO)
    assert tokenizer is not None
    eos = json.loads((DEMO / "config.json").read_text())["eos_token_id"]
    made = model(tokenizer, len(tokenizer), (eos,), tokenizer.decode)
    yield made
    made.compiler.close()
