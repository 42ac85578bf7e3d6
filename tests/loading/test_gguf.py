"""GGUF files: the same model as the safetensors checkpoint they were made of, and what is refused and how."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from tests.golden.checkpoints import BY_NAME, Variant, prompts, write_checkpoint
from tests.loading.gguf_files import finish, write_gguf

LLAMA = BY_NAME["llama"].config
# Query scaling is not in a GGUF file: it is the width of a head.
GEMMA2 = Variant("gemma2", BY_NAME["gemma2"].config | {"query_pre_attn_scalar": 16})
YARN = Variant("llama-yarn-turns", LLAMA | {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 16.0, "beta_slow": 2.0,
}})  # fmt: skip
VARIANTS = [YARN, GEMMA2] + [BY_NAME[name] for name in (
    "llama", "llama-theta", "llama-linear", "llama-llama3", "llama-yarn", "llama-tied", "llama-mqa", "llama-head-dim-8",
    "llama-head-dim-40", "llama-attention-bias", "llama-mlp-bias", "mistral", "qwen2", "qwen1.5", "qwen3", "gemma",
    "phi3", "phi3-partial-window",
)]  # fmt: skip


def load(path: Path, **options: Any):
    return load_model(EngineConfig(**{"model": str(path), "dtype": "float32", **options}))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with Checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.array(name)) for name in checkpoint.names}


def write_both(variant: Variant, folder: Path, **options: Any) -> tuple[Path, Path]:
    """The same model as a folder and as a GGUF file."""
    write_checkpoint(variant, 0, folder / "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    return folder / "hf", write_gguf(folder / "model.gguf", config, tensors_of(folder / "hf"), **options)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_float32_is_the_safetensors_model_bit_for_bit(variant: Variant, tmp_path: Path) -> None:
    """The same spec and the same parameters."""
    folder, file = write_both(variant, tmp_path)
    wanted, model = load(folder), load(file)
    assert model.spec == wanted.spec
    jax.tree.map(np.testing.assert_array_equal, model.params, wanted.params)


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2", "gemma"])
def test_answers_are_the_same(name: str, tmp_path: Path) -> None:
    folder, file = write_both(BY_NAME[name], tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    asked = [{"prompt_token_ids": ids} for ids in prompts(320)[:4]]
    answers = []
    for model in (folder, file):
        llm = LLM(str(model), max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, dtype="float32")
        outputs = llm.generate(asked, params)
        answers.append([(o.outputs[0].token_ids, [lp for lp in o.outputs[0].logprobs]) for o in outputs])
    assert answers[0] == answers[1]
