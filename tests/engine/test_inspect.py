"""`inspect` describes block tables, pool and queue of an engine correctly, compared with independent counts."""

import random
from collections import Counter
from concurrent.futures import Future

import pytest

from jpaged.engine.engine import Engine
from jpaged.engine.observe.inspect import EngineCapture
from jpaged.engine.observe.step_log import MAX_STEPS
from jpaged.params.sampling import SamplingParams
from jpaged.snapshot import EngineSnapshot
from tests.engine.fake_runner import FakeRunner

PREFIX = [7] * 8


def inspect(engine: Engine) -> EngineSnapshot:
    answer: Future[EngineCapture] = Future()
    engine.inspect(answer)
    return answer.result(timeout=0).snapshot()


def greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    """Blocks of 4 tokens; "first" and "second" share two of them, "third" has its own, "queued" waits for a row."""
    engine = Engine(FakeRunner(num_blocks=20, block_size=4, max_num_seqs=3))
    engine.add_request("first", [*PREFIX, 1], greedy(20))
    for _ in range(2):
        engine.step()
    engine.add_request("second", [*PREFIX, 2, 3], greedy(20))
    engine.add_request("third", [4, 5, 6], greedy(20))
    engine.add_request("queued", [4, 5, 6], greedy(20))
    engine.step()
    return engine


def test_the_table_and_the_queue(engine: Engine):
    snapshot = inspect(engine)
    by_id = {request.request_id: request for request in (*snapshot.running, *snapshot.waiting)}
    assert [request.request_id for request in snapshot.running] == ["first", "second", "third"]
    assert [request.request_id for request in snapshot.waiting] == ["queued"]
    assert sorted(request.row for request in snapshot.running) == [0, 1, 2]
    assert {request.status for request in snapshot.running} == {"decode"}
    assert (by_id["queued"].status, by_id["queued"].row, by_id["queued"].num_blocks) == ("waiting", None, 0)
    assert [by_id[name].cached_tokens for name in ("first", "second", "third")] == [0, 8, 0]
    assert [by_id[name].prompt_tokens for name in ("first", "second", "third")] == [9, 10, 3]
    # "first" has run in three steps: its prompt and two tokens. The third step's token is in flight.
    assert (by_id["first"].computed_tokens, by_id["first"].output_tokens) == (11, 2)
    assert all(0 <= request.age_seconds < 60 for request in by_id.values())


def test_the_last_steps(engine: Engine):
    """Three plans have been made, and the last one is in flight."""
    snapshot = inspect(engine)
    assert [(step.index, step.rows, step.decodes, step.prompt_tokens) for step in snapshot.last_steps] == [
        (0, 1, 0, 9),
        (1, 1, 1, 0),
    ]
    engine.step()
    newest = inspect(engine).last_steps[-1]
    assert (newest.index, newest.rows, newest.decodes, newest.prompt_tokens) == (2, 3, 1, 2 + 3)  # 8 of 10 are cached
    assert newest.seconds > 0
    assert newest.age_seconds >= 0
    assert (snapshot.max_num_seqs, snapshot.stats.steps, snapshot.stats.generated_tokens) == (3, 3, 2)


def test_old_steps_are_forgotten():
    engine = Engine(FakeRunner(num_blocks=200, block_size=4, max_model_len=700))
    engine.add_request("long", [1, 2, 3], greedy(600))
    while engine.has_work:
        engine.step()
    steps = inspect(engine).last_steps
    assert len(steps) == MAX_STEPS
    assert [step.index for step in steps] == list(range(steps[-1].index - MAX_STEPS + 1, steps[-1].index + 1))
    assert steps[-1].index >= 600 - 1
    ages = [step.age_seconds for step in steps]
    assert ages == sorted(ages, reverse=True)


def test_the_block_map(engine: Engine):
    snapshot = inspect(engine)
    shared = [block for block in snapshot.blocks if block.ref_count > 1]
    assert [[(o.request_id, o.sample, o.group, o.index) for o in block.owners] for block in shared] == [
        [("first", 0, 0, 0), ("second", 0, 0, 0)],
        [("first", 0, 0, 1), ("second", 0, 0, 1)],
    ]
    assert all(block.tokens == 4 and len(bytes.fromhex(block.prefix_hash)) == 32 for block in shared)
    assert shared[0].prefix_hash != shared[1].prefix_hash
    own = {b.owners[0].request_id: b for b in snapshot.blocks if b.ref_count == 1 and b.owners[0].index in (0, 2)}
    assert {name: block.tokens for name, block in own.items()} == {"first": 3, "second": 2, "third": 3}
    assert all(block.prefix_hash is None for block in own.values())  # not full yet
    pool = snapshot.pool
    assert (pool.num_blocks, pool.block_size, pool.num_groups) == (20, 4, 1)
    assert (pool.used_blocks, pool.shared_blocks, pool.references) == (5, 2, 7)
    assert (pool.cached_blocks, pool.empty_blocks, pool.used_tokens) == (0, 15, 16)


