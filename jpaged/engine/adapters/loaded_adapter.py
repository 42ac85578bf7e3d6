"""A LoRA adapter in host memory."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """One version of an adapter. Requests keep theirs until they end, also if its name gets another adapter."""

    name: str
    key: str       # part of the names of blocks: differs for every content, and after every reload
    rank: int
    content: Any   # for `AdapterLoad.content`
    summary: str   # what was read, for the log
