"""How requests are ordered, paced and limited."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Scheduling options of the engine. `EngineConfig` has fields of the same names."""

    scheduling_policy: str = "fcfs"            # a name in `waiting_queue.POLICIES`
    max_num_partial_prefills: int = 1          # long prompts that are computed at a time
    target_step_ms: float | None = None        # prompt tokens per step are limited to keep steps under this time
    max_queued_requests: int | None = None     # further requests are refused; None: no limit
    max_queued_tokens: int | None = None       # further prompts are refused; None: no limit
