"""A beam search over requests: what the beams gave goes into the search, and who goes on from whom comes out.

A step of the search: each live beam is a request that has computed all its tokens and waits (`on_hold`) with its
candidates given. When the last one has, the search chooses. A beam with one heir goes on in its own row and blocks; for
each further heir a request of the group that has none becomes a fork of it, sharing its blocks; a beam without an heir
gives up what it holds. Then each has its new token to compute.
"""

import time

import numpy as np

from jpaged.engine.beam_search import BeamSearch
from jpaged.engine.output_processor import note_token
from jpaged.engine.request import Request
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.step_plan import StepResult
from jpaged.errors import EngineError


def begin(group: RequestGroup) -> None:
    """One beam lives at first: the prompt."""
    group.beams = [group.first]


def take(group: RequestGroup, request: Request, result: StepResult, index: int) -> bool:
    """Keep what row `index` of a step gave for a beam; whether all beams have given theirs now."""
    if result.top_ids is None or result.top_logprobs is None:
        raise EngineError(f"request {request.request_id} is a beam, the step gave no log-probabilities")
    group.given[request] = (result.top_ids[index], result.top_logprobs[index])
    return len(group.given) == len(group.beams)


def advance(group: RequestGroup, search: BeamSearch, scheduler: Scheduler) -> bool:
    """Choose the beams that go on, and let them; False when the search is over."""
    given = [group.given[beam] for beam in group.beams]
    token_ids, logprobs = (np.stack(part) for part in zip(*given, strict=True))
    group.given.clear()
    note_token(group.metrics, time.monotonic())
    if group.params.logprobs is not None:
        group.candidates.append((token_ids, logprobs))
    steps = search.advance(token_ids, logprobs)
    if search.is_over:
        return False
    parents = [group.beams[step.parent] for step in steps]
    living = set(parents)
    idle = [request for request in group.requests if request not in living]
    for request in group.beams:
        if request not in living:
            scheduler.park(request)
    heirs = []
    for parent in parents:
        if parent in living:
            living.discard(parent)
            heirs.append(parent)
        else:
            heirs.append(idle.pop())
            heirs[-1].token_ids[:] = parent.token_ids
            scheduler.fork(parent, heirs[-1])
    for heir, step in zip(heirs, steps, strict=True):  # only now: forks are made of what the parents had
        heir.token_ids.append(step.token_id)
        scheduler.resume(heir)
    group.beams = heirs
    return True
