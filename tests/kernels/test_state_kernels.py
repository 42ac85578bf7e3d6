"""Kernels with a state for each row, against recurrences in float64: outputs, states, slots that must not change."""


import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta import gated_delta
from tests.kernels import state_oracle as oracle

slow = pytest.mark.slow
SHAPES = {
    "gated_delta": oracle.Shape(),
    "mamba2": oracle.Shape("mamba2", heads=6, k_heads=3, k_dim=32),
    "causal_conv": oracle.Shape("causal_conv", k_dim=4),
}


@pytest.mark.parametrize("implementation", ["xla", pytest.param("reference", marks=slow)])
@pytest.mark.parametrize("operation", SHAPES)
def test_ragged_rows(operation, implementation):
    shape = SHAPES[operation]
    for seed, rows in enumerate((oracle.RAGGED, oracle.DECODES, ((32, 7),), ((3, 0), (2, 0), (4, 2)))):
        oracle.check(shape, oracle.make_case(shape, rows, seed=seed), implementation)


@pytest.mark.parametrize(
    ("operation", "change", "message"),
    [
        ("gated_delta", {"q": (32, 2, 8)}, "q and k must have one shape"),
        ("gated_delta", {"v": (32, 3, 16)}, r"v \(32, 3, 16\): must have a multiple of 2 heads, as k has"),
        ("gated_delta", {"beta": (32, 2)}, r"beta \(32, 2\): must be \(32, 4\), one per token and head"),
        ("gated_delta", {"states": (9, 4, 16, 8)}, r"states \(9, 4, 16, 8\): must be \[slots, 4, 16, 16\]"),
        ("gated_delta", {"positions": (5,)}, r"positions \(5,\), query_start_loc \(7,\): must be \[rows\]"),
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
        case[name] = jax.ShapeDtypeStruct(shape, case[name].dtype)
    with pytest.raises(ValueError, match=message):
        oracle.call_of(SHAPES[operation], None, 32)(*case.values())


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
