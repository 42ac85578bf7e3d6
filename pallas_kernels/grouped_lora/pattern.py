"""The parts of a fused matrix: which A each output uses, and which numbers of an adapter belong to its rank."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

Pattern = tuple[tuple[int, int], ...]  # (part, width): the next `width` outputs belong to this part


def repeated(pattern: Sequence[Sequence[int]], parts: int, outputs: int) -> Pattern:
    """The pattern, repeated until it covers all outputs. Raises ValueError if it does not fit."""
    given = tuple((int(part), int(width)) for part, width in pattern)
    period = sum(width for _, width in given)
    if not given or any(not 0 <= part < parts or width < 1 for part, width in given) or outputs % period:
        raise ValueError(
            f"pattern={pattern}: must be pairs (part below {parts}, width above 0), with widths whose sum divides the "
            f"{outputs} outputs"
        )
    return given * (outputs // period)


def part_of_outputs(pattern: Pattern) -> Int[np.ndarray, " out"]:
    """The part of each output."""
    return np.repeat(*np.array(pattern, np.int32).reshape(-1, 2).T).astype(np.int32)


def in_rank(ranks: Int[Array, "*batch parts"], rank: int) -> Bool[Array, "*batch parts R"]:
    """True for the numbers of h, and the rows of A, that belong to the true rank of a part."""
    return jnp.arange(rank) < ranks[..., None]
