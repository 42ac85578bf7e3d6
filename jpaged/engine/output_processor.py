"""Sampled tokens in, outputs out: stop checks, text, log-probabilities, finish reasons."""

import time
from typing import Any

from jpaged.engine.detokenizer import Detokenizer, TextDecoder, text_decoder
from jpaged.engine.pooling import Pooling
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.step_plan import StepResult
from jpaged.errors import EngineError
from jpaged.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput
from jpaged.pooling_params import PoolingParams


class OutputProcessor:
    """Follows every live request's output. Without a tokenizer there is no text. pooling: of a pooling engine."""

    def __init__(self, tokenizer: Any = None, pooling: Pooling | None = None):
        self._pooling = pooling
        self._decoder: TextDecoder | None = None if tokenizer is None else text_decoder(tokenizer)
        self._detokenizers: dict[Request, Detokenizer] = {}

    def add(self, request: Request) -> None:
        """Begin to follow a request."""
        if self._decoder is not None and request.params.detokenize:
            skip = request.params.skip_special_tokens
            self._detokenizers[request] = self._decoder.new(skip_special_tokens=skip)

    def take(self, request: Request, result: StepResult, index: int) -> RequestStatus | None:
        """Append the token that row `index` of a step sampled; the request's end, if that ends it.

        A token that stops the request is part of its ids, but not of its text. What is pooled ends its request.
        """
        if request.pooling is not None:
            return self._take_pooled(request, result, index)
        token_id = int(result.token_ids[index])
        request.num_in_flight -= 1
        request.token_ids.append(token_id)
        now = time.monotonic()
        metrics = request.metrics
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if request.logprobs is not None:
            entries = self._logprobs(request, token_id, result, index)
            request.logprobs.append(entries)
            request.cumulative_logprob = (request.cumulative_logprob or 0.0) + entries[token_id].logprob
        if token_id in request.eos_token_ids or token_id in (request.params.stop_token_ids or ()):
            main = token_id == request.eos_token_id and token_id in request.eos_token_ids
            request.stop_reason = None if main else token_id
            return RequestStatus.STOPPED
        detokenizer = self._detokenizers.get(request)
        if detokenizer is not None:
            detokenizer.add(token_id)
        return RequestStatus.LENGTH if len(request.token_ids) >= request.max_total_tokens else None

    def output(self, request: Request) -> RequestOutput | PoolingRequestOutput[Any]:
        """A request's output so far. Of a request that has ended it is the last one: it is no longer followed.

        Of one that failed the text is what was certain until then.
        """
        finished = request.status.is_end
        detokenizer = self._detokenizers.get(request)
        if finished:
            request.metrics.finished_time = time.monotonic()
            if detokenizer is not None and request.status is not RequestStatus.FAILED:
                detokenizer.finish()
            self._detokenizers.pop(request, None)
        if request.pooling is not None:
            return PoolingRequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=request.prompt_token_ids,
                outputs=request.pooled,
                finished=finished,
                metrics=request.metrics,
                num_cached_tokens=request.num_cached_tokens,
            )
        completion = CompletionOutput(
            index=0,
            text="" if detokenizer is None else detokenizer.text,
            token_ids=request.output_token_ids,
            cumulative_logprob=request.cumulative_logprob,
            logprobs=None if request.logprobs is None else list(request.logprobs),
            finish_reason=request.status.value if finished else None,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            metrics=request.metrics,
            num_cached_tokens=request.num_cached_tokens,
        )

    def forget_all(self) -> None:
        """Stop following requests."""
        self._detokenizers.clear()

    def _take_pooled(self, request: Request, result: StepResult, index: int) -> RequestStatus:
        if result.pooled is None or self._pooling is None:
            raise EngineError(f"request {request.request_id} is to be pooled, the step gave nothing")
        request.num_in_flight -= 1
        request.pooled = self._pooling.output(result.pooled[index], request.pooling or PoolingParams())
        return RequestStatus.STOPPED

    def _logprobs(self, request: Request, token_id: int, result: StepResult, index: int) -> dict[int, Logprob]:
        """The sampled token first, then the most likely ones that were asked for."""
        if result.logprobs is None or result.ranks is None or result.top_ids is None or result.top_logprobs is None:
            raise EngineError(f"request {request.request_id} asked for log-probabilities, the step gave none")
        decoder = self._decoder if request.params.detokenize else None

        def entry(token_id: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, None if decoder is None else decoder.token_text(token_id))

        count = request.params.logprobs or 0
        entries = {token_id: entry(token_id, float(result.logprobs[index]), int(result.ranks[index]))}
        top = zip(result.top_ids[index, :count].tolist(), result.top_logprobs[index, :count].tolist(), strict=True)
        for rank, (top_id, logprob) in enumerate(top, start=1):
            if top_id != token_id:
                entries[top_id] = entry(top_id, logprob, rank)
        return entries
