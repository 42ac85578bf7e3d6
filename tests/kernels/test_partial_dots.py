"""partial_dots, add_norm, and dot for NVIDIA: against float64, and with the same bits in any number of rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_norm, dot, partial_dots
from pallas_kernels.add_norm.reference import tree_sum
from pallas_kernels.dot import triton
from pallas_kernels.dot.tiling import FIXED, Tiling, parts_that_fill
from tests.kernels.lowering import DEVICES
from tests.support.device_arrays import device_array

pytestmark = pytest.mark.codegen

SMALL = Tiling(16, 16, 16)  # small tiles have edges in small shapes
PARTS, OUTPUTS = 8, 40


def arrays(rows, inputs, outputs=OUTPUTS, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, inputs)), rng.standard_normal((outputs, inputs)) * inputs**-0.5
    return device_array(x, "bfloat16"), device_array(weight, "bfloat16")


@functools.cache
def kernel(*, together, tiling=SMALL, parts=PARTS):
    run = triton.tree_dot if together else triton.partial_dots
    return jax.jit(functools.partial(run, parts=parts, tiling=tiling, interpret=True))


@pytest.mark.parametrize("inputs", [128, pytest.param(192, marks=pytest.mark.slow)])  # 16 and 24 inputs a part
def test_sums_match_float64_and_pairs_have_the_bits_of_the_tree(inputs):
    x, weight = arrays(35, inputs)
    apart = np.asarray(kernel(together=False)(x, weight, np.int32(35)))
    cuts = np.split(np.asarray(x, np.float64), PARTS, axis=1), np.split(np.asarray(weight, np.float64), PARTS, axis=1)
    expected = np.stack([a @ b.T for a, b in zip(*cuts, strict=True)])
    np.testing.assert_allclose(apart, expected, atol=1e-5)
    tree = np.asarray(kernel(together=True)(x, weight, np.int32(35)))
    np.testing.assert_array_equal(tree[0], np.asarray(tree_sum(list(apart))))
    assert (tree[0] != apart.sum(0)).any(), "the order of additions does not matter here"


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bits_of_a_row_do_not_depend_on_the_others(together):
    x, weight = arrays(75, 128)
    x = np.array(x)
    run = kernel(together=together)
    whole = np.asarray(run(x, weight, np.int32(75)))
    for first, rows, needed in ((74, 1, 1), (7, 40, 33)):
        part = np.asarray(run(x[first : first + rows], weight, np.int32(needed)))
        np.testing.assert_array_equal(part[:, :needed], whole[:, first : first + needed])
    x[:60] = np.nan
    np.testing.assert_array_equal(np.asarray(run(x, weight, np.int32(75)))[:, 60:], whole[:, 60:])
    assert not np.asarray(run(x, weight, np.int32(0))).any()


@pytest.mark.slow
def test_a_part_of_the_outputs_or_inputs_has_the_same_bits():
    """As on one of several devices: other outputs, or half of the parts of the inputs, of the fixed tile."""
    x, weight = arrays(9, 512, 200)
    whole = np.asarray(partial_dots(x, weight, 9, parts=8, implementation="triton_fixed"))
    half = np.asarray(partial_dots(x[:, 256:], weight[:, 256:], 9, parts=4, implementation="triton_fixed"))
    np.testing.assert_array_equal(half, whole[4:])
    product = np.asarray(dot(x, weight, 9, implementation="triton_fixed"))
    outputs = np.asarray(dot(x, weight[77:], 9, implementation="triton_fixed"))
    np.testing.assert_array_equal(outputs, product[:, 77:])


@pytest.mark.slow
@pytest.mark.parametrize("width", [48, 1024])
def test_add_norm_has_the_bits_of_its_reference_nearly_everywhere(width):
    """A bfloat16 number may be rounded either way, because the mean is summed in another order."""
    rng = np.random.default_rng(1)
    parts = jnp.asarray(rng.standard_normal((4, 7, width)), jnp.float32)
    residual, norms = device_array(rng.standard_normal((7, width)), "bfloat16"), rng.standard_normal((3, width))
    norms = device_array(norms, "bfloat16")
    both = [add_norm(parts, residual, norms, layer=2, implementation=name) for name in ("triton", "reference")]
    (total, normed), (expected_total, expected) = ([np.asarray(a, np.float64) for a in each] for each in both)
    np.testing.assert_array_equal(total, expected_total)
    assert (normed != expected).mean() < 0.02
    np.testing.assert_allclose(normed, expected, rtol=2**-7)
    x = total * np.mean(total * total, -1, keepdims=True) ** -0.5 * np.asarray(norms[2], np.float64)
    np.testing.assert_allclose(normed, x, rtol=2**-6, atol=1e-4)
    _, alone = add_norm(None, both[0][0], norms[2], implementation="triton")
    np.testing.assert_array_equal(np.asarray(alone, np.float64), normed)
    assert add_norm(parts, residual, None, implementation="triton")[1] is None


def test_one_tile_is_in_the_programs_of_all_numbers_of_rows():
    """The traced kernels of 1 to 2,048 rows have the same tile, warps and stages."""
    seen = {rows: tile_of(rows, "triton_fixed") for rows in (1, 8, 64, 256, 2048)}
    assert set(seen.values()) == {("64,64", "64,64", str(FIXED.warps), str(FIXED.stages))}
    assert tile_of(1, "triton") != tile_of(2048, "triton"), "the other kernel has tiles by rows"


def tile_of(rows, implementation):
    """A tile's results and weights [inputs, outputs], warps and stages of the kernel, as Triton's lowering gets it."""
    call = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 1024), (512, 1024))]
    run = functools.partial(dot, implementation=implementation)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("_",), abstract_device=DEVICES["cuda"])):
        text = str(jax.make_jaxpr(run)(*call, jax.ShapeDtypeStruct((), jnp.int32)))
    wanted = (r"f32\[(\S+)\] = dot_general", r"bf16\[(\S+)\] = transpose", r"num_warps=(\d+)", r"num_stages=(\d+)")
    found = [set(re.findall(one, text)) for one in wanted]
    return tuple(value for (value,) in found)  # each has one value


def test_parts_fill_the_multiprocessors():
    assert [parts_that_fill(rows, 1024, 2048) for rows in (8, 64, 256)] == [8, 8, 4]
    assert parts_that_fill(64, 4096, 1024) == 2
    assert parts_that_fill(2048, 4096, 1024) == 1
    assert parts_that_fill(8, 1024, 512) == 2  # parts of 256 inputs
    assert parts_that_fill(8, 1024, 576) == 1  # they would not be whole tiles
    assert FIXED.rows == Tiling.by_rule(1).rows == 64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: partial_dots(x, w, 5, parts=3), r"parts=3: must be a power of two that divides the 96 inputs"),
        (lambda x, w: partial_dots(x, w, 5, parts=64), "parts=64: must be"),
        (lambda x, w: partial_dots(x, w[:, 1:], 5, parts=2), "weight .* must be"),
        (lambda x, w: partial_dots(x, w, 5, parts=2, implementation="cpu"), "implementation='cpu': must be one of"),
        (lambda x, w: dot(x.astype("float32"), w.astype("float32"), 5, implementation="triton"), "x of float32"),
        (lambda x, w: add_norm(None, x, None), "parts and weight: give at least one"),
        (lambda x, w: add_norm(np.zeros((3, 5, 96), np.float32), x, None), r"parts \(3, 5, 96\) of float32: must be"),
        (lambda x, w: add_norm(None, x, w[:, :3]), r"weight \(40, 3\): must be \[96\] or"),
    ],
)
def test_refuses(plain_errors, call, message):
    with pytest.raises(ValueError, match=message):
        call(*arrays(5, 96))
