"""Rows and tokens chosen for one step. Preemption may remove rows until the plan is built."""

from jpaged.engine.request import Request
from jpaged.engine.speculation.draft import Draft
from jpaged.engine.step_plan import ModelDraftPlan


class StepSelection:
    """The choice for one step so far."""

    def __init__(self, budget: int):
        self.budget = budget                         # tokens that can still be added
        self.decodes: list[Request] = []             # compute their last sampled token; already counted as computed
        self.boundary_decodes: list[Request] = []    # the part of `decodes` that reached its next boundary
        self.chunks: dict[Request, int] = {}         # known tokens that each prompt row computes
        self.prompts: list[Request] = []             # running requests that do not decode
        self.drafts: dict[Request, Draft] = {}       # for some of the decodes; already counted as computed
        self.model_drafts: ModelDraftPlan | None = None  # work of a draft model on the device
        self.block_updates: list[tuple[int, int, int, int]] = []  # (row, kv_group, index, block)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def add_chunk(self, request: Request, count: int) -> None:
        """Add `count` known tokens of a request."""
        self.chunks[request] = self.chunks.get(request, 0) + count
        self.budget -= count

    def end(self, request: Request) -> int:
        """Number of the request's tokens that are computed after this step."""
        return request.schedule.num_computed + self.chunks.get(request, 0)

    def num_drafts(self, request: Request) -> int:
        """Drafts of a decode."""
        draft = self.drafts.get(request)
        return 0 if draft is None else draft.count

    def remove(self, request: Request) -> None:
        """Remove a request that is preempted."""
        schedule = request.schedule
        if schedule.decoding and request in self.decodes:
            self.decodes.remove(request)
            self.budget += 1
            schedule.num_computed -= 1
            schedule.num_in_flight -= 1
            if request in self.boundary_decodes:
                self.boundary_decodes.remove(request)
        self.budget += self.chunks.pop(request, 0)
        self.block_updates = [update for update in self.block_updates if update[0] != schedule.row]
