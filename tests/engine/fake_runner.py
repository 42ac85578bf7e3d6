"""A runner in plain Python. Its "model" notices every wrong block, stale page and misplaced token.

State is stored as in the real runner: in pages, and in a request table that rows, block updates and sampled tokens are
written to.

1. A slot stores a token id instead of KV, and the kv_group and position that it was written for.
2. The next token is a hash of all tokens that each kv_group sees, read through the row's block tables. It is right only
   if each slot was written by the right request and was not overwritten since.
3. Tokens that only the first token of a chunk sees are compared with the tokens that the row was given.
4. A slot also stores everything else that its KV depends on. This is the salt of its request, the rope, and the oldest
   weights that it depends on, directly or through the slots that it attended to.
5. A verify step writes its drafts into the pages like any token. The slots of rejected drafts become GARBAGE, which no
   later token may see.
6. An adapter is a number, which changes every token of the model. A row reads it in its slot when it computes.
7. With `recurrent_sizes`, a slot of recurrent state has the tokens that it was computed from, their salt, and the
   oldest weights. A row's state must have all tokens before those that the row computes, as the pages have. A verify
   step adds the kept tokens to it when it samples. Host slots store states, too, and the host's bytes are counted.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jpaged.engine.step_plan import (
    EVERYTHING,
    NO_ADAPTER,
    NOTHING_ALLOWED,
    BlockMove,
    RecurrentSizes,
    ReplacedLeaves,
    RowInit,
    RowMask,
    SamplerVariant,
    Scores,
    StepPlan,
    StepResult,
    TextShape,
    TransferCosts,
    num_guesses,
)
from jpaged.metrics import ProgramMetrics

UNWRITTEN = -1
UNSAMPLED = -9
GARBAGE = 10**6  # a rejected draft, and what a verify step computes where no draft is known


State: TypeAlias = tuple[tuple[int, ...], str, int]  # tokens, salt of the request, number of the oldest weights
LOST: State = ((UNWRITTEN,), "", UNWRITTEN)


class DeviceFailure(RuntimeError):
    """Raised by a failing device."""


@dataclasses.dataclass
class FakeHandle:
    """A dispatched step. Its result exists at once, but only `collect` may read it."""

    number: int
    result: StepResult | None  # None: the step waits for masks
    plan: StepPlan
    # tokens that the rows would sample without masks; in a verify step an entry per token
    tokens: np.ndarray
    computed: list[list[int]]  # tokens that each row has computed


@dataclasses.dataclass
class FakeRunner:
    """See `jpaged.engine.step_plan.Runner`.

    fail_at: calls that raise, as ("dispatch", "sample" or "collect", number of the step).
    """

    num_blocks: int = 64
    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    num_stages: int = 1
    vocab_size: int = 97
    max_logprobs: int = 3
    logprobs_mode: str = "raw_logprobs"
    returns_sampling_mask: bool = False
    returns_routed_experts: bool = False
    compiles_after_ready: int = 0
    is_ready: bool = True
    cacheable_up_to: int = 10**9
    text_shapes: Sequence[TextShape] = ()
    longrope_switch_len: int | None = None
    host_slots: int = 0
    transfer_costs: TransferCosts | None = None
    min_jump_per_request: float = 0.0
    max_drafts: int = 0
    num_adapter_slots: int = 0
    recurrent_sizes: RecurrentSizes | None = None
    verify_sizes: tuple[int, ...] = ()
    decode_sizes: tuple[int, ...] = (4,)
    device_drafter: None = None
    fail_at: frozenset[tuple[str, int]] = frozenset()
    weights: int = 0                                 # number of the weights that it has
    head: int = 0                                    # the same of the programs that sample
    problem: str | None = None                       # with the weights
    weighs: bool = False                             # other weights sample other tokens
    oldest_kv: int = 0                               # number of the oldest weights that tokens may depend on
    salt_of: Callable[[int], str] = lambda row: ""   # row -> salt of its request
    owner_of: Callable[[int], object] = lambda row: None  # row -> its request and how often that started; None: unknown

    def __post_init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.closed = False
        self.released = False
        self.profiled: str | None = None
        self._collected = 0
        width = -(-self.max_model_len // self.block_size)
        self.pages = np.full((self.num_blocks, self.block_size), UNWRITTEN)
        self.written_for = np.full((self.num_blocks, self.block_size, 2), UNWRITTEN)  # (kv_group, position)
        # written with the rope of long sequences
        self.written_long = np.zeros((self.num_blocks, self.block_size), bool)
        # oldest weights that it depends on
        self.written_with = np.zeros((self.num_blocks, self.block_size), int)
        self.written_salt = np.full((self.num_blocks, self.block_size), "", object)
        self.row_weights = np.zeros(self.max_num_seqs, int)  # oldest weights that the row's KV depends on
        self.tables = np.full((len(self.windows), self.max_num_seqs, width), -1)
        # tokens that the row was given
        self.row_tokens = np.full((self.max_num_seqs, width * self.block_size), UNWRITTEN)
        self.lengths = np.zeros(self.max_num_seqs, int)
        self.last_tokens = np.full(self.max_num_seqs, UNSAMPLED)
        self.masks: list[np.ndarray | None] = [None] * self.max_num_seqs
        self.inits: list[RowInit | None] = [None] * self.max_num_seqs
        self.owners: list[object] = [None] * self.max_num_seqs  # of the last init
        self.host: dict[int, tuple[np.ndarray, ...]] = {}  # slot -> content of the block
        self.host_states: dict[int, State] = {}            # slot -> content of the snapshot
        self.adapters: list[int | None] = [None] * self.num_adapter_slots
        sizes = self.recurrent_sizes
        self.states: list[State] = [LOST] * (0 if sizes is None else sizes.num_rows + sizes.num_snapshots)

    def program_metrics(self) -> ProgramMetrics:
        """Figures of programs that do not exist."""
        return ProgramMetrics(ready=3, missing=0, seconds=1.5, cache_hits=2, cache_misses=1)

    def dispatch(self, plan: StepPlan) -> FakeHandle:
        """Run a step, after checking that the plan keeps all promises of StepPlan."""
        number = len(self.plans)
        assert not self.released, "a step while the engine sleeps"
        assert self.problem is None, "a step without weights"
        self.plans.append(plan)
        if ("dispatch", number) in self.fail_at:
            self._fail("dispatch")
        self._check(plan)
        for kind, source, target in plan.moves.tolist():
            self._move(BlockMove(kind), source, target)
        self._check_host_bytes()
        copied = {target for kind, _, target in plan.moves.tolist() if kind == BlockMove.COPY}
        for load in plan.adapter_loads:
            self.adapters[load.slot] = load.content
        for init in plan.row_inits:
            self.inits[init.row] = init
            self.masks[init.row] = None if init.extras is None else init.extras.mask
            self.tables[:, init.row] = -1
            for kv_group, index, block in init.blocks.tolist():
                self.tables[kv_group, init.row, index] = block
            self.row_tokens[init.row] = UNWRITTEN
            self.lengths[init.row] = init.num_computed
            self.last_tokens[init.row] = UNSAMPLED
            self.row_weights[init.row] = self.weights
        for row, kv_group, index, block in plan.block_updates.tolist():
            fresh = self.tables[kv_group, row, index] == -1
            if self.max_drafts:  # the block before was for drafts that were rejected
                fresh |= index * self.block_size >= self.lengths[row]
            assert fresh or block in copied, "a block table entry is replaced by a copy only"
            self.tables[kv_group, row, index] = block
        ids = self._token_ids(plan)
        # All rows write their KV before any row attends, as in the real step.
        for row, tokens in zip(plan.rows.tolist(), ids, strict=True):
            for position, token in enumerate(tokens, start=int(self.lengths[row])):
                self.row_tokens[row, position] = token
                for kv_group, table in enumerate(self.tables[:, row]):
                    block, offset = table[position // self.block_size], position % self.block_size
                    assert block >= 0, f"row {row} has no block for position {position}"
                    self.pages[block, offset] = token
                    self.written_for[block, offset] = kv_group, position
                    self.written_long[block, offset] = self._uses_long_rope(row, position + 1)
                    self.written_with[block, offset] = self.row_weights[row]
                    self.written_salt[block, offset] = self._salt(row)
        first_fork = len(plan.rows) - len(plan.forked_from)
        before = self.lengths.copy()
        for init in plan.row_inits:  # after writing: a prefix may have been written in this very step
            self._find_weights(init, is_fork=init.row in plan.rows[first_fork:])
        for row, count in zip(plan.rows[:first_fork].tolist(), plan.num_tokens.tolist(), strict=False):
            for kv_group in range(len(self.windows)):
                self._compare_seen(row, kv_group)
            if plan.drafts is None:
                self.lengths[row] += count
        if self.states:
            for row, tokens in zip(plan.rows[:first_fork].tolist(), ids, strict=False):
                self._advance_state(row, int(before[row]), tokens if plan.drafts is None else ())
        if plan.drafts is None:
            tokens = self._attend_last(plan, first_fork)
        else:
            tokens = self._attend_all(plan)
        handle = FakeHandle(number, None, plan, tokens, ids)
        return handle if plan.waits_for_masks else self.sample(handle, ())

    def _attend_last(self, plan: StepPlan, first_fork: int) -> np.ndarray:
        """Unmasked samples after the last token of each row."""
        tokens = np.zeros(len(plan.rows), np.int32)
        sources = np.concatenate([plan.rows[:first_fork], plan.rows[plan.forked_from]])
        for index, (row, source) in enumerate(zip(plan.rows, sources, strict=True)):
            assert self.lengths[row] == self.lengths[source], "a fork of another length"
            if plan.samples[index]:
                tokens[index] = self.attend(source, row, int(self.lengths[source]))
        return tokens

    def _attend_all(self, plan: StepPlan) -> np.ndarray:
        """Unmasked samples after each token of a verify step."""
        tokens = []
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            length = int(self.lengths[row])
            tokens += [self.attend(row, row, length + i) for i in range(1, count + 1)]
        return np.array(tokens, np.int32)

    def sample(self, handle: FakeHandle, masks: Sequence[RowMask]) -> FakeHandle:
        """Sample the token of each row, or the next id that its mask allows."""
        assert handle.result is None, "sampled twice"
        plan = handle.plan
        if plan.waits_for_masks and ("sample", handle.number) in self.fail_at:
            self._fail("sample")
        if plan.drafts is not None:
            return self._sample_checked(handle, [*plan.masks, *masks])
        for mask in (*plan.masks, *masks):
            assert mask.token == 0, "a mask of a token, and no verify step"
            self.masks[mask.row] = mask.words
        tokens = handle.tokens.copy()
        for index in np.flatnonzero(plan.samples):
            row = plan.rows[index]
            tokens[index] = self.last_tokens[row] = next_allowed(tokens[index], self.masks[row], self.vocab_size)
        return dataclasses.replace(handle, result=self._result(plan, tokens))

    def _sample_checked(self, handle: FakeHandle, masks: Sequence[RowMask]) -> FakeHandle:
        """Sample after each token of a verify step. A row keeps the samples after accepted drafts."""
        plan, tokens, accepted, first = handle.plan, handle.tokens.copy(), [], 0
        of_token = {mask.token: mask for mask in masks}
        assert len(of_token) == len(masks), "two masks for a token"
        rows = np.repeat(plan.rows, plan.num_tokens)
        assert all(mask.row == rows[mask.token] for mask in masks), "the mask of another row's token"
        for row, computed in zip(plan.rows.tolist(), handle.computed, strict=True):
            count = len(computed)
            for index in range(first, first + count):
                words = of_token[index].words if index in of_token else self.masks[row]
                tokens[index] = next_allowed(tokens[index], words, self.vocab_size)
            samples = tokens[first : first + count].tolist()
            fits = [draft == sample for draft, sample in zip(computed[1:], samples, strict=False)]
            accepted.append(fits.index(False) if False in fits else len(fits))
            self.last_tokens[row] = samples[accepted[-1]]
            if self.states:
                self._keep(plan, len(accepted) - 1, computed[: accepted[-1] + 1])
            self._spoil(row, int(self.lengths[row]) + accepted[-1] + 1, int(self.lengths[row]) + count)
            self.lengths[row] += accepted[-1] + 1
            first += count
        result = dataclasses.replace(
            self._result(plan, tokens), num_accepted=np.array(accepted, np.int32)
        )
        return dataclasses.replace(handle, result=result)

    def _spoil(self, row: int, first: int, end: int) -> None:
        """Make the slots of rejected drafts GARBAGE. Their KV depends on tokens that the row does not have."""
        for position in range(first, end):
            self.row_tokens[row, position] = GARBAGE
            self.pages[self.tables[:, row, position // self.block_size], position % self.block_size] = GARBAGE

    def _keep(self, plan: StepPlan, index: int, tokens: list[int]) -> None:
        """Advance the state of row `index` of a verify step by its kept tokens, and take a snapshot of it."""
        assert plan.drafts is not None
        assert plan.drafts.snapshots is not None
        row, slot = int(plan.rows[index]), int(plan.drafts.snapshots[index])
        length, state = int(self.lengths[row]), self.states[row]
        boundary = (length + len(tokens)) // self.block_size * self.block_size
        if boundary > length and slot >= 0:
            assert slot >= self.max_num_seqs, "the slot of a row"
            self.states[slot] = (state[0] + tuple(tokens[: boundary - length]), *state[1:])
        self.states[row] = (state[0] + tuple(tokens), *state[1:])

    def _advance_state(self, row: int, length: int, tokens: Sequence[int]) -> None:
        """Compute a row's state. Before, it must be that of the row's first `length` tokens."""
        state = (tuple[int, ...](), self._salt(row), int(self.row_weights[row]))
        if length:
            state = self.states[row]
            _, seen = self.seen(row, self.windows.index(None), length)
            assert state == (tuple(seen.tolist()), self._salt(row), int(self.row_weights[row])), "another state"
        self.states[row] = (state[0] + tuple(tokens), *state[1:])

    def _move(self, kind: BlockMove, source: int, target: int) -> None:
        match kind:
            case BlockMove.STATE:
                self.states[target] = self.states[source]
                return
            case BlockMove.STATE_TO_HOST:
                assert source >= self.max_num_seqs, "the slot of a row"
                self.host_states[target] = self.states[source]
                return
            case BlockMove.STATE_TO_DEVICE:
                self.states[target] = self.host_states[source]
                return
            case BlockMove.DROP | BlockMove.DROP_STATE:
                stored: dict[int, Any] = self.host if kind is BlockMove.DROP else self.host_states
                for slot in list(stored) if source == EVERYTHING else [source]:
                    stored.pop(slot, None)
                return
        arrays = (self.pages, self.written_for, self.written_long, self.written_with, self.written_salt)
        if kind is BlockMove.TO_HOST:
            assert 0 <= target < self.host_slots
            self.host[target] = tuple(array[source].copy() for array in arrays)
            return
        content = self.host[source] if kind is BlockMove.TO_DEVICE else tuple(array[source] for array in arrays)
        for array, part in zip(arrays, content, strict=True):
            array[target] = part

    def _check_host_bytes(self) -> None:
        """The host tier stores no more bytes than it may. Without recurrent layers, only slots are counted."""
        sizes = self.recurrent_sizes
        if sizes is not None:
            used = len(self.host) * sizes.block_bytes + len(self.host_states) * sizes.slot_bytes
            assert used <= self.host_slots * sizes.block_bytes, "too many bytes on the host"

    def _find_weights(self, init: RowInit, *, is_fork: bool) -> None:
        """Check that a starting row finds only KV of the present weights.

        Forks and beams may have older KV, and requests that only upload their row again.
        """
        starts = [(block, init.num_computed - index * self.block_size) for _, index, block in init.blocks.tolist()]
        found = [self.written_with[block, :count].min() for block, count in starts if count > 0]
        oldest = min(found, default=self.weights)
        owner = self.owner_of(init.row)
        continues = owner is not None and owner == self.owners[init.row]
        self.owners[init.row] = owner
        may_be_older = is_fork or init.beam_temperature > 0 or continues
        assert oldest == self.weights or may_be_older, "finds KV of other weights"
        self.row_weights[init.row] = oldest
        for block, count in starts:
            own = self.written_with[block, max(count, 0) :]  # written in this step, or not yet
            np.minimum(own, oldest, out=own)

    def collect(self, handle: FakeHandle) -> StepResult:
        """The step's result. Checks that steps are collected once, in order."""
        assert handle.number >= self._collected, "collected twice, or out of order"
        self._collected = handle.number + 1
        if ("collect", handle.number) in self.fail_at:
            self._fail("collect")
        assert handle.result is not None, "it still waits for masks"
        return handle.result

    def proposed(self, handle: FakeHandle) -> np.ndarray:
        """There is no drafter on the device."""
        raise AssertionError

    def update_params(self, leaves: Iterable[int]) -> ReplacedLeaves:
        """Use other weights. leaves: two equal numbers, larger than all numbers before."""
        rest = iter(leaves)
        first = next(rest)  # an error that comes before it leaves the old weights
        self.problem = "half of the weights"
        (second,) = rest
        assert first == second > self.weights
        self.weights, self.head, self.problem = first, second, None
        return ReplacedLeaves(2, 0, 8)

    def weights_problem(self) -> str | None:
        """Reason why no step can run."""
        return self.problem

    def describe(self, plan: StepPlan) -> str:
        """Name the program of a plan."""
        return f"fake step {len(self.plans)}"

    def release(self, *, discard: bool = False) -> None:
        """Lose all KV. discard: the weights too."""
        assert self._collected == len(self.plans), "a step is in flight"
        self.released, self.problem = True, "no weights: call update_weights" if discard else self.problem
        self.pages[:] = UNWRITTEN
        self.states = [LOST] * len(self.states)
        self.host, self.host_states = {}, {}
        self.written_for[:] = UNWRITTEN
        self.adapters = [None] * self.num_adapter_slots

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        """Allow steps again."""
        self.released = self.released and not kv_cache

    def start_profile(self, folder: str) -> None:
        """Remember the folder."""
        self.profiled = folder

    def stop_profile(self) -> None:
        """Forget the folder."""
        self.profiled = None

    def wait_until_ready(self) -> None:
        """All programs exist."""

    def can_run(self, sampler: SamplerVariant, *, scores: bool) -> bool:
        """All programs exist."""
        return True

    def prefix_cacheable(self, prompt_len: int) -> bool:
        """Whether KV of a prompt of this length may be shared."""
        return prompt_len <= self.cacheable_up_to

    def close(self) -> None:
        """No step may be dispatched after this."""
        self.closed = True

    def _fail(self, call: str) -> None:
        self.pages[:] = UNWRITTEN  # the real runner's state was donated to the failed step, and is lost too
        self.states = [LOST] * len(self.states)
        self.adapters = [None] * self.num_adapter_slots
        self._collected = len(self.plans)  # the engine drops the steps in flight
        raise DeviceFailure(call)

    def _check(self, plan: StepPlan) -> None:
        assert not self.closed
        rows = plan.rows.tolist()
        assert 0 < len(rows) <= self.max_num_seqs
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_num_seqs for row in rows)
        assert 0 < plan.total_tokens <= self.max_num_batched_tokens
        forks = len(plan.forked_from)
        assert (plan.num_tokens[: len(rows) - forks] > 0).all()
        assert (plan.num_tokens[len(rows) - forks :] == 0).all()
        assert plan.samples[len(rows) - forks :].all()
        assert plan.samples[plan.forked_from].all()
        if plan.drafts is None:
            assert (plan.num_tokens[: plan.num_decodes] == 1).all()
        else:
            self._check_drafts(plan)
        assert plan.samples[: plan.num_decodes].all()
        assert len(plan.prompt_tokens) == plan.num_tokens[plan.num_decodes :].sum()
        starting = [init.row for init in plan.row_inits]
        assert set(starting) <= set(rows[plan.num_decodes :]), "a row that starts is no decode"
        assert not set(starting) & set(plan.block_updates[:, 0].tolist())
        for name in ("rows", "num_tokens", "prompt_tokens", "block_updates"):
            assert getattr(plan, name).dtype == np.int32, name

    def _check_drafts(self, plan: StepPlan) -> None:
        """Check the promises of a verify step."""
        guesses, first = plan.drafts.guesses, plan.drafts.first
        assert self.verify_sizes, "no program"
        assert plan.total_tokens <= self.verify_sizes[-1], "too many tokens"
        assert plan.decodes_only, "a verify step only decodes"
        assert not plan.row_inits
        assert not plan.scored.size
        assert (plan.num_tokens <= 1 + self.max_drafts).all()
        assert plan.num_tokens.max() > 1, "a verify step without drafts"
        assert guesses.shape == (len(plan.rows), num_guesses(self.max_drafts))
        assert first.shape == (len(plan.rows),)
        assert guesses.dtype == first.dtype == np.int32
        known = guesses != -1
        assert ((guesses >= -1) & (guesses < self.vocab_size)).all()
        assert (known[:, 1:] <= known[:, :-1]).all(), "a guess after padding"
        drafted = plan.num_tokens > 1
        assert (first[drafted] >= 0).all(), "the fake device has no drafter"
        assert (first[drafted] <= self.lengths[plan.rows[drafted]] + 1).all(), "guesses for later positions"
        assert known.any(axis=1)[drafted].all(), "a row has drafts, and no guess"

    def _drafts(self, plan: StepPlan, index: int) -> list[int]:
        """Drafts of row `index`, as `step.batch` aligns them: those after the row's own last token."""
        row, count = plan.rows[index], int(plan.num_tokens[index]) - 1
        guesses, drafts = plan.drafts.guesses[index].tolist(), [GARBAGE] * count
        start = int(self.lengths[row] - plan.drafts.first[index])
        if start == -1 or (0 <= start < len(guesses) and guesses[start] == self.last_tokens[row]):
            for number, guess in enumerate(guesses[start + 1 : start + 1 + count]):
                drafts[number] = GARBAGE if guess < 0 else guess
        return drafts

    def _token_ids(self, plan: StepPlan) -> list[list[int]]:
        ids = [[int(token)] for token in self.last_tokens[plan.rows[: plan.num_decodes]]]
        assert all(tokens != [UNSAMPLED] for tokens in ids), "a decode of a row that has sampled nothing"
        ids = [[GARBAGE] if tokens == [NOTHING_ALLOWED] else tokens for tokens in ids]
        if plan.drafts is not None:
            return [tokens + self._drafts(plan, index) for index, tokens in enumerate(ids)]
        ends = np.cumsum(plan.num_tokens[plan.num_decodes :])
        return ids + [part.tolist() for part in np.split(plan.prompt_tokens, ends[:-1])] if len(ends) else ids

    def seen(self, row: int, kv_group: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions that the last of `length` tokens sees in a kv_group, and the tokens in their slots."""
        window = self.windows[kv_group]
        positions = np.arange(0 if window is None else max(length - window, 0), length)
        blocks = self.tables[kv_group, row, positions // self.block_size]
        offsets = positions % self.block_size
        tokens = self.pages[blocks, offsets]
        assert (blocks >= 0).all(), "attends to a freed block"
        assert (tokens != UNWRITTEN).all(), "attends to a slot that was never written"
        assert (self.written_for[blocks, offsets, 0] == kv_group).all(), "attends to another kv_group's block"
        assert (self.written_for[blocks, offsets, 1] == positions).all(), "attends to other positions"
        assert (self.written_salt[blocks, offsets] == self._salt(row)).all(), "attends to KV of another salt or adapter"
        assert (self.written_with[blocks, offsets] >= self.oldest_kv).all(), "attends to KV of older weights"
        long = self._uses_long_rope(row, length)
        assert (self.written_long[blocks, offsets] == long).all(), "attends to KV of another rope"
        return positions, tokens

    def adapter_of(self, row: int) -> int:
        """The adapter in a row's slot; 0: the base model alone."""
        slot = self.inits[row].adapter_slot
        if slot == NO_ADAPTER:
            return 0
        assert self.adapters[slot] is not None, "an empty slot"
        return self.adapters[slot]

    def _salt(self, row: int) -> str:
        """Salt of a row's request, and its adapter."""
        return f"{self.salt_of(row)} {self.adapter_of(row)}"

    def _uses_long_rope(self, row: int, length: int) -> bool:
        """Whether a row's token at this length is computed with the rope of long sequences."""
        return self.longrope_switch_len is not None and max(self.inits[row].rope_len, length) > self.longrope_switch_len

    def _compare_seen(self, row: int, kv_group: int) -> None:
        """Check the tokens that the first token of a chunk sees. Remember them as tokens of the row."""
        length = int(self.lengths[row])
        positions, tokens = self.seen(row, kv_group, length + 1)
        failed = self.last_tokens[row] == NOTHING_ALLOWED  # its request ends when the host knows
        assert failed or (tokens != GARBAGE).all(), "attends to a rejected draft"
        given = self.row_tokens[row, positions]
        assert ((given == tokens) | (given == UNWRITTEN)).all(), "attends to a token of another"
        self.row_tokens[row, positions] = tokens

    def attend(self, row: int, sampler: int, length: int) -> int:
        """The token after the first `length` of a row, read through its block tables.

        It is sampled with the parameters of row `sampler`.
        """
        seen = [self.seen(row, kv_group, length)[1] for kv_group in range(len(self.windows))]
        init = self.inits[sampler]
        seed = sample_seed(init.seed, init.sample_index) if init.temperature > 0 else 0
        assert self.adapter_of(row) == self.adapter_of(sampler), "a fork with another adapter"
        seed = adapted_seed(seed, self.adapter_of(row))
        if self.weighs:
            seed = weighted_seed(seed, self.weights, self.head)
        return _hash(np.concatenate(seen).tolist(), self.vocab_size, seed)

    def _result(self, plan: StepPlan, tokens: np.ndarray) -> StepResult:
        places, successors, *_ = plan.scored
        assert ((places >= 0) & (places < plan.total_tokens)).all()
        scores = Scores(
            -successors / 10, np.ones_like(successors), (successors[:, None] + np.arange(self.max_logprobs)) % 97,
            -(successors[:, None] + np.arange(self.max_logprobs)) / 10,
        )  # fmt: skip
        if plan.sampler is not SamplerVariant.FULL:
            return StepResult(tokens, scores=scores)
        top = tokens[:, None] + np.arange(self.max_logprobs)
        top_ids, top_logprobs = top % self.vocab_size, (-top / 10).astype(np.float32)
        for index, row in enumerate(plan.rows if plan.drafts is None else ()):  # a beam has no drafts
            if plan.samples[index] and self.inits[row].beam_temperature > 0:
                top_ids[index], top_logprobs[index] = candidates(int(tokens[index]), self.vocab_size, self.max_logprobs)
        return StepResult(tokens, -tokens / 10, np.ones_like(tokens), top_ids, top_logprobs, scores=scores)


def next_allowed(token: int, mask: np.ndarray | None, vocab_size: int) -> int:
    """The token, or the next larger id that a packed mask allows, modulo the vocabulary."""
    if mask is not None and not mask.any():
        return NOTHING_ALLOWED
    while mask is not None and not mask[token // 32] >> np.uint32(token % 32) & 1:
        token = (token + 1) % vocab_size
    return int(token)


def next_token(
    token_ids: list[int], vocab_size: int, seed: int = 0, windows: tuple[int | None, ...] = (None,)
) -> int:
    """The model: a hash of all tokens that each kv_group sees."""
    seen = [token for window in windows for token in token_ids[-window if window else None :]]
    return _hash(seen, vocab_size, seed)


def candidates(token: int, vocab_size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of a beam whose most likely token is `token`: other ids, less and less likely."""
    ids = (token + 5 * np.arange(count)) % vocab_size
    return ids, -((0.1 + token % 7 / 10) * (1 + np.arange(count))).astype(np.float32)


def sample_seed(seed: int, index: int) -> int:
    """Seed of one of n samples."""
    return seed + 1_000_003 * index


def weighted_seed(seed: int, weights: int, head: int) -> int:
    """A seed for the tokens of weights. head: number of the weights that sample."""
    return zlib.crc32(f"{seed} {weights} {head}".encode()) if weights or head else seed


def adapted_seed(seed: int, adapter: int) -> int:
    """Seed of a sample with an adapter; 0: the base model alone."""
    return seed + 7_000_003 * adapter


def _hash(token_ids: list[int], vocab_size: int, seed: int) -> int:
    return zlib.crc32(np.array([seed % 2**31, *token_ids], np.int32).tobytes()) % vocab_size


def alone(
    token_ids: list[int], count: int, vocab_size: int, *, seed: int = 0, windows: tuple[int | None, ...] = (None,)
) -> list[int]:
    """Tokens of a request that runs alone."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size, seed, windows))
    return tokens[len(token_ids) :]


class PoolingRunner(FakeRunner):
    """Pools the vector (next token of the model, 1), so that every token of the prompt matters.

    A single token has the vector (its id, 1)."""

    def _result(self, plan, tokens):
        assert plan.num_decodes == 0
        pooled, own = (np.stack([x, np.ones_like(x)], 1).astype(np.float32) for x in (tokens, plan.scored[1]))
        return StepResult(np.zeros(0, np.int32), pooled=pooled, pooled_tokens=own)
