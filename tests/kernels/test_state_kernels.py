"""Kernels with a state for each row, against recurrences in float64: outputs, states, slots that must not change."""


import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.state_scan import mosaic_tpu
from pallas_kernels.state_scan.chunk import compute_channel_chunk
from tests.kernels import state_oracle as oracle
from tests.support.device_arrays import device_array

slow = pytest.mark.slow
SHAPES = {
    "gated_delta": oracle.Shape(),
    "by_channel": oracle.Shape(by_channel=True),
    "mamba2": oracle.Shape("mamba2", heads=6, k_heads=3, k_dim=32),
    "causal_conv": oracle.Shape("causal_conv", k_dim=4),
}


@pytest.mark.parametrize("implementation", ["xla", "cpu", pytest.param("reference", marks=slow)])
@pytest.mark.parametrize("operation", SHAPES)
def test_ragged_rows(operation, implementation):
    shape = SHAPES[operation]
    for seed, rows in enumerate((oracle.RAGGED, oracle.DECODES, ((32, 7),), ((3, 0), (2, 0), (4, 2)))):
        oracle.check(shape, oracle.make_case(shape, rows, seed=seed), implementation)


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        *(("gated_delta", name) for name in ("cpu", "xla", "triton", "mosaic_tpu")), ("causal_conv", "cpu"),
        ("causal_conv", "xla"), *(pytest.param(name, "reference", marks=slow) for name in SHAPES),
        *(pytest.param(op, name, marks=slow) for op in ("mamba2", "by_channel")
          for name in ("cpu", "xla", "triton", "mosaic_tpu")),
    ],
)  # fmt: skip
def test_states_written_to_other_slots_or_not_at_all(operation, implementation):
    """Old states stay as they are, those of rows with one token too."""
    shape = dataclasses.replace(SHAPES[operation], targets=True)
    for seed, rows in enumerate((oracle.RAGGED, oracle.DECODES)):
        oracle.check(shape, oracle.make_case(shape, rows, seed=seed), implementation, factor=4)


