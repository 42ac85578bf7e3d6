"""Which LoRA adapter is in which slot of the device, and the requests that wait for a slot.

Called by: the scheduler and its plan builder.
Owns: the slots, and the requests whose adapter has none.
Never: delays a request without an adapter, or reads an adapter.

A request group uses the slot of its adapter from the time when it may start until it ends, also while it is preempted.
A slot without users keeps its adapter. A new adapter gets the slot that was unused for the longest time.

If all slots are in use, adapters leave, one for each adapter that waits, in the order in which they were loaded. A
leaving adapter starts no new request, so its slot becomes free when its requests have ended. Thus adapters take turns.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.request import Request
from jpaged.engine.step_plan import NO_ADAPTER, AdapterLoad
from jpaged.errors import EngineError


@dataclasses.dataclass(slots=True)
class _Slot:
    index: int
    adapter: LoadedAdapter | None = None
    users: set[str] = dataclasses.field(default_factory=set)  # ids of request groups
    loaded_at: int = 0       # order of the slots' last loads
    last_used: int = 0       # order of the ends of use
    is_leaving: bool = False  # takes no new requests


class AdapterGate:
    """The slots of an engine."""

    def __init__(self, num_slots: int):
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._slot_of_group: dict[str, _Slot] = {}
        self._waiting: dict[str, list[Request]] = {}  # by the adapter's key, in order of arrival
        self._loads: dict[int, LoadedAdapter] = {}    # to write before the next step, by slot
        self._order = itertools.count(1)

    @property
    def waiting(self) -> Iterator[Request]:
        """Requests that wait for a slot."""
        return itertools.chain.from_iterable(self._waiting.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a slot."""
        return sum(request.prompt_len for request in self.waiting)

    @property
    def num_slots(self) -> int:
        """Number of slots: adapters that are on the device at a time."""
        return len(self._slots)

    def names(self) -> tuple[list[str], list[str]]:
        """Names of the adapters that are in use, and of those that wait for a slot. Any thread may call it."""
        in_use = [slot.adapter.name for slot in self._slots if slot.users and slot.adapter is not None]
        first = [request for requests in list(self._waiting.values()) for request in requests[:1]]
        waiting = [request.adapter.name for request in first if request.adapter is not None]
        return sorted(set(in_use)), sorted(set(waiting))

    def slot_of(self, request: Request) -> int:
        """Slot of a request's adapter; NO_ADAPTER without one."""
        return NO_ADAPTER if request.adapter is None else self._slot_of_group[request.request_id].index

    def enter(self, request: Request) -> bool:
        """Return True if a request may start. Else `admit` returns it later. It may have entered before."""
        adapter = request.adapter
        if adapter is None or request.request_id in self._slot_of_group:
            return True
        if not self._slots:
            raise EngineError(f"request {request.request_id} has an adapter, and the engine has no slots for any")
        slot = self._find(adapter) if not self._waiting else self._staying(adapter)  # else it would overtake
        if slot is not None:
            self._use(slot, request)
            return True
        self._waiting.setdefault(adapter.key, []).append(request)
        return False

    def withdraw(self, request: Request) -> None:
        """Forget a request that waits for a slot, if it does."""
        if request.adapter is None or request.adapter.key not in self._waiting:
            return
        requests = self._waiting[request.adapter.key]
        if request in requests:
            requests.remove(request)
            if not requests:
                del self._waiting[request.adapter.key]
                self._end_leaving()

    def leave(self, request_id: str) -> None:
        """Note that a request group has ended."""
        slot = self._slot_of_group.pop(request_id, None)
        if slot is not None:
            slot.users.remove(request_id)
            slot.last_used = next(self._order)

    def admit(self) -> list[Request]:
        """Give slots to adapters that wait. Returns the requests that may start now, in order of arrival."""
        if not self._waiting:
            return []
        admitted = []
        for key in list(self._waiting):
            adapter = self._waiting[key][0].adapter
            slot = None if adapter is None else self._find(adapter)
            if slot is None:
                continue
            for request in self._waiting.pop(key):
                self._use(slot, request)
                admitted.append(request)
        if self._waiting:
            self._let_leave(len(self._waiting))
        self._end_leaving()
        return sorted(admitted, key=lambda request: request.arrival)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Adapters to write into their slots before the next step."""
        if not self._loads:
            return ()
        loads = tuple(AdapterLoad(slot, adapter.content) for slot, adapter in self._loads.items())
        self._loads.clear()
        return loads

    def load_again(self) -> None:
        """Note that the device has lost the content of all slots."""
        for slot in self._slots:
            if slot.adapter is not None:
                self._loads[slot.index] = slot.adapter

    def check(self) -> None:
        """Raise EngineError unless slots, users and waiting requests agree."""
        users = {request_id: slot for slot in self._slots for request_id in slot.users}
        if users != self._slot_of_group:
            raise EngineError(f"request groups with a slot {sorted(self._slot_of_group)}, users {sorted(users)}")
        keys = [slot.adapter.key for slot in self._slots if slot.adapter is not None]
        if len(set(keys)) != len(keys):
            raise EngineError(f"an adapter is in two slots: {keys}")

    def _staying(self, adapter: LoadedAdapter) -> _Slot | None:
        """The slot that has an adapter and keeps it, while other adapters wait. None: it must wait too."""
        slot = self._slot_with(adapter)
        return slot if slot is not None and slot.users and not slot.is_leaving else None

    def _slot_with(self, adapter: LoadedAdapter) -> _Slot | None:
        there = (slot for slot in self._slots if slot.adapter is not None and slot.adapter.key == adapter.key)
        return next(there, None)

    def _find(self, adapter: LoadedAdapter) -> _Slot | None:
        """A slot that has the adapter, or gets it now; None: the adapter must wait."""
        slot = self._slot_with(adapter)
        if slot is not None:
            return None if slot.is_leaving and slot.users else slot
        unused = [slot for slot in self._slots if not slot.users]
        if not unused:
            return None
        slot = min(unused, key=lambda slot: (slot.adapter is not None, slot.last_used))
        slot.adapter, slot.loaded_at, slot.is_leaving = adapter, next(self._order), False
        self._loads[slot.index] = adapter
        return slot

    def _use(self, slot: _Slot, request: Request) -> None:
        slot.users.add(request.request_id)
        slot.is_leaving = False
        self._slot_of_group[request.request_id] = slot

    def _let_leave(self, count: int) -> None:
        """Let at least `count` slots leave, those that were loaded first; all if there are fewer."""
        for slot in sorted(self._slots, key=lambda slot: (not slot.is_leaving, slot.loaded_at))[:count]:
            slot.is_leaving = True

    def _end_leaving(self) -> None:
        """Let no slot leave if no adapter waits."""
        if not self._waiting:
            for slot in self._slots:
                slot.is_leaving = False
