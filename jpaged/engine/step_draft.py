"""A step in the making: who advances by how many tokens. Nothing of it is final until the scheduler commits it."""

import array

import numpy as np

from jpaged.engine.request import Request
from jpaged.engine.step_plan import RowInit

# A larger factor would make infinity of logits, at any temperature, and a smaller one of their quotients.
MOST_REPETITION = 1e25
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)


class StepDraft:
    """What has been decided so far, so that a preempted row can leave it again."""

    def __init__(self, budget: int):
        self.budget = budget                                # tokens that may still be added
        self.decodes: list[Request] = []                    # advance by the token that was sampled last; counted
        self.boundary: list[Request] = []                   # of these, where more than a token may change
        self.num_tokens: dict[Request, int] = {}            # of all others, that advance by known tokens
        self.under_way: list[Request] = []                  # running, and not decoding
        self.updates: list[tuple[int, int, int, int]] = []  # of block tables: (row, group, index, block)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.num_tokens)

    def add(self, request: Request, count: int) -> None:
        """Let a request that does not decode advance by more tokens."""
        self.num_tokens[request] = self.num_tokens.get(request, 0) + count
        self.budget -= count

    def drop(self, request: Request) -> None:
        """Take out what a request that is preempted was to do."""
        if request.schedule.decoding and request in self.decodes:
            self.decodes.remove(request)
            self.budget += 1
            request.schedule.num_computed -= 1
            request.schedule.num_in_flight -= 1
            if request in self.boundary:
                self.boundary.remove(request)
        self.budget += self.num_tokens.pop(request, 0)
        self.updates = [update for update in self.updates if update[0] != request.schedule.row]


def row_init(request: Request, vocab_size: int) -> RowInit:
    """What the device must know of a row whose request starts, or goes on as a fork."""
    params = request.params
    blocks: list[int] = []  # flat: np.array takes twice as long over tuples
    for group, table in enumerate(request.kv.block_tables):
        for index, block in enumerate(table.held, table.first_held):
            blocks += (group, index, block)
    greedy = params.greedy or request.is_beam
    return RowInit(
        row=request.schedule.row,
        num_computed=request.schedule.num_computed,
        rope_len=request.kv.rope_len,
        blocks=np.frombuffer(array.array("i", blocks), np.int32).reshape(-1, 3),
        temperature=0.0 if greedy else params.temperature,
        top_p=1.0 if greedy else max(params.top_p, SMALLEST_FLOAT32),
        top_k=0 if greedy or params.top_k >= vocab_size else params.top_k,
        min_p=0.0 if greedy else params.min_p,
        seed=request.seed,
        sample_index=request.index,
        beam_temperature=(1.0 if params.greedy else params.temperature) if request.is_beam else 0.0,
        typical_p=1.0 if greedy else max(params.typical_p, SMALLEST_FLOAT32),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=min(max(params.repetition_penalty, 1 / MOST_REPETITION), MOST_REPETITION),
        processors=0 if request.extras is None else request.extras.processors,
        logprobs=params.needs_logprobs,
        extras=None if request.extras is None else request.extras.row_extras(request),
    )
