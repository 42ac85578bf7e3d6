"""The state machine of `engine_machine` for models with recurrent layers: alone, and with each other feature."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import event
from hypothesis.stateful import rule

from jpaged.engine.step_plan import RecurrentSizes, TransferCosts
from jpaged.params.sampling import SamplingParams
from tests.engine.adapter_machine import AdapterMachine
from tests.engine.engine_machine import VOCAB_SIZE, EngineMachine
from tests.engine.speculating_machine import SpeculatingMachine
from tests.engine.weights_machine import WeightsMachine

HOST_COUNTERS = ("snapshots_to_host", "snapshots_to_device")


class HybridMachine(EngineMachine):
    """A KV group without a window, one pipeline stage, and any number of snapshots."""

    def kinds(self, windows: tuple[int | None, ...], stages: int) -> tuple[tuple[int | None, ...], int]:
        """Windows of the KV groups, and the number of pipeline stages."""
        return (windows if None in windows else (None, *windows)), 1

    def recurrent_sizes(self, rows: int, number: int) -> RecurrentSizes | None:
        """Slots of recurrent state. number: decides them."""
        slot_bytes, block_bytes = ((1, 1), (5, 2), (1, 3), (20, 1))[number // 15 % 4]
        return RecurrentSizes(
            rows, num_snapshots=(0, 1, 3, 8, 40)[number % 5], interval=1 + number // 5 % 3, slot_bytes=slot_bytes,
            block_bytes=block_bytes,
        )  # fmt: skip

    def transfer_costs(self, costs: TransferCosts | None, number: int) -> TransferCosts | None:
        """Moving a snapshot costs nothing, as much as computing a few tokens, or too much."""
        if costs is None:
            return None
        return dataclasses.replace(costs, seconds_per_state=(0.0, 2.0, 100.0)[number // 60 % 3])

    @rule(
        seed=st.integers(0, 2**32), count=st.integers(2, 4), kind=st.sampled_from(["the same", "longer", "new weights"])
    )
    def take_turns(self, seed: int, count: int, kind: str) -> None:
        """Prompts that push each other from the device, and come again: the same, longer, or with new weights."""
        rng = random.Random(seed)
        prompts: list[list[int]] = [[] for _ in range(count)]
        for turn in range(3 if kind == "new weights" else 2):
            for prompt in prompts:
                if kind == "longer" or not prompt:
                    prompt += (rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((3, 8, 15))))
                self.ask_once(prompt)
                self.steps(8)
            if kind == "new weights" and not turn:
                self.new_weights(again=False, recompute=rng.random() < 0.5)

    def ask_once(self, prompt: Sequence[int]) -> None:
        """Add a request for one token."""
        request_id, params = str(len(self.salts)), SamplingParams(temperature=0, max_tokens=1)
        self.salts[request_id] = ""
        prompt = list(prompt)[: self.runner.max_model_len - 1]
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        self.asked[request_id] = prompt, params

    def teardown(self) -> None:
        super().teardown()
        for name in HOST_COUNTERS:
            self.reached[name] += getattr(self.engine.scheduler.counters, name)
            if self.reached[name]:
                event(name)

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


class HostHybridMachine(HybridMachine):
    """Few snapshots fit on the device, and moves to the host cost nothing."""

    def recurrent_sizes(self, rows: int, number: int) -> RecurrentSizes | None:
        sizes = super().recurrent_sizes(rows, number)
        assert sizes is not None
        return dataclasses.replace(sizes, num_snapshots=1 + number % 2, slot_bytes=min(sizes.slot_bytes, 5))

    def transfer_costs(self, costs: TransferCosts | None, number: int) -> TransferCosts | None:
        return None

    @rule(seed=st.integers(0, 2**32), count=st.integers(2, 4))
    def take_turns_with_new_weights(self, seed: int, count: int) -> None:
        self.engine.abort(sorted(self.asked.keys() - self.ended))
        self.ended |= self.asked.keys()
        self.take_turns(seed, count, "new weights")


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
