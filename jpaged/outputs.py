"""Results of requests, one `RequestOutput` per prompt, and the engine's statistics."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jpaged.parsers.answer import ParsedAnswer

WeightVersion = int | str  # the caller's label of an update of the weights, or the number of updates so far


@dataclasses.dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Result of `update_weights`."""

    version: WeightVersion
    num_leaves: int        # arrays, or quantised matrices, of the model
    num_by_reference: int  # leaves that are the caller's own buffers
    copied_bytes: int      # of all other leaves
    seconds: float         # during which no step ran


def joined_updates(updates: Sequence[WeightUpdate]) -> WeightUpdate:
    """The update of several engines, in order. All but the first engine get the first one's arrays, or copies."""
    copied, seconds = sum(update.copied_bytes for update in updates), max(update.seconds for update in updates)
    return dataclasses.replace(updates[0], copied_bytes=copied, seconds=seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability. `EngineConfig.logprobs_mode` names the distribution."""

    logprob: float             # natural logarithm
    rank: int | None = None    # 1 = most likely
    decoded_token: str | None = None  # None without detokenisation; an incomplete character is U+FFFD
    token_bytes: bytes | None = None  # the token's exact bytes; None if the tokenizer does not provide them

    def without_rank(self) -> "Logprob":
        """Return a copy without the rank."""
        return dataclasses.replace(self, rank=None)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The ids from which each token of an answer was drawn: those that the masks and filters of its request kept.

    A trainer that normalises its logits, divided by the temperature, over these ids has the distribution of the draw.
    """

    token_ids: list[np.ndarray]  # int32[kept ids] for each token, ascending; the token's own id is among them

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids as int32[K], and int32[tokens + 1]: the ids of token i are ids[offsets[i] : offsets[i + 1]]."""
        offsets = np.cumsum([0, *map(len, self.token_ids)], dtype=np.int32)
        return np.concatenate([np.zeros(0, np.int32), *self.token_ids]), offsets

    def padded(self, width: int, *, fill: int = -1) -> np.ndarray:
        """int32[tokens, width]: the ids of each token, then `fill`. Raises ValueError if a token has more ids."""
        most = max(map(len, self.token_ids), default=0)
        if most > width:
            raise ValueError(f"width={width}: a token has {most:,} ids. Use a larger width, or a smaller top_k")
        padded = np.full((len(self.token_ids), width), fill, np.int32)
        for row, ids in zip(padded, self.token_ids, strict=True):
            row[: len(ids)] = ids
        return padded

    def dense(self, vocab_size: int) -> np.ndarray:
        """bool[tokens, vocab_size]: True for the ids. Raises ValueError if an id is not below `vocab_size`."""
        largest = max((int(ids[-1]) for ids in self.token_ids if len(ids)), default=-1)
        if largest >= vocab_size:
            raise ValueError(f"vocab_size={vocab_size}: the mask has the id {largest:,}. Use the model's vocab_size")
        kept = np.zeros((len(self.token_ids), vocab_size), bool)
        for row, ids in zip(kept, self.token_ids, strict=True):
            row[ids] = True
        return kept


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt: everything generated so far.

    finish_reason: None while it runs, then 'stop', 'length', 'repetition', 'abort', or 'error'. 'error' means that its
                   text, its grammar or the model's logits failed.
    stop_reason:   the string of `stop`, or the id of `stop_token_ids`, that ended the answer. None at the model's own
                   end-of-sequence id and at a grammar's end. The error, if the grammar or the logits failed.
    logprobs:      one dict per token, from token id to Logprob: the token itself, and the requested most likely tokens.
    text_offsets:  with logprobs: number of characters of the answer before each token. A token that begins inside a
                   character has that character's offset. A stop string counts even if the text omits it.
    special_offsets: with skip_special_tokens=False: index in the answer's text of the name of each special token. The
                   same characters elsewhere are other tokens: the model has spelled the name.
    message:       from `LLM.chat` with tools or a reasoning parser: the text as content, reasoning and tool calls.
    weight_version: version of the weights that computed the last token (`LLM.update_weights`); 0: those of the start.
    weight_changes: (index of the first token of the answer that these weights computed, their version), in order. The
                   first index is 0.
    routed_experts: int32[prompt and answer - 1, layers with experts, top_k], of a finished answer: the experts of each
                    token but the last, which no layer has seen. See `SamplingParams.return_routed_experts`.
    sampling_mask: the ids from which each token was drawn; see `SamplingParams.return_sampling_mask`.
    With output_kind DELTA, text, token_ids, logprobs, text_offsets, special_offsets and sampling_mask have only the new
    part.
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
    weight_version: WeightVersion = 0
    weight_changes: tuple[tuple[int, WeightVersion], ...] = ((0, 0),)
    sampling_mask: SamplingMask | None = None
    routed_experts: np.ndarray | None = None
    special_offsets: list[int] | None = None

    def finished(self) -> bool:
        """Return True if the answer is complete."""
        return self.finish_reason is not None

    def followed_by(self, later: "CompletionOutput") -> "CompletionOutput":
        """Join this output with the next one of the same answer, both with output_kind DELTA."""
        mask = later.sampling_mask
        if mask is not None and self.sampling_mask is not None:
            mask = SamplingMask(self.sampling_mask.token_ids + mask.token_ids)
        return dataclasses.replace(
            later,
            sampling_mask=mask,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=_joined(self.logprobs, later.logprobs),
            text_offsets=_joined(self.text_offsets, later.text_offsets),
            special_offsets=_joined(self.special_offsets, later.special_offsets),
        )


def _joined(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    return second if first is None or second is None else first + second


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of `time.monotonic()`; None until the event has happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    # Speculative decoding: sums over all answers to the prompt.
    num_draft_tokens: int = 0     # drafts that steps have checked
    num_accepted_tokens: int = 0  # drafts among them that became tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's arrival to its first token on the host; None before that."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers so far.

    num_cached_tokens: prompt tokens that a prefix hit saved computing.
    prompt_logprobs:   if requested, one entry per prompt token, like `CompletionOutput.logprobs`; None for the first.
    score:             only inside of `LLM.score`.
    """

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    score: "ScoreOutput | None" = None

    def followed_by(self, later: "RequestOutput") -> "RequestOutput":
        """Join this output with the next one, both with output_kind DELTA. Used if this one was not read in time."""
        answers = {answer.index: answer for answer in self.outputs}
        for answer in later.outputs:
            before = answers.get(answer.index)
            answers[answer.index] = answer if before is None else before.followed_by(answer)
        return dataclasses.replace(later, outputs=[answers[index] for index in sorted(answers)])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScoreOutput:
    """How likely the tokens of a text are, each given all tokens before it."""

    prompt_token_ids: list[int]  # the whole text
    num_prompt_tokens: int       # the scored tokens are prompt_token_ids[num_prompt_tokens:]
    logprobs: np.ndarray         # float32[scored tokens]  see `EngineConfig.logprobs_mode`
    ranks: np.ndarray            # int32[scored tokens]    1 = the most likely token

    @property
    def cumulative_logprob(self) -> float:
        """Log-probability of all scored tokens, given the tokens before them."""
        return float(self.logprobs.sum(dtype=np.float64))


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclasses.dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A classifier's result: one number per label, in the order of the checkpoint's id2label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well a document fits a query."""

    score: float  # of a cross-encoder: its probability; of an embedding model: the cosine of two embeddings


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenPoolingOutput:
    """A vector for each token of the prompt: an embedding, or one number per label."""

    data: np.ndarray  # float32[tokens, size]


PooledT = TypeVar("PooledT")


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """A prompt and the result of a pooling model."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    # EmbeddingOutput, ClassificationOutput, ScoringOutput or TokenPoolingOutput; None: aborted, or see `error`
    outputs: PooledT
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # prompt tokens that a prefix hit saved computing
    weight_version: WeightVersion = 0  # version of the weights that computed the last token
    error: str | None = None    # why the prompt has no result, for example numbers that are not finite


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Statistics of speculative decoding. Counters start at zero, also after `reset_stats()`."""

    num_speculative_tokens: int  # most drafts of a row in a step
    drafts: int                  # rows with drafts, summed over steps
    draft_tokens: int            # drafts that steps have checked
    accepted_tokens: int         # drafts that became tokens
    accepted_per_position: tuple[int, ...]  # accepted_tokens by position in the row's drafts
    drafts_per_row: float        # chosen number of drafts per decode: mean over about the last 20 steps with decodes

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the drafts that became tokens. 0 without drafts."""
        return self.accepted_tokens / max(self.draft_tokens, 1)

    @property
    def tokens_per_draft(self) -> float:
        """Mean number of tokens that a row with drafts gets from a step: the accepted ones, and one more."""
        return 1 + self.accepted_tokens / max(self.drafts, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of one engine. Counters and the peak start at zero, also after `reset_stats()`."""

    num_blocks: int            # blocks of the KV pool
    block_size: int            # tokens per block
    used_blocks: int           # blocks that requests own now; a shared block counts once
    peak_used_blocks: int      # maximum of used_blocks
    num_running: int           # requests that own a row now
    num_waiting: int           # requests that wait for a row now, or for a slot of their LoRA adapter
    steps: int                 # steps dispatched
    prompt_tokens: int         # prompt tokens of started requests
    prefix_hit_tokens: int     # prompt tokens whose KV was found in the prefix index
    generated_tokens: int      # tokens sampled and kept
    finished_requests: int     # requests that ended, for any reason
    preemptions: int           # times that a running request lost its row and blocks
    recomputed_tokens: int     # tokens computed again after a preemption
    kv_waste: float            # fraction of empty slots in the running requests' blocks, averaged over steps
    compiles_after_ready: int  # programs compiled after the engine was ready; not 0 is a bug
    copied_blocks: int = 0     # shared blocks copied before a write (copy on write)
    blocks_to_host: int = 0    # blocks copied to the host tier
    blocks_to_device: int = 0  # blocks copied back from the host tier
    host_slots: int = 0        # capacity of the host tier, in blocks
    used_host_slots: int = 0   # blocks in the host tier now
    free_host_slots: int = 0   # blocks that fit into it besides. Snapshots share its bytes
    used_host_snapshots: int = 0  # snapshots of recurrent state in the host tier now
    snapshots_to_host: int = 0    # snapshots copied to the host tier
    snapshots_to_device: int = 0  # snapshots copied back from the host tier
    empty_turns: int = 0       # turns of the pipeline stages without a step: bubbles
    # With enable_expert_parallel: (token, expert) pairs on all devices, and on each layer's busiest device. The load is
    # even if expert_pairs / devices = busiest_expert_pairs. Layers of earlier pipeline stages do not count.
    expert_pairs: int = 0
    busiest_expert_pairs: int = 0
    num_waiting_for_adapters: int = 0  # requests of num_waiting whose LoRA adapter has no slot
    adapter_loads: int = 0     # LoRA adapters written into slots of the device
    speculation: SpeculationStats | None = None  # None: the engine does not speculate
