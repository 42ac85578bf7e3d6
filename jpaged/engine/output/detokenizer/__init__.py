"""Token ids to text, one token at a time. Text that was returned never changes.

The text is what `decode(prompt + answer)` adds to `decode(prompt)`. Three implementations, each linear in the number of
tokens (`benchmarks/host_overhead.py` measures a token's cost):
- `byte_level.py`, for byte-level BPE (GPT-2, Llama 3, Qwen). Each token stands for fixed bytes, so a table and an
  incremental UTF-8 decoder are enough. At most three bytes, an incomplete character, are held back.
- `pieces.py`, for SentencePiece-like tokenizers (Llama 2, Mistral, Gemma, T5). Each token has a fixed text, and some
  have another text at the beginning. Tokens of single bytes are held back until the run of them ends.
- `windows.py`, for any other tokenizer: decodes the last few tokens with and without the new one.

The tables of the first two come from the state of the tokenizer's decoder. They are compared with the tokenizer once.
If the texts differ, `windows.py` is used.
"""

import json
import logging
from typing import Any

from jpaged.engine.output.detokenizer.backend import token_strings
from jpaged.engine.output.detokenizer.byte_level import ByteLevelDecoder
from jpaged.engine.output.detokenizer.interface import Detokenizer, TextDecoder
from jpaged.engine.output.detokenizer.pieces import PieceDecoder, PieceRules
from jpaged.engine.output.detokenizer.windows import WindowDecoder

__all__ = ["ByteLevelDecoder", "Detokenizer", "PieceDecoder", "TextDecoder", "WindowDecoder", "text_decoder"]

logger = logging.getLogger(__name__)

NUM_COMPARED = 512  # tokens by which a table is compared with its tokenizer


def text_decoder(tokenizer: Any) -> TextDecoder:
    """Return the fastest exact decoder for a transformers tokenizer."""
    windows = WindowDecoder(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return windows
    steps = _decoder_steps(getattr(backend, "decoder", None))
    rules = PieceRules.of(steps)
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        table: TextDecoder = ByteLevelDecoder(backend)
    elif rules is not None:
        table = PieceDecoder(backend, rules)
    else:
        return windows
    if _agree(table, windows, sorted(token_strings(backend)), sorted(backend.get_added_tokens_decoder())):
        return table
    logger.info("%s does not decode each token by itself: the last few tokens are decoded together", type(tokenizer))
    return windows


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a decoder of `tokenizers`. [] for any other object, or if it does not show its state."""
    if not hasattr(decoder, "__getstate__") or not type(decoder).__module__.startswith("tokenizers"):
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _agree(table: TextDecoder, windows: WindowDecoder, ids: list[int], added: list[int]) -> bool:
    """True if a table returns the tokenizer's text, for tokens spread over the vocabulary and for added tokens."""
    compared = [*ids[:: -(-len(ids) // NUM_COMPARED) or 1], *added[:NUM_COMPARED]]
    for skip in (False, True):
        detokenizer = table.new(skip_special_tokens=skip)
        text = "".join([detokenizer.add(token_id) for token_id in compared]) + detokenizer.finish()
        if text != windows.decode(compared, skip):
            return False
    return True
