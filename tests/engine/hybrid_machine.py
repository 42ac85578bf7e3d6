"""The state machine of `engine_machine` for models with recurrent layers: alone, and with each other feature."""

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import rule

from jpaged.engine.step_plan import RecurrentSizes
from tests.engine.adapter_machine import AdapterMachine
from tests.engine.engine_machine import EngineMachine
from tests.engine.speculating_machine import SpeculatingMachine
from tests.engine.weights_machine import WeightsMachine


class HybridMachine(EngineMachine):
    """A KV group without a window, one pipeline stage, and any number of snapshots."""

    def kinds(self, windows: tuple[int | None, ...], stages: int) -> tuple[tuple[int | None, ...], int]:
        """Windows of the KV groups, and the number of pipeline stages."""
        return (windows if None in windows else (None, *windows)), 1

    def recurrent_sizes(self, rows: int, number: int) -> RecurrentSizes | None:
        """Slots of recurrent state. number: decides them."""
        return RecurrentSizes(rows, num_snapshots=(0, 1, 3, 8, 40)[number % 5], interval=1 + number // 5 % 3)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 8), way=st.sampled_from(["refused", "reset", "sleep"]))
    def preempt_all(self, seed: int, count: int, way: str) -> None:
        """All running requests are preempted. After weights that are refused, they find their snapshots again."""
        self.crowd(seed, 3)
        self.steps(count)
        self.flush()
        if way == "refused":
            with pytest.raises(OSError, match="no weights"):
                self.engine.update_weights(_no_leaves(), recompute=True)
        elif way == "reset":
            assert self.engine.reset_prefix_cache(reset_running_requests=True)
        else:
            self.engine.sleep()
            self.engine.wake_up()
        self.sound()


def _no_leaves() -> Iterator[int]:
    raise OSError("there are no weights")
    yield 0

class SpeculatingHybridMachine(HybridMachine, SpeculatingMachine):
    """Drafts on a model with recurrent layers. Counts snapshots that verify steps have taken."""

    def step(self) -> None:
        super().step()
        states = self.engine.scheduler.manager.states
        assert states is not None
        plans = [step.plan.drafts for step in self.engine.scheduler._newest if step.plan.drafts is not None]
        self.reached["reserved slots"] += any((drafts.snapshots >= 0).any() for drafts in plans)

    def teardown(self) -> None:
        super().teardown()
        assert not self.engine.scheduler.manager.states._reserved, "a slot that no step will free"


class AdapterHybridMachine(HybridMachine, AdapterMachine):
    """Requests of several adapters. A state that another adapter has computed is an error of the fake device."""


class WeightsHybridMachine(HybridMachine, WeightsMachine):
    """New weights while requests run. A state of other weights than its row's KV is an error of the fake device."""
