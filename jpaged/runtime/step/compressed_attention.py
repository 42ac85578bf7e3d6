"""DeepSeek V4's attention over pages: keys of tokens, and entries that stand for many tokens (`models.compressed`).

A page has more lines than a block has tokens (`Compressed.lines`). First come the keys of its tokens. The entries of
chunks that end in it follow, and then the indexer's keys of these entries. All lines are as wide as a key. A page is
complete if its tokens are computed, so the prefix cache needs to know nothing of entries. The inputs of a chunk that is
not finished are in the request's state, and the prefix cache has snapshots of it.

Each token becomes a row of `paged_attention`, and each line that it attends to becomes a block of one key. First come
the keys of the window, then the entries, both in the order of their positions.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.models.compressed import CompressedProjection, make_entries
from jpaged.models.compressed_spec import Compressed, Entries
from jpaged.models.indexer import IndexQueries, best_in_groups
from jpaged.models.recurrent import StateRows
from jpaged.runtime.step.batch import KVGroupRows
from pallas_kernels import KVPages, gather_rows, paged_attention, write_kv
from pallas_kernels.paged_attention.tiles import row_of_token
from pallas_kernels.set_rows import set_rows


class Steps(NamedTuple):
    """Numbers that one turn of a loop computes. The loops end at the longest row."""

    entries: int
    tokens: int  # whose entries are scored
    keys: int    # of entries, which are scored


# On CPU all programs compute the same number at a time, so an entry's or a score's bits depend on its own tokens only.
ON_CPU, ELSEWHERE = Steps(8, 16, 128), Steps(64, 64, 2048)


def steps_of(implementation: str, tokens: int, entries: int) -> Steps:
    """Steps for an implementation of attention, in a program of `tokens` tokens. entries: of a full block table."""
    if implementation in ("cpu", "xla_loop"):
        return ON_CPU
    most = ELSEWHERE
    return Steps(min(most.entries, tokens), min(most.tokens, tokens), min(most.keys, entries))


@dataclasses.dataclass(frozen=True)
class _Lines:
    """Places of vectors in the pages, as numbers of lines. row, in its methods: each token's row of tables."""

    kind: Compressed
    block_size: int  # tokens of a block
    block_tables: Int[Array, "rows width"]

    @property
    def entries(self) -> int:
        """Entries that the blocks of a table have room for."""
        return max(1, self.block_tables.shape[1] * self.block_size // self.kind.ratio)

    def _of(self, row: Int[Array, " tokens"], position: Int[Array, "tokens n"], offset: Array) -> Array:
        blocks = self.block_tables.at[row[:, None], position // self.block_size].get(mode="clip")
        return blocks * self.kind.lines(self.block_size) + offset

    def of_tokens(self, row: Int[Array, " tokens"], position: Int[Array, "tokens n"]) -> Int[Array, "tokens n"]:
        """Keys of the tokens at these positions."""
        return self._of(row, position, position % self.block_size)

    def of_entries(
        self, row: Int[Array, " tokens"], entry: Int[Array, "tokens n"], *, index: bool = False
    ) -> Int[Array, "tokens n"]:
        """Entries, or the indexer's keys of entries. They are in the block of their chunk's last token."""
        last = (entry + 1) * self.kind.ratio - 1
        first = self.block_size + (self.kind.entries_per_block(self.block_size) if index else 0)
        return self._of(row, last, first + last % self.block_size // self.kind.ratio)


def attend_compressed(
    projection: CompressedProjection,
    kept: tuple[KVPages, tuple[Array, ...]],
    rows: tuple[KVGroupRows, StateRows],
    *,
    block_size: int,
    implementation: str,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[KVPages, tuple[Array, ...]]]:
    """Store keys and finished entries, and attend. kept, rows: pages and the request's states, and the rows of both."""
    (pages, state), (of_pages, of_state), kind = kept, rows, projection.kind
    lines, tokens = _Lines(kind, block_size, of_pages.block_tables), projection.q.shape[0]
    steps = steps_of(implementation, tokens, lines.entries)
    row, count = row_of_token(of_pages.query_start_loc, tokens), of_pages.query_start_loc[-1]
    position = of_pages.context_lens[row] - of_pages.query_start_loc[row + 1] + jnp.arange(tokens)
    position = jnp.where(jnp.arange(tokens) < count, position, -1)
    slots = of_pages.slots // block_size * kind.lines(block_size) + of_pages.slots % block_size
    pages = write_kv(pages, projection.k, None, jnp.where(of_pages.slots < 0, -1, slots), implementation="xla")
    seen = jnp.minimum(position + 1, kind.window)  # keys of tokens
    window = jnp.maximum(position - seen + 1, 0)[:, None] + jnp.arange(kind.window)
    chosen, total = lines.of_tokens(row, window), seen
    if projection.inputs is not None:
        pages, state = _finish_entries(projection, pages, state, of_state, row, position, lines, steps)
        finished = (position + 1) // kind.ratio
        if projection.index is None:
            entries = jnp.broadcast_to(jnp.arange(lines.entries), (tokens, lines.entries))
        else:
            entries = _best_entries(projection.index, pages, row, finished, lines, steps, count)
            finished = jnp.minimum(finished, entries.shape[1])
        # a row has `seen` keys of tokens, then entries
        column = jnp.arange(kind.window + entries.shape[1])
        entry = jnp.clip(column - seen[:, None], 0, entries.shape[1] - 1)
        entry = lines.of_entries(row, jnp.take_along_axis(entries, entry, axis=1))
        chosen = jnp.pad(chosen, ((0, 0), (0, entries.shape[1])))
        chosen, total = jnp.where(column < seen[:, None], chosen, entry), seen + finished
    starts = jnp.minimum(jnp.arange(tokens + 1, dtype=jnp.int32), count)
    out = paged_attention(
        projection.q, pages.by_token(), chosen.astype(jnp.int32), jnp.maximum(total, 0).astype(jnp.int32), starts,
        scale=projection.scale, max_query_len=1, sinks=projection.params["sinks"],
        implementation=implementation,
    )  # fmt: skip
    return out, (pages, state)


def _finish_entries(
    projection: CompressedProjection, pages: KVPages, state: tuple[Array, ...], of_state: StateRows,
    row: Int[Array, " tokens"], position: Int[Array, " tokens"], lines: _Lines, steps: Steps,
) -> tuple[KVPages, tuple[Array, ...]]:  # fmt: skip
    """Store the entries of chunks that end in this step, and each row's last inputs in its state."""
    kind, inputs, (earlier,) = projection.kind, projection.inputs, state
    assert inputs is not None
    tokens, spans = len(position), jnp.arange(kind.span)
    is_last = (position + 1) % kind.ratio == 0  # False for padding, whose position is -1, if the ratio is above 1
    is_last &= position >= 0
    most = min(tokens, tokens // kind.ratio + len(of_state.slots))
    at_once = max(ON_CPU.entries, min(steps.entries, most))
    most = -(-most // at_once) * at_once
    (ends,) = jnp.nonzero(is_last, size=most, fill_value=tokens)
    slot = jnp.minimum(of_state.slots, earlier.shape[0] - 1)

    def next_entries(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        """`found` with the entries that end at the tokens ends[i * at_once] and after it."""
        token = jnp.minimum(lax.dynamic_slice_in_dim(ends, i * at_once, at_once), tokens - 1)
        own, last = row[token], position[token]
        before = last[:, None] - kind.span + 1 + spans
        in_step = before >= of_state.positions[own][:, None]
        new = inputs[jnp.maximum(token[:, None] - kind.span + 1 + spans, 0)]
        old = earlier[slot[own][:, None], before % kind.span]
        entries, keys = make_entries(projection, jnp.where(in_step[..., None], new, old), last)
        if keys is None:
            keys = jnp.zeros((len(entries), 0), entries.dtype)
        first = i * at_once
        of_entries, of_keys = found
        return (
            lax.dynamic_update_slice_in_dim(of_entries, entries, first, axis=0),
            lax.dynamic_update_slice_in_dim(of_keys, keys, first, axis=0),
        )

    index_dim = kind.index_dim if kind.kind is Entries.SPARSE else 0
    empty = (jnp.zeros((most, kind.head_dim), inputs.dtype), jnp.zeros((most, index_dim), inputs.dtype))
    used = -(-jnp.sum(is_last, dtype=jnp.int32) // at_once)
    entries, keys = lax.fori_loop(0, used, next_entries, empty)
    token = jnp.minimum(ends, tokens - 1)
    number = jnp.maximum((position[token] + 1) // kind.ratio - 1, 0)[:, None]
    for part, index in ((entries, False), (keys, True)):
        if part.shape[1]:
            at = lines.of_entries(row[token], number, index=index)[:, 0]
            padded = jnp.pad(part, ((0, 0), (0, kind.head_dim - part.shape[1])))[:, None]
            pages = write_kv(pages, padded, None, jnp.where(ends < tokens, at, -1), implementation="xla")
    end = of_state.query_start_loc[row + 1]
    stays = (position >= 0) & (jnp.arange(tokens) >= end - kind.span)
    at = jnp.where(stays, slot[row] * kind.span + position % kind.span, -1)
    return pages, (set_rows(earlier, at, inputs.astype(earlier.dtype)),)


def _best_entries(
    index: IndexQueries, pages: KVPages, row: Int[Array, " tokens"], finished: Int[Array, " tokens"], lines: _Lines,
    steps: Steps, count: Int[Array, ""],
) -> Int[Array, "tokens chosen"]:  # fmt: skip
    """Entries that each token attends to, in ascending order. finished: number of entries that each token sees.

    After a token's min(top_k, finished) entries come undefined numbers.
    """

    def scores(own: IndexQueries, last: Array, row: Array) -> Array:
        return _scores(own, pages, row, last, lines, steps.keys)

    chosen = min(index.top_k, lines.entries)
    return best_in_groups(index, finished - 1, chosen, (row,), scores, at_once=steps.tokens, count=count)


def _scores(
    index: IndexQueries, pages: KVPages, row: Int[Array, " tokens"], last: Int[Array, " tokens"], lines: _Lines,
    at_once: int,
) -> Float[Array, "tokens entries"]:  # fmt: skip
    """float32 scores of all entries of the block tables. Undefined after the token's last one, `last`."""
    most, tokens = lines.entries, len(last)
    flat = pages.data.reshape(-1, pages.head_dim)

    def next_keys(step: Array, scores: Array) -> Array:
        entry = jnp.broadcast_to(step * at_once + jnp.arange(at_once), (tokens, at_once))
        at = lines.of_entries(row, entry, index=True).reshape(-1)
        keys = gather_rows(flat, at, at.size)[:, : index.dim].reshape(tokens, at_once, index.dim)
        return lax.dynamic_update_slice_in_dim(scores, index.scores(keys), step * at_once, axis=1)

    needed = last.max() // at_once + 1
    empty = jnp.zeros((tokens, -(-most // at_once) * at_once), jnp.float32)
    return lax.fori_loop(0, needed, next_keys, empty)[:, :most]
