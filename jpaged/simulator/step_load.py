"""StepLoad: the few numbers that predict the time of a step, computed from its plan alone."""

import dataclasses

import numpy as np

from jpaged.engine.step_plan import BlockMove, StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of an engine's scheduler, KV pool and programs."""

    num_blocks: int              # blocks of the KV pool
    block_size: int              # tokens in a block
    max_num_seqs: int            # rows of the request table
    max_num_batched_tokens: int  # maximum tokens in a step
    max_model_len: int           # maximum tokens of a request
    windows: tuple[int | None, ...] = (None,)  # window of each KV group; None: attention to all earlier tokens
    # Decode-only steps are padded to a row bucket, other steps to all rows and a token bucket. Empty: no padding.
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    block_bytes: int | None = None  # bytes of a block's keys and values on one device; None: unknown
    num_devices: int = 1            # devices of the engine
    num_layers: int | None = None   # None: unknown
    hidden_bytes: int | None = None  # bytes of a token's hidden state; None: unknown

    def resized(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> "EngineShape":
        """Return the shape with other limits. Its buckets end at the new limits, as in `LLM`."""
        return dataclasses.replace(
            self,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            row_buckets=_ending_at(self.row_buckets, max_num_seqs),
            token_buckets=_ending_at(self.token_buckets, max_num_batched_tokens),
        )


def _ending_at(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the buckets up to `most`. Above the last given bucket, each is twice the one before."""
    if not buckets:
        return ()
    kept = [bucket for bucket in buckets if bucket < most]
    while buckets[-1] < most and kept[-1] * 2 < most:
        kept.append(kept[-1] * 2)
    return (*kept, most)


@dataclasses.dataclass(frozen=True, slots=True)
class StepLoad:
    """Work of one step. Tokens and rows include the padding of its program."""

    tokens: float        # tokens computed
    rows: float          # rows of the step; each may sample
    kv_tokens: float     # KV read, in tokens: sum of the rows' contexts, averaged over KV groups
    prompt_pairs: float  # (query, key) pairs of prompt rows, which the time of their attention grows with
    moved_blocks: float  # blocks moved to or from the host; without forks there are no copies on the device


FEATURES = tuple(field.name for field in dataclasses.fields(StepLoad))


class LoadMeter:
    """Computes the load of each plan of one engine. It must see every plan, from the first on."""

    def __init__(self, shape: EngineShape):
        self._lengths = np.zeros(shape.max_num_seqs, np.int64)  # tokens in each row's KV
        self._windows = shape.windows
        self._sees_all = all(window is None for window in shape.windows)
        self._most_rows, self._most_tokens = shape.max_num_seqs, shape.max_num_batched_tokens
        self._row_buckets = shape.row_buckets
        self._token_buckets = shape.token_buckets

    def measure(self, plan: StepPlan, rows: np.ndarray) -> StepLoad:
        """Return the load of the next plan. Call it once per plan, in order. rows: `plan.rows` as intp[R]."""
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
        # Few rows compute prompts, so a Python loop is faster than numpy.
        for row, chunk in zip(rows[decodes:].tolist(), plan.num_tokens[decodes:].tolist(), strict=True):
            end = int(lengths[row]) + chunk
            lengths[row] = end
            tokens += chunk
            pairs += chunk * end - chunk * (chunk - 1) // 2  # token i of the chunk sees end - chunk + i + 1 keys
            read += sum(end if window is None else min(window, end) for window in self._windows) / len(self._windows)
        padded = self._most_rows if self._token_buckets else count
        return StepLoad(_next(self._token_buckets, tokens), padded, read, pairs, _num_transfers(plan))

    def whole_step(self) -> StepLoad:
        """Return the load of a step with the maximum of tokens and no attention, for the cost of a token."""
        return StepLoad(self._most_tokens, self._most_rows if self._token_buckets else 1, 0, 0, 0)

    def _read(self, contexts: np.ndarray) -> float:
        if self._sees_all:
            return float(contexts.sum())
        seen = (contexts if window is None else np.minimum(contexts, window) for window in self._windows)
        return float(sum(int(part.sum()) for part in seen)) / len(self._windows)


def _num_transfers(plan: StepPlan) -> int:
    return int(np.isin(plan.moves[:, 0], (BlockMove.TO_HOST, BlockMove.TO_DEVICE)).sum()) if len(plan.moves) else 0


def _next(buckets: tuple[int, ...], count: int) -> int:
    return next((bucket for bucket in buckets if bucket >= count), count)
