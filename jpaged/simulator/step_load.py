"""What a step asks of a device, as the few numbers that its time depends on; read off the step's plan alone."""

import dataclasses

import numpy as np

from jpaged.engine.step_plan import BlockMove, StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of an engine: what its scheduler and its KV pool are made from, and its programs."""

    num_blocks: int              # blocks of the KV pool
    block_size: int              # tokens in one
    max_num_seqs: int            # rows of the request table
    max_num_batched_tokens: int  # most tokens in a step
    max_model_len: int           # most tokens of a request
    windows: tuple[int | None, ...] = (None,)  # one a group of layers: how far it sees, None = to the beginning
    # Rows of the programs for steps that only decode, and tokens of those for the others (which have all rows): a
    # step is padded to the next. None: nothing is padded.
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    block_bytes: int | None = None  # of one block's keys and values; None where nobody has said

    def resized(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> "EngineShape":
        """The same engine with another table and another budget; its buckets end there, as `LLM`'s do."""
        return dataclasses.replace(
            self,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            row_buckets=_ending_at(self.row_buckets, max_num_seqs),
            token_buckets=_ending_at(self.token_buckets, max_num_batched_tokens),
        )


def _ending_at(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Buckets up to `most`; beyond those there were, each is twice the one before."""
    if not buckets:
        return ()
    kept = [bucket for bucket in buckets if bucket < most]
    while buckets[-1] < most and kept[-1] * 2 < most:
        kept.append(kept[-1] * 2)
    return (*kept, most)


@dataclasses.dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computes and reads. Tokens and rows are those of its program, padding included."""

    tokens: float        # tokens computed
    rows: float          # rows, of which each may sample
    kv_tokens: float     # tokens of KV read: the sum of the rows' contexts, averaged over groups of layers
    prompt_pairs: float  # (query, key) pairs of rows that compute prompt tokens: a chunk's attention grows with these
    moved_blocks: float  # blocks moved to the host or back; copies on the device are for forks, which no load here has


FEATURES = tuple(field.name for field in dataclasses.fields(StepLoad))


class LoadMeter:
    """Follows the plans of one engine from its first on, and says what each of them asks of the device."""

    def __init__(self, shape: EngineShape):
        self._lengths = np.zeros(shape.max_num_seqs, np.int64)  # tokens in each row's KV
        self._windows = shape.windows
        self._sees_all = all(window is None for window in shape.windows)
        self._most_rows, self._most_tokens = shape.max_num_seqs, shape.max_num_batched_tokens
        self._row_buckets = shape.row_buckets
        self._token_buckets = shape.token_buckets

    def measure(self, plan: StepPlan, rows: np.ndarray) -> StepLoad:
        """The load of the next plan. Each plan is to be measured once, in order. rows: intp[R], the plan's."""
        lengths, decodes = self._lengths, plan.num_decodes
        decoding = rows[:decodes]
        contexts = lengths[decoding]
        contexts += 1
        lengths[decoding] = contexts
        read = self._read(contexts)
        count = len(rows)
        if count == decodes:
            padded = _next(self._row_buckets, count)
            return StepLoad(padded, padded, read, 0, _num_transfers(plan))
        for init in plan.row_inits:
            lengths[init.row] = init.num_computed
        tokens, pairs = decodes, 0
        # Rows that compute prompts are few: numpy would cost more than it saves.
        for row, chunk in zip(rows[decodes:].tolist(), plan.num_tokens[decodes:].tolist(), strict=True):
            end = int(lengths[row]) + chunk
            lengths[row] = end
            tokens += chunk
            pairs += chunk * end - chunk * (chunk - 1) // 2  # its tokens see 1, 2, ... keys more than what was there
            read += sum(end if window is None else min(window, end) for window in self._windows) / len(self._windows)
        padded = self._most_rows if self._token_buckets else count
        return StepLoad(_next(self._token_buckets, tokens), padded, read, pairs, _num_transfers(plan))

    def whole_step(self) -> StepLoad:
        """A step of as many tokens as there may be, without the attention to anything: what a token costs."""
        return StepLoad(self._most_tokens, self._most_rows if self._token_buckets else 1, 0, 0, 0)

    def _read(self, contexts: np.ndarray) -> float:
        if self._sees_all:
            return float(contexts.sum())
        seen = (contexts if window is None else np.minimum(contexts, window) for window in self._windows)
        return float(sum(int(part.sum()) for part in seen)) / len(self._windows)


def _num_transfers(plan: StepPlan) -> int:
    return int(np.count_nonzero(plan.moves[:, 0] != BlockMove.COPY)) if len(plan.moves) else 0


def _next(buckets: tuple[int, ...], count: int) -> int:
    return next((bucket for bucket in buckets if bucket >= count), count)
