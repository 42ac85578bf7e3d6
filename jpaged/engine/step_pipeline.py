"""Dispatches a step before it collects an earlier one: the device goes from one step straight to the next.

Called by: `Engine`, in `step`, in `flush`, and after a failure.
Owns: the handles of the steps in flight.
Never: changes a plan or a result.

With S pipeline stages, S steps are in flight between two turns, one per stage. A turn collects the oldest.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Generic, Literal

import numpy as np

from jpaged.engine.scheduling.scheduler_state import ScheduledStep
from jpaged.engine.step_plan import HandleT, RowMask, Runner, StepPlan
from jpaged.engine.strategies import CollectedStep
from jpaged.errors import EngineError
from jpaged.metrics import PhaseSeconds

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _StepInFlight(Generic[HandleT]):
    step: ScheduledStep
    handle: HandleT
    began: float  # seconds of time.monotonic()


@dataclasses.dataclass(frozen=True, slots=True)
class _DeviceCall:
    """A call of the runner that has not returned."""

    kind: Literal["dispatch", "collect", "sample"]
    plan: StepPlan
    began: float  # seconds of time.monotonic()


class StepPipeline(Generic[HandleT]):
    """Owns the steps in flight: between two turns, at most one per pipeline stage."""

    def __init__(self, runner: Runner[HandleT], phases: PhaseSeconds):
        """phases: receives the time of each call of the runner."""
        self.runner = runner
        self._phases = phases
        self.failure: Exception | None = None  # of a step that failed after its turn
        # By turn, oldest first. None: that turn had no step.
        self._in_flight: collections.deque[_StepInFlight[HandleT] | None] = collections.deque()
        self._last_collect = 0.0
        self.dispatched = 0.0  # time.monotonic() when a step was dispatched last
        self._call: _DeviceCall | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step is in flight, or a failure was not raised yet."""
        return self.has_steps or self.failure is not None

    @property
    def has_steps(self) -> bool:
        """Whether a step is in flight."""
        return any(step is not None for step in self._in_flight)

    def raise_failure(self) -> None:
        """Raise the failure of the last step, once."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def turn(self, step: ScheduledStep | None) -> CollectedStep | None:
        """Dispatch `step`, if any. Collect the step of `num_stages` turns before; returns None if there was none."""
        in_flight, began, phases = self._in_flight, time.monotonic(), self._phases
        previous = in_flight.popleft() if len(in_flight) == self.runner.num_stages else None
        dispatching = None
        if step is not None:
            self._call = _DeviceCall("dispatch", step.plan, began)
            dispatching = _StepInFlight(step, self.runner.dispatch(step.plan), began)
        in_flight.append(dispatching)
        self.dispatched = dispatched = time.monotonic()
        phases.dispatch += dispatched - began
        if previous is None:
            self._call = None
            return None
        self._call = _DeviceCall("collect", previous.step.plan, time.monotonic())
        result = self.runner.collect(previous.handle)
        now = time.monotonic()
        self._call = None
        phases.collect += now - dispatched
        # The device runs one step at a time: this one began when it was dispatched, or when the one before it ended.
        began, self._last_collect = max(self._last_collect, previous.began), now
        return CollectedStep(previous.step, result, result.token_ids.tolist(), began, now)

    def running(self) -> tuple[StepPlan, float] | None:
        """The only step in flight, and when the device began it. None if there are several stages, or no step."""
        if len(self._in_flight) != 1 or (step := self._in_flight[0]) is None or self.runner.num_stages != 1:
            return None
        return step.step.plan, max(self._last_collect, step.began)

    def step_without_masks(self) -> ScheduledStep | None:
        """The newest step in flight, if it waits for masks."""
        in_flight = self._in_flight[-1] if self._in_flight else None
        return None if in_flight is None or not in_flight.step.plan.waits_for_masks else in_flight.step

    def proposed(self) -> np.ndarray:
        """Drafts of the device for the newest step in flight, which waits for masks. See `Runner.proposed`."""
        in_flight = self._in_flight[-1]
        if in_flight is None:
            raise EngineError("no step is in flight")
        return self.runner.proposed(in_flight.handle)

    def sample(self, masks: Sequence[RowMask]) -> None:
        """Let the newest step in flight sample. masks: the masks that it waits for."""
        in_flight = self._in_flight[-1]
        if in_flight is not None:
            self._call = _DeviceCall("sample", in_flight.step.plan, time.monotonic())
            self._in_flight[-1] = dataclasses.replace(in_flight, handle=self.runner.sample(in_flight.handle, masks))
            self._call = None

    def describe(self) -> str:
        """Describe the current call of the device, for a log. Any thread may call it."""
        call = self._call
        if call is None:
            return "no call of the device: the host schedules, or processes outputs"
        plan, seconds = call.plan, time.monotonic() - call.began
        return (
            f"{call.kind} for {seconds:.1f} s of {self.runner.describe(plan)} with {len(plan.rows)} rows "
            f"({plan.num_decodes} decodes) and {plan.total_tokens} tokens"
        )

    def drop(self) -> None:
        """Wait for the steps in flight, and discard their results. Forget a failure that was not raised yet.

        A step must not outlive the engine: with JAX 0.11 its end takes the GIL, and aborts an exiting process.
        """
        dropped, self.failure, self._call = list(self._in_flight), None, None
        self._in_flight.clear()
        for step in dropped:
            try:
                if step is not None:
                    self.runner.collect(step.handle)
            except Exception as error:  # its requests have ended already
                logger.debug("a step that was dropped has failed: %s", error)
