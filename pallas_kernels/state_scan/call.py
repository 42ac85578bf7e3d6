"""ScanCall: the arguments of state_scan, as all implementations take them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import expect_floats, expect_integers, expect_number, expect_static

EPS = 1e-6  # of the L2 norm of queries and keys


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "q", "k", "v", "decay", "factor", "skip", "states", "slots", "positions", "query_start_loc", "targets",
    ],
    meta_fields=["scale", "is_delta", "max_query_len"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class ScanCall:
    """A call of `state_scan`, whose docstring explains the arguments. They are checked."""

    q: Float[Array, "tokens k_heads k_dim"]
    k: Float[Array, "tokens k_heads k_dim"]
    v: Float[Array, "tokens heads v_dim"]
    decay: Float[Array, "tokens heads *channels"]  # float32
    factor: Float[Array, "tokens heads"]  # float32
    skip: Float[Array, " heads"] | None   # float32
    states: Float[Array, "slots heads k_dim v_dim"]  # float32
    slots: Int[Array, " rows"]            # int32, as all index arrays
    positions: Int[Array, " rows"]
    query_start_loc: Int[Array, " rows_plus_1"]
    scale: float                          # static, as the two below
    is_delta: bool
    max_query_len: int
    targets: Int[Array, " rows"] | None = None

    @property
    def v_per_k(self) -> int:
        """Heads of v for each head of q and k."""
        return self.v.shape[1] // self.k.shape[1]

    @property
    def by_channel(self) -> bool:
        """True if each row of a state has a decay of its own."""
        return self.decay.ndim == 3


def written_slots(
    slots: Int[Array, " rows"], targets: Int[Array, " rows"] | None, query_start_loc: Int[Array, " rows_plus_1"],
    num_slots: int,
) -> Int[Array, " rows"]:  # fmt: skip
    """The slot that each row's state is written to; num_slots: none, also for a row without tokens."""
    written = slots if targets is None else jnp.where(targets < 0, num_slots, targets)
    return jnp.where(query_start_loc[1:] > query_start_loc[:-1], written, num_slots)


def expect_rows(slots: Any, positions: Any, query_start_loc: Any, targets: Any = None) -> None:
    """Raise ValueError unless the index arrays of a call with states fit each other."""
    for name, array, shape in (
        ("slots", slots, "[rows]"), ("positions", positions, "[rows]"),
        ("query_start_loc", query_start_loc, "[rows + 1]"),
    ):  # fmt: skip
        expect_integers(name, array, shape)
    if targets is not None:
        expect_integers("targets", targets, "[rows]")
        if targets.shape != slots.shape:
            raise ValueError(f"targets {targets.shape}: must be {slots.shape}, as slots")
    if positions.shape != slots.shape or query_start_loc.shape[0] != slots.shape[0] + 1:
        raise ValueError(
            f"slots {slots.shape}, positions {positions.shape}, query_start_loc {query_start_loc.shape}: must be "
            "[rows], [rows], [rows + 1]"
        )


def expect_call(
    names: dict[str, str], q: Any, k: Any, v: Any, decay: Any, factor: Any, states: Any, scale: Any, max_query_len: Any
) -> tuple[float, int]:
    """scale and max_query_len as numbers. Raises ValueError unless the arguments fit a state_scan.

    names: the caller's names of q, k, v, decay and factor, and of the axes k_heads, k_dim, heads and v_dim.
    A decay with three axes has one number for each channel of k.
    """
    tokens = f"[tokens, {names['heads']}, {names['v_dim']}]"
    for name, array in (("q", q), ("k", k)):
        expect_floats(names[name], array, f"[tokens, {names['k_heads']}, {names['k_dim']}]")
    expect_floats(names["v"], v, tokens)
    if q.shape != k.shape or q.shape[0] != v.shape[0]:
        raise ValueError(
            f"{names['q']} {q.shape}, {names['k']} {k.shape}, {names['v']} {v.shape}: {names['q']} and {names['k']} "
            f"must have one shape, and all as many tokens as {names['v']}"
        )
    if not q.shape[1] or v.shape[1] % q.shape[1]:
        raise ValueError(f"{names['v']} {v.shape}: must have a multiple of {q.shape[1]} heads, as {names['k']} has")
    by_channel = getattr(decay, "ndim", 2) == 3
    for name, array in (("decay", decay), ("factor", factor)):
        channels = (k.shape[2],) if name == "decay" and by_channel else ()
        axes, per = (f", {names['k_dim']}", ", head and channel") if channels else ("", " and head")
        expect_floats(names[name], array, f"[tokens, {names['heads']}{axes}]")
        if array.shape != (*v.shape[:2], *channels):
            raise ValueError(f"{names[name]} {array.shape}: must be {(*v.shape[:2], *channels)}, one per token{per}")
    expect_floats("states", states, f"[slots, {names['heads']}, {names['k_dim']}, {names['v_dim']}]")
    wanted = (v.shape[1], k.shape[2], v.shape[2])
    if states.shape[1:] != wanted:
        raise ValueError(f"states {states.shape}: must be [slots, {', '.join(map(str, wanted))}]")
    for name, array in ((names["decay"], decay), (names["factor"], factor), ("states", states)):
        if array.dtype != "float32":
            raise ValueError(f"{name} of {array.dtype}: must be float32")
    return expect_number("scale", scale), expect_static("max_query_len", max_query_len, 1)
