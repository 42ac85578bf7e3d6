"""NVFP4 and MXFP4: equal to compressed-tensors' decompression and to the bfloat16 tensors, or refused."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.mxfp4 import Mxfp4Checkpoint
from jpaged.loading.quantized import fp4
from pallas_kernels import QuantizedWeight
from tests.golden.checkpoints import BY_NAME, GOLDEN, write_checkpoint

CASES = json.loads((GOLDEN / "quantized" / "fp4.json").read_text())["cases"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def stored(case: dict[str, Any], name: str, dtype: Any, columns: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(case[name]), dtype).reshape(-1, columns)


def numbers(weight: QuantizedWeight) -> np.ndarray:
    return np.asarray(jax.tree.map(jnp.asarray, weight).dequantize())


def shapes(weight: QuantizedWeight) -> QuantizedWeight:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), weight)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}, {case['name']}")
def test_the_bits_of_compressed_tensors(case: dict[str, Any]) -> None:
    packed = stored(case, "weight_packed", np.uint8, case["in"] // 2)
    if case["kind"] == "nvfp4":
        scale = stored(case, "weight_scale", ml_dtypes.float8_e4m3fn, case["in"] // 16)
        weight = fp4.nvfp4(packed, scale, stored(case, "weight_global_scale", np.float32, 1)[0], divides=True)
        assert shapes(weight) == fp4.nvfp4_shape(packed.shape, divides=True)
    else:
        weight = fp4.mxfp4(packed, stored(case, "weight_scale", np.uint8, case["in"] // 32))
        assert shapes(weight) == fp4.mxfp4_shape(packed.shape)
    wanted = stored(case, "weight", ml_dtypes.bfloat16, case["in"])
    found = numbers(weight)
    assert (weight.kind, weight.layout, weight.shape) == ("fp4", "plain", (case["out"], case["in"]))
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, wanted)  # 0 and -0 are equal, and so are two NaNs
    assert len(np.unique(wanted.astype(np.float32))) > 15


def test_modelopt_multiplies_by_the_global_scale() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (3, 5, 32), np.uint8)
    scale = rng.integers(1, 127, (3, 5, 4), np.uint8).view(ml_dtypes.float8_e4m3fn)
    weight = fp4.nvfp4(packed, scale, np.array(0.00137, np.float32), divides=False)
    assert shapes(weight) == fp4.nvfp4_shape(packed.shape, divides=False)
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(3, 5, 4, 16)
    wanted = (values * (scale.astype(np.float32) * np.float32(0.00137))[..., None]).reshape(3, 5, 64)
    exact = dataclasses.replace(weight, dtype=np.dtype(np.float32))
    np.testing.assert_array_equal(numbers(exact), wanted)


def test_gpt_oss_in_four_bits_is_its_bfloat16(tmp_path: Path) -> None:
    """`quantized` has the numbers of `array`, with the last two axes in the order of the file."""
    write_checkpoint(BY_NAME["gpt-oss-mxfp4"], 0, tmp_path)
    with Checkpoint(tmp_path) as files:
        checkpoint = Mxfp4Checkpoint(files)
        kept = {name: weight for name in checkpoint.names if (weight := checkpoint.quantized(name)) is not None}
        assert kept.keys() == {name for name in checkpoint.names if name.endswith("_proj") and ".experts." in name}
        for name, weight in kept.items():
            assert shapes(weight) == checkpoint.quantized_shape(name)
            np.testing.assert_array_equal(numbers(weight).swapaxes(1, 2), checkpoint.array(name))
            assert checkpoint.quantized_shape(name.replace("_proj", "_proj_bias")) is None
        del weight


def nvfp4(packed: np.ndarray, scale: np.ndarray, global_scale: np.ndarray) -> QuantizedWeight:
    return fp4.nvfp4(packed, scale, global_scale, divides=True)


PACKED = np.zeros((2, 32), np.uint8)
E4M3 = np.ones((2, 4), ml_dtypes.float8_e4m3fn)
ONE = np.ones(1, np.float32)
NAN = E4M3.copy()
NAN[1, 2] = np.nan
BYTES = np.full((2, 2), 127, np.uint8)
LAST = BYTES.copy()
LAST[0, 1] = 255


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nvfp4(PACKED[:, :31], E4M3, ONE), r"packed is uint8\[2, 31\]: .* a multiple of 16"),
        (lambda: nvfp4(PACKED.view(np.int8), E4M3, ONE), r"packed is int8\[2, 32\]: it must be uint8"),
        (lambda: nvfp4(PACKED, E4M3[:, :2], ONE), r"scale is float8_e4m3fn\[2, 2\]: it must be .*2, 4"),
        (lambda: nvfp4(PACKED, E4M3.view(np.uint8), ONE), "scale is uint8.* must be float8_e4m3fn"),
        (lambda: nvfp4(PACKED, NAN, ONE), r"scale\[1, 2\] is NaN: it must be a number"),
        (lambda: nvfp4(PACKED, E4M3, np.ones(2, np.float32)), r"global_scale is float32\[2\]"),
        (lambda: nvfp4(PACKED, E4M3, ONE * 0), "global_scale=0.0: it must be a positive number"),
        (lambda: fp4.mxfp4(PACKED, BYTES[:, :1]), r"scale is uint8\[2, 1\]: it must be uint8\[2, 2\]"),
        (lambda: fp4.mxfp4(PACKED, LAST), r"scale\[0, 1\]=255, which means NaN"),
    ],
)
def test_malformed_tensors_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
