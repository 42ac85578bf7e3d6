"""Turns the engine's outputs, which have no text, into outputs with text: of one request.

Called by: `RemoteEngine`, on the event loop of a front end.
Owns: the text of the answers, and their tokens so far if the caller wants whole answers.
Never: talks to the engine. `stopped` has the answers that a stop string has ended.

The text and the ends are those of `AnswerWriter`, which does the same within the engine.
"""

import dataclasses

from jpaged.engine.output.answer_text import AnswerText
from jpaged.engine.output.answer_writer import AnswerWriter, append_last_text
from jpaged.engine.request import changes_within
from jpaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingMask
from jpaged.params.sampling import RequestOutputKind, SamplingParams

ENDS_BY_A_TOKEN = ("stop", "length", "repetition")  # then the last token ends the text


@dataclasses.dataclass(slots=True)
class _Answer:
    """An answer so far. Its lists are kept for whole answers only.

    stop: string that has ended the answer, until the engine's final output comes and the caller learns of it.
    """

    text: AnswerText | None
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop: str | None = None
    whole: CompletionOutput | None = None  # without its text

    def extend(self, new: CompletionOutput) -> None:
        """Append a new part to `whole`."""
        if (whole := self.whole) is None:
            self.whole = new
            return
        whole.token_ids += new.token_ids
        if whole.logprobs is not None and new.logprobs is not None:
            whole.logprobs += new.logprobs
        if whole.text_offsets is not None and new.text_offsets is not None:
            whole.text_offsets += new.text_offsets
        if whole.sampling_mask is not None and new.sampling_mask is not None:
            whole.sampling_mask.token_ids.extend(new.sampling_mask.token_ids)
        whole.cumulative_logprob = new.cumulative_logprob
        whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
        whole.weight_version, whole.weight_changes = new.weight_version, new.weight_changes

    def copy(self) -> CompletionOutput:
        """The whole answer so far, which later tokens do not change."""
        assert self.whole is not None
        whole = dataclasses.replace(self.whole, text="" if self.text is None else self.text.whole())
        whole.token_ids = list(whole.token_ids)
        whole.logprobs = None if whole.logprobs is None else list(whole.logprobs)
        whole.text_offsets = None if whole.text_offsets is None else list(whole.text_offsets)
        whole.special_offsets = None if self.text is None else self.text.special_offsets(new=False)
        return whole


