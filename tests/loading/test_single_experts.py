"""Checkpoints with a tensor for each expert, of families whose own checkpoints have one tensor for all experts.

Quantised releases are made so: Qwen3.5-35B-A3B-FP8, and the AWQ, GPTQ and NVFP4 versions of these models.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.drafters import load_drafter
from jpaged.loading.model_description import declared_weights, describe
from jpaged.loading.source import open_tensors
from jpaged.loading.weights import assemble, plan_weights
from jpaged.models.families import family_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.quantization import is_quantized
from jpaged.runtime.memory.weight_bytes import tree_bytes
from jpaged.speculation_config import SpeculationConfig
from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors
from tests.support.checkpoint_files import change_config, tensors_of
from tests.support.dense_leaves import dense
from tests.support.mtp_checkpoints import write_with_mtp

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
BLOCK = 16  # outputs and inputs that share a scale
TRANSPOSED = ("llama4",)  # their tensors of all experts are [experts, in, out]


def by_expert(tensors: dict[str, np.ndarray], transposed: bool = False) -> dict[str, np.ndarray]:
    """The tensors, with a matrix [out, in] for each expert."""
    found = {}
    for name, values in tensors.items():
        if not name.endswith((GATE_UP, DOWN)):
            found[name] = values
            continue
        head = name.rpartition(".")[0]
        for expert, matrix in enumerate(values.swapaxes(1, 2) if transposed else values):
            if name.endswith(DOWN):
                found[f"{head}.{expert}.down_proj.weight"] = matrix
            else:
                gate, up = np.split(matrix, 2)
                found |= {f"{head}.{expert}.gate_proj.weight": gate, f"{head}.{expert}.up_proj.weight": up}
    return found


def experts_of(folder: Path) -> dict[tuple[int | None, str], np.ndarray]:
    """The leaves of experts, on the host."""
    values = json.loads((folder / "config.json").read_text())
    family, config = family_of(values), CheckpointConfig(values)
    with open_tensors(folder, values) as checkpoint:
        plan = plan_weights(family, family.spec(config), family.constants(config), checkpoint)
        return {
            (each.leaf.layer, each.leaf.leaf): assemble(each, checkpoint, np.dtype(np.float32))
            for each in plan.leaves if each.leaf.leaf in ("expert_gate_up", "expert_down")
        }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3.5-moe", "gemma4-moe", "llama4", "mistral4"])
def test_single_experts_fill_the_same_leaves(name: str, tmp_path: Path) -> None:
    write_checkpoint(BY_NAME[name], 3, tmp_path)
    expected = experts_of(tmp_path)
    tensors = by_expert(tensors_of(tmp_path), name in TRANSPOSED)
    assert not any(tensor.endswith((GATE_UP, DOWN)) for tensor in tensors)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = experts_of(tmp_path)
    assert expected
    assert found.keys() == expected.keys()
    for leaf, values in expected.items():
        np.testing.assert_array_equal(found[leaf], values)


def in_fp8(tensors: dict[str, np.ndarray], kept: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Quantise all matrices, except those with a part of `kept` in their names. Also returns the numbers they have."""
    packed: dict[str, Any] = {}
    numbers = dict(tensors)
    for name, values in tensors.items():
        if values.ndim != 2 or any(part in name for part in kept):
            packed[name] = values
            continue
        grid = [-(-size // BLOCK) for size in values.shape]
        scales = np.zeros(grid, np.float32)
        numbers[name] = np.empty_like(values)
        codes = np.zeros(values.shape, ml_dtypes.float8_e4m3fn)
        for row in range(grid[0]):
            for column in range(grid[1]):
                at = np.s_[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
                scales[row, column] = np.abs(values[at]).max() / 448
                codes[at] = values[at] / scales[row, column]
                numbers[name][at] = codes[at].astype(np.float32) * scales[row, column]
        packed |= {name: codes, f"{name}_scale_inv": scales}
    return packed, numbers


@pytest.mark.slow
def test_a_quantised_release_of_qwen3_5(tmp_path: Path) -> None:
    """fp8 in blocks, inside the vision model, with an MTP layer: the experts stay in 8 bits, and have the numbers."""
    write_with_mtp("Qwen3.5 MoE", tmp_path / "text")
    tensors = by_expert(tensors_of(tmp_path / "text"))
    kept = (
        "embed_tokens", "lm_head", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b", "mtp.fc",
        "shared_expert.down_proj",
    )  # fmt: skip
    packed, numbers = in_fp8(tensors, kept)
    whole = tmp_path / "whole"
    whole.mkdir()
    values = json.loads((tmp_path / "text/config.json").read_text())
    excluded = [name.removesuffix(".weight") for name in packed if any(part in name for part in kept)]
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": values,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [renamed(name) for name in excluded] + ["model.visual.blocks.0.attn.qkv"],
        },
    }  # fmt: skip
    (whole / "config.json").write_text(json.dumps(config))
    write_safetensors(whole / "model.safetensors", {renamed(name): array for name, array in packed.items()})
    write_safetensors(tmp_path / "text/model.safetensors", numbers)

    def loaded(folder: Path, **more: str) -> Any:
        options = EngineConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True, **more)
        model = load_model(options)
        return options, model, load_drafter(SpeculationConfig(method="mtp"), model, options)

    options, found, drafter = loaded(whole, quantized_activations="fp8")  # without it, a CPU dequantises fp8
    _, expected, of_text = loaded(tmp_path / "text")
    for ours, plain in zip((found.params, drafter.params), (expected.params, of_text.params), strict=True):
        for layer, other in zip(ours["layers"], plain["layers"], strict=True):
            assert is_quantized(layer["expert_gate_up"])
            assert is_quantized(layer["expert_down"])
            for leaf, array in other.items():
                np.testing.assert_allclose(dense(layer)[leaf], array, rtol=1e-6, atol=1e-7, err_msg=leaf)
    assert tree_bytes(describe(options, "cpu").params) == tree_bytes(found.params)
    inside = {"text_config": values | {"quantization_config": config.pop("quantization_config")}}
    (whole / "config.json").write_text(json.dumps(config | inside))  # as in Kimi K2.5
    assert tree_bytes(describe(options, "cpu").params) == tree_bytes(found.params)
    (whole / "model.safetensors").unlink()
    assert tree_bytes(describe(options, "cpu").params) == tree_bytes(found.params)  # from the config alone
    assert declared_weights(options, whole)[2] == "fp8"


