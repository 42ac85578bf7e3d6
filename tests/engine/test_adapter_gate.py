"""AdapterGate: adapters take turns in the slots, and none waits for ever."""

import dataclasses
import random

import pytest

from jpaged.engine.adapters.adapter_gate import AdapterGate
from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.errors import EngineError


@dataclasses.dataclass(eq=False)
class Asked:
    """The fields of a request that the gate reads."""

    request_id: str
    adapter: LoadedAdapter | None
    arrival: int


class Users:
    """Requests of adapters by name, numbered in order of arrival."""

    def __init__(self, num_slots: int):
        self.gate, self.number, self.running = AdapterGate(num_slots), 0, []
        self.adapters: dict[str, LoadedAdapter] = {}

    def ask(self, name: str) -> Asked:
        adapter = self.adapters.setdefault(name, LoadedAdapter(name, name, 1, name, "")) if name else None
        request = Asked(str(self.number), adapter, self.number)
        self.number += 1
        if self.gate.enter(request):
            self.running.append(request)
        return request

    def turn(self) -> list[Asked]:
        admitted = self.gate.admit()
        self.running += admitted
        self.gate.check()
        return admitted

    def end(self, request: Asked) -> None:
        self.running.remove(request)
        self.gate.leave(request.request_id)


def loads(gate: AdapterGate) -> list[tuple[int, str]]:
    return [(load.slot, load.content) for load in gate.take_loads()]


def test_requests_without_an_adapter_never_wait():
    users = Users(1)
    users.ask("a")
    users.ask("b")
    base = users.ask("")
    assert base in users.running
    assert users.gate.slot_of(base) == -1


def test_an_adapter_is_loaded_once_and_its_slot_is_kept():
    users = Users(2)
    first, second, other = users.ask("a"), users.ask("a"), users.ask("b")
    assert users.running == [first, second, other]
    assert loads(users.gate) == [(0, "a"), (1, "b")]
    users.end(first)
    users.end(second)
    again = users.ask("a")  # its slot is not in use, and still has it
    assert users.gate.slot_of(again) == 0
    assert not loads(users.gate)


def test_the_slot_that_was_unused_for_the_longest_time_gets_a_new_adapter():
    users = Users(2)
    first, other = users.ask("a"), users.ask("b")
    users.end(other)
    users.end(first)
    loads(users.gate)
    assert users.gate.slot_of(users.ask("c")) == 1
    assert loads(users.gate) == [(1, "c")]


def test_a_waiting_adapter_starts_when_a_slot_has_no_users():
    users = Users(1)
    first, waiting, later = users.ask("a"), users.ask("b"), users.ask("b")
    assert users.turn() == []
    assert users.gate.names() == (["a"], ["b"])
    users.end(first)
    assert users.turn() == [waiting, later]
    assert users.gate.names() == (["b"], [])


def test_a_leaving_adapter_starts_no_new_request():
    users = Users(1)
    first, waiting = users.ask("a"), users.ask("b")
    users.turn()
    late = users.ask("a")
    assert late not in users.running
    users.end(first)
    assert users.turn() == [waiting]
    users.end(waiting)
    assert users.turn() == [late]


def test_only_as_many_adapters_leave_as_wait():
    users = Users(3)
    for name in "abc":
        users.ask(name)
    users.ask("d")
    users.turn()
    assert users.ask("a") not in users.running, "a was loaded first"
    assert users.ask("b") in users.running
    assert users.ask("c") in users.running


def test_an_adapter_stays_if_the_one_that_waited_is_aborted():
    users = Users(1)
    users.ask("a")
    waiting = users.ask("b")
    users.turn()
    users.gate.withdraw(waiting)
    assert users.ask("a") in users.running


def test_a_request_is_withdrawn_before_it_starts():
    users = Users(1)
    first, waiting = users.ask("a"), users.ask("b")
    users.gate.withdraw(waiting)
    users.end(first)
    assert users.turn() == []
    assert not users.gate.num_waiting


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_none_waits_for_ever(num_slots):
    """Ten busy adapters have new requests in each turn. A request waits for at most the turns of all others."""
    rng, users, waits = random.Random(num_slots), Users(num_slots), {}
    for turn in range(3_000):
        for name in "abcdefghij":
            if rng.random() < 0.9:
                waits[users.ask(name)] = turn
        users.turn()
        for request in users.running:
            waits.pop(request, None)
        for request in [one for one in users.running if rng.random() < 0.3]:
            users.end(request)
        assert turn - min(waits.values(), default=turn) < 60 * 10 / num_slots


@pytest.mark.parametrize("late", ["a", "c"])
def test_no_adapter_overtakes_one_that_waits_for_a_slot_that_is_free_now(late):
    """A client sends its next request as soon as it has an answer, before the next step is scheduled."""
    users = Users(1)
    first, waiting = users.ask("a"), users.ask("b")
    users.turn()
    users.end(first)
    behind = users.ask(late)
    assert behind not in users.running
    assert users.turn() == [waiting]
    users.end(waiting)
    assert users.turn() == [behind]


def test_an_engine_without_slots_refuses_an_adapter():
    with pytest.raises(EngineError, match="no slots"):
        Users(0).ask("a")


def test_all_adapters_are_loaded_again_after_their_loss():
    users = Users(3)
    users.ask("a")
    users.ask("b")
    loads(users.gate)
    users.gate.load_again()
    assert loads(users.gate) == [(0, "a"), (1, "b")]
