"""Batches of an encoder: a step has whole texts of one length, the oldest text first."""

import random

import pytest

from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduler_state import SchedulerLimits
from jpaged.engine.scheduling.text_batches import num_texts
from jpaged.engine.step_plan import TextShape
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import SamplingParams
from jpaged.runtime.step.program_shapes import text_shapes

SHAPES = tuple(TextShape(length, rows) for length in (8, 16, 32) for rows in (1, 4, 8))


def make_scheduler(rows: int = 16) -> Scheduler:
    manager = KVCacheManager(1, 16, windows=())
    return Scheduler(manager, SchedulerLimits(rows, 64, vocab_size=97, text_shapes=SHAPES))


def add(scheduler: Scheduler, arrival: int, length: int, type_1_from: int | None = None) -> Request:
    request = Request(
        request_id=str(arrival), prompt_token_ids=[(arrival + i) % 97 for i in range(length)],
        params=SamplingParams(temperature=0, max_tokens=1), max_total_tokens=length + 1, eos_token_ids=frozenset(),
        eos_token_id=None, metrics=RequestMetrics(arrival_time=0.0), arrival=arrival, type_1_from=type_1_from,
    )  # fmt: skip
    scheduler.add(request)
    return request


@pytest.mark.parametrize(
    ("waiting", "free", "texts"),
    [(1, 99, 1), (2, 99, 2), (3, 99, 3), (5, 99, 4), (15, 99, 4), (16, 99, 16), (32, 99, 32), (99, 99, 32), (99, 6, 4),
     (99, 20, 20)],
)  # fmt: skip
def test_a_program_is_at_least_half_full(waiting, free, texts):
    """Of 5 texts 4 run first: the program for 32 would be almost empty. 16 texts take the program for 32."""
    assert num_texts([1, 4, 32], waiting, free) == texts


def test_texts_of_one_length_run_together():
    """All texts run whole, once, in steps of one length. The oldest text that waits is in every step."""
    rng, scheduler = random.Random(0), make_scheduler()
    lengths = {str(i): rng.randint(1, 32) for i in range(200)}
    requests = {name: add(scheduler, int(name), length, length // 2) for name, length in lengths.items()}
    computed: set[str] = set()
    while scheduler.num_waiting:
        oldest = scheduler.waiting.head().request_id
        step = scheduler.schedule()
        assert step is not None
        names = [request.request_id for request in step.requests]
        assert oldest in names
        assert not computed & set(names)
        assert step.plan.num_tokens.tolist() == [lengths[name] for name in names]
        assert step.plan.type_1_from.tolist() == [lengths[name] // 2 for name in names]
        assert step.plan.samples.all()
        longest = max(lengths[name] for name in names)
        [size] = {next(n for n in (8, 16, 32) if n >= lengths[name]) for name in names}
        assert longest <= size
        assert len(names) <= 8
        for _, request in scheduler.results(step):
            scheduler.finish(request, RequestStatus.STOPPED)
        scheduler.check_integrity()
        computed |= set(names)
    assert computed == requests.keys()
    assert scheduler.counters.steps < 40  # 200 texts, up to 8 in a step


def test_shapes_of_programs():
    """The most texts of the budget, an eighth and a 64th. Tiny models need more tokens in a program."""
    assert text_shapes(64, 256, 2048, 8) == (
        (16, 2), (16, 16), (16, 128), (32, 1), (32, 8), (32, 64), (64, 1), (64, 4), (64, 32)
    )  # fmt: skip
    assert text_shapes(40, 4, 64, 64) == ((16, 4), (32, 2), (40, 1))
    assert text_shapes(40, 4, 160, 8, lengths=(8, 100), rows=(2,)) == ((8, 2), (8, 4), (40, 2), (40, 4))
