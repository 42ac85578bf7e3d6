"""A token's bits do not depend on the number of tokens in its program, nor on the number of heads on its device.

XLA's sums over a row on CPU do: with another number of rows, they add in another order. So the layers sum without them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.altup import _with_magnitude
from jpaged.models.layers import largest_gates, normalise_heads
from jpaged.models.linear import LayerContext
from jpaged.models.spec import WeightLayout
from pallas_kernels import rms_norm
from tests.support.tiny_engine import UNLIKE

pytestmark = pytest.mark.codegen
TOKENS, HEADS, DIM = 256, 16, 256  # Gemma 4 31B has 16 KV heads of 256 in layers with a window


def of_heads(x):
    context = LayerContext(UNLIKE, WeightLayout(), {}, num_rows=jnp.int32(x.shape[0]))
    return normalise_heads(x, jnp.linspace(1, 2, x.shape[2]), context)


def values(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal((TOKENS, *shape)), jnp.float32)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (of_heads, (HEADS, DIM)), (lambda x: _with_magnitude(x, x[:, ::-1]), (2048,)),
        (lambda x: largest_gates(x, 0.9), (64,)),
    ],
    ids=["norm of heads", "magnitude of a stream", "largest gates"],
)  # fmt: skip
def test_bits_do_not_depend_on_the_number_of_tokens(function, shape):
    x, run = values(*shape), jax.jit(function)
    whole = np.asarray(run(x))
    for tokens in (1, 8):
        np.testing.assert_array_equal(run(x[:tokens]), whole[:tokens])


def test_bits_of_a_head_do_not_depend_on_the_other_heads():
    x = values(8, 32)[:64]
    expected = rms_norm(x, jnp.linspace(1, 2, 32), UNLIKE.norm_eps)
    whole, alone = jax.jit(of_heads)(x), jax.jit(of_heads)(x[:, 3:4])
    np.testing.assert_allclose(whole, expected, rtol=2e-6)
    np.testing.assert_array_equal(alone[:, 0], whole[:, 3])
