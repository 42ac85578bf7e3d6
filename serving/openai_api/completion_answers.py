"""Makes the choices of a completion: the answer, and its prompt if the request asks for it."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.serving.engine_client import Prompt
from jpaged.serving.openai_api.echo import EchoedPrompt, Entries, echoed_prompt, prompt_logprob_pieces
from jpaged.serving.openai_api.generation import Update, weight_spans
from jpaged.serving.openai_api.logprob_shapes import completion_logprob_pieces, completion_logprobs
from jpaged.serving.schemas.answers import CompletionChoice, CompletionLogprobs
from jpaged.serving.schemas.requests import CompletionRequest
from jpaged.serving.web.json_pieces import Pieces, plain_pieces


class CompletionAnswers:
    """The answers of one request. Each prompt is converted once for all its answers."""

    def __init__(self, body: CompletionRequest, prompts: list[Prompt], tokenizer: Any, *, skip_special_tokens: bool):
        """prompts: as sent, before special tokens or a suffix were added."""
        self._body = body
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # A prompt that is cut is shown as its remaining tokens.
        cut = body.truncate_prompt_tokens is not None
        self._texts = [one if isinstance(one, str) and not cut else None for one in prompts]
        self._echoed: dict[int, EchoedPrompt] = {}
        self._prompt_ids: dict[int, Pieces] = {}
        self._prompt_logprobs: dict[int, Pieces] = {}

    async def first(self, new: Update, prompt: int, final: RequestOutput) -> CompletionChoice:
        """Return the choice of an answer's first stream event, with the parts of its prompt that were asked for."""
        if not self._body.echo:
            choice = self.part(new, prompt)
        else:
            echoed = await self._echo(prompt, final)
            choice = self._shown(new, echoed.text + new.text)
            if self._body.logprobs is not None:
                offsets = self._offsets(len(new.token_ids), new.text_offsets, new.num_characters, prompt)
                choice.logprobs = await self._joined_logprobs(prompt, new.token_ids, new.logprobs or [], offsets)
        await self._add_prompt(choice, prompt, final)
        return choice

    def part(self, new: Update, prompt: int) -> CompletionChoice:
        """Return the choice of a later stream event."""
        choice = self._shown(new, new.text)
        if new.logprobs is not None and new.token_ids:
            offsets = self._offsets(len(new.token_ids), new.text_offsets, new.num_characters, prompt)
            choice.logprobs = completion_logprobs(
                new.token_ids, new.logprobs, offsets, as_ids=bool(self._body.return_tokens_as_token_ids)
            )
        return choice

    def _shown(self, new: Update, text: str) -> CompletionChoice:
        choice = CompletionChoice(index=new.choice, text=text, finish_reason=new.finish_reason)
        if new.finish_reason is not None:
            choice.stop_reason = new.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = new.token_ids
        if self._body.return_weight_versions:
            choice.weight_versions = new.weight_versions
        return choice

    async def whole(self, index: int, prompt: int, final: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        """Return a complete choice. final: the last output of its prompt."""
        choice = CompletionChoice(
            index=index, text=output.text, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        if self._body.echo:
            choice.text = (await self._echo(prompt, final)).text + output.text
        if self._body.logprobs is not None:
            choice.logprobs = await self._whole_logprobs(output, prompt)
        if self._body.return_token_ids:
            choice.token_ids = output.token_ids
        if self._body.return_weight_versions:
            choice.weight_versions = weight_spans(output, len(output.token_ids))
        await self._add_prompt(choice, prompt, final)
        choice.prompt_logprobs = None
        if self._body.prompt_logprobs is not None and final.prompt_logprobs is not None:
            if prompt not in self._prompt_logprobs:
                self._prompt_logprobs[prompt] = await prompt_logprob_pieces(final.prompt_logprobs)
            choice.prompt_logprobs = cast(Any, self._prompt_logprobs[prompt])
        await asyncio.sleep(0)
        return choice

    async def _whole_logprobs(self, output: CompletionOutput, prompt: int) -> CompletionLogprobs | None:
        logprobs = output.logprobs or []
        shown = None if output.text_offsets is None else output.text_offsets[: len(logprobs)]
        offsets = self._offsets(len(logprobs), shown, len(output.text), prompt)
        return await self._joined_logprobs(prompt, output.token_ids, logprobs, offsets)

    async def _joined_logprobs(
        self, prompt: int, token_ids: list[int], logprobs: Sequence[Entries], offsets: list[int]
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of an echoed prompt and of tokens after it. offsets: of the later tokens."""
        echoed = self._echoed.get(prompt)
        if echoed is not None and echoed.logprobs is not None:
            token_ids = echoed.token_ids + token_ids
            logprobs = [*echoed.logprobs, *logprobs]
            offsets = echoed.offsets + offsets
        if not logprobs:
            return None
        return await completion_logprob_pieces(
            token_ids, logprobs, offsets, as_ids=bool(self._body.return_tokens_as_token_ids),
            first_text="" if echoed is None else echoed.first_text,
        )  # fmt: skip

    def _offsets(self, num_tokens: int, offsets: list[int] | None, length: int, prompt: int) -> list[int]:
        """Return text offsets in characters, with an echoed prompt. offsets: in the answer. length: of the answer."""
        before = len(self._echoed[prompt].text) if prompt in self._echoed else 0
        if offsets is None:  # a model without a tokenizer has no text
            return [before] * num_tokens
        return [before + min(offset, length) for offset in offsets]

    async def _echo(self, prompt: int, final: RequestOutput) -> EchoedPrompt:
        if prompt not in self._echoed:
            self._echoed[prompt] = await echoed_prompt(
                self._tokenizer, final, self._texts[prompt], skip_special_tokens=self._skip_special_tokens
            )
        return self._echoed[prompt]

    async def _add_prompt(self, choice: CompletionChoice, prompt: int, final: RequestOutput) -> None:
        if self._body.return_token_ids:
            if prompt not in self._prompt_ids:
                self._prompt_ids[prompt] = await plain_pieces(final.prompt_token_ids)
            choice.prompt_token_ids = cast(Any, self._prompt_ids[prompt])
