"""KVPages, write_kv and write_qkv: contents of the pages, layouts, sizes and errors."""

import functools
import itertools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from pallas_kernels import KVPages, finish_qkv, kv_pages, write_kv, write_qkv
from tests.kernels.oracle import numpy_qkv, slot_values
from tests.support.device_arrays import device_array

SLOTS = np.array([39, -1, 0, 17, -1, -7], np.int32)  # -1 must not become the last slot


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        *itertools.product(("int8", "float8_e4m3fn"), ("xla", "triton")),
        *(pytest.param("float32", name, marks=pytest.mark.slow) for name in ("xla", "triton")),
        *(pytest.param("bfloat16", name, marks=pytest.mark.slow) for name in ("xla", "triton")),
        ("float32", "mosaic_tpu"),
        ("bfloat16", "cpu"),
    ],
)
def test_write_kv_fills_slots_and_drops_padding(dtype, implementation):
    rng = np.random.default_rng(0)
    fp8_scales = np.array([[0.5, 2.0], [1.0, 0.25]]) if dtype == "float8_e4m3fn" else None
    pages = KVPages.create(5, 8, 2, 5, dtype, fp8_scales=fp8_scales)
    k, v = 100 * rng.standard_normal((2, 6, 2, 5)).astype(np.float32)
    k[0], k[2, 0], v[3, 1, 0] = 0.0, 1e-30, 1e4  # scale 0, a tiny scale, more than fp8 holds
    call = functools.partial(write_kv, implementation=implementation)
    nothing = jax.jit(call)(pages, *(a[:0] for a in (k, v, SLOTS)))
    jax.tree.map(np.testing.assert_array_equal, nothing, pages)
    by_xla = jax.jit(functools.partial(write_kv, implementation="xla"))(pages, k, v, SLOTS)
    written = jax.jit(call, donate_argnums=0)(pages, k, v, SLOTS)
    jax.tree.map(np.testing.assert_array_equal, written, by_xla)  # same bits: both round 8-bit numbers alike
    out = slot_values(written)
    expected = np.zeros((40, 2, 2, 5))
    real = SLOTS >= 0
    expected[SLOTS[real]] = np.stack([k, v], axis=1)[real]
    if dtype == "int8":  # half a step of the scale, which is rounded to bfloat16: 1 in 256
        step = np.abs(expected).max(-1, keepdims=True) / 127
        assert (np.abs(out - expected) <= 0.5 * step * (1 + 2**-7) + np.abs(expected) * 2**-8).all()
        return
    if fp8_scales is not None:
        scaled = np.clip(expected / fp8_scales[None, :, :, None], -448, 448).astype(np.float32)
        expected = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * fp8_scales[None, :, :, None]
    elif dtype == "bfloat16":
        expected = expected.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("implementation", ["xla", "triton", "cpu"])
