"""Packed checkpoints dequantise to the bits of the formats' own libraries, and damaged ones are refused by name.

The files in tests/golden/quantized come from the libraries' packers: tests/golden/record_quantized.py.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.checkpoint import Checkpoint, TensorSource
from jpaged.loading.packed_checkpoint import PackedCheckpoint, described_weight, format_of
from jpaged.loading.quantized.config import Matcher, with_quantization
from jpaged.loading.quantized.packing import unpack_rows
from jpaged.loading.safetensors_file import DTYPES
from jpaged.loading.source import open_source
from pallas_kernels.quantized_dot.weight import ARRAYS, PLAIN_DTYPES, QuantizedWeight
from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors

FILES = Path(__file__).parents[1] / "golden/quantized"
CASES: dict[str, dict[str, Any]] = json.loads((FILES / "cases.json").read_text())
UP = "model.layers.0.mlp.up_proj."


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's file."""
    with Checkpoint(path) as checkpoint:
        return {name: checkpoint.array(name).copy() for name in checkpoint.names}


def write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write model.safetensors."""
    write_safetensors(folder / "model.safetensors", tensors)


def folder_of(case: str, folder: Path) -> Path:
    """A folder with the recorded file of a case."""
    (folder / "model.safetensors").write_bytes((FILES / f"{case}.safetensors").read_bytes())
    return folder


def owned(weight: QuantizedWeight | None) -> QuantizedWeight | None:
    """The weight, with copies of arrays that may be views of the mapped file."""
    return None if weight is None else jax.tree.map(np.array, weight)


def config_of(case: str) -> dict[str, Any]:
    """config.json's values."""
    return {"quantization_config": copy.deepcopy(CASES[case]["quantization_config"])}


@pytest.mark.parametrize("case", CASES)
def test_a_packed_matrix_has_the_library_s_bits(case: str, tmp_path: Path) -> None:
    with Checkpoint(folder_of(case, tmp_path)) as checkpoint:
        packed = PackedCheckpoint(checkpoint, config_of(case))
        assert isinstance(packed, TensorSource)
        assert set(packed.packed) == {f"{module}.weight" for module in CASES[case]["expected"]}
        for module, expected in CASES[case]["expected"].items():
            name = f"{module}.weight"
            dtype = np.dtype(getattr(ml_dtypes, expected["dtype"], None) or expected["dtype"])
            values = packed.array(name)
            assert values.dtype == np.float32
            assert list(values.shape) == expected["shape"] == list(packed.entry(name).shape)
            if "fp4" in case:
                values += np.float32(0)  # the libraries differ in the sign of zeros
            assert hashlib.sha256(values.astype(dtype).tobytes()).hexdigest() == expected["sha256"], module
            packed.release(name)


# Every kind, with and without zeros, with and without an order of inputs, and both directions of a common factor
KINDS = [
    "gptq-3-v2-act", "gptq-4", "gptq-8", "ct-w8-asymmetric", "ct-w8", "fp8-block", "ct-w3-asymmetric",
    "ct-w6-asymmetric", "ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4",
]  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_the_device_dequantises_to_the_same_bits(case: str, tmp_path: Path) -> None:
    with Checkpoint(folder_of(case, tmp_path)) as checkpoint:
        packed = PackedCheckpoint(checkpoint, config_of(case))
        weight = owned(packed.quantized(UP + "weight"))
        assert weight.dtype == ml_dtypes.bfloat16
        dense = packed.array(UP + "weight")
    halves = dataclasses.replace(weight, dtype=np.dtype(np.float16))
    values = np.asarray(jax.jit(QuantizedWeight.dequantize)(halves))
    if weight.order is not None:
        values = values[:, np.argsort(weight.order)]
    np.testing.assert_array_equal(values, dense.astype(np.float16))


