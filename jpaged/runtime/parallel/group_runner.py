"""One engine on several processes: node 0 schedules, and every node runs the same programs on its own devices.

`LeaderRunner` is node 0's runner. It sends each call that starts device work to the other nodes, then runs the call on
its own devices. On the other nodes `follow` runs these calls until node 0 closes the engine.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.engine.step_plan import ReplacedLeaves, RowMask, StepPlan, StepResult
from jpaged.errors import EngineError
from jpaged.models.new_leaves import NewLeaf
from jpaged.runtime.parallel.process_group import ProcessGroup
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.step.result import StepHandle

logger = logging.getLogger(__name__)

KEPT = 16  # step handles that a follower keeps, the newest; an engine has 2 steps in flight


@dataclasses.dataclass(frozen=True)
class NumberedHandle:
    """A step's handle, and the step's number since the engine started."""

    number: int
    handle: StepHandle


class LeaderRunner:
    """See `engine.step_plan.Runner`. All other attributes are read from node 0's `ModelRunner`."""

    def __init__(self, runner: ModelRunner, group: ProcessGroup):
        """Start to watch the other nodes."""
        self._runner, self._group, self._steps = runner, group, 0
        group.watch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def dispatch(self, plan: StepPlan) -> NumberedHandle:
        """Start a step on all nodes."""
        self._steps += 1
        self._group.send("dispatch", self._steps, plan)
        return NumberedHandle(self._steps, self._runner.dispatch(plan))

    def sample(self, handle: NumberedHandle, masks: Sequence[RowMask]) -> NumberedHandle:
        """Sample on all nodes."""
        self._group.send("sample", handle.number, list(masks))
        return NumberedHandle(handle.number, self._runner.sample(handle.handle, masks))

    def proposed(self, handle: NumberedHandle) -> np.ndarray:
        """Drafts of a verify step. Every node has them; node 0 alone reads them."""
        return self._runner.proposed(handle.handle)

    def collect(self, handle: NumberedHandle) -> StepResult:
        """Wait for a step. Every node has the result; node 0 alone reads it."""
        return self._runner.collect(handle.handle)

    def update_params(self, leaves: Iterable[NewLeaf]) -> ReplacedLeaves:
        """Replace the weights of node 0. The leaves (`frontend/group_updates.py`) make the other nodes replace theirs.

        Raises as `ModelRunner.update_params`, and ModelLoadError if another node has failed.
        """
        try:
            return self._runner.update_params(leaves)
        except BaseException:
            self._group.send("abandon_weights")
            raise

    @property
    def kv_layout(self) -> str:
        """Empty, because no node has all parts of a block."""
        return ""

    def weights_problem(self) -> str | None:
        """Reason why no node can run a step with its weights."""
        return self._runner.weights_problem()

    def release(self, *, discard: bool = False) -> None:
        """Free the device state, and with `discard` the weights, on all nodes."""
        self._group.send("release", discard)
        self._runner.release(discard=discard)

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        """Allocate again on all nodes."""
        self._group.send("restore", weights, kv_cache)
        self._runner.restore(weights=weights, kv_cache=kv_cache)

    def start_profile(self, folder: str) -> None:
        """Profile all nodes. Each writes to `folder` on its own machine."""
        self._group.send("start_profile", folder)
        self._runner.start_profile(folder)

    def stop_profile(self) -> None:
        """Write the profiles."""
        self._group.send("stop_profile")
        self._runner.stop_profile()

    def close(self) -> None:
        """End all nodes."""
        self._runner.close()
        self._group.close()


def follow(runner: ModelRunner, group: ProcessGroup, commands: Mapping[str, Callable[..., None]]) -> int:
    """Run the calls that node 0 sends. Returns 0 when node 0 closes the engine; ends the process if node 0 is lost.

    commands: functions of further calls, by name.
    """
    [leader] = group.channels
    handles: collections.OrderedDict[int, StepHandle] = collections.OrderedDict()
    logger.info("node %d of %d follows node 0", group.rank, group.size)
    while True:
        try:
            command, *values = leader.receive()
        except (EOFError, OSError):
            group.lost("node 0")
            raise
        if command == "close":
            runner.close()
            group.close()
            return 0
        try:
            if command == "dispatch":
                number, plan = values
                handles[number] = runner.dispatch(plan)
                if len(handles) > KEPT:
                    handles.popitem(last=False)
            elif command == "sample":
                number, masks = values
                handles[number] = runner.sample(handles[number], masks)
            elif command == "restore":
                runner.restore(weights=values[0], kv_cache=values[1])
            elif command == "release":
                runner.release(discard=values[0])
            elif command in commands:
                commands[command](*values)
            else:
                {"stop_profile": runner.stop_profile, "start_profile": runner.start_profile}[command](*values)
        except EngineError as error:
            # node 0 raises the same error, or is stuck in a collective until it hears that this node failed
            leader.send("failed", str(error))
            raise
