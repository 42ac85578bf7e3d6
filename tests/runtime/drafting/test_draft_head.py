"""Drafts of EAGLE-3 heads and MTP layers that follow a target step by step, compared with dense attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import ModelLoadError
from jpaged.models import decoder, draft_head
from jpaged.models.draft_head import HeadKind, HeadSpec, head_param_shapes
from jpaged.models.sharding import Shards
from jpaged.models.spec import DecoderSpec, Rope, param_shapes
from jpaged.runtime.drafting.draft_head import (
    HeadOptions,
    compile_draft_head,
    pack_head_absorb,
    pack_head_propose,
    target_leaves,
)
from jpaged.runtime.drafting.draft_state import DraftSizes, TableColumns, create_draft_state, draft_state_shapes
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import NUM_FIELDS, Field
from jpaged.runtime.step.draft_shapes import HeadAbsorbShape, HeadProposeShape
from jpaged.runtime.step.forward import flat_weights

K, ROWS, WIDTH, BLOCK, TOKENS, VOCAB = 3, 8, 8, 8, 32, 96
LONGEST = 40  # indices of a row
LAYER = DecoderSpec(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=64, rope=Rope(),
)  # fmt: skip
TARGET = dataclasses.replace(LAYER, num_layers=4)
SPECS = {
    "eagle3": HeadSpec(HeadKind.EAGLE3, LAYER, 32, aux_layers=(0, 2, 4), draft_vocab_size=50, own_embed=True),
    "mtp": HeadSpec(HeadKind.MTP, LAYER, 32, own_head=False, norm_output=True),
}
SIZES = DraftSizes(64, BLOCK, ROWS, is_head=True)
DTYPE, COLUMNS, PLACEMENT = np.dtype(np.float32), TableColumns(0, WIDTH), Placement.single(jax.devices()[0])
PROMPT = [int(i) for i in np.random.default_rng(7).integers(0, VOCAB, 64)]


def random_tree(shapes, seed):
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        if path[-1].key == "d2t":
            ids = np.sort(rng.choice(VOCAB, shape.shape, replace=False))
            return jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
        values = rng.standard_normal(shape.shape) * 0.3 + (1 if "norm" in path[-1].key else 0)
        return jnp.asarray(values, shape.dtype)

    return jax.tree.map_with_path(leaf, shapes)


@functools.cache
def weights(name):
    return random_tree(head_param_shapes(SPECS[name], DTYPE), 1), random_tree(param_shapes(TARGET, DTYPE), 2)


@functools.cache
def compiled(name, shape):
    params, target = weights(name)
    state = draft_state_shapes(LAYER, SIZES, dtype=DTYPE, placement=PLACEMENT)
    table, blocks = (PLACEMENT.shape((ROWS, width), np.int32) for width in (NUM_FIELDS, WIDTH))
    options = HeadOptions(SPECS[name], TARGET, COLUMNS, "xla_loop")
    return compile_draft_head(
        params, target, state, table, blocks, shape, hidden_dtype=DTYPE, options=options, placement=PLACEMENT
    )


class Followed:
    """A target whose hidden states are random numbers by position and token, and a head that follows it."""

    def __init__(self, name):
        self.name, self.spec, (self.params, self.target) = name, SPECS[name], weights(name)
        self.arrays = create_draft_state(LAYER, SIZES, dtype=DTYPE, placement=PLACEMENT).arrays
        self.table = np.zeros((ROWS, NUM_FIELDS), np.int32)
        self.blocks = 1 + np.random.default_rng(0).permutation(63)[: ROWS * (WIDTH - 1)].reshape(ROWS, -1)
        self.blocks = np.pad(self.blocks, ((0, 0), (0, 1))).astype(np.int32)

    def hidden(self, position, token):
        return np.random.default_rng([position, token]).standard_normal((max(1, len(self.spec.capture)), 32))

    def weight_arguments(self):
        leaves = target_leaves(self.spec, TARGET, self.target)
        return flat_weights(self.params), flat_weights(leaves), self.arrays, self.table.copy(), self.blocks.copy()

    def step(self, rows, starts=(), first_block=-1, tokens=TOKENS):
        """One step of the target. rows: by row (first position, token ids, accepted of them, token after them).

        The token after them is the next token of the prompt if it is a tuple, else it was sampled.
        """
        shape = HeadAbsorbShape(tokens, ROWS, BLOCK, 1 if tokens == ROWS else tokens)
        ids, positions, hidden, after = [], [], [], []
        for row, (first, of_row, accepted, next_token) in rows.items():
            ids += of_row
            places = range(first, first + len(of_row))
            positions += places
            hidden += [self.hidden(*pair) for pair in zip(places, of_row, strict=True)]
            self.table[row, Field.LENGTH] = first + accepted
            after.append(next_token[0] if isinstance(next_token, tuple) else -1)
            if not isinstance(next_token, tuple):
                self.table[row, Field.LAST_TOKEN] = next_token
        padding = tokens - len(ids)
        counts = [len(of_row) for _, of_row, *_ in rows.values()] + [0] * (ROWS - len(rows))
        step = np.concatenate([
            ids, [0] * padding, positions, [0] * padding, [*rows], [ROWS] * (ROWS - len(rows)), np.cumsum([0, *counts])
        ]).astype(np.int32)  # fmt: skip
        states = np.pad(np.array(hidden, np.float32), ((0, padding), (0, 0), (0, 0))).reshape(tokens, -1)
        packed = pack_head_absorb(
            np.array(after), np.array([row in starts for row in rows]), np.full(len(rows), first_block), shape
        )
        self.arrays = compiled(self.name, shape)(*self.weight_arguments(), step, states, packed)

    def propose(self, rows, counts=None):
        shape = HeadProposeShape(K, ROWS, BLOCK)
        packed = pack_head_propose(
            np.array(rows), np.array(counts or [K] * len(rows)), np.zeros((0, 3), np.int32), shape, COLUMNS
        )
        self.arrays, drafts = compiled(self.name, shape)(*self.weight_arguments(), packed)
        return [list(map(int, row)) for row in np.asarray(drafts)[: len(rows)]]

    def expected(self, ids, first=0):
        """Drafts after the tokens `ids`, whose last one has no hidden state. first: first index that the head sees."""
        count = len(ids) - 1 - first
        hidden = np.zeros((max(1, len(self.spec.capture)), LONGEST, 32), np.float32)
        following = np.zeros(LONGEST, np.int32)
        hidden[:, :count] = np.array([self.hidden(p, ids[p]) for p in range(first, len(ids) - 1)]).swapaxes(0, 1)
        following[:count] = ids[first + 1 :]
        states, drafts = dense_states(self.name, self.params, self.target, tuple(hidden)), []
        for last in range(count - 1, count - 1 + K):
            draft, state = dense_pass(self.name, self.params, self.target, states, following, first, last)
            drafts.append(int(draft))
            following[last + 1] = draft
            states = states.at[last + 1].set(state)
        return drafts


@functools.partial(jax.jit, static_argnums=0)
def dense_states(name, params, target, hidden):
    return draft_head.target_state(SPECS[name], params, TARGET, target, hidden)


@functools.partial(jax.jit, static_argnums=0)
def dense_pass(name, params, target, states, following, first, last):
    """The draft after index `last`, and the state there. All indices of the row are computed, without pages."""
    spec, shape = SPECS[name], jnp.zeros((1, LONGEST), jnp.int32)
    x = draft_head.head_input(spec, params, draft_head.embed_for_head(spec, params, TARGET, target, following), states)
    out, _ = draft_head.head_layer(
        spec, params, x, first + jnp.arange(LONGEST), None, shape, decoder.dense_causal_attend
    )
    logits = draft_head.head_logits(spec, params, out, target)[last]
    return draft_head.to_target_ids(params, jnp.argmax(logits)), draft_head.next_state(spec, params, target, out)[last]


@pytest.fixture(params=list(SPECS))
def followed(request):
    return Followed(request.param)


def test_drafts_after_chunks_of_a_prompt_and_decodes(followed):
    ids, other = PROMPT[:20], PROMPT[30:43]
    followed.step({3: (0, ids[:11], 11, (ids[11],)), 5: (0, other, 13, 17)}, starts={3, 5})
    followed.step({5: (13, [17], 1, 18), 3: (11, ids[11:], 9, 40)})
    assert followed.propose([3, 5]) == [followed.expected([*ids, 40]), followed.expected([*other, 17, 18])]
    followed.step({3: (20, [40], 1, 41), 5: (14, [18], 1, 19)}, tokens=ROWS)
    drafts = followed.propose([3, 1, 5], counts=[K, 0, 2])
    assert drafts == [
        followed.expected([*ids, 40, 41]), [-1] * K, [*followed.expected([*other, 17, 18, 19])[:2], -1]
    ]  # fmt: skip


@pytest.mark.parametrize("accepted", range(K + 1))
def test_drafts_after_a_verify_step(followed, accepted):
    ids = PROMPT[:13]
    followed.step({2: (0, ids, 13, 40)}, starts={2})
    ids = [*ids, 40]
    for sampled in (50, 51):
        (drafts,) = followed.propose([2])
        assert drafts == followed.expected(ids)
        followed.step({2: (len(ids) - 1, [ids[-1], *drafts], 1 + accepted, sampled)})
        ids = [*ids, *drafts[:accepted], sampled]
    assert followed.propose([2]) == [followed.expected(ids)]


def test_a_row_that_was_not_followed_starts_at_the_next_block(followed):
    ids = PROMPT[:21]
    followed.step({4: (0, PROMPT[40:47], 7, 1)}, starts={4})  # another request in this row
    followed.step({4: (18, ids[18:], 3, 60)}, starts={4})     # index 18 is in block 2, so index 24 is the first
    ids = [*ids, 60]
    while len(ids) < 30:
        drafts, first = followed.propose([4])[0], 24
        assert drafts == (followed.expected(ids, first) if len(ids) - 1 > first else [-1] * K)
        followed.step({4: (len(ids) - 1, ids[-1:], 1, len(ids))}, tokens=ROWS)
        ids.append(len(ids))
    ids += [80, 81]  # two steps that are not absorbed: from index 29 to 31
    followed.step({4: (len(ids) - 1, [81, 82, 83, 84], 4, 85)})
    ids += [82, 83, 84, 85]
    assert followed.propose([4]) == [followed.expected(ids, 32)]


def test_a_fork_starts_at_the_next_block(followed):
    ids = PROMPT[:13]
    followed.step({3: (0, ids, 13, 40), 6: (13, [], 0, 41)}, starts={3, 6})
    followed.blocks[6, 0] = followed.blocks[3, 0]
    assert followed.propose([6, 3]) == [[-1] * K, followed.expected([*ids, 40])]
    ids = [*ids, 41]
    for token in (42, 43, 44, 45):
        followed.step({6: (len(ids) - 1, ids[-1:], 1, token)}, tokens=ROWS)
        ids.append(token)
    assert followed.propose([6]) == [followed.expected(ids, 16)]


def test_a_cached_prefix_whose_blocks_have_kv_of_the_head_is_seen(followed):
    ids = PROMPT[:23]
    followed.step({1: (0, ids[:16], 16, (ids[16],))}, starts={1})
    followed.blocks[6, :2] = followed.blocks[1, :2]
    followed.step({6: (16, ids[16:], 7, 60)}, starts={6}, first_block=0)
    assert followed.propose([6]) == [followed.expected([*ids, 60])]


def test_a_shared_output_matrix_on_several_devices_is_refused():
    options = HeadOptions(SPECS["mtp"], TARGET, COLUMNS, "xla_loop", shards=Shards(count=2))
    with pytest.raises(ModelLoadError, match="tensor_parallel_size=1"):
        options.check()
