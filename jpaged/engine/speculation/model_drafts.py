"""Host side of the device drafters: which tokens of a request the drafter has computed, and what a plan must carry.

Called by: the plan builder, for each step while drafting is on; the engine when drafts are verified or requests end.
Owns: the progress of the drafter in each request, and the contents of the drafter's blocks.
Never: sees a draft. Drafts stay on the device.

A draft model computes a token when it drafts, so it must first catch up with the tokens since its last proposal. When a
step is planned, the step before it is still in flight. There are three cases, with n known tokens:

| Step in flight | LENGTH | Tokens that the model may lack |
|---|---|---|
| none | n - 1 | known: up to n - 2 |
| plain | n | known: up to n - 1 |
| verifies the model's proposal | n + accepted drafts | only the last draft, which the device knows |

Blocks that requests share through the prefix index have one content in the drafter's pages, too. `BlockContents`
remembers it by the block's name, so a cached prefix is computed once by the drafter.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpaged.engine.request import NO_ROW, Request
from jpaged.engine.step_plan import AbsorbPlan, HeadPlan, ModelDraftPlan


class BlockContents:
    """Names of the blocks whose KV the drafter has computed.

    Only the drafter writes to its pages. So an entry stays true when the block is freed, and when the target stores
    other tokens in it: the block's name then differs.
    """

    def __init__(self, block_size: int, kv_group: int):
        """kv_group: the target's KV group with the drafter's block table."""
        self._block_size, self._kv_group = block_size, kv_group
        self._digests: dict[int, bytes] = {}

    def blocks(self, request: Request) -> list[int]:
        """The block table that the drafter uses."""
        tables = request.kv.block_tables
        return tables[self._kv_group].blocks if tables else []

    def first_unknown(self, request: Request, start: int, end: int) -> int:
        """First block in [start, end) that the drafter has not computed; `end` if it has computed all."""
        blocks, names = self.blocks(request), request.kv.block_names
        end = min(end, len(names), len(blocks))
        return next((i for i in range(start, end) if self._digests.get(blocks[i]) != names[i].digest), end)

    def note_written(self, request: Request, first: int) -> None:
        """Note that blocks of a request are written from position `first` on."""
        for block in self.blocks(request)[first // self._block_size :]:
            self._digests.pop(block, None)

    def note_full(self, request: Request, start: int, num_tokens: int) -> int:
        """Note that the drafter has computed the first `num_tokens` tokens, from block `start` on. Returns the end."""
        blocks, names = self.blocks(request), request.kv.block_names
        end = max(start, min(num_tokens // self._block_size, len(names), len(blocks)))
        for index in range(start, end):
            self._digests[blocks[index]] = names[index].digest
        return end

    def clear(self) -> None:
        """Forget all contents: the pages are empty."""
        self._digests.clear()


@dataclasses.dataclass(slots=True)
class _Progress:
    """Progress of the draft model in one request."""

    row: int
    num_computed: int = 0     # tokens whose KV the model has
    num_named: int = 0        # blocks whose contents are noted
    length: int = 0           # LENGTH at the first entry of `outstanding`
    outstanding: list[int] = dataclasses.field(default_factory=list)  # drafts of proposals that are not verified yet
    tail: tuple[int, int] = (0, -1)  # (index, block) of the block that the model wrote last


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRow:
    """A row of a verify step."""

    request: Request
    num_drafts: int      # drafts to propose; 0: none
    tokens_in_flight: int  # of the row's step in flight, with its drafts: 0 = none, 1 = plain


class ModelDrafts:
    """Plans the work of a draft model."""

    def __init__(self, *, block_size: int, kv_group: int, absorb_tokens: int, absorb_rows: int, max_len: int):
        """Plan for an empty pool.

        absorb_tokens, absorb_rows: size of the `absorb` program. A step runs it at most once, so that a long prompt
            does not delay other requests.
        max_len: largest number of tokens of a sequence that the draft model supports.
        """
        self._block_size, self._max_len = block_size, max_len
        self._absorb_tokens, self._absorb_rows = absorb_tokens, absorb_rows
        self._contents = BlockContents(block_size, kv_group)
        self._progress: dict[Request, _Progress] = {}

    def plan(self, rows: Sequence[DraftRow]) -> ModelDraftPlan | None:
        """Plan the proposal of a verify step. None: no row gets a draft.

        The step's block tables and block names must be final. A row gets no drafts while the model has not caught up
        with it, and if drafts of another drafter are in flight in it.
        """
        count = len(rows)
        num_drafts, num_known, continues = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, bool)
        known: list[int] = []
        absorbs: list[tuple[int, int, list[int]]] = []
        # a program has two tokens for each row; one is for LAST_TOKEN
        spare = 2 * count - sum(row.num_drafts > 0 for row in rows)
        for index, row in enumerate(rows):
            if not row.num_drafts:
                continue
            progress = self._progress_of(row.request)
            if row.tokens_in_flight > 1:
                drafts = self._continued(row, progress) if progress.outstanding else 0
                num_drafts[index], continues[index] = drafts, drafts > 0
                spare -= drafts > 0
                continue
            length = len(row.request.token_ids) - (row.tokens_in_flight == 0)
            drafts = max(0, min(row.num_drafts, self._max_len - 1 - length))
            missing = row.request.token_ids[progress.num_computed : length]
            if drafts and len(missing) <= min(1, spare):
                known += missing
                num_known[index], spare = len(missing), spare - len(missing)
            elif not drafts or not self._absorb(row.request, progress, missing, absorbs):
                continue
            num_drafts[index] = drafts
            self._note_proposed(row.request, progress, length, drafts)
        if not num_drafts.any() and not absorbs:
            return None
        return ModelDraftPlan(num_drafts, num_known, continues, np.array(known, np.int32), _absorb_plans(absorbs))

    def note_verified(self, request: Request, num_accepted: int) -> None:
        """Note that the first `num_accepted` drafts of the request's oldest proposal were accepted."""
        progress = self._progress.get(request)
        if progress is None or not progress.outstanding:
            return
        drafts = progress.outstanding.pop(0)
        progress.num_computed = progress.length + min(num_accepted + 1, drafts)
        progress.length += num_accepted + 1
        self._note_blocks(request, progress)

    def forget(self, request: Request) -> None:
        """Forget a request that has lost its row and its blocks. Unknown requests are ignored."""
        self._progress.pop(request, None)

    def reset(self) -> None:
        """Start over: the drafter's pages are empty."""
        self._progress.clear()
        self._contents.clear()

    def _progress_of(self, request: Request) -> _Progress:
        """Progress in a request. Starts with the blocks of its prefix that the model has computed."""
        progress = self._progress.get(request)
        row = request.schedule.row
        if progress is None or progress.row != row or row == NO_ROW:
            blocks = self._contents.first_unknown(request, 0, (len(request.token_ids) - 1) // self._block_size)
            progress = self._progress[request] = _Progress(row, blocks * self._block_size, blocks)
        index, block = progress.tail
        if block >= 0 and self._contents.blocks(request)[index] != block:  # a copy on write: the model has no KV there
            progress.num_computed = min(progress.num_computed, index * self._block_size)
            progress.tail = (0, -1)
        return progress

    def _continued(self, row: DraftRow, progress: _Progress) -> int:
        """Drafts of a row whose last proposal is in flight."""
        largest = progress.length + sum(drafts + 1 for drafts in progress.outstanding)  # LENGTH if all are accepted
        drafts = max(0, min(row.num_drafts, self._max_len - 1 - largest))
        if drafts:
            self._contents.note_written(row.request, progress.length)
            progress.outstanding.append(drafts)
        return drafts

    def _absorb(
        self, request: Request, progress: _Progress, missing: list[int], absorbs: list[tuple[int, int, list[int]]]
    ) -> bool:
        """Let the model compute known tokens before its proposal. False: not all of them fit into this step."""
        room = self._absorb_tokens - sum(len(tokens) for *_, tokens in absorbs)
        some = missing[: room if len(absorbs) < self._absorb_rows else 0]
        if some:
            first = progress.num_computed
            self._contents.note_written(request, first)
            absorbs.append((request.schedule.row, first, some))
            progress.num_computed += len(some)
            self._note_blocks(request, progress)
        return len(some) == len(missing)

    def _note_proposed(self, request: Request, progress: _Progress, length: int, drafts: int) -> None:
        """Note a proposal of a row whose LENGTH the host knows."""
        self._contents.note_written(request, max(progress.num_named * self._block_size, progress.num_computed))
        progress.num_computed, progress.length, progress.outstanding = length, length, [drafts]
        self._note_blocks(request, progress)

    def _note_blocks(self, request: Request, progress: _Progress) -> None:
        """Note the contents of full blocks, and the last block."""
        progress.num_named = self._contents.note_full(request, progress.num_named, progress.num_computed)
        blocks, index = self._contents.blocks(request), progress.num_computed // self._block_size
        progress.tail = (index, blocks[index]) if index < len(blocks) else (0, -1)


def _absorb_plans(absorbs: list[tuple[int, int, list[int]]]) -> tuple[AbsorbPlan, ...]:
    if not absorbs:
        return ()
    rows, first, tokens = zip(*absorbs, strict=True)
    counts = np.array([len(each) for each in tokens], np.int32)
    together = np.array([token for each in tokens for token in each], np.int32)
    return (AbsorbPlan(np.array(rows, np.int32), np.array(first, np.int32), counts, together),)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRow:
    """A row of a step that a head absorbs."""

    request: Request
    first: int       # position of the row's first token in the step; an upper bound if drafts are in flight
    num_tokens: int  # of the row in the step
    samples: bool    # the row samples: all its known tokens are computed


@dataclasses.dataclass(slots=True)
class _Followed:
    """A row that the head follows."""

    request: Request
    num_named: int  # end of the blocks whose contents are noted
    start: int      # index of the first KV of the head in the row


class HeadDrafts:
    """Plans the work of a draft head. It must see every step while the head follows the target."""

    def __init__(self, *, block_size: int, kv_group: int, max_len: int):
        """max_len: longest sequence that has drafts, in tokens."""
        self.block_size, self._max_len = block_size, max_len
        self._contents = BlockContents(block_size, kv_group)
        self._followed: dict[int, _Followed] = {}  # by row

    def plan(self, rows: Sequence[HeadRow]) -> HeadPlan:
        """Plan the absorption of a step. The step's block tables and block names must be final."""
        count = len(rows)
        starts, first_block = np.zeros(count, bool), np.full(count, -1, np.int32)
        following = np.full(count, -1, np.int32)
        for index, row in enumerate(rows):
            request = row.request
            last_known = len(request.token_ids) - 1
            if not row.samples:
                following[index] = request.token_ids[row.first + row.num_tokens]
            followed = self._followed.get(request.schedule.row)
            if followed is None or followed.request is not request:
                starts[index], first_block[index] = True, self._cached(request, row.first)
                boundary = -(-row.first // self.block_size)
                start = boundary if first_block[index] < 0 else int(first_block[index])
                followed = _Followed(request, boundary, start * self.block_size)
                self._followed[request.schedule.row] = followed
            self._contents.note_written(request, min(row.first, last_known))
            absorbed = min(row.first + row.num_tokens, last_known)
            followed.num_named = self._contents.note_full(request, followed.num_named, absorbed)
        return HeadPlan(following, starts, first_block)

    def _cached(self, request: Request, start: int) -> int:
        """First block of the cached prefix before position `start` from which on the head has KV. -1: none."""
        end = start // self.block_size
        if start % self.block_size or not end:
            return -1
        first = end
        while first > 0 and self._contents.first_unknown(request, first - 1, first) == first:
            first -= 1
        return first if first < end else -1

    def is_ready(self, request: Request) -> bool:
        """Whether the head can draft for a request: it follows it, and has absorbed an index."""
        followed, count = self._followed.get(request.schedule.row), len(request.token_ids)
        is_followed = followed is not None and followed.request is request
        return is_followed and followed.start + 1 < count < self._max_len

    def forget(self, request: Request) -> None:
        """Forget a request that has lost its row. Unknown requests are ignored."""
        followed = self._followed.get(request.schedule.row)
        if followed is not None and followed.request is request:
            del self._followed[request.schedule.row]

    def pause(self) -> None:
        """Note that the next step is not absorbed: all rows start again afterwards."""
        self._followed.clear()

    def reset(self) -> None:
        """Start over: the drafter's pages are empty."""
        self._followed.clear()
        self._contents.clear()
