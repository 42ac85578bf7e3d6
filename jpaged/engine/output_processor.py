"""Sampled tokens in, outputs out: stop checks, text, log-probabilities, finish reasons."""

import time
from typing import Any

from jpaged.engine.beam_search import BeamSearch, Hypothesis
from jpaged.engine.detokenizer import Detokenizer, TextDecoder, text_decoder
from jpaged.engine.pooling import Pooling
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.step_plan import StepResult
from jpaged.errors import EngineError
from jpaged.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestMetrics, RequestOutput
from jpaged.pooling_params import PoolingParams


class OutputProcessor:
    """Follows every live request's output. Without a tokenizer there is no text. pooling: of a pooling engine."""

    def __init__(self, tokenizer: Any = None, pooling: Pooling | None = None):
        self._pooling = pooling
        self._decoder: TextDecoder | None = None if tokenizer is None else text_decoder(tokenizer)
        self._detokenizers: dict[Request, Detokenizer] = {}

    def add(self, group: RequestGroup) -> None:
        """Begin to follow a group's requests; those of a search have no text before its end."""
        if self._decoder is not None and group.params.detokenize and group.search is None:
            skip = group.params.skip_special_tokens
            for request in group.requests:
                self._detokenizers[request] = self._decoder.new(skip_special_tokens=skip)

    def take(
        self, request: Request, token_id: int, now: float, result: StepResult, index: int
    ) -> RequestStatus | None:
        """Append the token that row `index` of a step sampled; the request's end, if that ends it.

        A token that stops the request is part of its ids, but not of its text. now: seconds of `time.monotonic()`.
        """
        request.num_in_flight -= 1
        request.token_ids.append(token_id)
        note_token(request.metrics, now)
        if request.params.needs_logprobs:
            self._add_logprobs(request, token_id, result, index)
        if token_id in request.stop_ids:
            request.stop_reason = _stop_reason(request, token_id)
            return RequestStatus.STOPPED
        detokenizer = self._detokenizers.get(request)
        if detokenizer is not None:
            detokenizer.add(token_id)
        return RequestStatus.LENGTH if len(request.token_ids) >= request.max_total_tokens else None

    def output(self, group: RequestGroup) -> RequestOutput | PoolingRequestOutput[Any]:
        """A group's output so far. Of one that has ended it is the last one: it is no longer followed.

        Of a request that failed the text is what was certain until then.
        """
        finished = group.has_ended
        if finished:
            group.metrics.finished_time = time.monotonic()
        if group.pooling is not None:
            return PoolingRequestOutput(
                request_id=group.request_id,
                prompt=group.prompt,
                prompt_token_ids=group.prompt_token_ids,
                outputs=group.first.pooled,
                finished=finished,
                metrics=group.metrics,
                num_cached_tokens=group.first.num_cached_tokens,
            )
        search = group.search
        completions = (
            [self._completion(request) for request in group.requests] if search is None else self._beams(group, search)
        )
        if group.params.chooses and search is None:
            completions.sort(key=lambda completion: -(completion.cumulative_logprob or 0.0))
            completions = completions[: group.params.n]
            for index, completion in enumerate(completions):
                completion.index = index
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=completions,
            finished=finished,
            metrics=group.metrics,
            num_cached_tokens=group.first.num_cached_tokens,
        )

    def _completion(self, request: Request) -> CompletionOutput:
        detokenizer = self._detokenizers.get(request)
        if request.status.is_end and detokenizer is not None and request.status is not RequestStatus.FAILED:
            detokenizer.finish()
        return CompletionOutput(
            index=request.index,
            text="" if detokenizer is None else detokenizer.text,
            token_ids=request.output_token_ids,
            cumulative_logprob=request.cumulative_logprob,
            logprobs=None if request.logprobs is None else list(request.logprobs),
            finish_reason=request.status.value if request.status.is_end else None,
            stop_reason=request.stop_reason,
        )

    def forget(self, group: RequestGroup) -> None:
        """Stop following a group, which has ended and given its last output."""
        for request in group.requests:
            self._detokenizers.pop(request, None)

    def _beams(self, group: RequestGroup, search: BeamSearch) -> list[CompletionOutput]:
        """The best answers of a search, as far as it has come."""
        status = group.first.status
        completions = []
        for index, found in enumerate(search.best(group.params.n)):
            token_ids = list(found.token_ids)
            stopped = found.finish_reason == "stop"
            reason = found.finish_reason or (status.value if status.is_end else None)
            completions.append(
                CompletionOutput(
                    index=index,
                    text=self._text(group, token_ids[:-1] if stopped else token_ids),
                    token_ids=token_ids,
                    cumulative_logprob=found.cumulative_logprob,
                    logprobs=self._beam_logprobs(group, found),
                    finish_reason=reason,
                    stop_reason=_stop_reason(group.first, token_ids[-1]) if stopped else None,
                )
            )
        if not completions and status.is_end:  # it was ended before its first step
            completions.append(CompletionOutput(0, "", [], None, None, finish_reason=status.value))
        return completions

    def _text(self, group: RequestGroup, token_ids: list[int]) -> str:
        if self._decoder is None or not group.params.detokenize:
            return ""
        detokenizer = self._decoder.new(skip_special_tokens=group.params.skip_special_tokens)
        for token_id in token_ids:
            detokenizer.add(token_id)
        detokenizer.finish()
        return detokenizer.text

    def _beam_logprobs(self, group: RequestGroup, found: Hypothesis) -> list[dict[int, Logprob]] | None:
        """The chosen token first, then the most likely ones that were asked for, of the beam it was a candidate of."""
        count = group.params.logprobs
        if count is None:
            return None
        entries = []
        steps = zip(found.token_ids, found.logprobs, found.beam_indices, group.candidates, strict=False)
        for token_id, logprob, beam, (ids, values) in steps:
            top = dict(zip(ids[beam].tolist(), values[beam].tolist(), strict=True))
            rank = list(top).index(token_id) + 1
            chosen = {token_id: self._entry(group.first, token_id, logprob, rank)}
            for place, (top_id, value) in enumerate(list(top.items())[:count], start=1):
                if top_id != token_id:
                    chosen[top_id] = self._entry(group.first, top_id, value, place)
            entries.append(chosen)
        return entries

    def forget_all(self) -> None:
        """Stop following requests."""
        self._detokenizers.clear()

    def take_pooled(self, request: Request, result: StepResult, index: int) -> RequestStatus:
        """Keep what row `index` of a step pooled, which ends its request."""
        if result.pooled is None or self._pooling is None:
            raise EngineError(f"request {request.request_id} is to be pooled, the step gave nothing")
        request.num_in_flight -= 1
        request.pooled = self._pooling.output(result.pooled[index], request.pooling or PoolingParams())
        return RequestStatus.STOPPED

    def _add_logprobs(self, request: Request, token_id: int, result: StepResult, index: int) -> None:
        """The sampled token first, then the most likely ones that were asked for."""
        if result.logprobs is None or result.ranks is None or result.top_ids is None or result.top_logprobs is None:
            raise EngineError(f"request {request.request_id} needs log-probabilities, the step gave none")
        sampled = float(result.logprobs[index])
        request.cumulative_logprob = (request.cumulative_logprob or 0.0) + sampled
        if request.logprobs is None:
            return
        count = request.params.logprobs or 0
        entries = {token_id: self._entry(request, token_id, sampled, int(result.ranks[index]))}
        top = zip(result.top_ids[index, :count].tolist(), result.top_logprobs[index, :count].tolist(), strict=True)
        for rank, (top_id, logprob) in enumerate(top, start=1):
            if top_id != token_id:
                entries[top_id] = self._entry(request, top_id, logprob, rank)
        request.logprobs.append(entries)

    def _entry(self, request: Request, token_id: int, logprob: float, rank: int) -> Logprob:
        decoder = self._decoder if request.params.detokenize else None
        return Logprob(logprob, rank, None if decoder is None else decoder.token_text(token_id))


def note_token(metrics: RequestMetrics, now: float) -> None:
    """A token of a request has reached the host."""
    metrics.last_token_time = now
    if metrics.first_token_time is None:
        metrics.first_token_time = now


def _stop_reason(request: Request, token_id: int) -> int | None:
    """The token that stopped a request; None where it is the model's main end."""
    main = token_id == request.eos_token_id and token_id in request.eos_token_ids
    return None if main else token_id
