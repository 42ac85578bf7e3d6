"""The decode for Hopper through Mosaic GPU: in Pallas' GPU interpreter against float64, lowered, and compiled."""

from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import KVPages, paged_attention, self_check
from pallas_kernels.paged_attention.tiling import Tiling
from tests.kernels import lowered
from tests.kernels.lowering import lower_for
from tests.kernels.machine_code import compile_for
from tests.kernels.oracle import DECODES, TOLERANCE, Shape, attend, expected, make_case
from tests.support.deviceless import H200

has_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="JAX 0.10 has no interpreter for these kernels"
)
PLAIN = Shape(head_dim=64, dtype="bfloat16", tokens=0)
# Splits of 192 keys are three tiles, one more than shared memory holds. Rows end at and after the borders of splits.
SPLITS = Tiling(decode_keys=64, prefill_rows=16, prefill_keys=64, min_split_keys=192)
SLOW = pytest.mark.slow
LONG = ((1, 300), (1, 64), (0, 0), (1, 65), (1, 192))


def interpreted(shape, rows):
    case = make_case(shape, rows)
    with plgpu.force_gpu_interpret_mode(), mock.patch.object(Tiling, "choose", return_value=SPLITS):
        return case, attend(shape, case, "mosaic_gpu", SPLITS)


@has_interpreter
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        pytest.param({}, DECODES, id="decodes"),
        pytest.param({}, LONG, id="splits", marks=SLOW),
        pytest.param({"heads": 7, "kv_heads": 1, "head_dim": 128}, LONG, id="mqa-odd-heads-128", marks=SLOW),
        pytest.param({"heads": 2, "block_size": 64, "width": 5}, LONG, id="mha-block-64", marks=SLOW),
        pytest.param({"block_size": 128, "width": 3}, LONG, id="block-128", marks=SLOW),
        pytest.param({"dtype": "float16", "block_size": 32, "width": 10}, LONG, id="fp16-block-32", marks=SLOW),
        pytest.param({"window": 100}, LONG, id="window"),
        pytest.param({"window": 1}, DECODES, id="window-1", marks=SLOW),
        pytest.param({"softcap": 2.0}, DECODES, id="softcap", marks=SLOW),
        pytest.param({"sinks": True}, LONG, id="sinks"),
        pytest.param({"slopes": True}, LONG, id="alibi", marks=SLOW),
        # the last tile extends beyond the block table
        pytest.param({"width": 19}, LONG, id="narrow-table", marks=SLOW),
    ],
)
def test_matches_float64(options, rows):
    shape = Shape(**{"head_dim": 64, "dtype": "bfloat16", "tokens": 0} | options)
    case, out = interpreted(shape, rows)
    np.testing.assert_allclose(out, expected(shape, case), atol=TOLERANCE[shape.dtype], rtol=0)


@has_interpreter
def test_bits_of_a_row_do_not_depend_on_other_rows():
    np.testing.assert_array_equal(
        interpreted(PLAIN, ((1, 300), (1, 7), (1, 150)))[1][:1], interpreted(PLAIN, ((1, 300),))[1]
    )


@has_interpreter
@pytest.mark.slow
def test_self_check_of_decodes_finds_agreement():
    with plgpu.force_gpu_interpret_mode():
        errors = self_check(implementation="mosaic_gpu", q_heads=2, kv_heads=1, head_dim=64, cases=("decode",))
    assert set(errors) == {"decode"}
    assert errors["decode"] < 1e-2


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        (PLAIN, {"q": jnp.zeros((6, 4, 64), jnp.float32)}, "q float32"),
        (Shape(head_dim=32, dtype="bfloat16", tokens=0), {}, "head_dim=32"),
        (Shape(head_dim=64, dtype="bfloat16", tokens=0, block_size=24), {}, "block_size=24"),
    ],
)
def test_refused_calls_are_named(shape, change, message):
    given = make_case(shape, DECODES) | {"scale": 1.0, "max_query_len": 1} | change
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=message):
        paged_attention(**given, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (name != "gqa-7-64")) for name in lowered.HOPPER]
)
def test_lowers(name):
    if name == "alibi" and jax.__version_info__ < (0, 11):
        with pytest.raises(ValueError, match=r"needs JAX 0\.11"):
            lower_for("cuda", *lowered.attention(name, 1, "mosaic_gpu", lowered.HOPPER))
        return
    text = lower_for("cuda", *lowered.attention(name, 1, "mosaic_gpu", lowered.HOPPER))
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.deviceless
@pytest.mark.skipif(H200.missing is not None, reason="needs jax-cuda13-plugin")
@pytest.mark.parametrize("name", lowered.HOPPER)
def test_compiles_for_an_h200(name):
    """It compiles up to ptxas, in a program with other operations, without a copy of the pages."""
    attention, arguments = lowered.attention(name, 1, "mosaic_gpu", lowered.HOPPER)

    def step(q, pages, *rest):
        pages = KVPages(pages.data.at[0, :, :, 0].add(1.0))
        return attention(q * 2, pages, *rest) + 1, pages

    memory = compile_for(H200, step, arguments, donate_argnums=1).memory_analysis()
    assert memory.temp_size_in_bytes < arguments[1].num_bytes / 2
    assert memory.alias_size_in_bytes >= arguments[1].num_bytes
