"""The host's bookkeeping of a draft model and of a head, with a pretended device that checks every proposal."""

import random

import pytest

from jpaged.engine.speculation.model_drafts import DraftRow, HeadDrafts, HeadRow, ModelDrafts
from tests.engine.speculation.fake_request import BLOCK, FakeRequest

K, MAX_LEN = 3, 60


class FakeDevice:
    """Runs plans over pages that store token ids. Fails if a proposal would read a missing or a wrong token."""

    def __init__(self):
        self.pages = {}  # slot -> token id
        self.tails = {}  # row -> (position, token)

    def slot(self, request, position):
        return request.kv.block_tables[1].blocks[position // BLOCK] * BLOCK + position % BLOCK

    def propose(self, plan, requests, sequences):
        """sequences: all tokens of each request, those in flight included. Returns drafts by request."""
        by_row = {request.schedule.row: request for request in requests}
        for absorb in plan.absorbs:
            tokens = iter(absorb.tokens.tolist())
            for row, first, count in zip(absorb.rows, absorb.first, absorb.num_tokens, strict=True):
                for position in range(first, first + count):
                    self.pages[self.slot(by_row[row], position)] = next(tokens)
        known, drafts = iter(plan.known.tolist()), {}
        for request, count, num_known, continues in zip(
            requests, plan.num_drafts, plan.num_known, plan.continues, strict=True
        ):
            if not count:
                continue
            ids = sequences[request]
            length, row = len(ids) - 1, request.schedule.row
            tail = self.tails.get(row)
            written = [next(known) for _ in range(num_known)]
            if continues and tail[0] == length - 1:
                written.append(tail[1])
            drafts[request] = [random.randrange(50) for _ in range(count)]
            for position, token in enumerate([*written, ids[-1], *drafts[request][:-1]], length - len(written)):
                self.pages[self.slot(request, position)] = token
            self.tails[row] = length + count, drafts[request][-1]
            seen = [self.pages.get(self.slot(request, position)) for position in range(length + 1)]
            assert seen == ids, "the draft model attends to keys of other tokens"
        return drafts


def rows_of(requests, num_drafts, in_flight):
    return [DraftRow(request, num_drafts, in_flight) for request in requests]


def new_drafts(**options):
    options = {"absorb_tokens": 16, "absorb_rows": 8} | options
    return ModelDrafts(block_size=BLOCK, kv_group=1, max_len=MAX_LEN, **options)


@pytest.mark.parametrize("seed", range(20))
def test_a_proposal_sees_every_token_before_it(seed):
    """Random steps: plain, verified with any number of accepted drafts, and pauses, one step in flight or none."""
    random.seed(seed)
    drafts, device, free = new_drafts(), FakeDevice(), list(range(1, 200))
    requests = [FakeRequest([random.randrange(50) for _ in range(random.randint(1, 40))], row) for row in range(3)]
    sequences = {request: [*request.token_ids] for request in requests}
    in_flight = {}  # request -> (drafts, accepted, new tokens)
    proposals = 0
    for _ in range(25):
        live = [request for request in requests if len(sequences[request]) + 3 * K < MAX_LEN]
        wanted = [random.choice([0, 1, K, K]) for _ in live]
        for request in live:
            request.grow(len(sequences[request]) + 2 * K + 2, free)
        plan = drafts.plan([
            DraftRow(request, count, 1 + len(in_flight[request][0]) if request in in_flight else 0)
            for request, count in zip(live, wanted, strict=True)
        ])  # fmt: skip
        proposed = {} if plan is None else device.propose(plan, live, sequences)
        proposals += len(proposed)
        arrives, in_flight = in_flight, {}
        for request in live:
            guesses = proposed.get(request, [])
            accepted = random.randint(0, len(guesses))
            new = [*guesses[:accepted], random.randrange(50)]
            sequences[request] += new
            in_flight[request] = guesses, accepted, new
        arrived = [arrives]
        if random.random() < 0.3:  # the pipeline drains
            arrived.append(in_flight)
            in_flight = {}
        for step in arrived:
            for request, (guesses, accepted, new) in step.items():
                request.token_ids += new
                if guesses:
                    drafts.note_verified(request, accepted)
    assert proposals > 10


def test_a_long_prompt_is_absorbed_over_several_steps():
    drafts, device, free = new_drafts(), FakeDevice(), list(range(1, 50))
    request = FakeRequest(range(40), 0)
    request.grow(50, free)
    plans = [drafts.plan(rows_of([request], K, 0)) for _ in range(3)]
    assert [plan.num_drafts[0] for plan in plans] == [0, 0, K]
    assert [plan.absorbs[0].num_tokens[0] for plan in plans] == [16, 16, 7]
    for plan in plans:
        device.propose(plan, [request], {request: request.token_ids})


def test_a_cached_prefix_is_absorbed_once():
    drafts, free = new_drafts(), list(range(1, 50))
    first = FakeRequest(range(14), 0)
    first.grow(20, free)
    assert drafts.plan(rows_of([first], K, 0)).absorbs[0].num_tokens.tolist() == [13]
    again = FakeRequest([*range(12), 30, 31], 1, first.kv.block_tables[1].blocks[:3])
    again.grow(20, free)
    absorb = drafts.plan(rows_of([again], K, 0)).absorbs
    assert absorb == ()  # positions 0 to 11 are in shared blocks, and 12 is in the proposal
    other = FakeRequest([99, *range(13)], 2, first.kv.block_tables[1].blocks[:3])  # other tokens now
    other.grow(20, free)
    assert drafts.plan(rows_of([other], K, 0)).absorbs[0].first.tolist() == [0]


def test_a_preempted_request_starts_over_and_unknown_requests_are_ignored():
    drafts, free = new_drafts(), list(range(1, 50))
    request = FakeRequest(range(3), 0)
    request.grow(10, free)
    drafts.plan(rows_of([request], K, 0))
    drafts.forget(request)
    drafts.note_verified(request, 2)
    request.schedule.row, request.kv.block_tables[1].blocks = 4, []
    request.grow(10, free)
    assert drafts.plan(rows_of([request], K, 0)).absorbs[0].num_tokens.tolist() == [2]


def test_a_block_that_was_copied_on_write_is_computed_again():
    drafts, free = new_drafts(), list(range(1, 50))
    request = FakeRequest(range(11), 0)
    request.grow(20, free)
    drafts.plan(rows_of([request], K, 0))
    drafts.note_verified(request, 0)
    request.token_ids.append(7)
    request.kv.block_tables[1].blocks[2] = free.pop(0)
    assert drafts.plan(rows_of([request], K, 0)).absorbs[0].first.tolist() == [8]


def test_drafts_of_another_drafter_in_flight_leave_no_proposal():
    drafts, free = new_drafts(), list(range(1, 50))
    request = FakeRequest(range(3), 0)
    request.grow(10, free)
    assert drafts.plan(rows_of([request], K, 3)) is None


def test_no_draft_lies_past_the_longest_sequence():
    drafts, free = new_drafts(absorb_tokens=100), list(range(1, 50))
    request = FakeRequest(range(MAX_LEN - 2), 0)
    request.grow(MAX_LEN, free)
    assert drafts.plan(rows_of([request], K, 0)).num_drafts.tolist() == [2]
    request.token_ids += [1, 1]
    assert drafts.plan(rows_of([request], K, 0)) is None


def test_a_head_follows_rows_from_their_start_or_from_a_cached_prefix():
    drafts, free = HeadDrafts(block_size=BLOCK, kv_group=1, max_len=10_000), list(range(1, 50))
    request = FakeRequest(range(14), 0)
    request.grow(20, free)
    plan = drafts.plan([HeadRow(request, 0, 9, samples=False)])
    assert (plan.next_tokens.tolist(), plan.starts.tolist(), plan.first_block.tolist()) == ([9], [True], [-1])
    plan = drafts.plan([HeadRow(request, 9, 5, samples=True)])
    assert (plan.next_tokens.tolist(), plan.starts.tolist()) == ([-1], [False])
    again = FakeRequest([*range(12), 30, 31], 1, request.kv.block_tables[1].blocks[:3])
    again.grow(20, free)
    plan = drafts.plan([HeadRow(again, 12, 2, samples=True), HeadRow(request, 14, 1, samples=True)])
    assert (plan.starts.tolist(), plan.first_block.tolist()) == ([True, False], [0, -1])
    drafts.pause()
    plan = drafts.plan([HeadRow(again, 16, 1, samples=True)])
    assert plan.starts.tolist() == [True]


def test_a_head_that_was_reset_knows_no_cached_prefix():
    drafts, free = HeadDrafts(block_size=BLOCK, kv_group=1, max_len=10_000), list(range(1, 50))
    request = FakeRequest(range(9), 0)
    request.grow(12, free)
    drafts.plan([HeadRow(request, 0, 9, samples=True)])
    drafts.reset()
    again = FakeRequest(range(9), 1, request.kv.block_tables[1].blocks[:2])
    again.grow(12, free)
    assert drafts.plan([HeadRow(again, 8, 1, samples=True)]).first_block.tolist() == [-1]
