"""Drafts of a draft model, compared with the same model computed without pages."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import ModelLoadError
from jpaged.kv_groups import group_layers
from jpaged.models import decoder
from jpaged.models.spec import WeightLayout
from jpaged.runtime.drafting.draft_model import (
    DraftModelOptions,
    compile_draft_model,
    pack_absorb,
    pack_propose,
)
from jpaged.runtime.drafting.draft_state import (
    DraftSizes,
    TableColumns,
    create_draft_state,
    draft_block_bytes,
    draft_state_shapes,
    draft_table_bytes,
)
from jpaged.runtime.kv_format import KVFormat
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import NUM_FIELDS, Field, row_values
from jpaged.runtime.step.draft_shapes import AbsorbShape, ProposeShape
from jpaged.runtime.step.forward import flat_weights
from tests.support.random_decoder import BLOCK, SPEC, random_params
from tests.support.row_inits import make_row

K, ROWS, WIDTH, BLOCKS = 4, 8, 8, 64
# the target has two KV groups; the drafter uses the second
COLUMNS = TableColumns(WIDTH, WIDTH)
SIZES = DraftSizes(BLOCKS, BLOCK, ROWS, is_head=False)
DTYPE = np.dtype(np.float32)
PLACEMENT = Placement.single(jax.devices()[0])
OPTIONS = DraftModelOptions(SPEC, WeightLayout(), COLUMNS, "xla_loop", target_vocab=SPEC.vocab_size)


@pytest.fixture(scope="module")
def params():
    return random_params()


@pytest.fixture(scope="module")
def dense_logits(params):
    """Logits after the last of some ids, computed without pages."""

    @jax.jit
    def logits(ids):
        hidden, *_ = decoder.decode(
            SPEC, params, ids, jnp.arange(len(ids)), [None] * SPEC.num_layers, jnp.zeros((1, len(ids)), jnp.int32),
            decoder.dense_causal_attend,
        )  # fmt: skip
        return decoder.lm_head(SPEC, params, hidden)

    return lambda ids: logits(jnp.asarray([*ids, *[0] * (128 - len(ids))], jnp.int32))[len(ids) - 1]


@functools.cache
def compiled(shape, sizes=SIZES):
    state = draft_state_shapes(SPEC, sizes, dtype=DTYPE, placement=PLACEMENT)
    table = PLACEMENT.shape((ROWS, NUM_FIELDS), np.int32)
    blocks = PLACEMENT.shape((ROWS, 2 * WIDTH), np.int32)
    params = jax.eval_shape(random_params)
    return compile_draft_model(
        PLACEMENT.shapes_of(params), state, table, blocks, shape, options=OPTIONS, placement=PLACEMENT
    )


class Sequences:
    """The target's request table and block tables, set by hand, and a draft model that follows them."""

    def __init__(self, params):
        self.weights = flat_weights(params)
        self.arrays = create_draft_state(SPEC, SIZES, dtype=DTYPE, placement=PLACEMENT).arrays
        self.table = np.zeros((ROWS, NUM_FIELDS), np.int32)
        self.blocks = np.zeros((ROWS, 2 * WIDTH), np.int32)
        self.ids = {}
        self.free = list(range(BLOCKS - 1, 0, -1))  # block 0 stays empty: stale entries of block tables name it

    def start(self, row, ids, **sampling):
        self.table[row] = row_values(make_row(row, 0, 1, np.zeros((0, 3), np.int32), **sampling))
        self.ids[row] = []
        self.extend(row, ids)

    def extend(self, row, ids):
        """Append tokens, as the target would after it has checked drafts. The last one has no KV in the target."""
        self.ids[row] = [*self.ids[row], *ids]
        self.table[row, Field.LENGTH], self.table[row, Field.LAST_TOKEN] = len(self.ids[row]) - 1, self.ids[row][-1]
        for _, column, block in self._new_blocks(row, 0):
            self.blocks[row, column] = block

    def absorb(self, row, first, end):
        shape = AbsorbShape(64, ROWS, BLOCK)
        of_row = (np.array([number], np.int32) for number in (row, first, end - first))
        packed = pack_absorb(*of_row, np.array(self.ids[row][first:end], np.int32), shape)
        self.arrays = compiled(shape)(self.weights, self.arrays, self.table.copy(), self.blocks.copy(), packed)

    def propose(self, rows, counts=None, known=None, continues=False):
        """Drafts of rows; known: number of tokens before LAST_TOKEN that the drafter has not computed."""
        shape = ProposeShape(K, ROWS, BLOCK)
        counts, known = counts or [K] * len(rows), known or [0] * len(rows)
        updates = [update for row, count in zip(rows, counts, strict=True) for update in self._new_blocks(row, count)]
        tokens = [t for row, n in zip(rows, known, strict=True) for t in self.ids[row][len(self.ids[row]) - 1 - n : -1]]
        packed = pack_propose(
            np.array(rows), np.array(counts), np.array(known), np.full(len(rows), continues), np.array(tokens),
            np.array(updates, np.int32).reshape(-1, 3), shape, COLUMNS,
        )  # fmt: skip
        self.arrays, drafts = compiled(shape)(self.weights, self.arrays, self.table.copy(), self.blocks.copy(), packed)
        for row, column, block in updates:  # the verify forward program writes them, too
            self.blocks[row, column] = block
        return [list(map(int, row)) for row in np.asarray(drafts)[: len(rows)]]

    def _new_blocks(self, row, count):
        needed = -(-(len(self.ids[row]) + count) // BLOCK)  # one block may have no KV yet
        have = np.count_nonzero(self.blocks[row, COLUMNS.first :])
        return [(row, COLUMNS.first + index, self.free.pop()) for index in range(have, needed)]


@pytest.fixture
def sequences(params):
    return Sequences(params)


@pytest.fixture(scope="module")
def greedy(dense_logits):
    def continuation(ids, count=K):
        ids = list(ids)
        for _ in range(count):
            ids.append(int(np.argmax(dense_logits(ids))))
        return ids[-count:]

    return continuation


def prompt(length, seed=0):
    return list(map(int, np.random.default_rng(seed).integers(0, SPEC.vocab_size, length)))


def test_drafts_are_the_greedy_continuation_of_rows_of_different_lengths(sequences, greedy):
    sequences.start(3, prompt(47, 1))
    sequences.start(5, prompt(19, 2))
    sequences.absorb(3, 0, 30)
    sequences.absorb(3, 30, 46)
    sequences.absorb(5, 0, 16)
    drafts = sequences.propose([3, 5], known=[0, 2])
    assert drafts == [greedy(sequences.ids[3]), greedy(sequences.ids[5])]


@pytest.mark.parametrize("accepted", [0, 2, K])
def test_the_next_proposal_follows_what_the_target_accepted(sequences, greedy, accepted):
    sequences.start(2, prompt(13))
    sequences.absorb(2, 0, 12)
    (drafts,) = sequences.propose([2])
    for _ in range(3):  # 13 to 28 tokens: over the end of a block
        sequences.extend(2, [*drafts[:accepted], 7])
        (drafts,) = sequences.propose([2], continues=True)
        assert drafts == greedy(sequences.ids[2])


def test_the_last_draft_gets_its_kv_only_if_it_was_accepted(sequences):
    def keys(position):
        block = sequences.blocks[2, COLUMNS.first + position // BLOCK]
        return np.asarray(sequences.arrays[0][0][0])[block, 0, :, position % BLOCK]

    sequences.start(2, prompt(13))
    sequences.absorb(2, 0, 12)
    (drafts,) = sequences.propose([2])
    assert keys(12 + K - 1).all()
    assert not keys(12 + K).any()
    sequences.extend(2, [*drafts, 7])
    sequences.propose([2], continues=True)
    assert keys(12 + K).all()


def test_rows_catch_up_after_plain_steps(sequences, greedy):
    sequences.start(0, prompt(20, 3))
    sequences.start(1, prompt(33, 4))
    sequences.absorb(0, 0, 19)
    sequences.absorb(1, 0, 32)
    first = sequences.propose([0, 1])
    sequences.extend(0, [first[0][0], 9])      # a verify step: one draft accepted, so the drafter has LENGTH - 1
    sequences.extend(0, [11])                  # then a plain step
    sequences.extend(1, [*first[1], 3, 4, 5])  # all accepted, then two plain steps
    sequences.absorb(1, 32 + K, 32 + K + 1)
    drafts = sequences.propose([0, 1], known=[1, 2])
    assert drafts == [greedy(sequences.ids[0]), greedy(sequences.ids[1])]


def test_a_row_may_have_fewer_drafts_or_none(sequences, greedy):
    for row, length in ((0, 15), (1, 9), (4, 30)):
        sequences.start(row, prompt(length, row))
        sequences.absorb(row, 0, length - 1)
    drafts = sequences.propose([0, 1, 4], counts=[1, 0, 3])
    assert drafts == [
        [*greedy(sequences.ids[0], 1), -1, -1, -1], [-1] * K, [*greedy(sequences.ids[4], 3), -1]
    ]  # fmt: skip
    untouched = np.asarray(sequences.arrays[0][1][0])[0]
    assert not untouched.any(), "a pass wrote past the row's blocks"
    sequences.extend(0, [drafts[0][0], 5])
    sequences.extend(4, [*drafts[2][:3], 5])
    drafts = sequences.propose([0, 4], continues=True)
    assert drafts == [greedy(sequences.ids[0]), greedy(sequences.ids[4])]


def test_no_write_leaves_the_block_table(sequences, greedy):
    sequences.start(0, prompt(WIDTH * BLOCK - 2))
    sequences.absorb(0, 0, 60)
    sequences.absorb(0, 60, 120)
    sequences.absorb(0, 120, WIDTH * BLOCK - 3)
    (drafts,) = sequences.propose([0], counts=[2])
    assert drafts[:2] == greedy(sequences.ids[0], 2)
    assert not np.asarray(sequences.arrays[0][0][0])[0].any()


@pytest.mark.codegen
def test_pages_are_updated_in_place():
    """Also in the loop over the passes."""
    sizes = dataclasses.replace(SIZES, num_blocks=4096)  # 17 MB for each layer
    program = compiled(ProposeShape(K, ROWS, BLOCK), sizes)
    pages = draft_state_shapes(SPEC, sizes, dtype=DTYPE).page_arrays
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(pages))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / len(pages)
    shape = ",".join(map(str, pages[0][0].shape))
    assert not re.search(rf"f32\[{shape}\]\S* copy\(", program.as_text())


def test_more_tokens_than_the_program_takes_are_an_error():
    shape = ProposeShape(K, ROWS, BLOCK)
    known = np.zeros(2 * ROWS, np.int32)
    with pytest.raises(ValueError, match="17 tokens"):
        pack_propose(
            np.array([0]), np.array([1]), np.array([16]), np.array([False]), known, np.zeros((0, 3), np.int32), shape,
            COLUMNS,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("is_head", [False, True])
def test_bytes_are_those_of_the_arrays(dtype, is_head):
    kv_format = KVFormat(np.dtype(dtype))
    sizes = dataclasses.replace(SIZES, is_head=is_head)
    state = create_draft_state(SPEC, sizes, dtype=DTYPE, placement=PLACEMENT, kv_format=kv_format)
    pages = sum(leaf.nbytes for leaf in jax.tree.leaves(state.page_arrays))
    assert pages == BLOCKS * draft_block_bytes(SPEC, BLOCK, kv_format)
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(state.replace(page_arrays=())))
    assert rest == draft_table_bytes(SPEC, ROWS, DTYPE, is_head=is_head)
    shapes = draft_state_shapes(SPEC, sizes, dtype=DTYPE, kv_format=kv_format)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, state, shapes)
    assert all(jax.tree.leaves(same))


def test_the_drafter_uses_the_first_kv_group_without_a_window():
    assert TableColumns.of(group_layers((64, None, 64, None), 1024), 10) == TableColumns(10, 10)
    with pytest.raises(ModelLoadError, match="every layer of the model has a sliding window"):
        TableColumns.of(group_layers((64, 64), 1024), 10)
