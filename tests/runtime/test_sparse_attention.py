"""Sparse attention over pages: every query attends to the tokens that the scores choose, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.indexer import IndexQueries, best_positions
from jpaged.runtime.step.sparse_attention import rows_by_token
from pallas_kernels import KVPages, paged_attention

BLOCK, WIDTH = 8, 32  # tokens of a block, blocks of a block table
KV_RANK, ROPE, INDEX, HEADS, INDEX_HEADS = 32, 8, 16, 4, 16
DIM = KV_RANK + ROPE + INDEX


@functools.cache
def _rows_by_token(on_cpu: bool):
    return jax.jit(functools.partial(rows_by_token, on_cpu=on_cpu))


@jax.jit
def _filled(vectors, slots):
    """Pages that hold vectors[i] in slots[i]."""
    pages = KVPages.create(len(slots) // BLOCK, BLOCK, 1, DIM, vectors.dtype, v_dim=KV_RANK)
    return pages.scatter(vectors, None, slots)


@functools.partial(jax.jit, static_argnames="implementation")
def _attend(q, pages, rows, implementation):
    """`paged_attention` over single tokens."""
    return paged_attention(q, pages.by_token(), *rows, scale=0.2, max_query_len=1, implementation=implementation)


class Case:
    """Rows of a step, with pages that hold every token of every row."""

    def __init__(self, counts: list[int], lens: list[int], tokens: int, top_k: int, dtype=np.float32):
        rng = np.random.default_rng(1)
        self.top_k, self.counts, self.lens = top_k, np.array(counts, np.int32), np.array(lens, np.int32)
        self.tables = rng.permutation(len(counts) * WIDTH).reshape(len(counts), WIDTH).astype(np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        vectors = rng.standard_normal((len(counts), WIDTH * BLOCK, DIM)).astype(dtype)
        slots = self.tables[:, :, None] * BLOCK + np.arange(BLOCK)
        self.vectors, self.pages = jnp.asarray(vectors), _filled(vectors.reshape(-1, 1, DIM), slots.reshape(-1))
        q = rng.standard_normal((tokens, HEADS, DIM)).astype(dtype)
        q[..., KV_RANK + ROPE :] = 0
        weights = rng.standard_normal((tokens, INDEX_HEADS)).astype(np.float32)
        queries = rng.standard_normal((tokens, INDEX_HEADS, INDEX)).astype(dtype)
        self.q, self.index = jnp.asarray(q), IndexQueries(jnp.asarray(queries), jnp.asarray(weights), top_k)

    def rows(self, on_cpu: bool = True):
        return _rows_by_token(on_cpu)(self.index, self.pages, self.tables, self.lens, self.starts)

    def chosen_slots(self, on_cpu: bool = True) -> list[list[int]]:
        """Slots that each token attends to."""
        slots, lens, starts = (np.asarray(part) for part in self.rows(on_cpu))
        return [own[:count].tolist() for own, count in zip(slots[: starts[-1]], lens, strict=False)]

    def attended(self, implementation: str | None = None) -> np.ndarray:
        return np.asarray(_attend(self.q, self.pages, self.rows(), implementation), np.float64)

    @functools.cached_property
    def numbers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """float64 vectors, queries, and the indexer's queries and weights, on the host."""
        arrays = self.vectors, self.q, self.index.q, self.index.weights
        return tuple(np.asarray(array).astype(np.float64) for array in arrays)

    def chosen(self, row: int, token: int, position: int) -> np.ndarray:
        """Positions that a query attends to, in float64. The best score first; of equal ones the earliest."""
        vectors, _, queries, weights = self.numbers
        keys = vectors[row, : position + 1, KV_RANK + ROPE :]
        scores = weights[token] @ np.maximum(queries[token] @ keys.T * INDEX**-0.5, 0)
        return np.sort(np.argsort(-scores, kind="stable")[: self.top_k])

    def wanted(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Slots and output of each token."""
        found = []
        for row, (count, length) in enumerate(zip(self.counts, self.lens, strict=True)):
            for i in range(count):
                token, position = self.starts[row] + i, length - count + i
                chosen = self.chosen(row, token, position)
                vectors = self.numbers[0][row, chosen]
                scores = self.numbers[1][token] @ vectors.T * 0.2
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out = weights / weights.sum(-1, keepdims=True) @ vectors[:, :KV_RANK]
                found.append((self.tables[row, chosen // BLOCK] * BLOCK + chosen % BLOCK, out))
        return found


RAGGED = {"counts": [1, 37, 0, 5, 1], "lens": [200, 60, 0, 5, 17], "tokens": 48, "top_k": 16}


@pytest.mark.parametrize("on_cpu", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_query_attends_to_the_tokens_with_the_best_scores(on_cpu: bool) -> None:
    """A decode, a chunk of a prompt, a row of padding, a prompt shorter than top_k; then padding."""
    case = Case(**RAGGED)
    wanted = case.wanted()
    assert case.chosen_slots(on_cpu) == [own.tolist() for own, _ in wanted]
    assert (np.asarray(case.rows(on_cpu)[1])[len(wanted) :] == 0).all()
    out = case.attended()[: len(wanted)]
    assert np.abs(out - np.array([each for _, each in wanted])).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", [None, "xla_loop"])
def test_bits_do_not_depend_on_the_batch_or_the_chunk(dtype, implementation) -> None:
    """A prompt of 150 tokens at once, and its tokens alone, in chunks and next to other rows."""
    whole = Case([150], [150], 152, 16, dtype)
    wanted = whole.attended(implementation)
    slots = whole.chosen_slots()
    for first, last, tokens in ((149, 150, 8), (100, 101, 8), (64, 150, 88), (3, 40, 40)):
        part = Case([last - first], [last], tokens, 16, dtype)
        part.tables, part.pages, part.vectors = whole.tables, whole.pages, whole.vectors
        padding = [(0, tokens - (last - first)), (0, 0)]
        part.q = jnp.pad(whole.q[first:last], [*padding, (0, 0)])
        part.index = IndexQueries(
            jnp.pad(whole.index.q[first:last], [*padding, (0, 0)]),
            jnp.pad(whole.index.weights[first:last], padding), 16,
        )  # fmt: skip
        count = last - first
        assert part.chosen_slots() == slots[first:last]
        assert (part.attended(implementation)[:count] == wanted[first:last]).all()


@pytest.mark.slow
def test_with_at_most_top_k_keys_it_is_attention_to_all_keys() -> None:
    """To the bit in float32."""
    case = Case(**RAGGED | {"top_k": 200})
    rows = (case.tables, case.lens, case.starts)
    dense = paged_attention(case.q, case.pages, *map(jnp.asarray, rows), scale=0.2, max_query_len=48)
    assert (np.asarray(dense)[:44] == case.attended()[:44]).all()


def test_of_equal_scores_the_earlier_token_is_chosen() -> None:
    """Also with zeros of both signs, and with -inf among the scores of tokens that the query sees."""
    scores = np.array([[0, -0.0, 1, 0, 2, 5], [-np.inf, 1, -np.inf, -np.inf, 9, 9]], np.float32)
    scores = np.where(scores == 0, np.float32(0), scores)  # as `IndexQueries.scores`
    best = jax.jit(best_positions, static_argnums=2)
    found = np.asarray(best(scores, np.array([4, 3]), 3))
    assert found[0].tolist() == [0, 2, 4]
    assert found[1].tolist() == [0, 1, 2]
    short = np.asarray(best(scores, np.array([1, 0]), 4))
    assert short[0, :2].tolist() == [0, 1]
    assert short[1, 0] == 0
    assert (short[1, 1:] == 6).all()  # no position of a key
