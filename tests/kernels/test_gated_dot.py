"""gated_dot: every implementation against float64, its rounding, a row's bits in any batch, and its choice."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from pallas_kernels import gated_dot
from pallas_kernels.gated_dot import IMPLEMENTATIONS, choose_implementation, tiling, triton
from pallas_kernels.gated_dot.tiling import Tiling
from tests.kernels.lowering import lower_for
from tests.support.device_arrays import device_array

pytestmark = pytest.mark.codegen

ORACLE = {
    "silu": lambda x: x * scipy.special.expit(x),
    "gelu": lambda x: x * scipy.special.ndtr(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}
SMALL = Tiling(16, 16, 16)  # small tiles have edges in small shapes


def inputs(rows, width, outputs, dtype="bfloat16", seed=0):
    """Sums of about 1, where activations are curved."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    weight = (rng.standard_normal((2, outputs, width)) * width**-0.5).astype(np.float32)
    return device_array(x, dtype), device_array(weight, dtype)


@functools.cache
def small_program(activation, rows_together):
    """rows_together: of `triton`, part of the cache key only."""
    return jax.jit(functools.partial(triton.gated_dot, activation=activation, tiling=SMALL, interpret=True))


def small_kernel(x, weight, num_rows, activation="silu"):
    """The kernel for NVIDIA in interpret mode, with small tiles."""
    return small_program(activation, triton.ROWS_TOGETHER)(x, weight, np.int32(num_rows))


@functools.cache
def in_program(activation, implementation):
    """gated_dot in a program of (x, weight, num_rows)."""
    return jax.jit(functools.partial(gated_dot, activation=activation, implementation=implementation))


def wide(array):
    return np.asarray(array).astype(np.float64)


def oracle(x, weight, activation):
    gate, up = np.einsum("ri,hoi->hro", wide(x), wide(weight))
    return ORACLE[activation](gate) * up


CALLS = [
    (5, 96, 40, "bfloat16", "silu"), (70, 50, 33, "bfloat16", "gelu_tanh"), (17, 64, 16, "float16", "relu"),
    (3, 32, 24, "float32", "gelu"), (1, 16, 8, "bfloat16", "silu"),
]  # fmt: skip


KERNELS = ("triton", "triton_fixed")
DEFAULT = {"triton": (CALLS[1], CALLS[3]), "triton_fixed": (CALLS[3],)}  # the fourth one is refused


# The kernel's own tiles hold each of these shapes once: one case with them, and all with small tiles.
@pytest.mark.parametrize(
    ("implementation", "rows", "width", "outputs", "dtype", "activation"),
    [
        pytest.param(name, *call, marks=[pytest.mark.slow] * (name in KERNELS and call not in DEFAULT[name]))
        for name in (None, *IMPLEMENTATIONS, "small tiles") for call in CALLS
    ],
)  # fmt: skip
def test_matches_float64(implementation, rows, width, outputs, dtype, activation):
    x, weight = inputs(rows, width, outputs, dtype)
    if implementation in (*KERNELS, "small tiles") and dtype == "float32":
        assert triton.refuse(jax.devices("cpu")[0], x, weight, activation) is not None
        return
    if implementation == "small tiles":
        got = small_kernel(x, weight, rows, activation)
    else:
        got = in_program(activation, implementation)(x, weight, np.int32(rows))
    assert got.dtype == x.dtype
    # gate, up, the activation and the result are rounded, each by half of the dtype's step
    limit = 1e-5 if dtype == "float32" else 4 * float(jnp.finfo(dtype).eps) / 2
    expected = oracle(x, weight, activation)
    np.testing.assert_allclose(wide(got), expected, rtol=limit, atol=limit * np.abs(expected).max() / 4)


@pytest.mark.parametrize(
    "activation", ["silu", "relu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gelu_tanh", "relu2"))]
)
def test_the_kernel_rounds_as_separate_operations_do(activation):
    """Small whole numbers have exact sums, so gate and up have the same bits, and so have nearly all results."""
    rng = np.random.default_rng(3)
    x = device_array(rng.integers(-15, 16, (40, 64)) / 256, "bfloat16")
    weight = device_array(rng.integers(-15, 16, (2, 48, 64)), "bfloat16")
    exact = np.einsum("ri,hoi->hro", wide(x), wide(weight))
    assert (exact != wide(exact.astype(jnp.bfloat16))).any(), "nothing is rounded"
    kernel = small_kernel(x, weight, 40, activation)
    plain = in_program(activation, "xla")(x, weight, np.int32(40))
    different = np.asarray(kernel) != np.asarray(plain)
    print(activation, different.sum(), "of", different.size)
    assert different.mean() < (0.01 if activation != "relu" else 1e-9)
    difference = np.abs(wide(kernel) - wide(plain))
    assert (difference <= 2**-7 * np.abs(wide(plain))).all()  # one step of bfloat16, where exp differs in a last bit


def test_the_kernel_is_as_near_to_float64_as_separate_operations():
    x, weight = inputs(64, 256, 96)
    expected = oracle(x, weight, "silu")
    errors = {
        name: np.sqrt(np.mean((wide(out) - expected) ** 2))
        for name, out in (
            ("kernel", small_kernel(x, weight, 64)),
            ("xla", in_program("silu", "xla")(x, weight, np.int32(64))),
        )
    }
    print(errors)
    assert errors["kernel"] <= 1.02 * errors["xla"]


