"""DeepSeek V4's attention over pages equals attention without pages. Its bits do not depend on the chunks."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.models.compressed import CompressedProjection, attend_in_sequences, make_entries, rotated
from jpaged.models.compressed_spec import Compressed, Entries
from jpaged.models.families import spec_of
from jpaged.models.indexer import IndexQueries
from jpaged.models.recurrent import StateRows
from jpaged.models.rope import rope_angles
from jpaged.runtime.kv_format import KVFormat
from jpaged.runtime.memory.plan import decide_limits
from jpaged.runtime.memory.refusals import NOT_WITH_COMPRESSED
from jpaged.runtime.step.batch import KVGroupRows
from jpaged.runtime.step.compressed_attention import attend_compressed
from tests.golden.checkpoints import BY_NAME

put = jax.device_put  # unlike jnp.asarray it compiles nothing
SPEC = spec_of(BY_NAME["deepseek-v4"].config)
BLOCK, TOKENS, LENGTHS = 8, 32, (75, 70)
TABLES = np.random.default_rng(1).permutation(20).astype(np.int32).reshape(2, 10)  # blocks of both rows, in any order


def projection(kind: Compressed, tokens: int, seed: int = 0) -> CompressedProjection:
    """A random projection of a layer."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return put(rng.normal(size=shape).astype(np.float32))

    params = {"sinks": draw(kind.heads)}
    inputs = index = None
    if kind.kind is not Entries.NONE:
        inputs = draw(tokens, kind.input_size)
        params |= {"entry_bias": draw(kind.ratio, kind.series * kind.head_dim), "entry_norm": draw(kind.head_dim)}
    if kind.kind is Entries.SPARSE:
        index = IndexQueries(draw(tokens, kind.index_heads, kind.index_dim), draw(tokens, kind.index_heads), kind.top_k)
        params |= {"index_bias": draw(kind.ratio, kind.series * kind.index_dim), "index_norm": draw(kind.index_dim)}
    q, k = draw(tokens, kind.heads, kind.head_dim), draw(tokens, 1, kind.head_dim)
    return CompressedProjection(q, k, inputs, index, params, SPEC, kind, SPEC.scale)


def of_tokens(whole: CompressedProjection, tokens: np.ndarray) -> CompressedProjection:
    """The projection of these tokens, then of padding. It is NaN, so that it changes no other token unseen."""

    def cut(x: jax.Array) -> jax.Array:
        padding = np.full((TOKENS - len(tokens), *x.shape[1:]), np.nan, np.float32)
        return put(np.concatenate([np.asarray(x)[tokens], padding]))

    index = whole.index and dataclasses.replace(whole.index, q=cut(whole.index.q), weights=cut(whole.index.weights))
    inputs = None if whole.inputs is None else cut(whole.inputs)
    return dataclasses.replace(whole, q=cut(whole.q), k=cut(whole.k), inputs=inputs, index=index)


