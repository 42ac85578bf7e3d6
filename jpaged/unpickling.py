"""Unpickling that cannot run code: it accepts classes and functions of a table only."""

import io
import pickle
from collections.abc import Collection
from typing import Any


def load(content: bytes | memoryview, accepted: Collection[tuple[str, str]], refusal: str) -> Any:
    """Return the pickled object. Raises UnpicklingError for a name that is not accepted.

    accepted: pairs of a module and a name. refusal: text of the error; {} stands for the name.
    """
    return _Unpickler(io.BytesIO(content), accepted, refusal).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, accepted: Collection[tuple[str, str]], refusal: str):
        super().__init__(file)
        self._accepted, self._refusal = accepted, refusal

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._accepted:
            raise pickle.UnpicklingError(self._refusal.format(f"{module}.{name}"))
        return super().find_class(module, name)
