"""Loads and checks the tokenizer of a model.

Imported late: Transformers, which takes seconds.
"""

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import MAX_JSON, read_json
from jpaged.loading.gguf_file import GgufFile
from jpaged.loading.hub import TOKENIZER_FILES, is_gguf
from jpaged.loading.mapped_file import check_file
from jpaged.text.transformers_import import import_transformers

logger = logging.getLogger(__name__)

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip

_MAX_TOKENIZER = 256 << 20  # bytes. Gemma 3's tokenizer.json has 33 MB
_SMALL = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")


def has_tokenizer(path: Path) -> bool:
    """Return True if a folder has a tokenizer, and for every GGUF file."""
    return is_gguf(path) or any((path / name).is_file() for name in _FILES)


def load_tokenizer(folder: Path) -> Any | None:
    """Load the tokenizer (transformers.PreTrainedTokenizerBase) of a folder or a GGUF file; None if it has none.

    Code in the checkpoint is never run. Raises ModelLoadError.
    """
    if not has_tokenizer(folder):
        logger.warning("%s has no tokenizer: prompts must be token ids, and outputs have no text", folder)
        return None
    import_transformers()
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    _check_files(folder)
    if is_gguf(folder):
        from jpaged.loading.gguf_tokenizer import gguf_tokenizer

        with contextlib.closing(GgufFile(folder)) as file:
            return gguf_tokenizer(folder, file.metadata)
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # damaged tokenizer files raise many types
        own_code = read_json(folder / "tokenizer_config.json").get("auto_map")
        if isinstance(own_code, dict) and "AutoTokenizer" in own_code:
            raise ModelLoadError(
                f"{folder / 'tokenizer_config.json'}: the tokenizer needs code in the checkpoint (auto_map), which "
                "jpaged does not run: convert it to tokenizer.json, or name another tokenizer with tokenizer="
            ) from None
        raise ModelLoadError(f"{folder}: the tokenizer cannot be loaded: {error}") from None
    finally:
        transformers_logging.set_verbosity(before)


def _check_files(folder: Path) -> None:
    """Raise ModelLoadError for tokenizer files that are not regular files, or would take minutes to read."""
    for path in {path for pattern in (*TOKENIZER_FILES, "config.json") for path in folder.glob(pattern)}:
        if path.is_dir():
            continue
        check_file(path, MAX_JSON if path.name in _SMALL else _MAX_TOKENIZER)


def check_vocabulary(tokenizer: Any | None, vocab_size: int, source: Path) -> None:
    """Raise ModelLoadError if the tokenizer's vocabulary is larger than the embedding.

    Added tokens may have larger ids (Gemma 3's <image_soft_token>). Prompts that contain them are refused later.
    """
    if tokenizer is None:
        return
    added = tokenizer.get_added_vocab()
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= vocab_size)
    for number, token in beyond:
        if token not in added:
            raise ModelLoadError(
                f"{source}: the tokenizer's token {token!r} has id {number}, but the embedding has {vocab_size:,} "
                "rows: tokenizer and weights are from different models"
            )
    if beyond:
        logger.warning("%s: %d added tokens have no row in the embedding and are refused in prompts: %s",
                       source, len(beyond), ", ".join(token for _, token in beyond[:5]))  # fmt: skip


def valid_token_mask(tokenizer: Any | None, vocab_size: int) -> np.ndarray | None:
    """Return bool[vocab_size]: True for ids of the tokenizer. None if all are True, or if there is no tokenizer.

    Embeddings are padded for speed (Qwen2: 151,646 tokens, 151,936 rows). A padding id has no text.
    """
    if tokenizer is None:
        return None
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    mask = np.zeros(vocab_size, bool)
    mask[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return None if mask.all() else mask