def with_fp8_experts(tensors: dict[str, np.ndarray], rows: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The tensors of all experts in fp8, with a scale for each expert (rows: 1), or for each output (0).

    rows: outputs of a block. Also returns the numbers of all tensors.
    """
    packed: dict[str, Any] = {}
    numbers = dict(tensors)
    for name, values in tensors.items():
        if not name.endswith((GATE_UP, DOWN)):
            packed[name] = values
            continue
        experts, outputs, inputs = values.shape
        size = {0: (1, inputs), 1: (outputs, inputs)}.get(rows, (rows, rows))
        blocks = values.reshape(experts, outputs // size[0], size[0], inputs // size[1], size[1])
        scales = np.abs(blocks).max((2, 4), keepdims=True) / 448
        codes = (blocks / scales).astype(ml_dtypes.float8_e4m3fn)
        numbers[name] = (codes.astype(np.float32) * scales).reshape(values.shape)
        packed |= {name: codes.reshape(values.shape), f"{name}_scale_inv": scales[:, :, 0, :, 0]}
        packed[f"{name}_activation_scale"] = np.ones((), np.float32)
    return packed, numbers


@pytest.mark.parametrize("rows", [0, 1, 16])
def test_fp8_tensors_of_all_experts(rows: int, tmp_path: Path) -> None:
    """Mistral Small 4's release: an fp8 tensor of all experts is read as a matrix for each expert."""
    write_checkpoint(BY_NAME["mistral4"], 3, tmp_path)
    packed, numbers = with_fp8_experts(tensors_of(tmp_path), rows)
    write_safetensors(tmp_path / "model.safetensors", numbers)
    expected = experts_of(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", packed)
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [16, 16] if rows > 1 else None}
    change_config(tmp_path, quantization_config=config)
    found = experts_of(tmp_path)
    assert found.keys() == expected.keys()
    for leaf, values in expected.items():
        np.testing.assert_allclose(found[leaf], values, rtol=1e-6)
    if rows > 1:
        change_config(tmp_path, quantization_config=config | {"weight_block_size": [48, 48]})
        with pytest.raises(ModelLoadError, match=r"gate_up_proj_scale_inv \[.*\] does not fit"):
            experts_of(tmp_path)


def renamed(name: str) -> str:
    """The name in the vision model."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@pytest.mark.slow
def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["qwen3.5-moe"], 3, tmp_path)
    tensors = by_expert(tensors_of(tmp_path))
    del tensors["model.layers.0.mlp.experts.4.up_proj.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.mlp\.experts\.4\.up_proj\.weight"):
        experts_of(tmp_path)
    change_config(tmp_path, num_experts=7)
