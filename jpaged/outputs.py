"""What a caller gets back: one RequestOutput a prompt, and the engine's own figures."""

import dataclasses
from typing import Any, Generic, TypeVar

from jpaged.answers.answer import ParsedAnswer


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token's place in the model's own distribution, before temperature and filters."""

    logprob: float             # natural logarithm
    rank: int | None = None    # 1 = most likely
    decoded_token: str | None = None  # None where the request does not detokenise; half a character is U+FFFD
    token_bytes: bytes | None = None  # what it stands for, exactly; None where the tokenizer does not tell


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt, as far as it has come.

    finish_reason: None while it runs, then 'stop', 'length', 'repetition', 'abort', or 'error': its text or its grammar
                   could not be gone on with.
    stop_reason:   the string out of `stop`, or the id out of `stop_token_ids`, that ended it; None at the model's own
                   end-of-sequence id and at a grammar's end. Of an error that the request's grammar made: what it is.
    logprobs:      one dict a token, from token id to Logprob: the most likely ones asked for, and the token itself.
    text_offsets:  with logprobs: characters of the answer before each token. One that begins inside of a character has
                   that character's; those of a stop string that is cut off, as if it were there.
    With output_kind DELTA, text, token_ids, logprobs and text_offsets hold what is new.
    message:       of `LLM.chat` with tools or a reasoning parser: the text as content, reasoning and tool calls.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] | None = None
    message: ParsedAnswer | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def followed_by(self, later: "CompletionOutput") -> "CompletionOutput":
        """This and a later one of the same answer, both with output_kind DELTA, as one."""
        return dataclasses.replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=_joined(self.logprobs, later.logprobs),
            text_offsets=_joined(self.text_offsets, later.text_offsets),
        )


def _joined(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    return second if first is None or second is None else first + second


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request: seconds on the clock of `time.monotonic()`, None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token's arrival on the host."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers so far. `num_cached_tokens` of the prompt were not computed: a prefix hit.

    prompt_logprobs: where they were asked for one entry a token of the prompt, as `CompletionOutput.logprobs`; None for
                     the first, which nothing predicts.
    """

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def followed_by(self, later: "RequestOutput") -> "RequestOutput":
        """This and a later one, both with output_kind DELTA, as one: for a reader who was not there for this one."""
        answers = {answer.index: answer for answer in self.outputs}
        for answer in later.outputs:
            before = answers.get(answer.index)
            answers[answer.index] = answer if before is None else before.followed_by(answer)
        return dataclasses.replace(later, outputs=[answers[index] for index in sorted(answers)])


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How likely the model finds a text: of each token but the first, behind all tokens before it."""

    prompt_token_ids: list[int]
    logprobs: list[float]  # natural logarithms, of prompt_token_ids[1:]
    ranks: list[int]       # 1 = the model's own choice

    @property
    def cumulative_logprob(self) -> float:
        """Of the whole text behind its first token."""
        return sum(self.logprobs)


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its numbers."""
        return len(self.embedding)


@dataclasses.dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What a classifier says: one number a label, in the order of the checkpoint's id2label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Labels."""
        return len(self.probs)


PooledT = TypeVar("PooledT")


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """A prompt and what was made of its last hidden state. `num_cached_tokens` of it were not computed."""

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: PooledT    # EmbeddingOutput or ClassificationOutput; the engine gives None for a request that was aborted
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of one engine. Counters and the peak count from start or from the last `reset_stats()`."""

    num_blocks: int            # blocks of the KV pool
    block_size: int            # tokens in one of them
    used_blocks: int           # blocks that running requests hold now; a shared one counts once
    peak_used_blocks: int      # the most that it was
    num_running: int           # requests that hold a row now
    num_waiting: int           # requests that wait for one now
    steps: int                 # steps dispatched
    prompt_tokens: int         # prompt tokens of requests that were started
    prefix_hit_tokens: int     # of these, tokens whose KV was there already
    generated_tokens: int      # tokens sampled and kept
    finished_requests: int     # requests that ended, in whatever way
    preemptions: int           # times a running request gave its blocks back: for an older one, or to be computed anew
    recomputed_tokens: int     # tokens computed once more because of that
    kv_waste: float            # slots of running requests' blocks that hold no token: a share, averaged over steps
    compiles_after_ready: int  # programs compiled after ready: 0, or something is wrong
    copied_blocks: int = 0     # copy-on-write: blocks that were shared with a fork and written to
    blocks_to_host: int = 0    # blocks whose content went to the host tier
    blocks_to_device: int = 0  # blocks whose content came back from there
    host_slots: int = 0        # blocks that the host tier has room for
    used_host_slots: int = 0   # blocks that are there now
