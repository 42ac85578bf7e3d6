"""Converts the engine's log-probabilities to OpenAI's two formats, and to vLLM's for prompts."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from jpaged.outputs import Logprob
from jpaged.serving.schemas.answers import (
    ChatLogprobs,
    ChosenTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
)
from jpaged.serving.web.json_pieces import ITEMS, Pieces, list_pieces

# Shown for -inf, a token that cannot be sampled: JSON has no infinity. vLLM shows the same value.
LOWEST = -9999.0


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
    text_offsets: Sequence[int],
    *,
    as_ids: bool = False,
    first_text: str = "",
) -> CompletionLogprobs:
    r"""Convert to the format of /v1/completions. text_offsets: number of characters of the answer before each token.

    A token that is only a part of a character is shown as `bytes:\xe2\x80`, as in OpenAI's API. So texts stay unique.

    as_ids:     show every token as `token_id:5`.
    first_text: text of a token without log-probabilities, the first one of a prompt.
    """
    shape = CompletionLogprobs([], [], [], list(text_offsets))
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        if entries is None:
            shape.tokens.append(_id_text(token_id) if as_ids else first_text)
            shape.token_logprobs.append(None)
            shape.top_logprobs.append(None)
            continue
        shape.tokens.append(_text(token_id, entries[token_id], "bytes:", as_ids=as_ids))
        shape.token_logprobs.append(_finite(entries[token_id]))
        top: dict[str, float] = {}
        for other_id, entry in sorted(entries.items(), key=lambda item: -item[1].logprob):
            top.setdefault(_text(other_id, entry, "bytes:", as_ids=as_ids), _finite(entry))  # the most likely one wins
        shape.top_logprobs.append(top)
    return shape


async def completion_logprob_pieces(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
    text_offsets: Sequence[int],
    *,
    as_ids: bool = False,
    first_text: str = "",
) -> CompletionLogprobs:
    """As `completion_logprobs`, for any number of tokens. Other requests run in between."""
    columns: dict[str, list[bytes]] = {name: [] for name in CompletionLogprobs.__struct_fields__}
    for start in range(0, len(token_ids), ITEMS):
        some = slice(start, start + ITEMS)
        shape = completion_logprobs(
            token_ids[some], logprobs[some], text_offsets[some], as_ids=as_ids, first_text=first_text
        )
        for name, parts in columns.items():
            parts.append((b"," if start else b"[") + msgspec.json.encode(getattr(shape, name))[1:-1])
        await asyncio.sleep(0)
    pieces = [Pieces((*parts, b"]")) if parts else Pieces((b"[]",)) for parts in columns.values()]
    return CompletionLogprobs(*cast(Any, pieces))


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int, *, as_ids: bool = False
) -> ChatLogprobs:
    r"""Convert to the format of /v1/chat/completions, with the `top` most likely tokens at each position.

    A token that is only a part of a character is shown as `\xe2\x80`, as in OpenAI's API. `bytes` has its exact bytes.
    as_ids: show every token as `token_id:5`.
    """
    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        likeliest = sorted(entries.items(), key=lambda item: -item[1].logprob)[:top]
        chosen = _token(token_id, entries[token_id], as_ids)
        content.append(
            ChosenTokenLogprob(
                chosen.token, chosen.logprob, chosen.bytes, [_token(*item, as_ids) for item in likeliest]
            )
        )
    return ChatLogprobs(content)


async def chat_logprob_pieces(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int, *, as_ids: bool = False
) -> ChatLogprobs:
    """As `chat_logprobs`, for any number of tokens. Other requests run in between."""

    def convert(some: Sequence[int], start: int) -> list[ChosenTokenLogprob]:
        return chat_logprobs(some, logprobs[start : start + len(some)], top, as_ids=as_ids).content

    return ChatLogprobs(cast(Any, await list_pieces(token_ids, convert)))


def prompt_logprob(entry: Logprob) -> PromptLogprob:
    """Convert to an entry of vLLM's `prompt_logprobs`."""
    return PromptLogprob(_finite(entry), entry.rank, entry.decoded_token)


def _token(token_id: int, entry: Logprob, as_ids: bool) -> TokenLogprob:
    text = _text(token_id, entry)
    exact = text.encode(errors="replace") if entry.token_bytes is None else entry.token_bytes
    return TokenLogprob(_id_text(token_id) if as_ids else text, _finite(entry), list(exact))


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _text(token_id: int, entry: Logprob, before_bytes: str = "", *, as_ids: bool = False) -> str:
    """Return a token's text, or its escaped bytes if they are part of a character. Without a tokenizer: its id."""
    if as_ids or entry.decoded_token is None:
        return _id_text(token_id)
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
