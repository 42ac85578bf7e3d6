"""grouped_lora and lora_expand: every implementation against float64."""

import functools
import re

import jax
import numpy as np
import pytest

from pallas_kernels import grouped_lora, lora_expand
from pallas_kernels.grouped_lora import EXPAND_IMPLEMENTATIONS, IMPLEMENTATIONS
from tests.kernels.lora_cases import CASES, LAYER, in_float64, make

pytestmark = pytest.mark.codegen


@functools.cache
def program(implementation, pattern):
    call = functools.partial(grouped_lora, layer=LAYER, pattern=pattern, implementation=implementation)
    return jax.jit(call)


def is_refused(implementation, call, pattern):
    """Whether a kernel takes other sizes only. Then the call must say so."""
    if implementation is None:
        return False
    reason = IMPLEMENTATIONS[implementation].refuse(jax.devices("cpu")[0], *call[:3], pattern)
    if reason is None:
        return False
    assert "multiple of" in reason
    with pytest.raises(ValueError, match=re.escape(reason)):
        program(implementation, pattern)(*call)
    return True


def compare(found, expected, dtype):
    """Results are rounded once: to 24 or 8 bits."""
    found = np.asarray(found)[: len(expected)].astype(np.float64)
    limit = {"float32": 1e-5, "bfloat16": 2**-8}[dtype]
    np.testing.assert_allclose(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize(
    ("name", "dtype", "pool"),
    [("qkv", "float32", "bfloat16"), ("gate_up", "bfloat16", "bfloat16"), ("down", "float32", "float32"),
     ("odd", "bfloat16", "float32"), ("lanes", "float32", "bfloat16")],
)  # fmt: skip
def test_matches_float64(implementation, name, dtype, pool):
    case = CASES[name]
    call = make(case, dtype, pool)
    if is_refused(implementation, call, case.pattern):
        return
    found = program(implementation, case.pattern)(*call)
    assert found.dtype == dtype
    assert found.shape == call[1].shape
    compare(found, in_float64(case, call), dtype)


@functools.cache
def expansion(implementation):
    return jax.jit(functools.partial(lora_expand, layer=LAYER, implementation=implementation))


@pytest.mark.parametrize("implementation", [None, *EXPAND_IMPLEMENTATIONS])
@pytest.mark.parametrize(("dtype", "pool"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_expand_matches_float64(implementation, dtype, pool):
    case = CASES["down" if implementation != "mosaic_tpu" else "one part"]
    call = make(case, dtype, pool)
    assert not is_refused(implementation, call, case.pattern)
    base, a, b, ranks, scales, slots, num_rows = call[1:]
    h = np.random.default_rng(1).standard_normal((case.rows, case.rank)).astype(np.float32)
    given = h.copy()
    for row, slot in enumerate(slots):
        given[row, ranks[LAYER, slot, 0] :] = np.nan  # beyond the true rank, as a row of A may be
    found = expansion(implementation)(given, base, b, ranks, scales, slots, num_rows)
    # A of ones and zeros makes x = h
    a = np.broadcast_to(np.eye(case.rank), (*a.shape[:3], case.rank, case.rank))
    compare(found, in_float64(case, [h, base, a, b, ranks, scales, slots, num_rows]), dtype)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_rows_without_an_adapter_keep_their_bits(implementation):
    case = CASES["qkv"]
    call = make(case)
    none = np.full(case.rows, -1, np.int32)
    for slots, num_rows in ((none, case.rows), (call[6], 0)):
        found = program(implementation, case.pattern)(*call[:6], slots, np.int32(num_rows))
        np.testing.assert_array_equal(found, call[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.zeros(64, np.float32)}, r"x \(64,\): must be"),
        ({0: np.zeros((21, 63), np.float32)}, r"a \(2, 5, 3, 8, 64\): must be .* R, 63\]"),
        ({1: np.zeros((20, 128), np.float32)}, r"base \(20, 128\): must be \(21, 128\)"),
        ({3: np.zeros((2, 5, 8, 127), np.float32)}, r"b \(2, 5, 8, 127\): must be"),
        ({3: np.zeros((2, 5, 8, 128), np.float16)}, "b of float16: must be float32, as a"),
        ({4: np.zeros((2, 5, 1), np.int32)}, r"ranks \(2, 5, 1\): must be \(2, 5, 3\)"),
        ({4: np.zeros((2, 5, 3), np.int8)}, "ranks of int8: must be int32"),
        ({5: np.zeros((2, 5, 3), np.float16)}, "scales of float16: must be float32"),
        ({6: np.zeros(20, np.int32)}, r"slot_of_row \(20,\): must be \(21,\)"),
        ({"pattern": ((0, 60),)}, "must be pairs"),
        ({"pattern": ((3, 64),)}, "must be pairs"),
        ({"implementation": "fast"}, "implementation='fast': must be one of"),
    ],
)
def test_refuses(plain_errors, change, message):
    call = [change.get(i, value) for i, value in enumerate(make(CASES["qkv"]))]
    options = {"layer": LAYER, "pattern": CASES["qkv"].pattern}
    options |= {name: value for name, value in change.items() if isinstance(name, str)}
    with pytest.raises(ValueError, match=message):
        grouped_lora(*call, **options)
