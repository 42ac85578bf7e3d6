"""Checkpoints of multimodal models: their text model is loaded, as if it was a checkpoint of its own."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.convert import convert
from jpaged.loading.live import config_values
from jpaged.loading.model_description import declared_weights
from jpaged.models.families import spec_of
from jpaged.models.families.wrappers import DEFAULTS
from jpaged.models.spec import param_shapes
from jpaged.quantizing.checkpoint import quantize_checkpoint
from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors
from tests.support.checkpoint_files import assert_same, tensors_of

# Text model -> (wrapper, model type of the text model in it)
CASES = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma3n": ("Gemma3nForConditionalGeneration", "gemma3n_text"),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4_text"),
    "gemma4-unified": ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
    "mistral": ("Mistral3ForConditionalGeneration", "mistral"),
    "llama4": ("Llama4ForConditionalGeneration", "llama4_text"),
    "ministral3": ("Mistral3ForConditionalGeneration", "ministral3"),
    "mistral4": ("Mistral3ForConditionalGeneration", "mistral4"),
    "deepseek-v3": ("KimiK25ForConditionalGeneration", "kimi_k2"),
    "qwen3.5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3.5-moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
}
NEWER = ("gemma3n", "gemma4", "gemma4-unified", "llama4", "ministral3", "mistral4", "qwen3.5", "qwen3.5-moe")
# The published text_config of google/gemma-3-4b-it, and that of mistralai/Mistral-Small-3.1-24B-Instruct-2503.
GEMMA = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
MISTRAL = {
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
    "sliding_window": None, "use_cache": True, "vocab_size": 131072,
}  # fmt: skip
# The sizes of Qwen/Qwen3.5-27B that differ from Transformers' defaults. Those of Qwen/Qwen3.5-35B-A3B are the defaults.
QWEN = {
    "attn_output_gate": True, "full_attention_interval": 4, "hidden_size": 5120, "intermediate_size": 17408,
    "linear_num_value_heads": 48, "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
    "num_attention_heads": 24, "num_hidden_layers": 64, "tie_word_embeddings": False,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip


def renamed(name: str, newer: bool) -> str:
    if newer:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    return f"language_model.{name}"


def wrap(name: str, folder: Path, newer: bool) -> tuple[Path, Path]:
    """Write a text model, and the same inside a wrapper. Returns both folders."""
    wrapper, kind = CASES[name]
    text, whole = folder / "text", folder / "whole"
    whole.mkdir()
    text.mkdir()
    write_checkpoint(BY_NAME[name], 3, text)
    tensors = {renamed(each, newer): values for each, values in tensors_of(text).items()}
    vision, projector = ("vision_tower", "model.multi_modal_projector") if newer else ("vision_tower", "mm_projector")
    tensors[f"{vision}.encoder.weight"] = np.ones((512, 1024), np.float32)
    tensors[f"{projector}.bias"] = np.ones(4, np.float32)
    write_safetensors(whole / "model.safetensors", tensors)
    values = json.loads((text / "config.json").read_text())
    inner = {key: value for key, value in values.items() if key not in ("architectures", "torch_dtype", "dtype")}
    config = {
        "architectures": [wrapper], "model_type": "whole", "text_config": inner | {"model_type": kind},
        "vision_config": {"hidden_size": 8}, "dtype": values.get("dtype", values.get("torch_dtype", "float32")),
        "tie_word_embeddings": True,
    }  # fmt: skip
    (whole / "config.json").write_text(json.dumps(config))
    return text, whole


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(EngineConfig(model=str(folder), dtype="float32", **options))


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in NEWER)) for name in CASES])
def test_the_text_model_is_loaded(name: str, newer: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The spec and all arrays are those of the text model's own checkpoint, which Transformers' answers are for."""
    text, whole = wrap(name, tmp_path, newer)
    expected = loaded(text)
    caplog.set_level(logging.INFO)
    found = loaded(whole)
    assert found.spec == expected.spec
    assert_same(found.params, expected.params)
    told = next(record.message for record in caplog.records if "the text model is loaded" in record.message)
    assert "vision_tower (2.0 MiB)" in told
    assert "projector" in told
    assert found.eos_token_ids == expected.eos_token_ids


def test_it_is_planned_converted_and_drawn_like_the_text_model(tmp_path: Path) -> None:
    text, whole = wrap("gemma3", tmp_path, False)
    expected = loaded(text)
    convert(str(whole), tmp_path / "converted")
    assert_same(loaded(tmp_path / "converted").params, expected.params)
    assert loaded(whole, load_format="dummy").spec == expected.spec
    config = EngineConfig(model=str(whole))
    assert declared_weights(config, whole)[0] == declared_weights(config, text)[0]
    assert spec_of(config_values(json.loads((whole / "config.json").read_text()))) == expected.spec
    with pytest.raises(ModelLoadError, match="inside Gemma3ForConditionalGeneration cannot be quantised yet"):
        quantize_checkpoint(str(whole), tmp_path / "quantised", scheme="w8a8", method="rtn")


@pytest.mark.parametrize(
    ("wrapper", "text", "parameters"),
    [
        ("Gemma3ForConditionalGeneration", GEMMA, 3_880_263_168),
        ("Mistral3ForConditionalGeneration", MISTRAL, 23_572_403_200),
        ("Qwen3_5ForConditionalGeneration", QWEN, 26_895_998_464),
        ("Qwen3_5MoeForConditionalGeneration", {"model_type": "qwen3_5_moe_text"}, 34_660_610_688),
    ],
)
def test_published_configs(wrapper: str, text: dict[str, Any], parameters: int) -> None:
    """The numbers of parameters are those of the published text models."""
    spec = spec_of({"architectures": [wrapper], "text_config": text})
    assert sum(leaf.size for leaf in jax.tree.leaves(param_shapes(spec, np.float32))) == parameters
    if text["model_type"].startswith("qwen"):
        assert (sum(spec.recurrent), spec.rope.partial) == (spec.num_layers * 3 // 4, 0.25)
    elif text is GEMMA:
        assert (spec.max_position, spec.rope.factor, spec.num_kv_heads) == (131_072, 8.0, 4)
    else:
        assert spec.sliding_window == ()


def test_defaults_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for kind, defaults in DEFAULTS.items():
        theirs = CONFIG_MAPPING[kind]().to_dict()
        assert {key: theirs[key] for key in defaults} == defaults


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_config": None}, "text_config=None must be the config of Mistral3ForConditionalGeneration's text model"),
        (
            {"text_config": {"model_type": "qwen3"}},
            "text_config.model_type='qwen3' inside Mistral3ForConditionalGeneration is not supported by jpaged "
            r"\(only mistral or ministral3 or mistral4\)",
        ),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of({"architectures": ["Mistral3ForConditionalGeneration"]} | values)
    says = "the text models inside Gemma3ForConditionalGeneration, .*; the nearest is Gemma[34]ForConditionalGeneration"
    with pytest.raises(ModelLoadError, match=says):
        spec_of({"architectures": ["Gemma9ForConditionalGeneration"], "text_config": {}})
