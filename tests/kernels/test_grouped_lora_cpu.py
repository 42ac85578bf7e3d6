"""The native kernel of grouped_lora: a row's bits depend on its own adapter only, and nothing is copied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dot, grouped_lora, lora_dot, lora_expand
from pallas_kernels.grouped_lora import cpu
from tests.kernels.lora_cases import CASES, LAYER, Case, in_float64, make
from tests.support.device_arrays import device_array

CPU = jax.devices("cpu")[0]
WIDE = Case(128, ((0, 48), (1, 16), (2, 16)), repeats=3, rows=90, rank=37, slots=6)
DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32")]


@pytest.fixture(scope="module", autouse=True)
def _native():
    """Skip the module where the native kernel cannot run."""
    if cpu.kernel().name is None:
        pytest.skip(cpu.kernel().reason)


@functools.cache
def program(pattern):
    return jax.jit(functools.partial(grouped_lora, layer=LAYER, pattern=pattern, implementation="cpu"))


def results(call, pattern):
    return np.asarray(program(pattern)(*call))


@pytest.mark.parametrize(("dtype", "pool"), DTYPES)
def test_bits_of_a_row_depend_on_its_adapter_only(dtype, pool):
    """Not on other rows, their order, the number of rows, the slot, the adapters in other slots, or R."""
    call = make(WIDE, dtype, pool)
    whole = results(call, WIDE.pattern)
    x, base, a, b, ranks, scales, slots, num_rows = call
    shuffled = np.random.default_rng(1).permutation(WIDE.rows)
    mixed = [np.asarray(x)[shuffled], np.asarray(base)[shuffled], a, b, ranks, scales, slots[shuffled], num_rows]
    np.testing.assert_array_equal(results(mixed, WIDE.pattern), whole[shuffled])
    moved = np.array([3, 0, 5, 1, 2, 4])  # slot i is moved to moved[i]
    pools = [np.empty_like(np.asarray(pool)) for pool in (a, b, ranks, scales)]
    for to, pool in zip(pools, (a, b, ranks, scales), strict=True):
        to[:, moved] = np.asarray(pool)
    pools[0], pools[1] = (
        np.pad(pool, [(0, 0)] * (pool.ndim - 2) + [(0, 9), (0, 0)], constant_values=np.nan) for pool in pools[:2]
    )
    for first, rows in ((0, 1), (7, 2), (30, 3), (11, 40)):
        own = np.where(slots[first : first + rows] >= 0, moved[slots[first : first + rows]], -1).astype(np.int32)
        part = [np.asarray(array)[first : first + rows] for array in (x, base)]
        np.testing.assert_array_equal(
            results([*part, *pools, own, np.int32(rows)], WIDE.pattern), whole[first : first + rows]
        )


def test_many_tiles_and_blocks_of_outputs_match_float64():
    """More rows than a unit, more outputs than a block, with a rest of one vector, and the threads share the work."""
    for case in (
        Case(64, ((0, 2032), (1, 32)), repeats=2, rows=70, rank=21, slots=3, num_rows=67),
        Case(1024, ((0, 528),), rows=40, rank=64, slots=40, ranks=(8, 16, 33, 64)),
    ):
        call = make(case, "float32", "bfloat16")
        found = results(call, case.pattern)[: call[7]]
        np.testing.assert_allclose(found, in_float64(case, call), rtol=1e-5, atol=2e-5)


def test_rows_without_an_adapter_keep_their_bits():
    """Also numbers that a conversion to float32 and back would change: NaN with any payload."""
    case = dataclasses.replace(CASES["qkv"], num_rows=None)
    for dtype in ("float32", "bfloat16"):
        call = make(case, dtype)
        row_bytes = case.outputs * jnp.dtype(dtype).itemsize
        call[1] = np.random.default_rng(0).integers(0, 256, (case.rows, row_bytes), np.uint8).view(jnp.dtype(dtype))
        for slots, num_rows in ((np.full(case.rows, -1, np.int32), case.rows), (call[6], 0), (call[6], -5)):
            found = results([*call[:6], slots, np.int32(num_rows)], case.pattern)
            assert found.tobytes() == call[1].tobytes()


@pytest.mark.codegen
@pytest.mark.parametrize("call", [grouped_lora, lora_expand])
def test_base_is_updated_in_place_and_no_pool_is_copied(call):
    """Pools of 2 x 64 MiB, in another dtype than x."""
    rows, rank, pattern = 8, 16, {"pattern": ((0, 512),)} if call is grouped_lora else {}
    a = [((2, 4096, 1, rank, 256), "bfloat16")] if call is grouped_lora else []
    shapes = [
        ((rows, 256 if a else rank), "float32"), ((rows, 512), "float32"), *a, ((2, 4096, rank, 512), "bfloat16"),
        ((2, 4096, 1), "int32"), ((2, 4096, 1), "float32"), ((rows,), "int32"), ((), "int32"), ((), "int32"),
    ]  # fmt: skip
    given = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    made = jax.jit(lambda *args: call(*args[:-1], layer=args[-1], **pattern), donate_argnums=1).lower(*given).compile()
    memory = made.memory_analysis()
    assert memory.alias_size_in_bytes == rows * 512 * 4
    assert memory.temp_size_in_bytes < 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.zeros((21, 60), np.float32)}, "rows of 60 numbers are not a multiple of 16"),
        ({0: np.zeros((21, 64), np.float16)}, "not float16"),
        ({0: np.zeros((0, 64), np.float32)}, "is empty"),
    ],
)
def test_refuses(change, message):
    call = [change.get(i, value) for i, value in enumerate(make(CASES["qkv"]))]
    assert message in cpu.refuse(CPU, *call[:3], CASES["qkv"].pattern)


def test_refuses_outputs_that_are_no_whole_vectors():
    x, base, a = make(CASES["odd"])[:3]
    x = device_array(np.zeros((5, 64)), "float32")
    assert "5 outputs are not a multiple of 16" in cpu.refuse(CPU, x, base, a, CASES["odd"].pattern)


@pytest.mark.parametrize(("dtype", "pool"), DTYPES)
@pytest.mark.parametrize("out", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES["qkv"], marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(WIDE, num_rows=85), marks=pytest.mark.slow),
        Case(1024, ((0, 528),), rows=40, rank=16, slots=40, ranks=(8, 16)),  # threads share blocks and groups
        pytest.param(Case(128, ((0, 1024), (1, 1024)), rows=3, rank=16, num_rows=1), marks=pytest.mark.slow),
    ],
)
def test_lora_dot_has_the_bits_of_dot_and_grouped_lora(case, dtype, pool, out):
    x, _, *call = make(case, dtype, pool)
    weight = device_array(np.random.default_rng(3).standard_normal((case.outputs, case.inputs)), dtype)
    options = {"layer": LAYER, "pattern": case.pattern}
    fused = jax.jit(functools.partial(lora_dot, dtype=jnp.dtype(out), **options))
    for slots, num_rows in ((call[4], call[5]), (np.full(case.rows, -1, np.int32), call[5]), (call[4], np.int32(0))):
        given = tuple(map(jnp.asarray, (*call[:4], slots, num_rows)))
        base = dot(x, weight, given[-1], dtype=jnp.dtype(out), implementation="cpu")
        expected = grouped_lora(x, base, *given, implementation="cpu", **options)
        assert np.asarray(fused(x, weight, *given)).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.codegen
def test_lora_dot_is_one_call():
    call = make(CASES["qkv"])
    weight = device_array(np.zeros((CASES["qkv"].outputs, CASES["qkv"].inputs)), "float32")
    program = jax.jit(functools.partial(lora_dot, layer=LAYER, pattern=CASES["qkv"].pattern))
    text = program.lower(call[0], weight, *call[2:]).compile().as_text()
    assert text.count("custom_call_target=") == text.count("pallas_kernels.grouped_lora.cpu_kernel") == 1


def test_lora_dot_refuses_weights_of_another_dtype():
    x, base, *call = map(jnp.asarray, make(CASES["qkv"]))
    weight = jnp.zeros((base.shape[1], x.shape[1]), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"weight .* of float32, as x"):
        lora_dot(x, weight, *call, layer=LAYER, pattern=CASES["qkv"].pattern)
