"""The tokenizer of a model."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import read_json
from jpaged.loading.gguf_file import GgufFile
from jpaged.loading.hub import is_gguf

logger = logging.getLogger(__name__)

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip


def has_tokenizer(path: Path) -> bool:
    """Whether a folder has a tokenizer; a GGUF file always has."""
    return is_gguf(path) or any((path / name).is_file() for name in _FILES)


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer (transformers.PreTrainedTokenizerBase) of a folder or a GGUF file; None where it has none.

    Code that a checkpoint brings is not run. Raises ModelLoadError.
    """
    if not has_tokenizer(folder):
        logger.warning("%s has no tokenizer: only prompts of token ids are taken, and outputs have no text", folder)
        return None
    # Imported here: it takes seconds, and prompts of token ids need none of it.
    # On import it warns that PyTorch is not there and models cannot be used, which is no news here.
    logging.getLogger("transformers").addFilter(_is_news)
    import transformers
    from transformers.utils import logging as transformers_logging

    if is_gguf(folder):
        from jpaged.loading.gguf_tokenizer import gguf_tokenizer

        with contextlib.closing(GgufFile(folder)) as file:
            return gguf_tokenizer(folder, file.metadata)
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a damaged tokenizer file makes it raise
        own_code = read_json(folder / "tokenizer_config.json").get("auto_map")
        if isinstance(own_code, dict) and "AutoTokenizer" in own_code:
            raise ModelLoadError(
                f"{folder / 'tokenizer_config.json'}: the tokenizer needs code of its own (auto_map), which jpaged "
                "does not run: convert it to tokenizer.json, or name another one with tokenizer="
            ) from error
        raise ModelLoadError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    finally:
        transformers_logging.set_verbosity(before)


def _is_news(record: logging.LogRecord) -> bool:
    """A function of its own: added again and again, it is one filter."""
    return "PyTorch was not found" not in record.getMessage()


def check_vocabulary(tokenizer: Any | None, vocab_size: int, source: Path) -> None:
    """Raise ModelLoadError where the tokenizer's own vocabulary does not fit into the embedding.

    Tokens that were added to it may lie beyond (Gemma 3's <image_soft_token>): a prompt that has one is refused.
    """
    if tokenizer is None:
        return
    added = tokenizer.get_added_vocab()
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= vocab_size)
    for number, token in beyond:
        if token not in added:
            raise ModelLoadError(
                f"{source}: the tokenizer has token {token!r} as {number}, but the embedding {vocab_size:,} rows: "
                "tokenizer and weights are of different models"
            )
    if beyond:
        logger.warning("%s: %d added tokens have no row in the embedding and are refused in prompts: %s",
                       source, len(beyond), ", ".join(token for _, token in beyond[:5]))  # fmt: skip


def valid_token_mask(tokenizer: Any | None, vocab_size: int) -> np.ndarray | None:
    """bool[vocab_size]: which ids the tokenizer has; None where it has all of them, or there is no tokenizer.

    Vocabularies are padded for speed (151,646 tokens in 151,936 rows for Qwen2): sampling a padding id gives no text.
    """
    if tokenizer is None:
        return None
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    mask = np.zeros(vocab_size, bool)
    mask[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return None if mask.all() else mask
