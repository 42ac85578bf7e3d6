"""The engine's log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence

from jpaged.outputs import Logprob
from jpaged.serving.response_schema import ChatLogprobs, ChosenTokenLogprob, CompletionLogprobs, TokenLogprob

# JSON has no infinity; a token that cannot be sampled is shown at this, as vLLM does.
LOWEST = -9999.0


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], text_offsets: Sequence[int]
) -> CompletionLogprobs:
    r"""The shape of /v1/completions. text_offsets: characters of the answer before each of these tokens.

    A token that is no whole characters is `bytes:\xe2\x80`, as in OpenAI's API: no two are the same.
    """
    shape = CompletionLogprobs([], [], [], list(text_offsets))
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        shape.tokens.append(_text(token_id, entries[token_id], "bytes:"))
        shape.token_logprobs.append(_finite(entries[token_id]))
        top: dict[str, float] = {}
        for other_id, entry in sorted(entries.items(), key=lambda item: -item[1].logprob):
            top.setdefault(_text(other_id, entry, "bytes:"), _finite(entry))  # of two with the same text, the likelier
        shape.top_logprobs.append(top)
    return shape


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int) -> ChatLogprobs:
    r"""The shape of /v1/chat/completions, with the `top` most likely tokens in each place.

    A token that is no whole characters is `\xe2\x80`, as in OpenAI's API, and its `bytes` are what it stands for.
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
    """The token's text, or its bytes as one; a model without a tokenizer has only ids to show."""
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
