"""The engine's log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence

from jpaged.outputs import Logprob
from jpaged.serving.response_schema import ChatLogprobs, ChosenTokenLogprob, CompletionLogprobs, TokenLogprob

# JSON has no infinity; a token that cannot be sampled is shown at this, as vLLM does.
LOWEST = -9999.0


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], text_offset: int
) -> CompletionLogprobs:
    """The shape of /v1/completions. text_offset: characters of the answer before the first of these tokens."""
    shape = CompletionLogprobs([], [], [], [])
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        text = _text(token_id, entries[token_id])
        shape.tokens.append(text)
        shape.token_logprobs.append(_finite(entries[token_id]))
        shape.text_offset.append(text_offset)
        top: dict[str, float] = {}
        for other_id, entry in sorted(entries.items(), key=lambda item: -item[1].logprob):
            top.setdefault(_text(other_id, entry), _finite(entry))  # of two with the same text, the likelier
        shape.top_logprobs.append(top)
        text_offset += len(text)
    return shape


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int) -> ChatLogprobs:
    """The shape of /v1/chat/completions, with the `top` most likely tokens in each place."""
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
    return TokenLogprob(text, _finite(entry), list(text.encode("utf-8", errors="replace")))


def _text(token_id: int, entry: Logprob) -> str:
    """The token's text; a model without a tokenizer has only ids to show."""
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