def test_bits_of_a_row_do_not_depend_on_the_others():
    x, weight = inputs(75, 80, 50)
    x = np.array(x)
    whole = np.asarray(small_kernel(x, weight, 75))
    for first, rows, needed in ((74, 1, 1), (7, 40, 33)):
        part = np.asarray(small_kernel(x[first : first + rows], weight, needed))
        np.testing.assert_array_equal(part[:needed], whole[first : first + needed])
    x[:60] = np.nan
    company = np.asarray(small_kernel(x, weight, 75))
    np.testing.assert_array_equal(company[60:], whole[60:])


def test_tiles_without_needed_rows_are_zero():
    x, weight = inputs(75, 80, 50)
    harmed = np.array(x)
    harmed[33:] = np.inf
    out = np.asarray(small_kernel(harmed, weight, 33))
    np.testing.assert_array_equal(out[:33], np.asarray(small_kernel(x, weight, 75))[:33])
    assert not out[48:].any()
    assert not np.asarray(small_kernel(x, weight, 0)).any()


def test_blocks_of_row_tiles_cover_all_rows(monkeypatch):
    """More rows than are multiplied together, and a last block that is not full."""
    x, weight = inputs(75, 32, 20)
    whole = np.asarray(small_kernel(x, weight, 75))
    monkeypatch.setattr(triton, "ROWS_TOGETHER", 32)
    np.testing.assert_array_equal(small_kernel(x, weight, 75), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_the_kernel_lowers(rows, dtype):
    """Shapes of Llama 3.1 8B, and a width of 2,880, which is not a multiple of 128."""
    for outputs, width in ((14336, 4096), (2880, 2880)):
        call = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((rows, width), (2, outputs, width))]
        run = functools.partial(gated_dot, activation="silu", implementation="triton")
        text = lower_for("cuda", run, [*call, jax.ShapeDtypeStruct((), jnp.int32)])
        assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


CARD = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
MEASURED = {
    "64": {"tiling": {"rows": 64, "outputs": 32, "inputs": 64, "warps": 4, "stages": 3}},
    "256": {"tiling": None},
    "2048": {"tiling": {"rows": 128, "outputs": 128, "inputs": 64, "warps": 8, "stages": 4}},
}


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Measurements of a card, as `benchmarks/tune_kernels.py` writes them."""
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps({"NVIDIA H200": {"bfloat16, 4096 -> 14336": MEASURED}}))
    monkeypatch.setattr(tiling, "FILE", file)


def shapes(rows, dtype="bfloat16", outputs=14336):
    return [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in ((rows, 4096), (2, outputs, 4096))]


@pytest.mark.parametrize(
    ("call", "activation", "name"),
    [
        (shapes(1), "silu", "triton"), (shapes(64), "silu", "triton"), (shapes(65), "silu", "xla"),
        (shapes(256), "silu", "xla"), (shapes(257), "gelu_tanh", "triton"), (shapes(9999), "silu", "triton"),
        (shapes(64), "gelu", "xla"), (shapes(64, "float32"), "silu", "xla"), (shapes(64, outputs=512), "silu", "xla"),
    ],
)  # fmt: skip
def test_measurements_choose(table, call, activation, name):
    assert choose_implementation(CARD, *call, activation) == name
    other = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA L4", compute_capability="8.9")
    assert choose_implementation(other, *call, activation) == "xla"


def test_without_a_measurement_xla_is_chosen(monkeypatch, tmp_path):
    file = tmp_path / "tuning.json"
    file.write_text("{}")
    monkeypatch.setattr(tiling, "FILE", file)
    assert choose_implementation(CARD, *shapes(64), "silu") == "xla"


def test_the_shipped_file_holds_tilings():
    for matrices in json.loads(tiling.FILE.read_text("utf-8")).values():
        for by_rows in matrices.values():
            for rows, entry in by_rows.items():
                assert int(rows) > 0
                assert entry["tiling"] is None or Tiling(**entry["tiling"]).rows >= 64


def test_a_measured_kernel_is_in_the_program_of_its_card_only(table):
    call = [*shapes(64), jax.ShapeDtypeStruct((), jnp.int32)]
    for kind, kernels in (("NVIDIA H200", 1), ("NVIDIA L4", 0)):
        card = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("_",), abstract_device=card)):
            traced = jax.jit(functools.partial(gated_dot, activation="silu")).trace(*call)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @__gpu$xla.gpu.triton") == kernels


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({0: np.zeros(5, np.float32)}, {}, r"x \(5,\): must be"),
        ({1: np.zeros((2, 40, 95), jnp.bfloat16)}, {}, r"weight \(2, 40, 95\) of bfloat16: must be \[2, out, 96\]"),
        ({1: np.zeros((3, 40, 96), jnp.bfloat16)}, {}, r"weight \(3, 40, 96\)"),
        ({1: np.zeros((2, 40, 96), np.float32)}, {}, "of float32: must be .* of bfloat16"),
        ({}, {"activation": "swish"}, "activation='swish': must be one of silu, gelu, gelu_tanh, relu"),
        ({}, {"implementation": "cuda"}, "implementation='cuda': must be one of"),
        ({}, {"implementation": "triton", "activation": "gelu"}, "cannot take this: activation='gelu'"),
    ],
)
def test_refuses(plain_errors, change, options, message):
    call = [change.get(i, value) for i, value in enumerate(inputs(5, 96, 40))]
    with pytest.raises(ValueError, match=message):
        gated_dot(*call, 5, **{"activation": "silu", **options})


def test_the_kernel_refuses_float32():
    with pytest.raises(ValueError, match="cannot take this: x of float32: it multiplies bfloat16 and float16"):
        gated_dot(*inputs(5, 96, 40, "float32"), 5, activation="silu", implementation="triton")
