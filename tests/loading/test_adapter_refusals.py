"""LoRA adapters that are refused: the message names the file, the option or tensor, and what to change."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.adapters import read_arrays, reader
from jpaged.loading.adapters.patterns import ModulePatterns
from jpaged.models.families import family_of, spec_of
from tests.golden.checkpoints import BY_NAME as CHECKPOINTS
from tests.golden.checkpoints import write_safetensors
from tests.loading.recorded_adapters import CONFIG, TENSORS, Recorded, recorded, tensors_of

FIRST = "base_model.model.model.layers.0."

OPTIONS = {
    "DoRA": ({"use_dora": True}, "use_dora=True: DoRA is not supported: train with plain LoRA, or merge"),
    "full": ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: weights that are trained in full"),
    "lora_bias": ({"lora_bias": True}, "lora_bias=True: a bias of lora_B is not supported"),
    "bias": ({"bias": "lora_only"}, "bias='lora_only': trained biases are not supported: train with bias='none'"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices=[1]: trained token embeddings"),
    "qalora": ({"use_qalora": True}, "use_qalora=True: QA-LoRA is not supported"),
    "bdlora": ({"use_bdlora": {"nblocks": 2}}, "block-diagonal LoRA is not supported"),
    "arrow": ({"arrow_config": {"top_k": 2}}, "Arrow routes tokens between adapters"),
    "kasa": ({"kasa_config": {"beta": 1}}, "KaSA changes the base model's weights"),
    "replication": ({"layer_replication": [[0, 2], [1, 2]]}, "repeated layers are not supported"),
    "alora": ({"alora_invocation_tokens": [1]}, "activated LoRA (aLoRA) is not supported"),
    "monteclora": ({"monteclora_config": {"n": 2}}, "MonteCLoRA is not supported"),
    "megatron": ({"megatron_config": {"n": 2}}, "Megatron's parallel layers are not supported"),
    "other method": ({"peft_type": "IA3"}, "peft_type='IA3': only LORA is supported"),
    "no method": ({"peft_type": None}, "peft_type=None: only LORA is supported"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': such training changes the"),
    "olora": ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
    "unknown": ({"use_new_method": True}, "use_new_method=True: unknown option"),
    "rank 0": ({"r": 0}, "r=0: must be an integer of at least 1"),
    "rank": ({"r": "8"}, "r='8': must be an integer of at least 1"),
    "alpha": ({"lora_alpha": float("nan")}, "lora_alpha=nan: must be a finite number"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha=None: must be a finite number"),
    "alpha in a pattern": ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern['q_proj']='x': must be a finite number"),
    "rank in a pattern": ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern['q_proj']=2.5: must be an integer"),
    "pattern": ({"rank_pattern": {"q_proj(": 2}}, "rank_pattern: the key 'q_proj(' is not a regular expression"),
    "slow pattern": ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern: the key '(a+)+b' is too complex"),
    "patterns": ({"rank_pattern": [1]}, "rank_pattern=[1]: must map ends of module paths to numbers"),
    "targets": ({"target_modules": {"a": 1}}, "target_modules={'a': 1}: must be a list of names"),
    "layers": ({"layers_to_transform": ["0"]}, "layers_to_transform=['0']: must be a layer number or a list of them"),
    "rslora": ({"use_rslora": "yes"}, "use_rslora='yes': must be true or false"),
    "other rank": ({"r": 4}, "_proj.lora_A.weight has rank 2, but adapter_config.json calls for 4"),
    "other layers": ({"layers_to_transform": [0]}, "has tensors of layer 1, but layers_to_transform=[0]"),
    "absent layer": ({"layers_to_transform": [0, 1, 2]}, "has no tensors of layer 2, but layers_to_transform=[0, 1,"),
    "other targets": ({"target_modules": ["q_proj"]}, "is of a module that target_modules in adapter_config.json does"),
    "absent target": (
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]},
        "has no tensors of lm_head, which target_modules in adapter_config.json names",
    ),
}  # fmt: skip


def message_of(one: Recorded, folder: Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        one.read(folder, **options)
    message = str(caught.value)
    assert message.startswith(str(folder))
    return message


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_are_refused(case: str, tmp_path: Path) -> None:
    one = recorded("llama")
    folder = one.write(tmp_path)
    values, message = OPTIONS[case]
    (folder / CONFIG).write_text(json.dumps(one.values["config"] | values))
    assert message in message_of(one, folder)


Tensors = dict[str, np.ndarray]
Q_A, Q_B = f"{FIRST}self_attn.q_proj.lora_A.weight", f"{FIRST}self_attn.q_proj.lora_B.weight"


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def changed(**values: Any) -> Callable[[Tensors], Tensors]:
    names = {"a": Q_A, "b": Q_B}
    return lambda tensors: tensors | {names.get(key, FIRST + key): value for key, value in values.items()}


def removed(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: tensor for n, tensor in tensors.items() if n != name}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no B": (removed(Q_B), f"tensor {Q_A} has no lora_B: the adapter is incomplete"),
    "no A": (removed(Q_A), f"tensor {Q_B} has no lora_A: the adapter is incomplete"),
    "no tensors": (lambda _: {}, "has no tensors of LoRA"),
    "magnitude": (
        lambda t: t | {f"{FIRST}self_attn.q_proj.lora_magnitude_vector": zeros(64)},
        "self_attn.q_proj.lora_magnitude_vector: DoRA is not supported",
    ),
    "bias": (lambda t: t | {f"{FIRST}self_attn.q_proj.lora_B.bias": zeros(64)}, "lora_B.bias: trained biases are not"),
    "tokens": (
        lambda t: t | {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": zeros(1, 64)},
        "trainable_tokens_delta: trained token embeddings are not supported",
    ),
    "saved module": (
        lambda t: t | {"base_model.model.lm_head.modules_to_save.weight": zeros(320, 64)},
        "lm_head.modules_to_save.weight: weights that are trained in full are not supported",
    ),
    "full weight": (
        lambda t: t | {"base_model.model.lm_head.weight": zeros(320, 64)},
        "tensor base_model.model.lm_head.weight: weights that are trained in full are not supported",
    ),
    "unused": (
        lambda t: t | {f"base_model.model.extra.{n}": zeros(1) for n in range(5)},
        "tensors base_model.model.extra.0, base_model.model.extra.1, base_model.model.extra.2 and 2 others: unknown",
    ),
    "other module": (renamed("mlp.up_proj", "mlp.dense"), "the model has no module model.layers.0.mlp.dense: the"),
    "another layer": (renamed("layers.1.", "layers.5."), "layer 5, but the model has 2 layers: the adapter is for"),
    "norm": (renamed("mlp.up_proj", "input_layernorm"), "jpaged cannot adapt attn_norm; it can adapt qkv, o, gate_up"),
    "other inputs": (changed(a=zeros(2, 96)), f"tensor {Q_A} has shape [2, 96], the model calls for [2, 64] at rank 2"),
    "other outputs": (changed(b=zeros(96, 2)), f"tensor {Q_B} has shape [96, 2], the model calls for [64, 2] at rank"),
    "ranks of A and B": (changed(b=zeros(64, 3)), f"tensor {Q_B} has shape [64, 3], the model calls for [64, 2]"),
    "one axis": (changed(b=zeros(128)), f"tensor {Q_B} has shape [128], it must have two axes"),
    "no rank": (changed(a=zeros(0, 64), b=zeros(64, 0)), f"tensor {Q_A} has rank 0, but adapter_config.json calls"),
    "rank": (
        changed(a=zeros(16, 64), b=zeros(64, 16)),
        f"tensor {Q_A} has rank 16, and the engine has max_lora_rank=8: start with --max-lora-rank 16",
    ),
    "NaN": (changed(a=np.full((2, 64), np.nan, np.float32)), f"tensor {Q_A} has NaN or infinite values"),
    "integers": (changed(b=np.ones((64, 2), np.int32)), f"tensor {Q_B} is int32; supported are float64, float32"),
    "twice": (
        lambda t: t | {Q_A.replace("A.w", "A.other.w"): zeros(2, 64)},
        "are for the same matrix: keep one adapter only",
    ),
    "twice under two names": (
        lambda t: t | {name.replace("model.model.model", "model.model"): t[name] for name in (Q_A, Q_B)},
        "the adapter has this matrix twice",
    ),
    "copy of a resized embedding": (
        lambda t: t | {"base_model.model.model.embed_tokens.base_layer.weight": zeros(322, 64)},
        "embed_tokens.base_layer.weight has shape [322, 64], the model's is [320, 64]: the adapter was trained with",
    ),
    "copy of another weight": (
        lambda t: t | {f"{FIRST}mlp.up_proj.base_layer.weight": zeros(2, 2)}, "does not read copies of this weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_are_refused(case: str, tmp_path: Path) -> None:
    one = recorded("llama")
    folder = one.write(tmp_path)
    config = one.values["config"] | {"target_modules": None}
    (folder / CONFIG).write_text(json.dumps(config))
    change, message = WRONG[case]
    write_safetensors(folder / TENSORS, change(tensors_of(folder)))
    assert message in message_of(one, folder)


def test_an_embedding_needs_its_own_kind_of_tensors(tmp_path: Path) -> None:
    one = recorded("llama-embeddings")
    folder = one.write(tmp_path)
    tensors = {n.replace("embedding_A", "A.weight").replace("embedding_B", "B.weight"): t
               for n, t in tensors_of(folder).items()}  # fmt: skip
    write_safetensors(folder / TENSORS, tensors)
    assert "model.embed_tokens needs lora_embedding_A" in message_of(one, folder)


def test_tied_embeddings_need_both_adapters_if_they_were_trained_tied(tmp_path: Path) -> None:
    one = recorded("llama-tied-both")
    folder = one.write(tmp_path)
    write_safetensors(folder / TENSORS, {n: t for n, t in tensors_of(folder).items() if "lm_head" not in n})
    assert "has no tensors of lm_head, but ensure_weight_tying=True" in message_of(one, folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("mixtral-experts", "experts.3.", "experts.4.", "expert 4, but the model has 4 experts: the adapter is for"),
        ("mixtral-fused", "layers.1.", "layers.2.", "layer 2, but the model has 2 layers: the adapter is for another"),
        ("mixtral-fused", "self_attn.q_proj", "mlp.gate", "the model has no module model.layers.0.mlp.gate"),
        ("mixtral-experts", "self_attn.k_proj", "block_sparse_moe.gate", "jpaged cannot adapt router"),
    ],
)
def test_modules_of_experts_that_are_refused(name: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    one = recorded(name)
    folder = one.write(tmp_path)
    write_safetensors(folder / TENSORS, {n.replace(old, new): t for n, t in tensors_of(folder).items()})
    assert message in message_of(one, folder)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("layers.0.mlp.experts.1.up_proj", "layer 0 of the model has no such module"),  # it is dense
        ("layers.1.mlp.experts.8.up_proj", "expert 8, but the model has 8 experts"),
        ("layers.9.mlp.experts.1.up_proj", "layer 9, but the model has 2 layers"),
        ("layers.9.mlp.experts", "layer 9, but the model has 2 layers"),
        ("layers.0.mlp.experts", "layer 0 of the model has no such module"),
        ("layers.0.self_attn.kv_b_proj", "jpaged cannot adapt kv_b; it can adapt gate_up, down, expert_gate_up"),
        ("layers.1.mlp.shared_expert.up_proj", "model.layers.1.mlp.shared_expert.up_proj: the adapter is for another"),
    ],
)  # fmt: skip
def test_modules_of_a_model_with_dense_layers_and_experts(module: str, message: str) -> None:
    config = CHECKPOINTS["deepseek-v3"].config
    arrays = {f"model.{module}.lora_{side}.weight": zeros(8, 8) for side in "AB"}
    with pytest.raises(ModelLoadError) as caught:
        read_arrays(arrays, family_of(config), spec_of(config), alpha=1, max_rank=8, dtype=np.float32)
    assert str(caught.value).startswith("arrays: tensor model.layers.")
    assert message in str(caught.value)


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    one = recorded("mixtral-down")
    folder = one.write(tmp_path)
    tensors = {n: zeros(12, 80) if "lora_A" in n else t for n, t in tensors_of(folder).items()}
    write_safetensors(folder / TENSORS, tensors)
    message = message_of(one, folder)
    assert "it is for experts with 80 inputs and 64 outputs, the model's have 64 inputs and 192 outputs or" in message


def test_float16_pools_refuse_larger_values(tmp_path: Path) -> None:
    one = recorded("llama")
    folder = one.write(tmp_path)
    tensors = tensors_of(folder)
    tensors[Q_B][3, 1] = 1e5
    write_safetensors(folder / TENSORS, tensors)
    message = message_of(one, folder, dtype=np.float16)
    assert f"tensor {Q_B} has values beyond the range of float16: use dtype bfloat16 or float32" in message
    assert one.read(folder).rank == 2


def test_missing_and_other_files(tmp_path: Path) -> None:
    one = recorded("llama")
    assert "is not a folder" in message_of(one, tmp_path / "nothing")
    assert "adapter_config.json is missing: an adapter is a folder" in message_of(one, tmp_path)
    one.write(tmp_path)
    data = (tmp_path / TENSORS).read_bytes()
    (tmp_path / TENSORS).unlink()
    assert "adapter_model.safetensors is missing: save the adapter" in message_of(one, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    assert "missing, only adapter_model.bin, a pickle, which could run code: save" in message_of(one, tmp_path)
    (tmp_path / TENSORS).write_bytes(data[:-5])
    assert "truncated" in message_of(one, tmp_path)
    (tmp_path / CONFIG).write_text("[]")
    assert "must contain a JSON object" in message_of(one, tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "arrays must map the names of PEFT's tensors to arrays"),
        ({"a": [[1.0]]}, "must be a numpy or JAX array"),
        ({"a": 1.0}, "must be a numpy or JAX array"),
    ],
)
def test_arrays_of_another_kind_are_refused(arrays: Any, message: str) -> None:
    config = CHECKPOINTS["llama"].config
    with pytest.raises(RequestError, match=message):
        read_arrays(arrays, family_of(config), spec_of(config), alpha=1, max_rank=4, dtype=np.float32)


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    """Only the links of the Hugging Face cache may: from snapshots/REVISION into blobs."""
    one = recorded("llama")
    blobs, folder = one.write(tmp_path / "blobs"), tmp_path / "snapshots/1234"
    elsewhere = one.write(tmp_path / "elsewhere")
    folder.mkdir(parents=True)
    for name in (TENSORS, CONFIG):
        (folder / name).symlink_to(blobs / name)
    assert one.read(folder).num_tensors == 28
    for name in (TENSORS, CONFIG):
        (folder / name).unlink()
        (folder / name).symlink_to(elsewhere / name)
        assert f"{name} is a link to a file outside the folder: copy the file" in message_of(one, folder)
        (folder / name).unlink()
        (folder / name).symlink_to(blobs / name)


@pytest.mark.parametrize("name", [TENSORS, CONFIG])
def test_a_pipe_is_no_file(name: str, tmp_path: Path) -> None:
    one = recorded("llama")
    (one.write(tmp_path) / name).unlink()
    os.mkfifo(tmp_path / name)  # to open it would wait for a writer
    assert f"{name} is missing" in message_of(one, tmp_path)


def test_a_config_of_megabytes_takes_no_minutes(tmp_path: Path) -> None:
    one = recorded("llama")
    folder = one.write(tmp_path)
    names = [f"layers.{n}.self_attn.q_proj" for n in range(20_000)]
    config = {"target_modules": names, "layers_to_transform": list(range(20_000)), "rank_pattern": {}}
    config["rank_pattern"] = dict.fromkeys(names, 2)
    (folder / CONFIG).write_text(json.dumps(one.values["config"] | config))
    began = time.thread_time()
    assert len(message_of(one, folder)) < 3000
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("key", ["(a*)*b", "(.*){9}x", ".*.*.*.*x", "(x)\\1", "(?=a)b", "a" * 501 + "+"])
def test_patterns_that_could_take_minutes_are_refused(key: str) -> None:
    with pytest.raises(ModelLoadError, match="too complex"):
        ModulePatterns({key: 1}, "rank_pattern")


def test_patterns_take_milliseconds_at_most() -> None:
    keys = {f"{n}.*.*.*x": n for n in range(200)}
    found, began = ModulePatterns(keys, "rank_pattern"), time.thread_time()
    assert found.find("model.layers.10." + "0123456789" * 4, None) is None
    assert time.thread_time() - began < 2
    with pytest.raises(ModelLoadError, match="has 201 regular expressions; at most 200 are supported"):
        ModulePatterns(keys | {"a+": 1}, "rank_pattern")


def test_a_file_that_is_overwritten_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """A read of a mapped file would end the process."""
    one = recorded("llama")
    folder = one.write(tmp_path / "adapter")
    find = reader.pair_names

    def truncating(*arguments):
        os.truncate(folder / TENSORS, (folder / TENSORS).stat().st_size // 2)
        return find(*arguments)

    monkeypatch.setattr(reader, "pair_names", truncating)
    with pytest.raises(ModelLoadError, match="became shorter while it was read"):
        one.read(folder)