@pytest.mark.parametrize("case", CASES)
def test_shapes_from_headers_equal_the_shapes_of_the_data(case: str, tmp_path: Path) -> None:
    with Checkpoint(folder_of(case, tmp_path)) as checkpoint:
        packed = PackedCheckpoint(checkpoint, config_of(case))
        for name in packed.names:
            weight, described = owned(packed.quantized(name)), packed.quantized_shape(name)
            assert (weight is None) == (described is None) == (name not in packed.packed)
            if weight is None:
                continue
            for field in ARRAYS:
                a, b = getattr(weight, field), getattr(described, field)
                assert (a is None) == (b is None), field
                if a is not None:
                    assert isinstance(a, np.ndarray)
                    assert isinstance(b, jax.ShapeDtypeStruct)
                    assert (a.shape, a.dtype) == (b.shape, b.dtype), field
            assert weight.codes.dtype == PLAIN_DTYPES[weight.kind]
            assert weight.codes.flags.c_contiguous
            assert dataclasses.replace(weight, **dict.fromkeys(ARRAYS)) == dataclasses.replace(
                described, **dict.fromkeys(ARRAYS)
            )


@pytest.mark.parametrize("case", CASES)
def test_the_config_alone_describes_a_matrix_as_its_headers_do(case: str, tmp_path: Path) -> None:
    with Checkpoint(folder_of(case, tmp_path)) as checkpoint:
        packed = PackedCheckpoint(checkpoint, config_of(case))
        form = format_of(config_of(case))
        for name in packed.packed:
            module, weight = name.removesuffix(".weight"), owned(packed.quantized(name))
            header = form.declared(module, weight.shape)
            stored = next(name for name, dtype in DTYPES.items() if dtype == weight.scales.dtype)
            header = dataclasses.replace(header, scales=stored)  # only the file has its dtype
            assert form.excluded(module) is None
            described = described_weight(header, has_order=form.reorders(module))
            assert described == jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weight)


def test_parts_are_hidden_and_other_tensors_stay(tmp_path: Path) -> None:
    with Checkpoint(folder_of("ct-mixed", tmp_path)) as checkpoint:
        packed = PackedCheckpoint(checkpoint, config_of("ct-mixed"))
        layer, attention = "model.layers.0.mlp.", "model.layers.0.self_attn."
        assert sorted(packed.names) == [
            "lm_head.weight", layer + "down_proj.weight", layer + "gate_proj.weight", layer + "up_proj.weight",
            attention + "k_scale", attention + "v_scale",
        ]  # fmt: skip
        described = {name: packed.quantized_shape(name) for name in packed.packed}
        kinds = {name: (weight.kind, weight.activations) for name, weight in described.items()}
        assert kinds == {
            layer + "up_proj.weight": ("int4", "float"), layer + "down_proj.weight": ("fp8", "float"),
            layer + "gate_proj.weight": ("int8", "int8"),
        }  # fmt: skip
        assert layer + "up_proj.weight_packed" not in packed
        assert packed.label(layer + "up_proj.weight") == layer + "up_proj.weight_packed"
        assert packed.quantized("lm_head.weight") is None
        assert packed.array("lm_head.weight").dtype == ml_dtypes.bfloat16
        assert packed.kv_scheme.kind == "fp8"
        scales = {name: float(packed.array(attention + name)[0]) for name in ("k_scale", "v_scale")}
        assert scales == pytest.approx({"k_scale": 0.03, "v_scale": 0.05}, rel=0.01)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 100])
