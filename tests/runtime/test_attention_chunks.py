"""The rows of chunked attention: every query has the keys of its own chunk, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runtime.step.attention_chunks import rows_by_chunk

BLOCK = 8


SLOW = ((8, 1), (40, 5), (8, 60))


@pytest.mark.parametrize(
    ("chunk", "longest"), [(16, 60), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_each_query_has_the_keys_of_its_chunk(chunk: int, longest: int) -> None:
    """Rows anywhere in their chunks, an empty one, and a padding row, compared with one look-up per query."""
    rng = np.random.default_rng(chunk + longest)
    counts = np.minimum(np.array([1, longest, 0, longest, 1, longest]), longest).astype(np.int32)
    lens = (counts + rng.integers(0, 90, counts.size) * (counts > 0)).astype(np.int32)
    tables = rng.permutation(len(counts) * 24).reshape(len(counts), 24).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    cut = jax.jit(functools.partial(rows_by_chunk, chunk=chunk, max_query_len=longest, block_size=BLOCK))
    parts = cut(tables, lens, starts)
    part_tables, part_lens, part_starts = (np.asarray(part) for part in parts)

    found: list[list[tuple[int, int]]] = []
    for part in range(len(part_lens)):
        queries = part_starts[part + 1] - part_starts[part]
        positions = range(part_lens[part] - queries, part_lens[part])  # within the chunk
        found += [[(part_tables[part, k // BLOCK], k % BLOCK) for k in range(position + 1)] for position in positions]
    wanted = []
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        for position in range(length - count, length):
            first = position // chunk * chunk
            wanted.append([(tables[row, key // BLOCK], key % BLOCK) for key in range(first, position + 1)])
    assert found == wanted
    assert part_starts[-1] == starts[-1]


def test_a_chunk_has_whole_blocks() -> None:
    rows = jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32), jnp.array([0, 1])
    with pytest.raises(ValueError, match="chunk must be a multiple of block_size=8, got 12"):
        rows_by_chunk(*rows, 12, max_query_len=1, block_size=BLOCK)
