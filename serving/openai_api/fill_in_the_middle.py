"""`suffix` of a completion request: the model writes the text between a prompt and a suffix.

A model that was trained for it has three special tokens, and continues
`<prefix token>PROMPT<suffix token>SUFFIX<middle token>` (Bavarian et al., arXiv:2207.14255, order PSM).
"""

import dataclasses
from typing import Any

from jpaged.errors import RequestError
from jpaged.serving.engine_client import Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class MiddleTokens:
    """The special tokens around the two given parts of a text."""

    prefix: str
    suffix: str
    middle: str


KNOWN = (
    MiddleTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    MiddleTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    MiddleTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    # DeepSeek Coder
    MiddleTokens("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


def middle_tokens(tokenizer: Any) -> MiddleTokens | None:
    """Return the tokens of the model's tokenizer; None if it has none of the known ones."""
    added = {str(token) for token in (getattr(tokenizer, "added_tokens_decoder", None) or {}).values()}
    return next((one for one in KNOWN if {one.prefix, one.suffix, one.middle} <= added), None)


def fill_in_prompt(tokenizer: Any, prompt: Prompt, suffix: str) -> Prompt:
    """Return the prompt for the text before `suffix`. Raises RequestError if the model cannot fill in."""
    tokens = middle_tokens(tokenizer)
    if tokens is None:
        accepted = "the model has no tokens to fill in the middle of a text: leave it out"
        raise RequestError("suffix", suffix, accepted)
    if not isinstance(prompt, str):
        raise RequestError("suffix", suffix, "needs a prompt of text: token ids can contain the model's tokens for it")
    return f"{tokens.prefix}{prompt}{tokens.suffix}{suffix}{tokens.middle}"