def test_a_row_of_codes_is_a_stream_of_bits(bits: int, count: int) -> None:
    codes = np.random.default_rng(bits * count).integers(0, 2**bits, (3, count), np.uint8)
    stream = np.unpackbits(codes[:, :, None], axis=2, bitorder="little", count=bits).reshape(3, -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words = np.packbits(stream, axis=1, bitorder="little").view(np.int32)
    np.testing.assert_array_equal(unpack_rows(words, bits, count), codes)


def test_a_stored_zero_of_fifteen_is_sixteen_in_gptq_v1(tmp_path: Path) -> None:
    folder = folder_of("gptq-4-act", tmp_path)
    tensors = tensors_of(folder)
    tensors[UP + "qzeros"][0, 0] = -1
    write(folder, tensors)
    with Checkpoint(folder) as checkpoint:
        weight = PackedCheckpoint(checkpoint, config_of("gptq-4-act")).quantized(UP + "weight")
        assert weight.zeros[:8, 0].tolist() == [16] * 8


def test_inputs_in_order_need_no_g_idx(tmp_path: Path) -> None:
    folder = folder_of("gptq-4", tmp_path)
    tensors = tensors_of(folder)
    with Checkpoint(folder) as checkpoint:
        before = PackedCheckpoint(checkpoint, config_of("gptq-4")).quantized(UP + "weight")
    del tensors[UP + "g_idx"]
    write(folder, tensors)
    with Checkpoint(folder) as checkpoint:
        after = PackedCheckpoint(checkpoint, config_of("gptq-4")).quantized(UP + "weight")
    assert before.order is after.order is None
    np.testing.assert_array_equal(before.codes, after.codes)


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; must be awq, gptq"),
    ("awq", {"quant_method": None}, "quant_method is None"),
    ("awq", {"version": "gemv"}, "version is 'gemv'; must be gemm: convert it"),
    ("awq", {"bits": 3}, "bits is 3; must be 4: use another"),
    ("awq", {"zero_point": False}, "zero_point is False"),
    ("awq", {"group_size": 0}, "group_size is 0"),
    ("awq", {"group_size": 40}, "group_size is 40; must divide the"),
    ("awq", {"group_size": 16}, "qzeros is I32[3, 8], but must be I32 of shape [6, 8]"),
    ("awq", {"modules_to_not_convert": ["gate_proj"]}, "gate_proj.qweight belongs to a packed matrix"),
    ("awq", {"modules_to_not_convert": "gate"}, "must be a list of strings"),
    ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; must be gptq or gptq_v2: save it"),
    ("gptq-4", {"bits": 5}, "bits is 5; must be 2 or 3 or 4 or 8"),
    ("gptq-4", {"bits": True}, "bits is True"),
    ("gptq-4", {"bits": 8}, "qzeros is I32[3, 4], but must be I32 of shape [2, 8]"),
    ("gptq-4", {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    ("gptq-4", {"dynamic": {"-:.*up_proj": {}}}, "(dynamic has '-:.*up_proj')"),
    ("gptq-4", {"dynamic": {"-:(": {}}}, "is not a regular expression"),
    ("gptq-4", {"dynamic": {".*": {"bits": 7}}}, "dynamic..*.bits is 7"),
    ("gptq-dynamic", {"lm_head": False}, "(lm_head is false)"),
    ("ct-w4", {"format": "nonsense"}, "format is 'nonsense'; must be pack-quantized"),
    ("ct-w4", {"ignore": ["re:.*up"]}, "(ignore has 're:.*up')"),
    ("ct-w4", {"config_groups": {}}, "(no target of config_groups is this module)"),
    ("ct-w4", {"ignore": ["re:("]}, "ignore is '('; is not a regular expression"),
    ("ct-w4", {"ignore": ["re:a{99999999999999999999}"]}, "is not a regular expression"),
    ("ct-w4", {"ignore": ["re:" + 9999 * "(" + 9999 * ")"]}, "is not a regular expression"),
    ("ct-w4", {"config_groups": {"W4A16": "Linear"}}, "config_groups.W4A16 is 'Linear'; must be an object"),
    ("ct-w4", {"config_groups": {"W9A16": ["Linear"]}}, "W9A16 is ['Linear']; must be an object, or its name one of"),
    ("ct-w4", {"config_groups": {"W8A4": ["Linear"]}}, "W8A4 is ['Linear']; must be an object, or its name one of"),
    ("ct-w4", {"config_groups": {"W4A4": ["Linear"]}}, "W4A4.input_activations.num_bits is 4; must be 8"),
    ("ct-w4", {"config_groups": {"MXFP8": ["Linear"]}}, "MXFP8 is ['Linear']; must be an object, or its name one of"),
    ("ct-w4", {"config_groups": {"UNQUANTIZED": ["Linear"]}}, "(no target of config_groups is this module)"),
    ("ct-w4", {"format": "mxfp8-quantized"}, "format is 'mxfp8-quantized'; must be pack-quantized or"),
    ("ct-w4", {"config_groups": []}, "config_groups is []; must be an object"),
    ("ct-w4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is"),
    ("ct-w4", {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme.num_bits is 4; must be 8: delete kv_cache_scheme"),
    ("fp8-block", {"activation_scheme": "magic"}, "activation_scheme is 'magic'; must be dynamic or static"),
    ("fp8-block", {"fmt": "e5m2"}, "fmt is 'e5m2'"),
    ("fp8-block", {"weight_block_size": [128]}, "weight_block_size is [128]"),
    ("fp8-block", {"weight_block_size": [64, 128]}, "weight_scale_inv is F32[1, 2], but must be"),
    ("fp8-block", {"ignored_layers": ["mlp"], "modules_to_not_convert": None}, "has 'mlp'"),
    ("modelopt-fp8", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "quant_algo is 'W4A8_AWQ'; must be fp8"),
    ("modelopt-nvfp4", {"quantization": {"quant_algo": "NVFP4_AWQ"}}, "quant_algo is 'NVFP4_AWQ'; must be fp8 or"),
    ("modelopt-nvfp4", {"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "group_size is 32; must be 16"),
    ("modelopt-nvfp4", {"quantization": {"quant_algo": "FP8"}}, "weight is U8[32, 48], but must be F8_E4M3 with two"),
    (
        "modelopt-nvfp4", {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.*.mlp.up*"]}},
        "up_proj.weight_scale belongs to a packed matrix, but",
    ),
    ("modelopt-fp8", {"quantization": {"quant_algo": "MIXED_PRECISION"}}, "quantized_layers is None; must have the"),
    (
        "modelopt-fp8", {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}}},
        "quantized_layers.a.quant_algo is None; must be fp8 or",
    ),
    (
        "modelopt-fp8",
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}},
        "is not quantised according to quantization_config (quantized_layers does not name it)",
    ),
    ("modelopt-fp8", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["*up_proj"]}}, "has '*up_proj'"),
]
GROUPS: list[tuple[str, dict[str, Any], str]] = [
    ("ct-w4", {"num_bits": 9}, "config_groups.group_0.weights.num_bits is 9; must be 1 or 2 or 3 or 4 or 5"),
    ("ct-w4", {"num_bits": 3}, "to fit weight_packed I32[out, 12], whose codes of 3 bits have no padding between them"),
    ("ct-w4", {"type": "float"}, "config_groups.group_0.format is 'pack-quantized'; does not fit weights of the type"),
    ("ct-w4", {"strategy": "tensor_group"}, "strategy is 'tensor_group'"),
    ("ct-w4", {"group_size": 16}, "weight_scale is BF16[32, 3], but must be"),
    ("ct-w4", {"symmetric": False}, "has no weight_zero_point, but its config group says symmetric=false"),
    ("ct-nvfp4", {"group_size": 32}, "config_groups.group_0.weights.group_size is 32; must be 16"),
    ("ct-nvfp4", {"type": "int"}, "group_0.format is 'nvfp4-pack-quantized'; does not fit weights of the type int"),
    ("ct-nvfp4", {"num_bits": 8}, "config_groups.group_0.weights.num_bits is 8; must be 4"),
    ("ct-nvfp4", {"strategy": "channel"}, "strategy is 'channel'; must be tensor_group or group"),
    ("ct-mxfp4", {"group_size": 16}, "config_groups.group_0.weights.group_size is 16; must be 32"),
    ("ct-mxfp4", {"group_size": None}, "config_groups.group_0.weights.group_size is None; must be 32"),
    ("ct-fp8", {"symmetric": False}, "symmetric is False; must be true with the type float"),
    ("ct-fp8-block", {"block_structure": [0, 128]}, "block_structure is [0, 128]"),
]


@pytest.mark.parametrize(("case", "changes", "says"), CONFIGS)
def test_a_config_that_jpaged_has_not_is_refused_by_name(
    case: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = config_of(case)
    config["quantization_config"] |= changes
    refused(folder_of(case, tmp_path), config, says)


@pytest.mark.parametrize(("case", "changes", "says"), GROUPS)
def test_a_group_of_the_config_that_jpaged_has_not_is_refused_by_name(
    case: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = config_of(case)
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    refused(folder_of(case, tmp_path), config, says)


@pytest.mark.parametrize("inputs", [{"num_bits": 4, "type": "int"}, {"num_bits": 4, "type": "float"}])
def test_activations_of_four_bits_are_refused(inputs: dict[str, Any], tmp_path: Path) -> None:
    config = config_of("ct-w8a8")
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    refused(folder_of("ct-w8a8", tmp_path), config, "group_0.input_activations.num_bits is 4; must be 8")


HEADERS: list[tuple[str, str, Callable[[np.ndarray], np.ndarray] | None, str]] = [
    ("gptq-4", "qzeros", None, "has no qzeros, but a GPTQ matrix has qweight, qzeros and scales"),
    ("gptq-4", "qweight", None, "has no qweight"),
    ("gptq-4", "qweight", lambda a: a.astype(np.int64), "qweight is I64[12, 32], but must be I32 with two axes"),
    ("gptq-4", "scales", lambda a: a[:, :-1], "scales is F16[3, 31], but must be F16 or BF16 or F32 of shape [3, 32]"),
    ("gptq-4", "g_idx", lambda a: a[:-1], "g_idx is I32[95], but must be I32 or I64 of shape [96]"),
    ("gptq-4", "g_idx", lambda a: a.astype(np.float32), "g_idx is F32[96], but must be"),
    ("awq", "scales", lambda a: a.view(np.int16), "scales is I16"),
    ("ct-w4", "weight_shape", None, "has no weight_shape"),
    ("ct-w4", "weight_scale", lambda a: a[:, :2], "weight_scale is BF16[32, 2], but must be"),
    ("ct-w4-asymmetric", "weight_zero_point", lambda a: a.T, "weight_zero_point is I32[3, 5], but must be I32[5, 3]"),
    ("ct-w8a8", "weight_scale", lambda a: a[:-1], "weight_scale is BF16[31, 1], but must be"),
    ("fp8-block", "weight_scale_inv", None, "has no weight_scale_inv"),
    ("fp8-block", "weight", lambda a: a.astype(ml_dtypes.float8_e5m2), "weight is F8_E5M2[128, 256], but must be F8"),
    ("ct-nvfp4", "weight_global_scale", None, "has no weight_global_scale, but a matrix in nvfp4-pack-quantized has"),
    ("ct-nvfp4", "weight_scale", None, "has no weight_scale, but"),
    ("ct-nvfp4", "weight_packed", None, "has no weight_packed, but"),
    ("ct-nvfp4", "weight_global_scale", lambda a: np.ones(32, np.float32), "weight_global_scale is F32[32], but must"),
    ("ct-nvfp4", "weight_global_scale", lambda a: a.astype(np.float16), "must be F32 of shape [1] or [] (one number)"),
    ("ct-nvfp4", "weight_scale", lambda a: a[:, :3], "weight_scale is F8_E4M3[32, 3], but must be F8_E4M3 of shape"),
    ("ct-nvfp4", "weight_scale", lambda a: a.astype(np.float32), "weight_scale is F32[32, 6], but must be F8_E4M3"),
    ("ct-nvfp4", "weight_packed", lambda a: a[:, :-1], "U8[32, 47], but must be U8[out, in / 2] with a multiple of 16"),
    ("ct-nvfp4", "weight_packed", lambda a: a.view(np.int32), "weight_packed is I32[32, 12], but must be U8 with two"),
    ("ct-mxfp4", "weight_scale", lambda a: a[:, :2], "weight_scale is U8[32, 2], but must be U8 or F8_E8M0 of shape"),
    ("ct-mxfp4", "weight_packed", lambda a: a[None], "weight_packed is U8[1, 32, 48], but must be U8 with two axes"),
    ("modelopt-nvfp4", "weight_scale_2", None, "has no weight_scale_2, but a matrix of ModelOpt's NVFP4 has"),
    ("modelopt-nvfp4", "weight_scale_2", lambda a: np.ones(2, np.float32), "weight_scale_2 is F32[2], but must be F32"),
    ("modelopt-nvfp4", "weight", lambda a: a.view(np.int8), "weight is I8[32, 48], but must be U8 with two axes"),
    ("modelopt-fp8", "weight_scale", lambda a: np.ones(2, np.float32), "weight_scale is F32[2], but must be"),
    ("modelopt-fp8", "weight_scale", lambda a: np.ones((32, 1), np.float32), "F32[32, 1], but must be F16 or BF16"),
    ("modelopt-channel", "weight_scale", lambda a: a[0], "weight_scale is F32[1], but must be F16 or BF16 or"),
    ("ct-fp8-channel", "weight_scale", lambda a: a[0], "is BF16[1], but must be F16 or BF16 or F32 of shape [32] or ["),
    ("ct-w8a8", "weight_scale", lambda a: a[0, 0], "weight_scale is BF16[1], but must be F16 or BF16 or F32 of shape"),
    ("gptq-4-act", "g_idx", None, "has no g_idx, but desc_act is true"),
    ("gptq-4-act", "g_idx", lambda a: a[:0], "g_idx is I32[0], but must be I32 or I64 of shape [96]"),
]


@pytest.mark.parametrize(("case", "part", "change", "says"), HEADERS)
def test_a_part_that_is_missing_or_has_another_shape_is_refused_before_data_is_read(
    case: str, part: str, change: Callable[[np.ndarray], np.ndarray] | None, says: str, tmp_path: Path
) -> None:
    folder = damaged(case, part, change, tmp_path)
    refused(folder, config_of(case), says)


def test_an_order_of_inputs_that_the_config_announces_must_be_there(tmp_path: Path) -> None:
    config = config_of("ct-w4")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    refused(folder_of("ct-w4", tmp_path), config, "has no weight_g_idx, but actorder is group")


# Parts of the same method that the config does not call for. Reading the matrix without them would be wrong
MORE: list[tuple[str, str, np.ndarray]] = [
    ("fp8-block", "weight_scale", np.ones((1, 2), np.float32)),
    ("modelopt-fp8", "weight_scale_2", np.ones((), np.float32)),
    ("ct-w4", "weight_global_scale", np.ones(1, np.float32)),
    ("ct-mxfp4", "weight_global_scale", np.ones(1, np.float32)),
    ("ct-mxfp4", "weight_zero_point", np.ones(5, np.int32)),
    ("ct-nvfp4", "weight_g_idx", np.arange(96, dtype=np.int32)),
    ("ct-fp8", "weight_packed", np.ones((32, 12), np.int32)),
    ("ct-fp8", "weight_shape", np.array([3, 5])),
]


@pytest.mark.parametrize(("case", "part", "array"), MORE)
def test_a_part_that_nothing_would_read_is_refused(case: str, part: str, array: np.ndarray, tmp_path: Path) -> None:
    folder = folder_of(case, tmp_path)
    write(folder, tensors_of(folder) | {UP + part: array})
    refused(folder, config_of(case), f"{UP}{part} is one part more than quantization_config calls for in {UP[:-1]}")


def zeroed(array: np.ndarray) -> np.ndarray:
    array.reshape(-1)[0] = 0
    return array


def filled(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def fill(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[-1:] = value
        return array

    return fill


DATA: list[tuple[str, str, Callable[[np.ndarray], np.ndarray], str]] = [
    ("awq", "scales", filled(np.nan), "scales has a scale of nan (scales must be finite and not 0)"),
    ("gptq-4", "scales", filled(np.inf), "scales has a scale of inf"),
    ("ct-w8a8", "weight_scale", zeroed, "weight_scale has a scale of 0"),
    ("fp8-block", "weight_scale_inv", filled(np.nan), "weight_scale_inv has a scale of nan"),
    ("fp8-block", "weight", filled(np.nan), "weight has a code that means NaN"),
    ("ct-nvfp4", "weight_scale", filled(np.nan), "weight_scale has a scale of nan (scales must be numbers, and not"),
    ("ct-nvfp4", "weight_scale", filled(-0.5), "weight_scale has a scale of -0.5"),
    ("ct-nvfp4", "weight_global_scale", filled(0), "weight_global_scale has the number 0 (it must be positive and"),
    ("ct-nvfp4", "weight_global_scale", filled(np.nan), "weight_global_scale has the number nan"),
    ("ct-nvfp4", "weight_global_scale", filled(-3), "weight_global_scale has the number -3"),
    ("ct-nvfp4", "weight_global_scale", filled(1e-38), "has the number 1e-38, which makes weights infinite"),
    ("modelopt-nvfp4", "weight_scale_2", filled(np.inf), "weight_scale_2 has the number inf"),
    ("modelopt-nvfp4", "weight_scale_2", filled(1e36), "has the number 1e+36, which makes weights infinite"),
    ("ct-mxfp4", "weight_scale", filled(255), "weight_scale has a byte 255, which means NaN"),
    ("modelopt-fp8", "weight_scale", filled(np.nan), "weight_scale has a scale of nan"),
    ("gptq-4", "g_idx", filled(3), "g_idx has group 3 at input 95, but there are 3 groups"),
    ("gptq-4", "g_idx", filled(-1), "g_idx has group -1 at input 95"),
    ("gptq-4-act", "g_idx", np.zeros_like, "g_idx has 96 inputs in group 0 (groups must have 32)"),
    ("gptq-4", "qzeros", filled(0), "qzeros has a zero of 1, but quantization_config says sym=true, where"),
    ("fp8-block", "weight_scale_inv", filled(3e38), "weight_scale_inv has a scale of 3e+38, which makes weights inf"),
    ("ct-w4", "weight_scale", filled(-3e38), "weight_scale has a scale of -3.00406e+38, which makes weights"),
    ("fp8-block", "weight_scale_inv", filled(-1), "weight_scale_inv has a scale of -1 (scales of fp8 must be above 0)"),
    ("ct-fp8", "weight_scale", filled(-1), "weight_scale has a scale of -1 (scales of fp8 must be above 0)"),
    ("modelopt-fp8", "weight_scale", filled(-1), "weight_scale has a scale of -1 (scales of fp8 must be above 0)"),
    ("ct-w4", "weight_shape", filled(7), "weight_shape has the shape [32, 7], but weight_packed has [32, 96]"),
]


@pytest.mark.parametrize(("case", "part", "change", "says"), DATA)
def test_wrong_numbers_are_refused_when_they_are_read(
    case: str, part: str, change: Callable[[np.ndarray], np.ndarray], says: str, tmp_path: Path
) -> None:
    folder = damaged(case, part, change, tmp_path)
    with Checkpoint(folder) as checkpoint:
        packed = PackedCheckpoint(checkpoint, config_of(case))
        found = []
        for name in packed.packed:
            try:
                packed.quantized(name)
            except ModelLoadError as error:
                found.append(str(error))
        assert len(found) == 1
        assert "model.safetensors: model.layers.0.mlp." in found[0]
        assert says in found[0]


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_group_of_nvfp4_may_have_the_scale_zero(value: float, tmp_path: Path) -> None:
    folder = damaged("ct-nvfp4", "weight_scale", filled(value), tmp_path)
    with Checkpoint(folder) as checkpoint:
        values = PackedCheckpoint(checkpoint, config_of("ct-nvfp4")).array(UP + "weight")
    assert not values[-1, -16:].any()
    assert values[-1, :-16].any()


def test_a_pattern_that_takes_hours_is_refused() -> None:
    matches = Matcher()
    assert matches(r".*\.mlp\.(gate|up)_proj$", UP[:-1], "ignore")
    assert not matches(r".*self_attn\.(?!kv_b).*", UP[:-1], "ignore")
    matches = Matcher(seconds=0.05)
    with pytest.raises(ModelLoadError, match=r"ignore is '\(a\|aa\)\+\$'; takes too long to match 'aaaa.*: use"):
        matches("(a|aa)+$", "a" * 60 + "b", "ignore")


def test_all_patterns_share_the_time_limit() -> None:
    matches, begun = Matcher(seconds=0.05), itertools.count()

    def match_for_ever() -> None:
        while next(begun) < 10_000:
            matches(".*a.*a.*a[b]", "a" * 100, "ignore")  # takes about a millisecond

    with pytest.raises(ModelLoadError, match="takes too long"):
        match_for_ever()
    assert next(begun) > 2


@pytest.mark.parametrize(("part", "dtype", "shown"), [("gate_up_proj", np.uint8, "U8"), ("down_proj", np.int8, "I8")])
def test_experts_in_one_tensor_are_refused_by_name(part: str, dtype: Any, shown: str, tmp_path: Path) -> None:
    folder, name = folder_of("modelopt-nvfp4", tmp_path), f"model.layers.0.mlp.experts.{part}"
    more = {name: np.ones((4, 8, 8), dtype), f"{name}_weight_scale": np.ones((4, 8, 1), np.float32)}
    write(folder, tensors_of(folder) | more)
    refused(folder, config_of("modelopt-nvfp4"), f"{name} is {shown}[4, 8, 8]: quant_method 'modelopt' with all")


def test_codes_of_four_bits_in_bytes_must_be_in_range(tmp_path: Path) -> None:
    config = config_of("ct-w8a8")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    with Checkpoint(folder_of("ct-w8a8", tmp_path)) as checkpoint:
        packed = PackedCheckpoint(checkpoint, config)
        with pytest.raises(ModelLoadError, match=r"up_proj.weight has a code of .* \(num_bits 4 goes from -8 to 7\)"):
            packed.array(UP + "weight")


def test_a_config_without_packed_tensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"model.norm.weight": np.ones(4, np.float32)})
    refused(tmp_path, config_of("awq"), "no tensor is quantised that way: delete quantization_config")


def test_a_matrix_that_is_packed_and_dense_is_refused(tmp_path: Path) -> None:
    folder = folder_of("gptq-4", tmp_path)
    write(folder, tensors_of(folder) | {UP + "weight": np.ones((32, 96), np.float32)})
    refused(folder, config_of("gptq-4"), f"has both {UP}weight and {UP}qweight")


@pytest.mark.parametrize(
    ("name", "values", "case"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}, "gptq-4"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, "awq"),
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "modelopt-fp8"),
    ],
)
def test_the_config_may_be_in_a_file_of_its_own(name: str, values: dict[str, Any], case: str, tmp_path: Path) -> None:
    folder = folder_of(case, tmp_path)
    (folder / name).write_text(json.dumps(values))
    with Checkpoint(folder) as checkpoint:
        packed = PackedCheckpoint(checkpoint, with_quantization(folder, {}))
        assert len(list(packed.packed)) == len(CASES[case]["expected"])