def in_chunks(
    whole: CompressedProjection, chunks: list[tuple[int, int]], implementation: str = "cpu"
) -> np.ndarray:
    """Attention of two sequences over pages. chunks: tokens of both rows in each step."""
    kind, kv_groups = whole.kind, decide_limits(SPEC, CONFIG, "cpu").kv_groups
    pages = KVFormat(np.dtype(np.float32)).create_pages(SPEC, kv_groups, BLOCK, 20, None)[0]
    state = tuple(put(np.full((3, *each.shape), np.nan, each.dtype)) for each in kind.state_shapes(np.float32))
    done, out = np.zeros(2, np.int32), np.zeros((sum(LENGTHS), kind.heads, kind.head_dim), np.float32)
    for chunk in chunks:
        lens = np.minimum(chunk, np.array(LENGTHS) - done).astype(np.int32)
        position = np.concatenate([np.arange(start, start + n) for start, n in zip(done, lens, strict=True)])
        row = np.repeat([0, 1], lens)
        tokens = position + row * LENGTHS[0]
        slots = np.full(TOKENS, -1, np.int32)
        slots[: len(tokens)] = TABLES[row, position // BLOCK] * BLOCK + position % BLOCK
        starts = np.array([0, lens[0], lens.sum()], np.int32)
        rows = KVGroupRows(TABLES, slots, np.where(lens, done + lens, 0).astype(np.int32), starts)
        of_state = StateRows(put(np.array([2, 0], np.int32)), put(done.copy()), put(starts), TOKENS)
        found, (pages, state) = RUN[implementation](of_tokens(whole, tokens), (pages, state), (rows, of_state))
        out[tokens] = np.asarray(found)[: len(tokens)]
        done += lens
    assert done.tolist() == list(LENGTHS)
    return out


RUN = {
    name: jax.jit(functools.partial(attend_compressed, block_size=BLOCK, implementation=name))
    for name in ("cpu", "triton")
}
CONFIG = EngineConfig(model="", block_size=BLOCK, max_model_len=80)


@pytest.mark.parametrize(
    "layer", [pytest.param(layer, id=name, marks=[pytest.mark.slow] * (name != "sparse"))
              for layer, name in enumerate(("none", "sparse", "heavy"))]
)  # fmt: skip
def test_chunks_give_the_attention_of_whole_sequences(layer: int) -> None:
    """Chunks end in entries, at their ends and in blocks. Rows decode while others are prefilled."""
    kind = SPEC.recurrence.of_layer(layer)
    whole = projection(kind, sum(LENGTHS))
    halves = []
    for cut, length in ((slice(LENGTHS[0]), LENGTHS[0]), (slice(LENGTHS[0], None), LENGTHS[1])):
        of_row = functools.partial(lambda cut, x: put(np.asarray(x)[cut]) if len(x) == sum(LENGTHS) else x, cut)
        shape = put(np.zeros((1, length), np.int32))
        halves.append(jax.jit(attend_in_sequences)(jax.tree.map(of_row, whole), shape))
    long = in_chunks(whole, [(16, 16)] * 5)
    np.testing.assert_allclose(long, np.concatenate(halves), atol=2e-5, rtol=2e-5)
    mixed = in_chunks(whole, [(1, 31), (30, 1), (1, 7), (13, 1), (3, 29)] + [(1, 1)] * 5 + [(25, 6)])
    assert np.array_equal(long, mixed), "an answer's bits depend on its chunks"


@pytest.mark.parametrize("layer", [1, *(pytest.param(layer, marks=pytest.mark.slow) for layer in (0, 2))])
def test_kernels_for_nvidia_give_the_attention_of_cpus(layer: int) -> None:
    """In interpret mode, with larger steps: sparse layers, then those without entries and those with heavy ones."""
    whole = projection(SPEC.recurrence.of_layer(layer), sum(LENGTHS))
    chunks = [(1, 31), (30, 1), (1, 7), *[(16, 16)] * 2, (11, 0)]
    found = in_chunks(whole, chunks, "triton")
    np.testing.assert_allclose(found, in_chunks(whole, chunks), atol=2e-5, rtol=2e-5)


def test_an_entry_is_a_softmax_over_its_tokens() -> None:
    """In float64: of a sparse layer's second entry, from the first series of its first chunk, and its second chunk."""
    kind = SPEC.recurrence.of_layer(1)
    made = projection(kind, kind.span)
    width, ratio, params = kind.head_dim, kind.ratio, jax.tree.map(np.asarray, made.params)
    turn = jax.jit(lambda x, at: rotated(x, *rope_angles(SPEC, SPEC.rope, at, None)))
    x = np.asarray(made.inputs, np.float64)
    both = jax.jit(make_entries)(made, put(np.stack([x, x]).astype(np.float32)), put(np.array([7, 3], np.int32)))
    entries, first = np.asarray(both[0])[:, None]
    values, gates = x[:, : 2 * width], x[:, 2 * width : 4 * width] + np.tile(params["entry_bias"], (2, 1))
    values = np.concatenate([values[:ratio, :width], values[ratio:, width:]])
    gates = np.exp(np.concatenate([gates[:ratio, :width], gates[ratio:, width:]]))
    for found, seen, start in ((entries, slice(None), ratio), (first, slice(ratio, None), 0)):
        total = (values[seen] * gates[seen]).sum(0) / gates[seen].sum(0)
        normed = total / np.sqrt((total**2).mean() + SPEC.norm_eps) * params["entry_norm"]
        wanted = np.asarray(turn(put(normed[None, None].astype(np.float32)), put(np.array([start], np.int32))))[0]
        np.testing.assert_allclose(found, wanted, atol=2e-6)


VALUES = {
    "deterministic": True, "enable_lora": True, "kv_handover": True, "speculative_config": {"method": "ngram"},
    "quantization": "int8", "kv_cache_dtype": "int8",
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_WITH_COMPRESSED)
def test_options_that_do_not_work_are_refused(name: str) -> None:
    config = dataclasses.replace(CONFIG, **{name: VALUES.get(name, 2)})
    with pytest.raises(ModelLoadError, match=f"{name}=.*: does not work with the compressed attention"):
        decide_limits(SPEC, config, "cpu")


def test_devices_and_blocks_that_do_not_work_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="compressed attention, which does not run on TPUs yet"):
        decide_limits(SPEC, CONFIG, "tpu")
    decide_limits(SPEC, CONFIG, "gpu")
    odd = dataclasses.replace(SPEC, recurrence=dataclasses.replace(SPEC.recurrence, ratios=(4, 12)))
    with pytest.raises(ModelLoadError, match="block_size=8: must be a multiple or a divisor of the 12 tokens"):
        decide_limits(odd, CONFIG, "cpu")
