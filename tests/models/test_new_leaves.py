"""Lists that name leaves of `param_shapes` have the leaves of every family. Activations without a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.decoder import LAYER_VECTORS
from jpaged.models.families import family_of, spec_of
from jpaged.models.layers import xielu
from jpaged.models.spec import param_shapes
from jpaged.runtime.memory.weight_bytes import weight_parts
from pallas_kernels import activate
from tests.golden.checkpoints import VARIANTS, Variant


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_lists_of_leaves_are_complete(variant: Variant) -> None:
    tree = param_shapes(spec_of(variant.config), np.float32)
    of_layers = {rule.leaf for rule in family_of(variant.config).rules if "{layer}" in rule.name}
    stacked = (tree.keys() & of_layers) - set(LAYER_VECTORS)
    assert not stacked, f"stacked over layers, but not in LAYER_VECTORS of models/decoder.py: {sorted(stacked)}"
    assert weight_parts(tree)  # names a leaf that `jpaged plan` does not know


def test_the_memory_plan_names_a_leaf_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="the leaf 'zeta' is in no part of the memory plan: add it to `_PARTS`"):
        weight_parts({"zeta": np.zeros(2)})


def test_xielu_is_the_papers_function() -> None:
    """In float64, with other numbers than a release has: each of the four has an effect."""
    x = np.array([-30, -3, -0.2, -0.05, -1e-7, 0, 1e-7, 0.05, 3, 30], np.float32)
    numbers = np.array([0.3, -0.4, 0.6, -0.1], np.float32)
    a, b, beta, eps = numbers.astype(np.float64)
    wide = x.astype(np.float64)
    alpha_p, alpha_n = np.log1p(np.exp(a)), beta + np.log1p(np.exp(b))
    above = alpha_p * wide**2 + beta * wide
    below = alpha_n * (np.expm1(np.minimum(wide, eps)) - wide) + beta * wide
    wanted = np.where(wide > 0, above, below)
    run = jax.jit(xielu)
    np.testing.assert_allclose(run(x, numbers), wanted, rtol=2e-6, atol=1e-7)
    short = np.asarray(run(x.astype(jnp.bfloat16), numbers))
    assert short.dtype == jnp.bfloat16
    np.testing.assert_allclose(short.astype(np.float32), wanted, rtol=0.02, atol=1e-3)


def test_relu2_is_a_squared_relu() -> None:
    squares = jax.jit(activate, static_argnums=0)("relu2", np.array([-2, 0, 3], np.float32))
    assert squares.tolist() == [0, 0, 9]