def test_the_source_is_chosen_by_the_method(tmp_path: Path) -> None:
    folder = folder_of("awq", tmp_path)
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values | config_of("awq")))
    with open_source(folder) as (_, source):
        assert isinstance(source, PackedCheckpoint)
    (folder / "model.safetensors").unlink()
    changes = {"quantization_config": {"quant_method": "awq", "version": "gemv"}}
    with pytest.raises(ModelLoadError, match="version is 'gemv'"), open_source(folder, changes):
        pass


# (model, matrices that stay dense)
MODELS = [
    ("llama", ()), ("qwen3.5", ("in_proj_a", "in_proj_b")), ("qwen3-next-dense-layer", ("in_proj_ba",)), ("lfm2", ()),
    ("gemma4", ()), ("gemma4-moe", ()), ("gemma3n", ()),
]  # fmt: skip


@pytest.mark.parametrize(("model", "kept"), MODELS, ids=[name for name, _ in MODELS])
def test_a_packed_model_loads_as_the_dense_model_with_the_same_numbers(
    model: str, kept: tuple[str, ...], tmp_path: Path
) -> None:
    """Heads of recurrent layers, and layers without values, are as in a dense checkpoint. So are other projections."""
    write_checkpoint(BY_NAME[model], 0, tmp_path)
    tensors, dense = tensors_of(tmp_path), {}
    packed = re.compile(r".*(_proj|_projection|_input_gate|linear_left|linear_right)\.weight")
    for name in [n for n in tensors if packed.fullmatch(n) and n.split(".")[-2] not in kept]:
        codes = (tensors.pop(name) * 16).astype(ml_dtypes.float8_e4m3fn)
        scale = np.float32(1 / 16)
        tensors |= {name: codes, name + "_scale": scale.reshape(1), name.replace("weight", "input_scale"): scale}
        dense[name] = codes.astype(np.float32) * scale
    values = json.loads((tmp_path / "config.json").read_text())
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    for folder, changes, contents in (
        ("packed", {"quantization_config": config}, tensors),
        ("dense", {}, {n: a for n, a in tensors.items() if not n.endswith(("weight_scale", "input_scale"))} | dense),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(values | changes))
        write(tmp_path / folder, contents)
    trees = [
        load_model(EngineConfig(model=str(tmp_path / folder), dtype="float32")).params for folder in ("packed", "dense")
    ]
    jax.tree.map(np.testing.assert_array_equal, *trees)


def damaged(
    case: str, part: str, change: Callable[[np.ndarray], np.ndarray] | None, folder: Path
) -> Path:
    """A folder with a case's file whose first tensor of this part is changed, or removed."""
    folder_of(case, folder)
    tensors = tensors_of(folder)
    name = next(n for n in tensors if n.endswith(f".{part}"))
    if change is None:
        del tensors[name]
    else:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    write(folder, tensors)
    return folder


def refused(folder: Path, config: dict[str, Any], says: str) -> None:
    """Check that the folder is refused with this message, without reading data."""
    with Checkpoint(folder) as checkpoint:
        checkpoint.array = None  # type: ignore[assignment]
        with pytest.raises(ModelLoadError) as caught:
            PackedCheckpoint(checkpoint, config)
    assert says in str(caught.value)
