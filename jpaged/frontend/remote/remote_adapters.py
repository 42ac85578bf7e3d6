"""The engine's LoRA adapters, as the server of a front end sees them. Their weights stay in the engine's process.

Called by: `ServedAdapters`.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jpaged.engine.adapters.adapter_registry import AdapterInfo
from jpaged.lora.request import LoRARequest


class RemoteAdapters:
    """All adapters. It has the methods of `AdapterRegistry` that the server calls."""

    def __init__(self, ask: Callable[..., Any], call: Callable[..., Future[Any]]):
        """ask, call: `Questions.ask`, and the function that calls a method of the engine."""
        self._ask, self._call = ask, call

    def known(self) -> list[AdapterInfo]:
        """All adapters, in the order in which they were added."""
        return self._ask("known_adapters")

    def find(self, adapter: str | int) -> AdapterInfo | None:
        """An adapter by name or number."""
        return next((each for each in self.known() if adapter in (each.name, each.int_id)), None)

    def get(self, request: LoRARequest) -> Future[Any]:
        """Read an adapter if it is not in memory. The Future raises RequestError and ModelLoadError."""
        found = self.find(request.lora_name)
        if found is not None and found.path == request.lora_path:  # one of --lora-modules: the engine has read it
            done: Future[Any] = Future()
            done.set_result(True)
            return done
        return self._call("add_lora", request)

    def reload(self, request: LoRARequest) -> Future[Any]:
        """Read an adapter again. Raises as `get`."""
        return self._call("add_lora", dataclasses.replace(request, load_inplace=True))

    def remove(self, adapter: str | int) -> bool:
        """Forget an adapter. Its requests go on."""
        return self._ask("remove_adapter", adapter)