@pytest.mark.parametrize(
    ("q_per_kv", "dim", "half", "options", "dtype"),
    [
        pytest.param(1, 8, 4, (), "float32", id="rotation", marks=pytest.mark.slow),
        pytest.param(7, 20, 10, ("bias",), "float32", id="bias-gqa-7", marks=pytest.mark.slow),
        pytest.param(4, 64, 32, ("norm",), "float32", id="norm", marks=pytest.mark.slow),
        pytest.param(3, 80, 10, ("norm", "bias"), "float32", id="partial"),
        pytest.param(3, 16, 0, (), "float32", id="no-rotation", marks=pytest.mark.slow),
        pytest.param(2, 128, 64, ("norm",), "bfloat16", id="bf16", marks=pytest.mark.slow),
        pytest.param(2, 64, 32, ("norm",), "int8", id="int8-pages", marks=pytest.mark.slow),
        pytest.param(2, 64, 32, (), "float8_e4m3fn", id="fp8-pages", marks=pytest.mark.slow),
    ],
)
def test_write_qkv_matches_float64(q_per_kv, dim, half, options, dtype, implementation):
    """q, and the keys and values in the pages. 35 tokens are not a multiple of the tiles."""
    rng = np.random.default_rng(1)
    tokens, heads = 35, 2
    kind = dtype if dtype in ("float32", "bfloat16") else "float32"
    qkv = device_array(rng.standard_normal((tokens, heads, q_per_kv + 2, dim)), kind)
    angles = rng.uniform(0, 6, (tokens, half))
    given = {"cos": np.cos(angles), "sin": np.sin(angles)} if half else {}
    if "bias" in options:
        given["bias"] = rng.standard_normal(qkv.shape[1:])
    if "norm" in options:
        given |= {"q_norm": rng.uniform(0.5, 2, dim), "k_norm": rng.uniform(0.5, 2, dim)}
    slots = rng.permutation(80)[:tokens].astype(np.int32)
    slots[[3, 34]] = -1
    pages = KVPages.create(10, 8, heads, dim, dtype)
    call = jax.jit(functools.partial(write_qkv, implementation=implementation))
    arrays = {n: device_array(a, kind if n in ("bias", "q_norm", "k_norm") else "float32") for n, a in given.items()}
    q, pages = call(pages, qkv, slots, **arrays)
    expected_q, k, v = numpy_qkv(qkv, **{n: np.asarray(a, np.float64) for n, a in arrays.items()})
    exact, stored = {"float32": (2e-6, 2e-6), "bfloat16": (6e-2, 6e-2), "int8": (2e-6, 3e-2)}.get(dtype, (2e-6, 0.26))
    values, real = slot_values(pages), slots >= 0
    assert np.isfinite(np.asarray(q, np.float64)).all()
    np.testing.assert_allclose(np.asarray(q, np.float64)[real], expected_q[real], atol=exact, rtol=1e-6)
    np.testing.assert_allclose(values[slots[real], 0], k[real], atol=stored)
    np.testing.assert_allclose(values[slots[real], 1], v[real], atol=stored)
    untouched = np.setdiff1d(np.arange(80), slots[real])
    assert not values[untouched].any()

    def in_two_calls(pages, qkv, slots):
        q, k, v = finish_qkv(pages, qkv, **arrays, implementation=implementation)
        return q, write_kv(pages, k, v, slots, implementation=implementation)

    again_q, again = jax.jit(in_two_calls)(KVPages.create(10, 8, heads, dim, dtype), qkv, slots)
    np.testing.assert_array_equal(np.asarray(again_q)[real], np.asarray(q)[real])
    jax.tree.map(np.testing.assert_array_equal, again, pages)


def test_write_qkv_for_tpu_is_the_reference_and_its_write():
    rng = np.random.default_rng(2)
    qkv = rng.standard_normal((9, 2, 4, 16)).astype(np.float32)
    angles = rng.uniform(0, 6, (9, 8)).astype(np.float32)
    slots = rng.permutation(40)[:9].astype(np.int32)
    call = (KVPages.create(5, 8, 2, 16, jnp.float32), qkv, slots)
    results = [
        jax.jit(functools.partial(write_qkv, implementation=name))(*call, cos=np.cos(angles), sin=np.sin(angles))
        for name in ("xla", "mosaic_tpu")
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=[pytest.mark.slow] * (d not in ("float32", "int8")))
              for d in ("float32", "bfloat16", "int8", "float8_e4m3fn")],
)  # fmt: skip
def test_blocks_move_and_copy(dtype):
    rng = np.random.default_rng(0)
    data = rng.standard_normal((6, 2, 2, 8, 4)).astype(np.float32)
    pages = KVPages.create(6, 8, 2, 4, dtype)
    k, v = data.transpose(1, 0, 3, 2, 4).reshape(2, 48, 2, 4)
    pages = jax.jit(write_kv)(pages, k, v, np.arange(48, dtype=np.int32))
    held_before = slot_values(pages).reshape(6, 8, 2, 2, 4)
    pairs = np.array([[0, 3], [3, 5], [1, -1], [-1, 2]], np.int32)
    copied = jax.jit(KVPages.copy_blocks)(pages, pairs)
    copied = slot_values(copied).reshape(held_before.shape)
    expected = held_before.copy()
    expected[3], expected[5] = held_before[0], held_before[3]  # reads come before writes
    np.testing.assert_array_equal(copied, expected)
    held = pages.to_host(np.array([4, 1]))
    assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(held))
    assert pages.to_host(np.array([], np.int32)).num_blocks == 0
    for blocks in ([6], [-1], [[0]], [0.5]):
        with pytest.raises(ValueError, match="blocks="):
            pages.to_host(np.array(blocks))
    with pytest.raises(ValueError, match="held"):
        pages.from_host(np.array([0]), held)
    with pytest.raises(ValueError, match="held"):
        KVPages.create(6, 8, 2, 4, "float16").from_host(np.array([0, 1]), held)
    back = KVPages.create(6, 8, 2, 4, dtype).from_host(np.array([2, 0]), held)
    np.testing.assert_array_equal(slot_values(back).reshape(held_before.shape)[[2, 0]], held_before[[4, 1]])


