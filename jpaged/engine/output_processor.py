"""Sampled tokens in, outputs out: stop checks, text, log-probabilities, finish reasons."""

import dataclasses
import time
from typing import Any

from jpaged.engine.answer_text import AnswerText
from jpaged.engine.beam_search import BeamSearch, Hypothesis
from jpaged.engine.detokenizer import TextDecoder, text_decoder
from jpaged.engine.pooling import Pooling
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.step_plan import Scores, StepResult
from jpaged.errors import EngineError, RequestError
from jpaged.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestMetrics, RequestOutput
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import RequestOutputKind


@dataclasses.dataclass(slots=True)
class _Answer:
    """One request's output as far as its reader knows it."""

    text: AnswerText | None  # None where there is none: no tokenizer, or not asked for
    told: int = 0            # tokens that were given out
    end_told: bool = False


class OutputProcessor:
    """Follows every live request's output. Without a tokenizer there is no text. pooling: of a pooling engine."""

    def __init__(self, tokenizer: Any = None, pooling: Pooling | None = None):
        self._pooling = pooling
        self._decoder: TextDecoder | None = None if tokenizer is None else text_decoder(tokenizer)
        self._answers: dict[Request, _Answer] = {}

    def add(self, group: RequestGroup) -> None:
        """Begin to follow a group's requests; those of a search have no text before its end."""
        if group.search is None:
            for request in group.requests:
                self._answers[request] = _Answer(self._new_text(group))

    def _new_text(self, group: RequestGroup) -> AnswerText | None:
        params = group.params
        if self._decoder is None or not params.detokenize:
            return None
        detokenizer = self._decoder.new(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return AnswerText(detokenizer, params)

    def take(
        self, request: Request, token_id: int, now: float, result: StepResult, index: int
    ) -> RequestStatus | None:
        """Append the token that row `index` of a step sampled; the request's end, if that ends it.

        A token that stops the request is part of its ids; of its text only with include_stop_str_in_output. A stop
        string comes before a stop token, and both before the length. now: seconds of `time.monotonic()`.
        """
        if token_id < 0:
            accepted = "leave no token to sample: logits that are not finite, or all -inf"
            raise RequestError("logits_processors", request.params.logits_processors, accepted)
        if request.params.needs_logprobs:
            self._add_logprobs(request, token_id, result, index)
        return self.append(request, token_id, now)

    def take_scores(self, request: Request, scores: Scores, places: slice) -> None:
        """Keep what a step tells about the next tokens of a prompt."""
        if request.output.prompt_logprobs is None:
            raise EngineError(f"request {request.request_id} did not ask for prompt_logprobs")
        count = request.params.prompt_logprobs or 0
        columns = (scores.logprobs, scores.ranks, scores.top_ids[:, :count], scores.top_logprobs[:, :count])
        for told in zip(*(column[places].tolist() for column in columns), strict=True):
            token_id = request.prompt_token_ids[len(request.output.prompt_logprobs)]
            request.output.prompt_logprobs.append(self._entries(request, token_id, *told))

    def append(self, request: Request, token_id: int, now: float) -> RequestStatus | None:
        """Append a token, sampled or forced; the request's end, if that ends it."""
        request.token_ids.append(token_id)
        note_token(request.metrics, now)
        matcher = request.output.matcher
        if request.output.reasoning_budget is not None:
            request.output.reasoning_budget.append(token_id, self._token_bytes(token_id))
        stops = token_id in request.stop_ids
        is_full = len(request.token_ids) >= request.max_total_tokens
        ends = stops or is_full
        if matcher is not None and not stops:
            if not matcher.accept(token_id):
                raise EngineError(f"request {request.request_id}: its grammar does not allow token {token_id}")
            ends |= matcher.is_finished
        repeats = request.output.repetition is not None and request.output.repetition.append(token_id)
        repeats &= request.num_output_tokens >= request.params.min_tokens
        ends |= repeats
        stop_string = self._add_text(request, token_id, stops=stops, ends=ends)
        if stops or stop_string is not None:
            request.output.stop_reason = _stop_reason(request, token_id) if stop_string is None else stop_string
            return RequestStatus.STOPPED
        if matcher is not None and matcher.is_finished:
            return RequestStatus.STOPPED
        if repeats and not is_full:
            request.output.stop_reason = "repetition_detected"
            return RequestStatus.REPETITION
        return RequestStatus.LENGTH if is_full else None

    def _token_bytes(self, token_id: int) -> bytes:
        if self._decoder is None:
            raise EngineError("there is no tokenizer")
        exact = self._decoder.token_bytes(token_id)
        return self._decoder.token_text(token_id).encode() if exact is None else exact

    def _add_text(self, request: Request, token_id: int, *, stops: bool, ends: bool) -> str | None:
        """The stop string that is complete with a token, the end of the answer's text included if it ends."""
        text = self._answers[request].text
        if text is None:
            return None
        stop_string = None
        if stops and not request.params.include_stop_str_in_output:
            text.add_without_text(token_id)
        else:
            stop_string = text.add(token_id)
        return text.end() if ends and stop_string is None else stop_string

    def streams(self, group: RequestGroup) -> bool:
        """Whether a group gives outputs before its end."""
        params = group.params
        return group.stream and not params.chooses and params.output_kind is not RequestOutputKind.FINAL_ONLY

    def is_due(self, group: RequestGroup, request: Request) -> bool:
        """Whether a request's new token is to be told at once: always, or as stream_interval says."""
        if not self.streams(group):
            return False
        interval = group.params.stream_interval or 1
        told = 0 if interval == 1 else self._answers[request].told
        return interval == 1 or told == 0 or request.num_output_tokens - told >= interval

    def output(self, group: RequestGroup) -> RequestOutput | PoolingRequestOutput[Any]:
        """A group's output so far; with output_kind DELTA what is new in it, and only the answers that have news.

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
                outputs=group.pooled,
                finished=finished,
                metrics=group.metrics,
                num_cached_tokens=group.first.schedule.num_cached_tokens,
            )
        search = group.search
        completions = self._completions(group) if search is None else self._beams(group, search)
        if group.params.chooses and search is None:
            failed = RequestStatus.FAILED.value
            completions.sort(key=lambda each: (each.finish_reason == failed, -(each.cumulative_logprob or 0.0)))
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
            num_cached_tokens=group.first.schedule.num_cached_tokens,
            prompt_logprobs=None if group.first.output.prompt_logprobs is None else list(group.first.output.prompt_logprobs),
        )

    def _completions(self, group: RequestGroup) -> list[CompletionOutput]:
        delta = group.params.output_kind is RequestOutputKind.DELTA and not group.params.chooses
        followed = [(request, self._answers[request]) for request in group.requests]
        for request, answer in followed:  # before anything counts as told: it may fail
            if request.schedule.status.is_end and request.schedule.status is not RequestStatus.FAILED and answer.text is not None:
                answer.text.end()
        return [
            self._completion(request, answer, delta=delta)
            for request, answer in followed
            if not delta or answer.told < request.num_output_tokens or request.schedule.status.is_end > answer.end_told
        ]

    def _completion(self, request: Request, answer: _Answer, *, delta: bool) -> CompletionOutput:
        new, text = slice(answer.told if delta else 0, None), answer.text
        answer.told, answer.end_told = request.num_output_tokens, request.schedule.status.is_end
        return CompletionOutput(
            index=request.index,
            text="" if text is None else text.new() if delta else text.whole(),
            token_ids=request.token_ids[request.prompt_len + new.start :],
            cumulative_logprob=request.output.cumulative_logprob,
            logprobs=None if request.output.logprobs is None else request.output.logprobs[new],
            finish_reason=request.schedule.status.value if request.schedule.status.is_end else None,
            stop_reason=request.output.stop_reason,
            text_offsets=None if text is None or text.offsets is None else text.offsets[new],
        )

    def forget(self, group: RequestGroup) -> None:
        """Stop following a group, which has ended and given its last output."""
        for request in group.requests:
            self._answers.pop(request, None)

    def _beams(self, group: RequestGroup, search: BeamSearch) -> list[CompletionOutput]:
        """The best answers of a search, as far as it has come."""
        status = group.first.schedule.status
        completions = []
        for index, found in enumerate(search.best(group.params.n)):
            token_ids = list(found.token_ids)
            stopped = found.finish_reason == "stop"
            text = self._beam_text(group, token_ids, stopped=stopped)
            reason = found.finish_reason or (status.value if status.is_end else None)
            completions.append(
                CompletionOutput(
                    index=index,
                    text="" if text is None else text.whole(),
                    token_ids=token_ids,
                    cumulative_logprob=found.cumulative_logprob,
                    logprobs=self._beam_logprobs(group, found),
                    finish_reason=reason,
                    stop_reason=_stop_reason(group.first, token_ids[-1]) if stopped else None,
                    text_offsets=None if text is None else text.offsets,
                )
            )
        if not completions and status.is_end:  # it was ended before its first step
            completions.append(CompletionOutput(0, "", [], None, None, finish_reason=status.value))
        return completions

    def _beam_text(self, group: RequestGroup, token_ids: list[int], *, stopped: bool) -> AnswerText | None:
        """stopped: by the last token, which is then no text unless it is asked for."""
        text = self._new_text(group)
        if text is not None:
            left_out = stopped and not group.params.include_stop_str_in_output
            for token_id in token_ids[:-1] if left_out else token_ids:
                text.add(token_id)
            if left_out:
                text.add_without_text(token_ids[-1])
            text.end()
        return text

    def _beam_logprobs(self, group: RequestGroup, found: Hypothesis) -> list[dict[int, Logprob]] | None:
        """As `_entries`, of the beam that a token was a candidate of."""
        count = group.params.logprobs
        if count is None:
            return None
        entries = []
        steps = zip(found.token_ids, found.logprobs, found.beam_indices, group.candidates, strict=False)
        for token_id, logprob, beam, (ids, values) in steps:
            top_ids, top_logprobs = ids[beam].tolist(), values[beam].tolist()
            rank = top_ids.index(token_id) + 1
            entries.append(
                self._entries(group.first, token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
            )
        return entries

    def forget_all(self) -> None:
        """Stop following requests."""
        self._answers.clear()

    def take_pooled(self, group: RequestGroup, request: Request, result: StepResult, index: int) -> RequestStatus:
        """Keep what row `index` of a step pooled, which ends its request."""
        if result.pooled is None or self._pooling is None:
            raise EngineError(f"request {request.request_id} is to be pooled, the step gave nothing")
        group.pooled = self._pooling.output(result.pooled[index], group.pooling or PoolingParams())
        return RequestStatus.STOPPED

    def _add_logprobs(self, request: Request, token_id: int, result: StepResult, index: int) -> None:
        if result.logprobs is None or result.ranks is None or result.top_ids is None or result.top_logprobs is None:
            raise EngineError(f"request {request.request_id} needs log-probabilities, the step gave none")
        sampled = float(result.logprobs[index])
        request.output.cumulative_logprob = (request.output.cumulative_logprob or 0.0) + sampled
        if request.output.logprobs is None:
            return
        count = request.params.logprobs or 0
        top_ids, top_logprobs = result.top_ids[index, :count].tolist(), result.top_logprobs[index, :count].tolist()
        rank = int(result.ranks[index])
        request.output.logprobs.append(self._entries(request, token_id, sampled, rank, top_ids, top_logprobs))

    def _entries(
        self, request: Request, token_id: int, logprob: float, rank: int, top_ids: list[int], top_logprobs: list[float]
    ) -> dict[int, Logprob]:
        """The token itself first, then the most likely ones that were asked for."""
        entries = {token_id: self._entry(request, token_id, logprob, rank)}
        for place, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
            if top_id != token_id:
                entries[top_id] = self._entry(request, top_id, value, place)
        return entries

    def _entry(self, request: Request, token_id: int, logprob: float, rank: int) -> Logprob:
        decoder = self._decoder if request.params.detokenize else None
        if decoder is None:
            return Logprob(logprob, rank)
        return Logprob(logprob, rank, decoder.token_text(token_id), decoder.token_bytes(token_id))


def note_token(metrics: RequestMetrics, now: float) -> None:
    """A token of a request has reached the host."""
    metrics.last_token_time = now
    if metrics.first_token_time is None:
        metrics.first_token_time = now


def _stop_reason(request: Request, token_id: int) -> int | None:
    """The token that stopped a request; None where it is the model's main end."""
    main = token_id == request.eos_token_id and token_id in request.eos_token_ids
    return None if main else token_id
