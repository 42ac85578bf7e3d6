"""Random LoRA adapters for the random users of EngineMachine: few slots, reloads, requests that wait for a slot."""

import dataclasses
import random
from concurrent.futures import Future
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import rule

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.request_group import RequestGroup
from tests.engine.engine_machine import EngineMachine

NAMES = "abcd"


class AdapterMachine(EngineMachine):
    """Requests name one of four adapters, or none. A reload gives a name another adapter."""

    def drafting(self, number: int, budget: int) -> dict[str, Any]:
        self.rng = random.Random(number)
        self.versions = dict.fromkeys(NAMES, 0)
        self.loaded: dict[str, LoadedAdapter] = {}
        return {"num_adapter_slots": self.rng.choice((1, 2, 3))}

    def adapter(self, name: str) -> LoadedAdapter:
        """The adapter that a name has now. Its content is a number of its own."""
        if name not in self.loaded:
            content = 1 + NAMES.index(name) + len(NAMES) * self.versions[name]
            key = f"{name} {self.versions[name]}"
            self.loaded[name] = LoadedAdapter(name, key, 1, content, "")
        return self.loaded[name]

    def ruled(self, request_group: RequestGroup) -> RequestGroup:
        name = self.rng.choice(("", "", *NAMES))
        if not name:
            return request_group
        adapter: Future[LoadedAdapter] = Future()
        adapter.set_result(self.adapter(name))
        self.adapters[request_group.request_id] = self.adapter(name).content
        return dataclasses.replace(request_group, adapter=adapter)

    @rule(name=st.sampled_from(NAMES), again=st.booleans())
    def reload(self, name: str, again: bool) -> None:
        """Give a name another adapter, while requests of the old one may run."""
        self.versions[name] += 1
        self.loaded.pop(name, None)
        if again:
            self.crowd(*self.last_crowd)

    @rule()
    def sleep(self) -> None:
        """Lose the content of all slots. Running requests go on after it."""
        for output in self.engine.flush() if not self.runner.fail_at else ():
            self.judge(output)
        if not self.runner.fail_at:
            self.engine.sleep()
            self.engine.wake_up()
            self.reached["sleep"] += 1

    def step(self) -> None:
        gate = self.engine.scheduler.adapters
        self.reached["waits for a slot"] += bool(gate.num_waiting)
        self.reached["leaves its slot"] += any(slot.is_leaving for slot in gate._slots)
        super().step()