@pytest.mark.parametrize(
    ("operation", "change", "message"),
    [
        ("gated_delta", {"q": (32, 2, 8)}, "q and k must have one shape"),
        ("gated_delta", {"v": (32, 3, 16)}, r"v \(32, 3, 16\): must have a multiple of 2 heads, as k has"),
        ("gated_delta", {"beta": (32, 2)}, r"beta \(32, 2\): must be \(32, 4\), one per token and head"),
        ("by_channel", {"decay": (32, 4, 8)}, r"decay \(32, 4, 8\): must be \(32, 4, 16\), one per token, head and"),
        ("gated_delta", {"states": (9, 4, 16, 8)}, r"states \(9, 4, 16, 8\): must be \[slots, 4, 16, 16\]"),
        ("gated_delta", {"positions": (5,)}, r"positions \(5,\), query_start_loc \(7,\): must be \[rows\]"),
        ("gated_delta", {"targets": (5,)}, r"targets \(5,\): must be \(6,\), as slots"),
        ("mamba2", {"a": (3,)}, r"a \(3,\): must be \[6\], one per head of x"),
        ("mamba2", {"b": (32, 3, 8)}, "c and b must have one shape"),
        ("causal_conv", {"weight": (4, 32)}, r"weight \(4, 32\): must be \[width, 64\]"),
        ("causal_conv", {"states": (9, 4, 64)}, r"states \(9, 4, 64\): must be \[slots, 3, 64\]"),
        ("causal_conv", {"bias": (1,)}, r"bias \(1,\): must be \[64\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(operation, change, message, plain_errors):
    case = oracle.make_case(SHAPES[operation])
    for name, shape in change.items():
        case[name] = jax.ShapeDtypeStruct(shape, case.get(name, case["slots"]).dtype)
    with pytest.raises(ValueError, match=message):
        oracle.call_of(SHAPES[operation], None, 32)(**case)


def test_options_that_do_not_fit_are_named(plain_errors):
    case = oracle.make_case(SHAPES["causal_conv"])
    with pytest.raises(ValueError, match="activation='gelu': must be None or 'silu'"):
        causal_conv(*case.values(), max_query_len=32, activation="gelu")
    case = oracle.make_case(SHAPES["gated_delta"])
    with pytest.raises(ValueError, match="max_query_len=0: must be at least 1"):
        gated_delta(*case.values(), max_query_len=0)
    case["states"] = jax.ShapeDtypeStruct(case["states"].shape, jnp.bfloat16)
    with pytest.raises(ValueError, match="states of bfloat16: must be float32"):
        gated_delta(*case.values(), max_query_len=32)


# --- native kernels for CPU ------------------------------------------------------------------------------------------


def rows_of(case, tokens, position, slots):
    """The same inputs as one row of `tokens` (begin, end), at a position, with other states."""
    begin, end = tokens
    names = [name for name in case if name in ("q", "k", "v", "decay", "beta", "x", "dt", "b", "c")]
    if "weight" in case:
        names = ["x"]
    moved = {name: device_array(np.roll(np.asarray(case[name]), -begin, axis=0), case[name].dtype) for name in names}
    starts = np.full(len(case["query_start_loc"]), end - begin)
    starts[0] = 0
    positions = np.full(len(slots), position)
    index = {"slots": slots, "positions": positions, "query_start_loc": starts}
    return {**case, **moved, **{name: device_array(x, "int32") for name, x in index.items()}}


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
@pytest.mark.parametrize("operation", SHAPES)
def test_bits_on_cpu_do_not_depend_on_how_tokens_are_divided(operation, dtype):
    """Cold or continued, as a chunk or token by token, alone or between other rows: the same bits."""
    shape = dataclasses.replace(SHAPES[operation], dtype=dtype)
    case = oracle.make_case(shape, ((3, 5), (20, 0), (2, 0)))
    slots = np.asarray(case["slots"])
    whole, states = oracle.run(shape, case, "cpu")
    for ends in ([20], [1, 2, 20], [7, 8, 17, 20], list(range(1, 21))):
        own, begin = case["states"], 0
        for end in ends:
            part = rows_of(case, (3 + begin, 3 + end), begin, np.roll(slots, -1))
            out, after = oracle.run(shape, {**part, "states": own}, "cpu")
            assert out.tobytes() == whole[3 + begin : 3 + end].tobytes()
            own, begin = device_array(after, after.dtype), end
        assert after[slots[1]].tobytes() == states[slots[1]].tobytes()


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [("gated_delta", "cpu"), *(pytest.param(name, i, marks=slow) for name in SHAPES for i in ("cpu", "xla"))],
)
def test_donated_states_are_not_copied(operation, implementation):
    """XLA operations copy the states of the call's rows, not all states."""
    shape = dataclasses.replace(SHAPES[operation], slots=4096, tokens=8, rows=4)
    case = oracle.make_case(shape, ((1, 0), (3, 1), (1, 7)))
    call = jax.jit(oracle.call_of(shape, implementation, 8), donate_argnames=("states",))
    given = [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.values()]
    memory = call.lower(**dict(zip(case, given, strict=True))).compile().memory_analysis()
    size = case["states"].nbytes
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 50


@pytest.mark.parametrize("operation", SHAPES)
def test_the_native_kernel_is_chosen_on_cpu(operation):
    shape = SHAPES[operation]
    case = oracle.make_case(shape)
    text = jax.jit(oracle.call_of(shape, None, 32)).lower(*case.values()).as_text()
    assert ("causal_conv" if operation == "causal_conv" else "state_scan") + ".cpu_kernel" in text


def test_sizes_that_are_not_whole_vectors_are_left_to_xla(plain_errors):
    shape = oracle.Shape(k_dim=8)
    case = oracle.make_case(shape)
    with pytest.raises(ValueError, match="states of 8 x 16 numbers: it takes multiples of 16"):
        gated_delta(*case.values(), max_query_len=32, implementation="cpu")
    text = jax.jit(oracle.call_of(shape, None, 32)).lower(*case.values()).as_text()
    assert "cpu_kernel" not in text


# --- kernels for accelerators, in interpret mode ---------------------------------------------------------------------

SCANS = {
    "gated_delta": oracle.Shape(k_dim=32, tokens=160),
    "by_channel": oracle.Shape(k_dim=32, tokens=160, by_channel=True),
    "mamba2": oracle.Shape("mamba2", heads=3, k_heads=1, k_dim=16, v_dim=32, tokens=160),
}


@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
@pytest.mark.parametrize("operation", ["gated_delta", "by_channel", pytest.param("mamba2", marks=slow)])
def test_decodes_and_chunks_of_kernels_for_accelerators(operation, implementation):
    """Rows of one token, of a few, and of more than a chunk, which begin and end inside a chunk."""
    shape = SCANS[operation]
    for seed, rows in enumerate((((1, 9), (100, 40), (0, 0), (40, 128), (1, 0), (5, 63)), ((160, 0),))):
        oracle.check(shape, oracle.make_case(shape, rows, seed=seed), implementation, factor=4)


@pytest.mark.slow
@pytest.mark.parametrize("operation", SCANS)
def test_chunks_on_nvidia_write_states_to_other_slots(operation):
    shape = dataclasses.replace(SCANS[operation], targets=True)
    rows = ((1, 9), (100, 40), (0, 0), (40, 128), (5, 63))
    oracle.check(shape, oracle.make_case(shape, rows), "triton", factor=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
def test_chunks_by_channel_of_published_sizes(implementation, dtype):
    """Heads of 128, as in Kimi Linear, and keys that two heads of values share."""
    for k_heads, k_dim, v_dim in ((2, 128, 128), (1, 48, 40)):
        sizes = {"heads": 2, "k_heads": k_heads, "k_dim": k_dim, "v_dim": v_dim}
        shape = dataclasses.replace(SCANS["by_channel"], **sizes, dtype=dtype)
        rows = ((97, 31), (1, 9), (62, 64))
        oracle.check(shape, oracle.make_case(shape, rows), implementation, factor=4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_weak_decays_after_strong_ones_keep_their_bits(size):
    """The decays before token 16 or 32 add up to -320 or -640: a difference of two sums has an error of 1e-5 then."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((size, 128)) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=1)[:, None] for x in (q, k))
    decay = np.full((size, 128), -20.0)
    decay[size // 2 :] = -np.exp(rng.uniform(-7, -4, (size // 2, 1)))
    given = q, k, v, decay, rng.uniform(0, 1, (1, size)), rng.standard_normal((128, 128))
    arrays = [device_array(x, "float32") for x in given]
    out, state = jax.jit(lambda *given: compute_channel_chunk(*given, dot=mosaic_tpu._dot))(*arrays)
    q, k, v, decay, factor, right = (np.asarray(x).astype(np.float64) for x in arrays)
    for t in range(size):
        right *= np.exp(decay[t])[:, None]
        right += np.outer(k[t], factor[0, t] * (v[t] - k[t] @ right))
        np.testing.assert_allclose(out[t], q[t] @ right, atol=2e-6, rtol=0)
    np.testing.assert_allclose(state, right, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "operation", ["gated_delta", *(pytest.param(name, marks=slow) for name in ("by_channel", "mamba2"))]
)
def test_bits_on_nvidia_do_not_depend_on_the_step_before_a_whole_chunk(operation):
    """A prompt that is cut at a multiple of the chunk, next to another row or alone: the same bits."""
    shape = SCANS[operation]
    case = oracle.make_case(shape, ((37, 5), (100, 0)))
    slots = np.asarray(case["slots"])
    whole, states = oracle.run(shape, case, "triton")
    own = case["states"]
    for begin, end in ((0, 64), (64, 100)):
        part = rows_of(case, (37 + begin, 37 + end), begin, np.roll(slots, -1))
        out, after = oracle.run(shape, {**part, "states": own}, "triton")
        assert out.tobytes() == whole[37 + begin : 37 + end].tobytes()
        own = device_array(after, after.dtype)
    assert after[slots[1]].tobytes() == states[slots[1]].tobytes()
