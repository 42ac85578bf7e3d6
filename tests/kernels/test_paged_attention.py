"""paged_attention and write_kv against a float64 oracle, and to the bit against themselves in other company."""

import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import KernelCheckError, KVPages, paged_attention, self_check, write_kv
from pallas_kernels.paged_attention import IMPLEMENTATIONS, choose_implementation, triton

NUM_BLOCKS, WIDTH = 64, 20
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
# (tokens of each row, keys of each row): one-token rows, chunks with and without a past, empty rows, block borders
RAGGED = ((1, 1, 0, 33, 7, 16), (5, 300, 0, 40, 200, 16))
DECODES = ((1, 1, 1, 0, 1, 1), (1, 15, 16, 0, 17, 129))


def make_case(rows, *, heads=4, kv_heads=2, head_dim=16, block_size=16, dtype="float32", seed=0):
    """Random pages and queries for the given (counts, context_lens)."""
    rng = np.random.default_rng(seed)
    counts, lens = rows
    pages = rng.standard_normal((NUM_BLOCKS, 2, kv_heads, block_size, head_dim))
    q = rng.standard_normal((-(-sum(counts) // 8) * 8, heads, head_dim))
    tables = np.stack([rng.permutation(NUM_BLOCKS)[:WIDTH] for _ in counts]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return {
        "q": jnp.asarray(q, dtype),
        "pages": KVPages(jnp.asarray(pages, dtype)),
        "block_tables": jnp.asarray(tables),
        "context_lens": jnp.asarray(lens, jnp.int32),
        "query_start_loc": jnp.asarray(starts),
    }


def attend(case, implementation, **options):
    counts = np.diff(case["query_start_loc"])
    options = {"scale": 0.3, "max_query_len": max(1, int(counts.max())), **options}
    call = jax.jit(functools.partial(paged_attention, implementation=implementation, **options))
    out = call(*case.values())
    return np.asarray(out, np.float32)[: int(counts.sum())]


def oracle(case, *, scale=0.3, sliding_window=None, logit_softcap=None, sinks=None, alibi_slopes=None):
    """Attention written down once more: float64, one query at a time, nothing shared with the package."""
    q, data = np.asarray(case["q"], np.float64), np.asarray(case["pages"].data, np.float64)
    tables, lens, starts = (np.asarray(case[n]) for n in ("block_tables", "context_lens", "query_start_loc"))
    block_size, group = data.shape[3], q.shape[1] // data.shape[2]
    out = []
    for row, length in enumerate(lens):
        count = starts[row + 1] - starts[row]
        keys = [data[tables[row, p // block_size], :, :, p % block_size] for p in range(length)]
        for i in range(count):
            position = length - count + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(q.shape[1]):
                kv = np.stack([keys[p][:, head // group] for p in range(first, position + 1)])
                scores = kv[:, 0] @ q[starts[row] + i, head] * scale
                if logit_softcap is not None:
                    scores = logit_softcap * np.tanh(scores / logit_softcap)
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[head] * (np.arange(first, position + 1) - position)
                weights = np.exp(scores - scores.max())
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
                out.append(weights @ kv[:, 1] / total)
    return np.asarray(out).reshape(-1, *q.shape[1:])


@pytest.mark.parametrize("implementation", ["reference", "xla", "xla_loop", "triton"])
@pytest.mark.parametrize(
    ("shape", "rows", "options"),
    [
        pytest.param({}, RAGGED, {}, id="ragged"),
        pytest.param({}, DECODES, {}, id="decodes"),
        pytest.param({"heads": 7, "kv_heads": 1, "head_dim": 40}, RAGGED, {}, id="mqa-odd-group-head-40"),
        pytest.param({"heads": 2, "kv_heads": 2, "head_dim": 8, "block_size": 8}, ((9, 1), (100, 160)), {}, id="mha-8"),
        pytest.param({"dtype": "bfloat16", "block_size": 32}, RAGGED, {}, id="bf16-block-32"),
        pytest.param({"dtype": "float16"}, RAGGED, {}, id="fp16"),
        pytest.param({}, RAGGED, {"sliding_window": 40}, id="window"),
        pytest.param({}, DECODES, {"sliding_window": 1}, id="window-1"),
        pytest.param({}, RAGGED, {"logit_softcap": 2.0}, id="softcap"),
        pytest.param({}, RAGGED, {"sinks": np.linspace(-1, 1, 4)}, id="sinks"),
        pytest.param({}, RAGGED, {"alibi_slopes": 2.0 ** -np.arange(1, 5)}, id="alibi"),
    ],
)
def test_matches_float64(implementation, shape, rows, options):
    case = make_case(rows, **shape)
    given = {n: jnp.asarray(v, jnp.float32) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    np.testing.assert_allclose(
        attend(case, implementation, **given), oracle(case, **options), atol=TOLERANCE[shape.get("dtype", "float32")]
    )


@pytest.mark.parametrize("rows", [RAGGED, DECODES], ids=["ragged", "decodes"])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 100}, {"sinks": np.linspace(-1, 1, 4)}, {"logit_softcap": 2.0}],
    ids=["plain", "window", "sinks", "softcap"],
)
def test_triton_splits_of_a_row_are_merged(rows, options):
    """Rows of up to 300 keys in splits of 64, the last ones empty, the first ones before the window."""
    case = make_case(rows)
    given = {n: jnp.asarray(v, jnp.float32) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    small = triton.Tiling(split_keys=64, decode_keys=32, prefill_rows=16, prefill_keys=32)
    with mock.patch.object(triton.Tiling, "choose", return_value=small):
        np.testing.assert_allclose(attend(case, "triton", **given), oracle(case, **options), atol=TOLERANCE["float32"])


def test_triton_decode_gets_the_same_bits_in_any_company():
    """Splits are cut at fixed positions: more rows, other rows or a chunk beside it change nothing."""
    small = triton.Tiling(split_keys=64, decode_keys=32, prefill_rows=16, prefill_keys=32)
    with mock.patch.object(triton.Tiling, "choose", return_value=small):
        alone = attend(make_case(((1,), (300,))), "triton")
        for others in (((1, 1, 1), (300, 7, 150)), ((1, 6), (300, 90))):  # all of 8 token places: equal data
            np.testing.assert_array_equal(attend(make_case(others), "triton")[:1], alone)


@pytest.mark.parametrize(
    ("window", "shape"),
    [
        (None, {"heads": 6}),
        (50, {"heads": 6}),
        (None, {"heads": 4, "head_dim": 32, "dtype": "bfloat16"}),
        (None, {"heads": 2, "head_dim": 64}),
        (None, {"heads": 20, "kv_heads": 1, "head_dim": 40}),
    ],
)
def test_a_query_gets_the_same_bits_in_any_company(window, shape):
    """All of a prompt at once, in chunks, token by token, and among other rows: equal to the bit."""
    length = 150
    case = make_case(((length,), (length,)), **shape)
    whole = attend(case, "xla_loop", sliding_window=window)

    def part(first, count, company=()):
        """Queries first .. first + count - 1, in one call with rows of `company` behind them."""
        others = make_case(tuple(zip(*company, strict=True)) or ((0,), (0,)), seed=1, **shape)
        n = len(company)
        q = jnp.concatenate([case["q"][first : first + count], others["q"][: sum(c for c, _ in company)]])
        q = jnp.pad(q, ((0, -len(q) % 8), (0, 0), (0, 0)))
        tables = jnp.concatenate([case["block_tables"], others["block_tables"][:n]])
        lens = jnp.asarray([first + count, *(x for _, x in company)], jnp.int32)
        starts = jnp.asarray(np.cumsum([0, count, *(c for c, _ in company)]), jnp.int32)
        mixed = dict(case, q=q, block_tables=tables, context_lens=lens, query_start_loc=starts)
        return attend(mixed, "xla_loop", sliding_window=window)[:count]

    for first, count in ((0, 7), (71, 1), (100, 50)):
        np.testing.assert_array_equal(part(first, count), whole[first : first + count])
        with_others = part(first, count, company=((1, 300), (40, 41), (1, 1), (1, 7)))
        np.testing.assert_array_equal(with_others, whole[first : first + count])
    np.testing.assert_array_equal(attend(case, "xla", sliding_window=window), whole)


def test_nan_in_a_stale_page_touches_nobody():
    """What a block held for its last owner, NaN included, must not leak to the next: 0 * NaN is NaN."""
    case = make_case(RAGGED)
    clean = {name: attend(case, name) for name in ("reference", "xla", "xla_loop", "triton")}
    data = np.array(case["pages"].data)
    used = np.zeros(data.shape[:1] + data.shape[3:4], bool)
    for row, length in enumerate(np.asarray(case["context_lens"])):
        for p in range(length):
            used[np.asarray(case["block_tables"])[row, p // 16], p % 16] = True
    data[np.broadcast_to(~used[:, None, None, :, None], data.shape)] = np.nan
    case["pages"] = KVPages(jnp.asarray(data))
    for name, expected in clean.items():
        np.testing.assert_array_equal(attend(case, name), expected)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_write_kv_fills_slots_and_drops_padding(implementation):
    rng = np.random.default_rng(0)
    pages = KVPages.create(5, 8, 2, 5, jnp.float32)
    k, v = rng.standard_normal((2, 6, 2, 5)).astype(np.float32)
    slots = np.array([39, -1, 0, 17, -1, -7], np.int32)  # -1 must not become the last slot
    call = jax.jit(functools.partial(write_kv, implementation=implementation), donate_argnums=0)
    out = np.asarray(call(pages, k, v, slots).data)
    expected = np.zeros((5, 2, 2, 8, 5), np.float32)
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 8, 0, :, slot % 8], expected[slot // 8, 1, :, slot % 8] = k[i], v[i]
    np.testing.assert_array_equal(out, expected)


def test_blocks_move_and_copy():
    rng = np.random.default_rng(0)
    data = rng.standard_normal((6, 2, 2, 8, 4)).astype(np.float32)
    pages = KVPages(jnp.asarray(data))
    copied = np.asarray(pages.copy_blocks(jnp.asarray([[0, 3], [3, 5], [1, -1]])).data)
    expected = data.copy()
    expected[3], expected[5] = data[0], data[3]  # reads come before writes
    np.testing.assert_array_equal(copied, expected)
    held = pages.to_host(np.array([4, 1]))
    np.testing.assert_array_equal(held, data[[4, 1]])
    back = KVPages.create(6, 8, 2, 4, jnp.float32).from_host(np.array([2, 0]), held)
    np.testing.assert_array_equal(np.asarray(back.data)[[2, 0]], data[[4, 1]])
    assert pages.num_bytes == data.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"context_lens": jnp.zeros(5, jnp.int32)}, "context_lens"),
        ({"q": jnp.zeros((64, 3, 16))}, "multiple of 2 heads"),
        ({"debug": True, "context_lens": jnp.asarray([5, 400, 0, 40, 200, 16])}, "context_lens="),
        ({"debug": True, "context_lens": jnp.asarray([5, 300, 0, 20, 200, 16])}, "context_lens="),
        ({"debug": True, "block_tables": jnp.full((6, WIDTH), NUM_BLOCKS)}, "blocks are 0 to 63"),
        ({"debug": True, "max_query_len": 8}, "max_query_len=8"),
        ({"debug": True, "query_start_loc": jnp.asarray([0, 1, 2, 2, 35, 42, 99])}, "query_start_loc="),
    ],
)
def test_wrong_arguments_are_named(change, message):
    # in tests the annotated shapes are checked too, and may speak first
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=message):
        paged_attention(**{**make_case(RAGGED), "scale": 1.0, "max_query_len": 64} | change)


@pytest.mark.parametrize("implementation", ["xla_loop", "triton"])
def test_self_check_finds_agreement(implementation):
    errors = self_check(implementation=implementation, dtype=jnp.float32, head_dim=16, q_heads=4)
    assert set(errors) == {"decode", "chunks", "mixed"}
    assert max(errors.values()) < 1e-5


def test_self_check_refuses_a_wrong_kernel(monkeypatch):
    def scale_forgotten(*args, **options):
        return IMPLEMENTATIONS["xla_loop"](*args, **{**options, "scale": 1.0})

    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", scale_forgotten)
    with pytest.raises(KernelCheckError, match=r"'wrong' on .*case decode .*differs from the reference by"):
        self_check(implementation="wrong", dtype=jnp.float32, head_dim=16, q_heads=4)


@pytest.mark.parametrize(
    ("platform", "capability", "name"),
    [
        ("cpu", None, "xla_loop"), ("tpu", None, "xla"),
        ("gpu", "9.0", "triton"), ("gpu", "7.5", "xla"), ("gpu", "gfx942", "xla"),
    ],
)
def test_the_device_decides_the_implementation(platform, capability, name):
    device = types.SimpleNamespace(platform=platform)
    if capability:
        device.compute_capability = capability
    assert choose_implementation(device) == name


def test_write_kv_names_wrong_arguments():
    pages = KVPages.create(2, 8, 2, 4, jnp.float32)
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=r"kv_heads|tokens, 2, 4"):
        write_kv(pages, jnp.zeros((3, 1, 4)), jnp.zeros((3, 1, 4)), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="implementation='cuda'"):
        write_kv(pages, jnp.zeros((3, 2, 4)), jnp.zeros((3, 2, 4)), jnp.zeros(3, jnp.int32), implementation="cuda")
    with pytest.raises(ValueError, match="dtype=int8"):
        KVPages.create(2, 8, 2, 4, jnp.int8)
