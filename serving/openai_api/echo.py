"""Prompts in answers: `echo` of a completion, and vLLM's `prompt_logprobs`."""

import codecs
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.concurrency import run_in_threadpool

from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.serving.openai_api.generation import Outputs
from jpaged.serving.openai_api.logprob_shapes import prompt_logprob
from jpaged.serving.web.json_pieces import Pieces, list_pieces

Entries = dict[int, Logprob] | None  # log-probabilities of one prompt position, by token id; None at the first


@dataclasses.dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as an answer shows it.

    logprobs:   one entry per token, None for the first. None without log-probabilities.
    offsets:    number of characters of `text` before each token; empty without log-probabilities.
    first_text: text of the first token, which has no entry; empty without log-probabilities.
    """

    text: str
    token_ids: list[int]
    logprobs: list[Entries] | None
    offsets: list[int]
    first_text: str


async def echoed_prompt(
    tokenizer: Any, final: RequestOutput, text: str | None, *, skip_special_tokens: bool
) -> EchoedPrompt:
    """Return a prompt for its answers. text: the prompt as sent; None: decode its tokens, if there is a tokenizer."""
    return await run_in_threadpool(_echoed, tokenizer, final, text, skip_special_tokens)  # may be a million tokens


def _echoed(tokenizer: Any, final: RequestOutput, text: str | None, skip_special_tokens: bool) -> EchoedPrompt:
    ids = final.prompt_token_ids
    if text is None:
        text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    if final.prompt_logprobs is None:
        return EchoedPrompt(text, ids, None, [], "")
    first_text = f"token_id:{ids[0]}" if tokenizer is None else tokenizer.decode([ids[0]])
    hidden = frozenset(getattr(tokenizer, "all_special_ids", ()) if skip_special_tokens else ())
    offsets = _offsets(ids, final.prompt_logprobs, first_text, hidden, text)
    return EchoedPrompt(text, ids, final.prompt_logprobs, offsets, first_text)


def _offsets(
    token_ids: list[int], logprobs: Sequence[Entries], first_text: str, hidden: frozenset[int], text: str
) -> list[int]:
    """Return the number of characters of a prompt's text before each token. hidden: tokens that are not in the text.

    A token that begins inside a character has that character's offset, if the tokenizer shows its bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, total, dropped = [], 0, 0
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        offsets.append(total)
        if token_id in hidden:
            continue
        entry = None if entries is None else entries[token_id]
        if entry is None or entry.token_bytes is None:
            piece = first_text if entry is None else entry.decoded_token or ""
        else:
            piece = decoder.decode(entry.token_bytes)
        if not total and piece.startswith(" ") and not text.startswith(" "):
            dropped = 1  # some tokenizers drop the space before the first word
        total += len(piece)
    return [min(max(offset - dropped, 0), len(text)) for offset in offsets]


async def prompt_only(outputs: Outputs) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Remove the answers from outputs, for `max_tokens` 0: the engine generates one token after every prompt."""
    async with aclosing(outputs):
        async for prompt, output in outputs:
            yield prompt, dataclasses.replace(output, outputs=[_without_tokens(one) for one in output.outputs])


def _without_tokens(output: CompletionOutput) -> CompletionOutput:
    reason = "length" if output.finish_reason in ("stop", "repetition") else output.finish_reason
    stop = output.stop_reason if output.finish_reason == "error" else None
    return CompletionOutput(output.index, "", [], None, None, finish_reason=reason, stop_reason=stop)


async def prompt_logprob_pieces(logprobs: Sequence[Entries]) -> Pieces:
    """Convert a prompt's log-probabilities to vLLM's `prompt_logprobs`."""

    def convert(some: Sequence[Entries], _: int) -> list[Any]:
        return [
            None if entries is None else {str(token): prompt_logprob(one) for token, one in entries.items()}
            for entries in some
        ]

    return await list_pieces(logprobs, convert)