def test_pages_have_the_layout_of_the_platform(monkeypatch):
    """`create` uses `page_format`. CPU shows this with a layout that has the last axis outermost."""
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    assert kv_pages.page_format(sharding, 5) is sharding
    tpu = types.SimpleNamespace(device_set=[types.SimpleNamespace(platform="tpu")])
    with mock.patch.object(kv_pages, "Format", lambda layout, where: (layout.major_to_minor, where)):
        assert kv_pages.page_format(tpu, 4) == ((0, 1, 2, 3), tpu)
    monkeypatch.setattr(
        kv_pages, "page_format", lambda s, n: Format(Layout(tuple(reversed(range(n)))), s)
    )
    pages = KVPages.create(3, 8, 2, 4, jnp.int8, device=device)
    assert pages.data.format.layout.major_to_minor == (4, 3, 2, 1, 0)
    assert pages.scales.format.layout.major_to_minor == (3, 2, 1, 0)
    assert not np.asarray(pages.data).any()


def test_layers_of_fp8_pages_do_not_share_their_scales():
    """Shared scales would be donated twice, and donating the pages would delete the caller's array."""
    scales = device_array(np.ones((2, 2)), "float32")
    layers = [KVPages.create(2, 8, 2, 4, jnp.float8_e4m3fn, fp8_scales=scales) for _ in range(2)]
    jax.jit(lambda layers: jax.tree.map(jnp.copy, layers), donate_argnums=0)(layers)
    assert not scales.is_deleted()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "more"),
    [("bfloat16", 128, 0), ("int8", 128, 2 / 128), ("int8", 64, 2 / 64), ("float8_e4m3fn", 128, 0)],
)
def test_scales_take_few_bytes(dtype, head_dim, more):
    """int8 scales: under 4% from heads of 64 on."""
    pages = KVPages.shapes(100, 16, 8, head_dim, dtype)
    plain = 100 * 2 * 8 * 16 * head_dim * jnp.dtype(dtype).itemsize
    static = 2 * 8 * 4 if dtype == "float8_e4m3fn" else 0
    assert pages.num_bytes == pages.bytes_on("gpu") == plain * (1 + more) + static
    # heads are padded to 128 numbers, scales to 128 tokens
    padding = plain * (128 // head_dim - 1) + (100 * 2 * 8 * (128 - 16) * 2 if dtype == "int8" else 0)
    assert pages.bytes_on("tpu") - pages.num_bytes == padding
    assert more < 0.04


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((2, 8, 2, 4, jnp.int16), {}, "dtype=int16"),
        ((0, 8, 2, 4, jnp.int8), {}, "num_blocks=0"),
        ((2, 8, 0, 4, jnp.float32), {}, "num_kv_heads=0"),
        ((2, 8, 1, 4, jnp.float32), {"v_dim": 5}, "v_dim=5"),
        ((2, 8, 1, 4, jnp.int8), {"v_dim": 4}, "v_dim=4"),
        # Triton's offsets into an array of 2^31 to 2^32 bytes are 32 bits and signed
        ((131_072, 16, 8, 128, jnp.int8), {}, "num_blocks=131072.*at most 65,536 blocks"),
    ],
)
def test_wrong_arguments_of_create_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        KVPages.shapes(*arguments, **options)
    for dtype, scales in ((jnp.bfloat16, np.ones((2, 2))), (jnp.float8_e4m3fn, np.zeros((2, 2)))):
        with pytest.raises(ValueError, match="fp8_scales"):
            KVPages.create(2, 8, 2, 4, dtype, fp8_scales=scales)
    assert KVPages.shapes(65_536, 16, 8, 128, jnp.int8).num_blocks == 65_536
    assert KVPages.shapes(131_073, 16, 8, 128, jnp.int8).num_blocks == 131_073


