"""The LoRA adapters that an engine knows by name, and their copies in host memory.

Called by: `LLM`, `AsyncLLM` and the server, on any thread.
Owns: the names and numbers of adapters, and how many are in host memory.
Never: touches the device, or lets a caller wait for a file: `get` returns a Future.

An adapter is read on a thread of its own when it is asked for. At most `max_loaded` are in memory. Those that were used
the longest time ago are dropped, and read again when they are needed. Requests keep the version that they have.
"""

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.errors import EngineError, RequestError
from jpaged.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_CLOSED = "the engine is closed: make a new one"

# read(name, source, generation): source is the path of a folder, or arrays by name with their options
Read = Callable[[str, Any, int], LoadedAdapter]


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that the engine knows."""

    name: str
    int_id: int
    path: str             # "": live arrays
    loaded: LoadedAdapter | None  # None: not in host memory at the moment


@dataclasses.dataclass(slots=True)
class _Entry:
    name: str
    int_id: int
    source: Any
    path: str
    generation: int = 0  # of `future`; counts reloads
    asked: int = 0       # generation of the last read that was asked for
    was_read: bool = False
    was_removed: bool = False  # by `remove`
    future: Future[LoadedAdapter] | None = None
    asked_at: int = 0


class AdapterRegistry:
    """Adapters by name."""

    def __init__(self, read: Read, *, max_loaded: int):
        self._read, self._max_loaded = read, max_loaded
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._order = itertools.count(1)
        self._readers = ThreadPoolExecutor(2, "adapter-reader")

    def get(self, request: LoRARequest) -> Future[LoadedAdapter]:
        """The adapter of a request, which is read if it is not in memory. A new name is added, if it has a path.

        Raises RequestError for an unknown name without a path, or if name, number or path belong to another adapter.
        The Future raises ModelLoadError for an adapter that cannot be read.
        """
        with self._lock:
            return self._ask(self._entry(request))

    def reload(self, request: LoRARequest) -> Future[LoadedAdapter]:
        """Read an adapter again, from the request's path if it has one. Raises as `get`, but the path may be new.

        Other requests get the old content until the new one is read. If that fails, the old content stays.
        """
        with self._lock:
            entry = self._entries.get(request.lora_name)
            if entry is None:
                return self._ask(self._entry(request))
            self._check_number(request)
            path = request.lora_path or entry.path
            if not path:
                raise RequestError("lora_path", "", f"adapter {entry.name!r} is of live arrays: name the new folder")
            return self._read_again(entry, path, path)

    def add_arrays(
        self, adapter: LoRARequest | str, arrays: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Future[LoadedAdapter]:
        """Add an adapter of live arrays, or replace the one of this name. It stays in memory until it is removed.

        adapter: a request without a path, or a name. A new name alone gets the next free number.

        Raises RequestError if name or number belong to another adapter. If the arrays cannot be used, the Future raises
        ModelLoadError, and the old content stays.
        """
        with self._lock:
            if isinstance(adapter, LoRARequest):
                request = adapter
                self._check_number(request)
            else:
                known = self._entries.get(adapter)
                number = known.int_id if known else 1 + max((e.int_id for e in self._entries.values()), default=0)
                request = LoRARequest(adapter, number)  # checks the name
            entry = self._entries.get(request.lora_name)
            if entry is not None:
                return self._read_again(entry, "", (arrays, options))
            entry = _Entry(request.lora_name, request.lora_int_id, (arrays, options), "")
            self._entries[entry.name] = entry
            return self._ask(entry)

    def remove(self, adapter: str | int) -> bool:
        """Forget an adapter, by name or number. Its requests go on. Returns False if there is no such adapter."""
        with self._lock:
            entry = self._find(adapter)
            if entry is not None:
                del self._entries[entry.name]
                entry.was_removed = True
            return entry is not None

    def known(self) -> list[AdapterInfo]:
        """All adapters, in the order in which they were added."""
        with self._lock:
            return [_info(entry) for entry in self._entries.values()]

    def find(self, adapter: str | int) -> AdapterInfo | None:
        """An adapter by name or number; None: there is none."""
        with self._lock:
            entry = self._find(adapter)
            return None if entry is None else _info(entry)

    def close(self) -> None:
        """Stop reading. Futures of adapters that are not read yet raise EngineError."""
        self._is_closed = True
        self._readers.shutdown(wait=False)  # a cancelled Future would look as if its waiting task was cancelled

    def _find(self, adapter: str | int) -> _Entry | None:
        if isinstance(adapter, str):
            return self._entries.get(adapter)
        return next((entry for entry in self._entries.values() if entry.int_id == adapter), None)

    def _entry(self, request: LoRARequest) -> _Entry:
        entry = self._entries.get(request.lora_name)
        self._check_number(request)
        if entry is None:
            if not request.lora_path:
                there = ", ".join(self._entries) or "none"
                known = f"unknown adapter: name its folder (lora_path), or one of those there are: {there}"
                raise RequestError("lora_request", request.lora_name, known)
            entry = _Entry(request.lora_name, request.lora_int_id, request.lora_path, request.lora_path)
            self._entries[entry.name] = entry
        elif request.lora_path and request.lora_path != entry.path:
            origin = entry.path or "live arrays"
            known = f"adapter {entry.name!r} is from {origin}: set load_inplace, or use another name"
            raise RequestError("lora_path", request.lora_path, known)
        return entry

    def _check_number(self, request: LoRARequest) -> None:
        """Raise RequestError if the name has another number, or the number another name."""
        known, same = self._entries.get(request.lora_name), self._find(request.lora_int_id)
        if known is not None and known.int_id != request.lora_int_id:
            raise RequestError("lora_int_id", request.lora_int_id, f"adapter {known.name!r} has {known.int_id}")
        if same is not None and same.name != request.lora_name:
            known_as = f"is the number of adapter {same.name!r}: use another one"
            raise RequestError("lora_int_id", request.lora_int_id, known_as)

    def _ask(self, entry: _Entry) -> Future[LoadedAdapter]:
        entry.asked_at = next(self._order)
        if entry.future is None:
            entry.future = self._submit(self._load, entry, entry.source, entry.generation)
            self._drop_some()
        return entry.future

    def _submit(self, call: Callable[..., LoadedAdapter], *arguments: Any) -> Future[LoadedAdapter]:
        try:
            return self._readers.submit(call, *arguments)
        except RuntimeError:
            raise EngineError(_CLOSED) from None

    def _read_again(self, entry: _Entry, path: str, source: Any) -> Future[LoadedAdapter]:
        entry.asked += 1
        return self._submit(self._replace, entry, path, source, entry.asked)

    def _read_now(self, name: str, source: Any, generation: int) -> LoadedAdapter:
        if self._is_closed:
            raise EngineError(_CLOSED)
        return self._read(name, source, generation)

    def _load(self, entry: _Entry, source: Any, generation: int) -> LoadedAdapter:
        try:
            loaded = self._read_now(entry.name, source, generation)
        except BaseException:
            with self._lock:
                if self._entries.get(entry.name) is entry and entry.generation == generation:
                    entry.future = None  # the next request tries again
                    if not entry.was_read:  # so that a better folder can be tried under the same name
                        del self._entries[entry.name]
            raise
        entry.was_read = True
        logger.info("LoRA %s", loaded.summary)
        return loaded

    def _replace(self, entry: _Entry, path: str, source: Any, generation: int) -> LoadedAdapter:
        """Read new content for an adapter. Later requests get it, unless an even later reload was faster."""
        loaded = self._read_now(entry.name, source, generation)
        with self._lock:
            if not entry.was_removed and self._find(entry.int_id) is None:
                self._entries.setdefault(entry.name, entry)  # the first read has failed since, and forgot the name
            if entry.generation < generation:
                future: Future[LoadedAdapter] = Future()
                future.set_result(loaded)
                entry.path, entry.source, entry.generation, entry.future = path, source, generation, future
                entry.was_read = True
                self._drop_some()
        logger.info("LoRA %s, read again", loaded.summary)
        return loaded

    def _drop_some(self) -> None:
        """Drop adapters from memory until at most `max_loaded` are left. Those of live arrays cannot be read again."""
        loaded = [e for e in self._entries.values() if e.future is not None and e.path]
        for entry in sorted(loaded, key=lambda e: e.asked_at)[: max(0, len(loaded) - self._max_loaded)]:
            entry.future = None


def _info(entry: _Entry) -> AdapterInfo:
    return AdapterInfo(entry.name, entry.int_id, entry.path, _result(entry.future))


def _result(future: Future[LoadedAdapter] | None) -> LoadedAdapter | None:
    done = future is not None and future.done() and not future.cancelled()
    return future.result() if future is not None and done and future.exception() is None else None
