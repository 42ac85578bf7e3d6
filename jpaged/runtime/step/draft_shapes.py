"""Shapes of the programs of a drafter on the device, and the layouts of their packed inputs.

Called by: the program table, which compiles them; `jpaged.runtime.drafting`, which packs and runs them.
Owns: the keys of these programs.
Never: imports a program.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jpaged.runtime.step.batch import SPARE_UPDATES, ForwardShape

ABSORB_TOKENS = 32  # of the smaller `absorb` program, which catches up after a few steps without drafts


def slices(sizes: dict[str, int]) -> dict[str, slice]:
    """Slice of each part in a packed array, by name, from the sizes of the parts."""
    ends = np.cumsum(list(sizes.values()))
    return {name: slice(int(end) - size, int(end)) for (name, size), end in zip(sizes.items(), ends, strict=True)}


@dataclasses.dataclass(frozen=True)
class AbsorbShape:
    """Key of an `absorb` program, and the layout of its packed input."""

    tokens: int
    rows: int
    block_size: int

    @functools.cached_property
    def cuts(self) -> dict[str, slice]:
        """Slice of each part in the packed int32 array, by name."""
        return slices({"rows": self.rows, "first": self.rows, "num_tokens": self.rows, "tokens": self.tokens})

    @property
    def packed_size(self) -> int:
        """Number of int32s in the packed input."""
        return 3 * self.rows + self.tokens

    def __str__(self) -> str:
        return f"draft absorb {self.tokens} tokens"


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """The sizes of a program that proposes."""

    drafts: int  # k, the most drafts of a row
    rows: int
    block_size: int

    @property
    def max_updates(self) -> int:
        """Maximum changes of block tables: blocks that the drafts fill, and one started block per row."""
        return self.rows * (1 + self.drafts) // self.block_size + self.rows + SPARE_UPDATES

    def __str__(self) -> str:
        return f"propose {self.drafts} drafts {self.rows} rows"


@dataclasses.dataclass(frozen=True)
class ProposeShape(_Proposal):
    """Key of a `propose` program, and the layout of its packed input."""

    @property
    def tokens(self) -> int:
        """Tokens of pass 0. Two of each row: a steady row has LAST_TOKEN, and sometimes its tail."""
        return 2 * self.rows

    @functools.cached_property
    def cuts(self) -> dict[str, slice]:
        """Slice of each part in the packed int32 array, by name."""
        rows = ("rows", "num_drafts", "num_known", "continues")
        return slices(dict.fromkeys(rows, self.rows) | {"updates": 3 * self.max_updates, "known": self.tokens})

    @property
    def packed_size(self) -> int:
        """Number of int32s in the packed input."""
        return 4 * self.rows + 3 * self.max_updates + self.tokens


@dataclasses.dataclass(frozen=True)
class HeadAbsorbShape:
    """Key of an `absorb_step` program, and the layout of its packed input. The sizes are the forward program's."""

    tokens: int
    rows: int
    block_size: int
    max_query_len: int  # as of the forward program

    @functools.cached_property
    def cuts(self) -> dict[str, slice]:
        """Slice of each part in the packed int32 array, by name."""
        return slices(dict.fromkeys(("next_tokens", "starts", "first_block"), self.rows))

    @property
    def packed_size(self) -> int:
        """Number of int32s in the packed input."""
        return 3 * self.rows

    def __str__(self) -> str:
        return f"head absorb {self.tokens} tokens {self.rows} rows"


@dataclasses.dataclass(frozen=True)
class HeadProposeShape(_Proposal):
    """Key of a `propose_head` program, and the layout of its packed input."""

    @functools.cached_property
    def cuts(self) -> dict[str, slice]:
        """Slice of each part in the packed int32 array, by name."""
        return slices({"rows": self.rows, "num_drafts": self.rows, "updates": 3 * self.max_updates})

    @property
    def packed_size(self) -> int:
        """Number of int32s in the packed input."""
        return 2 * self.rows + 3 * self.max_updates


DraftShape = AbsorbShape | ProposeShape | HeadAbsorbShape | HeadProposeShape


def draft_model_shapes(forwards: Sequence[ForwardShape]) -> list[DraftShape]:
    """Programs of a draft model. forwards: shapes of the target's forward programs, verify programs included."""
    verifies = [shape for shape in forwards if shape.drafts]
    tokens, rows = max(shape.tokens for shape in forwards), max(shape.rows for shape in forwards)
    absorbs = [AbsorbShape(n, rows, verifies[0].block_size) for n in sorted({min(ABSORB_TOKENS, tokens), tokens})]
    return [*absorbs, *dict.fromkeys(ProposeShape(s.drafts, s.rows, s.block_size) for s in verifies)]


def draft_head_shapes(forwards: Sequence[ForwardShape]) -> list[DraftShape]:
    """Programs of a draft head: `absorb_step` for each forward program, `propose_head` for each verify program."""
    verifies = [shape for shape in forwards if shape.drafts]
    absorbs = {HeadAbsorbShape(s.tokens, s.rows, s.block_size, s.max_query_len): None for s in forwards}
    proposes = dict.fromkeys(HeadProposeShape(s.drafts, s.rows, s.block_size) for s in verifies)
    return [*absorbs, *proposes]