@pytest.mark.usefixtures("plain_errors")
def test_write_kv_names_wrong_arguments():
    pages, latent = KVPages.create(2, 8, 2, 4, jnp.float32), KVPages.create(2, 8, 2, 4, jnp.float32, v_dim=2)
    k, slots = np.zeros((3, 2, 4), np.float32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=r"kv_heads|tokens, 2, 4"):
        write_kv(pages, k[:, :1], k[:, :1], slots)
    with pytest.raises(ValueError, match=r"slot_mapping|tokens"):
        write_kv(pages, k, k, slots[:2])
    for implementation in ("cuda", "mosaic"):
        with pytest.raises(ValueError, match=f"implementation='{implementation}'"):
            write_kv(pages, k, k, slots, implementation=implementation)
    with pytest.raises(ValueError, match="latent pages"):
        write_kv(latent, k, k, slots)
    with pytest.raises(ValueError, match="v=None: only latent pages"):
        write_kv(pages, k, None, slots)
    for given, message in (
        ((pages.data, k, k, slots), "pages of type"),
        ((pages, k[0], k, slots), r"k \(2, 4\): must be \[tokens, kv_heads, head_dim\]"),
        ((pages, k, k, slots.astype(np.float32)), "slot_mapping of float32: must be int32"),
        ((pages, [[1.0]], k, slots), "k of type list"),
        ((pages, k.astype(np.int32), k, slots), "k of int32"),
    ):
        with pytest.raises(ValueError, match=message):
            write_kv(*given)
    with pytest.raises(ValueError, match="latent"):
        write_kv(latent, k, None, slots, implementation="mosaic_tpu")


def test_triton_writes_latent_pages():
    rng = np.random.default_rng(0)
    data, k = np.zeros((5, 1, 1, 8, 40), jnp.bfloat16), rng.standard_normal((6, 1, 40)).astype(np.float32)
    write = jax.jit(write_kv, static_argnames="implementation")
    given = KVPages(jnp.asarray(data), v_dim=32), k, None, np.array(SLOTS, np.int32)
    np.testing.assert_array_equal(*(write(*given, implementation=name).data for name in ("triton", "xla")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"qkv": np.zeros((3, 2, 2, 4), np.float32)}, "qkv"),
        ({"qkv": np.zeros((3, 2, 4, 8), np.float32)}, "qkv"),
        ({"slot_mapping": np.zeros(2, np.int32)}, "slot_mapping|tokens"),
        ({"cos": np.zeros((3, 2), np.float32)}, "both of a pair"),
        ({"cos": np.zeros((3, 4), np.float32), "sin": np.zeros((3, 4), np.float32)}, r"cos \(3, 4\)"),
        ({"cos": np.zeros((3, 2), np.float32), "sin": np.zeros((3, 1), np.float32)}, "the same shape"),
        ({"cos": np.zeros((3, 0), np.float32), "sin": np.zeros((3, 0), np.float32)}, "half 1 to 2"),
        ({"qkv": np.zeros((3, 32), np.float32)}, r"qkv \(3, 32\): must be"),
        ({"norm_eps": np.nan}, "norm_eps=nan"),
        ({"q_norm": np.zeros(4, np.float32)}, "both of a pair"),
        ({"bias": np.zeros((2, 3, 4), np.float32)}, "bias|q_per_kv_plus_2"),
    ],
)
@pytest.mark.usefixtures("plain_errors")
def test_write_qkv_names_wrong_arguments(change, message):
    arguments = {
        "pages": KVPages.create(2, 8, 2, 4, jnp.float32), "qkv": np.zeros((3, 2, 4, 4), np.float32),
        "slot_mapping": np.zeros(3, np.int32),
    }  # fmt: skip
    given = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in (arguments | change).items()}
    with pytest.raises(ValueError, match=message):
        write_qkv(**given)
    if "slot_mapping" not in change:
        del given["slot_mapping"]
        with pytest.raises(ValueError, match=message):
            finish_qkv(**given)