class RequestTexts:
    """Text of one request's answers.

    stopped: (index, number of tokens) of answers that a stop string has ended, for the caller to take.
    """

    def __init__(
        self, writer: AnswerWriter, params: SamplingParams, request_id: str, prompt: str | None,
        prompt_token_ids: list[int], end_token_ids: frozenset[int], metrics: RequestMetrics,
    ):  # fmt: skip
        """params: what the caller asked for. end_token_ids: the model's."""
        self.stopped: list[tuple[int, int]] = []
        self._writer, self._params = writer, params
        self._request_id, self._prompt, self._prompt_token_ids = request_id, prompt, prompt_token_ids
        own = frozenset(params.stop_token_ids or ())
        self._stop_ids = own if params.ignore_eos else end_token_ids | own
        self._include = params.include_stop_str_in_output
        self._metrics = metrics
        self._deltas = params.output_kind is RequestOutputKind.DELTA
        self._answers = [_Answer(writer.new_text(params, prompt_token_ids)) for _ in range(params.n)]

    def tokens(self, token_ids: list[int]) -> RequestOutput | None:
        """The output for new tokens of a plain stream, which has one answer. None if there is nothing to tell."""
        answer = self._answers[0]
        if answer.finish_reason is not None:
            return None
        new, text = CompletionOutput(0, "", token_ids, None, None), answer.text
        found = None if text is None else self._append(text, new)
        if found is not None:
            new.token_ids = token_ids[: found[0]]
        answer.num_tokens += len(new.token_ids)
        if text is not None:
            if found is not None:  # the engine's final output follows, which has the versions of the weights
                text.end()
                answer.finish_reason, answer.stop = "stop", found[1]
                self.stopped.append((0, answer.num_tokens))
            if self._deltas:
                new.text, new.special_offsets = text.new(), text.special_offsets(new=True)
        if not self._deltas:
            answer.extend(new)
            if self._params.output_kind is RequestOutputKind.FINAL_ONLY:
                return None
            new = answer.copy()
        return self._output([new], finished=False)

    def output(self, output: RequestOutput) -> RequestOutput | None:
        """The output with text, for one of the engine without. None if there is nothing to tell."""
        self._metrics = output.metrics
        completions = [made for each in output.outputs if (made := self._add(each)) is not None]
        if not self._deltas:
            if not output.finished and self._params.output_kind is RequestOutputKind.FINAL_ONLY:
                return None
            completions = [each.copy() for each in self._answers if each.whole is not None]
        if not (completions or output.finished):
            return None
        made = self._output(completions, finished=output.finished)
        made.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            made.prompt_logprobs = [each and self._decoded(each) for each in output.prompt_logprobs]
        return made

    def _add(self, new: CompletionOutput) -> CompletionOutput | None:
        """Add the new part of an answer. Returns it with its text; None if its text has ended before."""
        answer = self._answers[new.index]
        if answer.finish_reason is not None:
            return self._stopped(answer, new)
        text, first = answer.text, answer.num_tokens
        if text is not None and (stop := self._append(text, new)) is not None:
            position, found = stop
            _cut(new, position, first)
            answer.num_tokens = first + position
            self._end(answer, new, found)
        answer.num_tokens = first + len(new.token_ids)
        answer.finish_reason = new.finish_reason
        if text is not None:
            if new.finish_reason is not None and new.finish_reason != "error":
                text.end()
            if self._deltas:
                new.text, new.special_offsets = text.new(), text.special_offsets(new=True)
            new.text_offsets = None if text.offsets is None else text.offsets[first : answer.num_tokens]
        if new.logprobs is not None:
            for token_id, entries in zip(new.token_ids, new.logprobs, strict=True):
                answer.cumulative_logprob += entries[token_id].logprob
            new.cumulative_logprob = answer.cumulative_logprob
            new.logprobs = [self._decoded(entries) for entries in new.logprobs]
        if not self._deltas:
            answer.extend(new)
        return new

    def _stopped(self, answer: _Answer, new: CompletionOutput) -> CompletionOutput | None:
        """The end of an answer that a stop string has ended before. None if the caller knows of it."""
        if answer.stop is None:
            return None
        _cut(new, 0, answer.num_tokens)
        new.finish_reason, new.stop_reason, answer.stop = "stop", answer.stop, None
        if self._deltas and answer.text is not None:
            new.special_offsets = answer.text.special_offsets(new=True)
        if not self._deltas:
            answer.extend(new)
        return new

    def _append(self, text: AnswerText, new: CompletionOutput) -> tuple[int, str] | None:
        """Append tokens to the text. Returns (number of tokens, stop string) if one ends it."""
        last = len(new.token_ids) if new.finish_reason in ENDS_BY_A_TOKEN else 0
        for position, token_id in enumerate(new.token_ids, 1):
            if position == last:
                found = append_last_text(text, token_id, omit=token_id in self._stop_ids and not self._include)
            else:
                found = text.add(token_id)
            if found is not None:
                return position, found
        return None

    def _end(self, answer: _Answer, new: CompletionOutput, stop: str) -> None:
        """End an answer by a stop string. The engine must hear of it, unless the answer has ended there too."""
        if new.finish_reason is None:
            self.stopped.append((new.index, answer.num_tokens))
        new.finish_reason, new.stop_reason = "stop", stop
        answer.finish_reason = "stop"

    def _output(self, completions: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        return RequestOutput(
            self._request_id, self._prompt, self._prompt_token_ids, completions, finished, self._metrics
        )

    def _decoded(self, entries: dict[int, Logprob]) -> dict[int, Logprob]:
        """Log-probabilities with the text of their tokens."""
        entry = self._writer.entry
        return {token_id: entry(self._params, token_id, each.logprob, each.rank) for token_id, each in entries.items()}


def _cut(new: CompletionOutput, count: int, first: int) -> None:
    """Keep `count` tokens of the new part of an answer. first: tokens of the answer before it."""
    new.token_ids = new.token_ids[:count]
    if new.logprobs is not None:
        new.logprobs = new.logprobs[:count]
    if new.sampling_mask is not None:
        new.sampling_mask = SamplingMask(new.sampling_mask.token_ids[:count])
    new.weight_changes = changes_within(new.weight_changes, first + count)
    new.weight_version = new.weight_changes[-1][1]
