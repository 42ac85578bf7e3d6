"""Imports Transformers, which takes seconds, without its warning that PyTorch is missing.

Imported late: Transformers. Token ids as prompts do not need it.
"""

import logging
import threading

_importing = threading.Lock()  # two threads that import transformers at once see a partial module


def import_transformers() -> None:
    """Import the tokenizers of Transformers. They do not need PyTorch."""
    logging.getLogger("transformers").addFilter(_is_news)
    with _importing:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401


def _is_news(record: logging.LogRecord) -> bool:
    """Drop the warning about PyTorch. A module-level function, because a logger adds the same filter only once."""
    return "PyTorch was not found" not in record.getMessage()
