"""NVFP4 and MXFP4: equal to compressed-tensors' decompression and to the bfloat16 tensors, or refused."""

import base64
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
from jpaged.loading.packed_checkpoint import PackedCheckpoint
from jpaged.loading.quantized import fp4
from pallas_kernels import QuantizedWeight
from tests.golden.checkpoints import BY_NAME, GOLDEN, write_checkpoint, write_safetensors

CASES = json.loads((GOLDEN / "quantized" / "fp4.json").read_text())["cases"]


def stored(case: dict[str, Any], name: str, dtype: Any, columns: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(case[name]), dtype).reshape(-1, columns)


def numbers(weight: QuantizedWeight) -> np.ndarray:
    return np.asarray(jax.tree.map(jnp.asarray, weight).dequantize())


def shapes(weight: QuantizedWeight) -> QuantizedWeight:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), weight)


FORMATS = {"nvfp4": ("nvfp4-pack-quantized", 16), "mxfp4": ("mxfp4-pack-quantized", 32)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}, {case['name']}")
def test_the_bits_of_compressed_tensors(case: dict[str, Any], tmp_path: Path) -> None:
    form, group = FORMATS[case["kind"]]
    dtype = ml_dtypes.float8_e4m3fn if case["kind"] == "nvfp4" else np.uint8
    tensors = {
        "x.weight_packed": stored(case, "weight_packed", np.uint8, case["in"] // 2),
        "x.weight_scale": stored(case, "weight_scale", dtype, case["in"] // group),
    }  # fmt: skip
    if case["kind"] == "nvfp4":
        tensors["x.weight_global_scale"] = stored(case, "weight_global_scale", np.float32, 1)[0]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    weights = {"num_bits": 4, "type": "float", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    with Checkpoint(tmp_path) as checkpoint:
        packed = PackedCheckpoint(checkpoint, {"quantization_config": config})
        weight = packed.quantized("x.weight")
        assert shapes(weight) == packed.quantized_shape("x.weight")
        dense = packed.array("x.weight")
    wanted = stored(case, "weight", ml_dtypes.bfloat16, case["in"])
    assert (weight.kind, weight.layout, weight.shape) == ("fp4", "plain", (case["out"], case["in"]))
    found = numbers(weight)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, wanted)  # 0 and -0 are equal, and so are two NaNs
    np.testing.assert_array_equal(dense.astype(ml_dtypes.bfloat16), wanted)
    assert len(np.unique(wanted.astype(np.float32))) > 15


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


PACKED = np.zeros((2, 32), np.uint8)
BYTES = np.full((2, 2), 127, np.uint8)
LAST = BYTES.copy()
LAST[0, 1] = 255


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp4.mxfp4(PACKED[:, :31], BYTES), r"packed is uint8\[2, 31\]: .* a multiple of 32"),
        (lambda: fp4.mxfp4(PACKED.view(np.int8), BYTES), r"packed is int8\[2, 32\]: it must be uint8"),
        (lambda: fp4.mxfp4(PACKED, BYTES[:, :1]), r"scale is uint8\[2, 1\]: it must be uint8\[2, 2\]"),
        (lambda: fp4.mxfp4(PACKED, LAST), r"scale\[0, 1\]=255, which means NaN"),
    ],
)
def test_malformed_tensors_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