def test_last_use_is_the_step_in_which_a_block_was_freed(engine: Engine):
    before = inspect(engine)
    assert all(b.last_use == (before.step if b.ref_count else None) for b in before.blocks)
    engine.step()
    engine.abort(["first", "second"])
    after = inspect(engine)
    freed = [b for b in after.blocks if before.blocks[b.block].ref_count and not b.ref_count]
    assert len(freed) == 4
    assert all(block.last_use == before.step + 1 for block in freed)
    # Their shared blocks can still be found, and so can the block that "first" has filled. "second" filled none.
    assert sum(block.prefix_hash is not None for block in freed) == after.pool.cached_blocks == 3
    assert all(block.tokens == (4 if block.prefix_hash else 0) for block in freed)
    for _ in range(3):
        engine.step()
    later = inspect(engine)
    assert later.step == after.step + 3
    assert [later.blocks[b.block].last_use for b in freed if not later.blocks[b.block].ref_count].count(
        before.step + 1
    ) >= 2


def test_a_prompt_in_chunks_and_a_preempted_request():
    engine = Engine(FakeRunner(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=8))
    engine.add_request("old", list(range(20)), greedy(30))
    engine.step()
    (request,) = inspect(engine).running
    assert (request.status, request.computed_tokens) == ("prefill", 8)
    engine.add_request("young", list(range(50, 58)), greedy(30))
    while not inspect(engine).waiting or inspect(engine).waiting[0].status == "waiting":
        engine.step()
    (waiting,) = inspect(engine).waiting
    assert (waiting.request_id, waiting.status, waiting.preemptions) == ("young", "preempted", 1)
    assert (waiting.computed_tokens, waiting.num_blocks, waiting.row) == (0, 0, None)


@pytest.mark.parametrize("windows", [(None,), (6, None)])
def test_it_agrees_with_the_block_tables_under_random_load(windows: tuple[int | None, ...]):
    rng = random.Random(1)
    engine = Engine(FakeRunner(num_blocks=40, windows=windows, block_size=4, max_model_len=48, max_num_seqs=5))
    for turn in range(150):
        if rng.random() < 0.4:
            prompt = [*([9] * rng.choice([0, 4, 11])), *(rng.randrange(97) for _ in range(rng.randint(1, 9)))]
            engine.add_request(str(turn), prompt, greedy(rng.randint(1, 25)))
        engine.step()
        snapshot, pool = inspect(engine), engine.scheduler.manager.pool
        engine.check_integrity()
        stats = engine.stats()
        assert snapshot.pool.used_blocks == stats.used_blocks
        assert (len(snapshot.running), len(snapshot.waiting)) == (stats.num_running, stats.num_waiting)
        figures = snapshot.pool
        assert figures.used_blocks + figures.cached_blocks + figures.empty_blocks == len(snapshot.blocks) == 40
        tables = Counter(o.request_id for block in snapshot.blocks for o in block.owners)
        assert tables == Counter({r.request_id: r.num_blocks for r in snapshot.running if r.num_blocks})
        for block in snapshot.blocks:
            assert block.ref_count == pool.ref_count(block.block) == len(block.owners)
            assert 0 <= block.tokens <= 4
            for owner in block.owners:  # compare with the block table itself
                (request,) = (one for one in engine.scheduler.running if one.request_id == owner.request_id)
                assert request.kv.block_tables[owner.group].blocks[owner.index] == block.block


def test_a_cancelled_inspection_is_ignored(engine: Engine):
    answer: Future[EngineCapture] = Future()
    answer.cancel()
    engine.inspect(answer)
    assert answer.cancelled()


def test_an_error_is_raised_in_the_thread_that_asks(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.scheduler.manager.pool, "states", lambda: 1 / 0)
    answer: Future[EngineCapture] = Future()
    engine.inspect(answer)
    with pytest.raises(ZeroDivisionError):
        answer.result(timeout=0)
    monkeypatch.undo()
    assert inspect(engine).pool.used_blocks == 5
