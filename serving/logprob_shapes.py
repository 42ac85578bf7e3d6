"""Converts the engine's log-probabilities to OpenAI's two formats."""

from collections.abc import Sequence

from jpaged.outputs import Logprob
from jpaged.serving.response_schema import ChatLogprobs, ChosenTokenLogprob, CompletionLogprobs, TokenLogprob

# Shown for -inf, a token that cannot be sampled: JSON has no infinity. vLLM shows the same value.
LOWEST = -9999.0


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], text_offsets: Sequence[int]
) -> CompletionLogprobs:
    r"""Convert to the format of /v1/completions. text_offsets: number of characters of the answer before each token.

    A token that is only a part of a character is shown as `bytes:\xe2\x80`, as in OpenAI's API: a unique text.
    """
    shape = CompletionLogprobs([], [], [], list(text_offsets))
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        shape.tokens.append(_text(token_id, entries[token_id], "bytes:"))
        shape.token_logprobs.append(_finite(entries[token_id]))
        top: dict[str, float] = {}
        for other_id, entry in sorted(entries.items(), key=lambda item: -item[1].logprob):
            top.setdefault(_text(other_id, entry, "bytes:"), _finite(entry))  # the most likely one wins
        shape.top_logprobs.append(top)
    return shape


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int) -> ChatLogprobs:
    r"""Convert to the format of /v1/chat/completions, with the `top` most likely tokens at each position.

    A token that is only a part of a character is shown as `\xe2\x80`, as in OpenAI's API. `bytes` has its exact bytes.
    """
    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        likeliest = sorted(entries.items(), key=lambda item: -item[1].logprob)[:top]
        chosen = _token(token_id, entries[token_id])
        content.append(
            ChosenTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, [_token(*item) for item in likeliest])
        )
    return ChatLogprobs(content)


def _token(token_id: int, entry: Logprob) -> TokenLogprob:
    text = _text(token_id, entry)
    exact = text.encode(errors="replace") if entry.token_bytes is None else entry.token_bytes
    return TokenLogprob(text, _finite(entry), list(exact))


def _text(token_id: int, entry: Logprob, before_bytes: str = "") -> str:
    """Return a token's text, or its escaped bytes if they are part of a character. Without a tokenizer: its id."""
    if entry.decoded_token is None:
        return f"token_id:{token_id}"
    if entry.token_bytes is None or "\ufffd" not in entry.decoded_token or _is_text(entry.token_bytes):
        return entry.decoded_token
    return before_bytes + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)


def _is_text(token_bytes: bytes) -> bool:
    try:
        token_bytes.decode()
    except UnicodeDecodeError:
        return False
    return True


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
