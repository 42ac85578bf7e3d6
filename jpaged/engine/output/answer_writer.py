"""Appends tokens to the output of a request: text, stop checks, log-probabilities.

Called by: the strategies, for each token.
Owns: the decoder of the text. It writes `Request.output` and `Request.metrics`, and appends to `Request.token_ids`.
Never: ends a request. It returns the end state.
"""

from collections.abc import Sequence
from typing import Any

from jpaged.engine.output.answer_text import AnswerText
from jpaged.engine.output.detokenizer import TextDecoder, text_decoder
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.sampling_extras import unpack_mask
from jpaged.engine.step_plan import Scores, StepResult
from jpaged.errors import EngineError
from jpaged.outputs import Logprob
from jpaged.params.sampling import SamplingParams


class AnswerWriter:
    """Writes `Request.output` and appends to `Request.token_ids`. One object serves all requests."""

    def __init__(self, tokenizer: Any = None):
        """tokenizer: None means that answers have no text."""
        self._decoder: TextDecoder | None = None if tokenizer is None else text_decoder(tokenizer)
        self._special_names = special_names(tokenizer)

    def new_text(self, params: SamplingParams, prompt: Sequence[int]) -> AnswerText | None:
        """Text of a new answer to a prompt. None if there is no tokenizer, or the caller wants no text."""
        if self._decoder is None or not params.detokenize:
            return None
        detokenizer = self._decoder.new(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            after=prompt,
        )
        return AnswerText(detokenizer, params, None if params.skip_special_tokens else self._special_names)

    def append(self, request: Request, token_id: int, now: float) -> RequestStatus | None:
        """Append a sampled or forced token. now: `time.monotonic()`. Returns the end state if it ends the request.

        A token that stops the request is part of its token ids, and of its text only with include_stop_str_in_output.
        A stop string takes precedence over a stop token, and both take precedence over the length limit.
        """
        token_ids, output, metrics = request.token_ids, request.output, request.metrics
        token_ids.append(token_id)
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if output.is_bare:
            if token_id in request.stop_ids:
                output.stop_reason = stop_reason(request, token_id)
                return RequestStatus.STOPPED
            return RequestStatus.LENGTH if len(token_ids) >= request.max_total_tokens else None
        if output.reasoning_budget is not None:
            output.reasoning_budget.append(token_id, self.token_bytes(token_id))
        stops = token_id in request.stop_ids
        is_full = len(token_ids) >= request.max_total_tokens
        completes_grammar = repeats = False
        if output.matcher is not None and not stops:
            if not output.matcher.accept(token_id):
                raise EngineError(f"request {request.request_id}: its grammar does not allow token {token_id}")
            completes_grammar = output.matcher.is_finished
        if output.repetition is not None:
            is_long = request.num_output_tokens >= request.params.min_tokens
            repeats = output.repetition.append(token_id) and is_long
        if output.text is not None:
            if stops or is_full or completes_grammar or repeats:
                include = request.params.include_stop_str_in_output
                stop_string = append_last_text(output.text, token_id, omit=stops and not include)
            else:
                stop_string = output.text.add(token_id)
            if stop_string is not None:
                output.stop_reason = stop_string
                return RequestStatus.STOPPED
        if stops:
            output.stop_reason = stop_reason(request, token_id)
            return RequestStatus.STOPPED
        if completes_grammar:
            return RequestStatus.STOPPED
        if repeats and not is_full:
            output.stop_reason = "repetition_detected"
            return RequestStatus.REPETITION
        return RequestStatus.LENGTH if is_full else None

    def append_logprobs(self, request: Request, token_id: int, result: StepResult, index: int) -> None:
        """Append the log-probabilities of the token that row `index` of a step sampled."""
        if result.logprobs is None or result.ranks is None or result.top_ids is None or result.top_logprobs is None:
            raise EngineError(f"request {request.request_id} needs log-probabilities, but the step returned none")
        output = request.output
        sampled = float(result.logprobs[index])
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sampled
        if output.logprobs is None:
            return
        count = request.params.logprobs or 0
        top_ids, top_logprobs = result.top_ids[index, :count].tolist(), result.top_logprobs[index, :count].tolist()
        rank = int(result.ranks[index])
        entries = self.entries(request.params, token_id, sampled, rank, top_ids, top_logprobs)
        if request.params.logprob_token_ids:  # the order of the ids is not their rank
            entries = {each: entry if each == token_id else entry.without_rank() for each, entry in entries.items()}
        output.logprobs.append(entries)

    def append_kept_ids(self, request: Request, result: StepResult, index: int) -> None:
        """Append the ids from which row `index` of a step drew its token."""
        if result.kept_ids is None or request.output.kept_ids is None:
            raise EngineError(f"request {request.request_id} needs a sampling mask, but the step returned none")
        request.output.kept_ids.append(unpack_mask(result.kept_ids[index]))

    def append_prompt_logprobs(self, request: Request, scores: Scores, entries: slice) -> None:
        """Append the log-probabilities of the next prompt tokens. entries: their indices in the step's scores."""
        prompt_logprobs = request.output.prompt_logprobs
        if prompt_logprobs is None:
            raise EngineError(f"request {request.request_id} did not ask for prompt_logprobs")
        count = request.params.prompt_logprobs or 0
        columns = (scores.logprobs, scores.ranks, scores.top_ids[:, :count], scores.top_logprobs[:, :count])
        for scored in zip(*(column[entries].tolist() for column in columns), strict=True):
            token_id = request.prompt_token_ids[len(prompt_logprobs)]
            prompt_logprobs.append(self.entries(request.params, token_id, *scored))

    def entries(
        self,
        params: SamplingParams,
        token_id: int,
        logprob: float,
        rank: int,
        top_ids: Sequence[int],
        top_logprobs: Sequence[float],
    ) -> dict[int, Logprob]:
        """Log-probabilities at one position: the token itself first, then the requested number of most likely ones."""
        entries = {token_id: self.entry(params, token_id, logprob, rank)}
        for top_rank, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
            if top_id != token_id:
                entries[top_id] = self.entry(params, top_id, value, top_rank)
        return entries

    def entry(self, params: SamplingParams, token_id: int, logprob: float, rank: int | None) -> Logprob:
        """One entry, with the text of its token if the caller wants text."""
        decoder = self._decoder if params.detokenize else None
        if decoder is None:
            return Logprob(logprob, rank)
        return Logprob(logprob, rank, decoder.token_text(token_id), decoder.token_bytes(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Text of a token in UTF-8, for a reasoning budget. Raises EngineError without a tokenizer."""
        if self._decoder is None:
            raise EngineError("a reasoning budget needs a tokenizer")
        exact = self._decoder.token_bytes(token_id)
        return self._decoder.token_text(token_id).encode() if exact is None else exact


def special_names(tokenizer: Any) -> dict[int, str]:
    """Return the name of each special token of a tokenizer, by its id. {} if the tokenizer does not show them."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {token_id: str(token) for token_id, token in added.items() if getattr(token, "special", False)}


def stop_reason(request: Request, token_id: int) -> int | None:
    """The token that stopped a request; None if it is the model's main end token."""
    main = token_id == request.eos_token_id and token_id in request.eos_token_ids
    return None if main else token_id


def append_last_text(text: AnswerText, token_id: int, *, omit: bool) -> str | None:
    """Append the text of the token that ends the answer. Returns the stop string that it completes.

    omit: the token has no text, because it stops the answer.
    """
    if omit:
        text.add_without_text(token_id)
        return text.end()
    found = text.add(token_id)
    return text.end() if found is None else found
