"""LoRA adapters: PEFT's adapters change a model's weights and answers as PEFT does, and every other one is refused."""

import dataclasses
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.loading import LoadedModel
from jpaged.loading.adapters import describe_adapter, read_arrays
from jpaged.loading.adapters.patterns import ModulePatterns
from jpaged.models.adapters import Adapter, adapter_targets
from jpaged.models.decoder import decode, dense_causal_attend, lm_head
from jpaged.models.families import family_of, spec_of
from jpaged.models.spec import WeightLayout, param_shapes
from tests.golden.adapters import VARIANTS
from tests.golden.checkpoints import BY_NAME as CHECKPOINTS
from tests.golden.checkpoints import write_safetensors
from tests.loading.recorded_adapters import (
    CONFIG,
    TENSORS,
    Recorded,
    base_model,
    delta,
    merged,
    recorded,
    tensors_of,
)

SLOW = pytest.mark.slow
# Log-probabilities of two float32 programs differ by up to 2e-5 here. A matrix that is left out changes 0.05 or more.
TOLERANCE = 1e-4


class Answers:
    """Log-probabilities of the recorded answer's tokens, by a model with dense attention."""

    def __init__(self, one: Recorded, model: LoadedModel):
        prompt, tokens = one.values["prompt"], one.values["tokens"]
        self._tokens, self._start = np.array(tokens), len(prompt) - 1
        ids = jnp.array(prompt + tokens)

        def run(params: Any) -> jax.Array:
            hidden, *_ = decode(
                model.spec, params, ids, jnp.arange(len(ids)), [None] * model.spec.num_layers, ids[None],
                dense_causal_attend,
            )  # fmt: skip
            return jax.nn.log_softmax(lm_head(model.spec, params, hidden))

        self._run, self._peft = jax.jit(run), np.array(one.values["logprobs"])

    def error(self, params: Any) -> float:
        """Largest difference from PEFT's log-probabilities."""
        rows = np.asarray(self._run(params))[self._start : -1]
        return float(np.abs(rows[np.arange(len(self._tokens)), self._tokens] - self._peft).max())


def without(adapter: Adapter, leaf: str) -> Adapter:
    return dataclasses.replace(adapter, matrices={n: m for n, m in adapter.matrices.items() if n != leaf})


@pytest.mark.slow
@pytest.mark.parametrize("name", [v.name for v in VARIANTS])
def test_answers_are_pefts_and_need_every_matrix(name: str, tmp_path: Path) -> None:
    one = recorded(name)
    model = base_model(one.variant.base, one.values["base_seed"], tmp_path / "base")
    adapter = one.read(one.write(tmp_path / "adapter"))
    answers = Answers(one, model)
    assert answers.error(merged(model, adapter)) < TOLERANCE
    assert answers.error(model.params) > 1
    for leaf in adapter.matrices:
        assert answers.error(merged(model, without(adapter, leaf))) > 500 * TOLERANCE, leaf


@pytest.mark.parametrize(
    ("name", "pair"),
    [("llama", ("gate_proj", "up_proj")), pytest.param("llama-mha-rslora", ("q_proj", "k_proj"), marks=SLOW)],
)
def test_exchanged_matrices_are_seen(name: str, pair: tuple[str, str], tmp_path: Path) -> None:
    """gate and up have the same shapes, and so have q and k without grouped queries. Only answers tell them apart."""
    one = recorded(name)
    model = base_model(one.variant.base, one.values["base_seed"], tmp_path / "base")
    folder = one.write(tmp_path / "adapter")
    other = dict(zip(pair, pair[::-1], strict=True))
    exchanged = {re.sub("|".join(pair), lambda m: other[m[0]], n): t for n, t in tensors_of(folder).items()}
    write_safetensors(folder / TENSORS, exchanged)
    assert Answers(one, model).error(merged(model, one.read(folder))) > 500 * TOLERANCE


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
def test_each_part_is_where_the_weight_of_its_module_is(name: str, tmp_path: Path) -> None:
    """scale B A, stored as the module's weight is loaded, equals what the matrices add to the leaf."""
    one = recorded(name)
    folder = one.write(tmp_path)
    adapter, tensors = one.read(folder), tensors_of(folder)
    shapes = param_shapes(one.spec, np.float64)
    shapes["lm_head"] = shapes["embed"]
    targets = [target for target in adapter_targets(one.spec) if target.name in adapter.matrices]
    expected = {
        (t.leaf, layer): np.zeros((shapes["layers"][layer] | shapes)[t.leaf].shape)
        for t in targets for layer in t.layers
    }  # fmt: skip
    used = 0
    for leaf in family_of(one.config).tensors(shapes):
        for tensor, name_of in ((each, name_of) for each in leaf.tensors for name_of in each.names):
            path = f"base_model.model.{name_of.removesuffix('.weight')}"
            for a, b in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
                if f"{path}.{a}" in tensors:
                    product = tensors[f"{path}.{b}"].astype(np.float64) @ tensors[f"{path}.{a}"]
                    rank = tensors[f"{path}.{a}"].shape[0]
                    host = expected[leaf.leaf, leaf.layer or 0]
                    turned = tensor.rule.transposed or "embedding" in a
                    scale = one.values["config"]["lora_alpha"] / (rank**0.5 if "rslora" in name else rank)
                    if name == "llama-patterns":
                        scale = {"k_proj": 9, "down_proj": 1.5}.get(path.split(".")[-1], 4) / rank
                        scale = 4 / rank if path.endswith("1.self_attn.k_proj") else scale
                    tensor.rule.store(scale * (product.T if turned else product), leaf.block(host, tensor))
                    used += 2
    # one module for all experts: see the test below
    experts = [n for n in tensors if re.search(r"\.experts\.(base_layer|lora)", n)]
    copies = [n for n in tensors if n.endswith("base_layer.weight")]
    assert used + len(experts) + len(copies) == len(tensors)
    assert adapter.num_tensors == used + len(experts)
    for target in targets:
        if target.leaf.startswith("expert_") and experts:
            continue
        for layer in target.layers:
            weight = expected[target.leaf, layer]
            found = [delta(target, adapter.matrices[target.name], layer, e) for e in range(target.experts)]
            np.testing.assert_allclose(np.stack(found).reshape(weight.shape), weight, rtol=1e-6, atol=1e-7)


def test_all_experts_of_a_layer_in_one_module(tmp_path: Path) -> None:
    """PEFT's layout: A is [experts, rank, in], B is [out, rank, experts], each flattened to two axes."""
    one = recorded("mixtral-fused")
    folder = one.write(tmp_path)
    adapter, tensors = one.read(folder), tensors_of(folder)
    path = "base_model.model.model.layers.0.mlp.experts."
    for leaf, wrapped in (("expert_gate_up", "base_layer."), ("expert_down", "")):
        a, b = (tensors[f"{path}{wrapped}lora_{side}.weight"] for side in "AB")
        matrix = adapter.matrices[leaf]
        for expert in range(4):
            for part in range(matrix.a.shape[2]):
                np.testing.assert_array_equal(matrix.a[0, expert, part], a[2 * expert : 2 * expert + 2])
            np.testing.assert_array_equal(matrix.b[0, expert], b[:, [expert, 4 + expert]].T)
        assert (matrix.ranks == 2).all()
        assert (matrix.scales == 2).all()


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS if variant.as_file])
def test_files_that_peft_wrote(name: str, tmp_path: Path) -> None:
    one = recorded(name)
    ours, pefts = one.read(one.write(tmp_path)), one.read(one.variant.files)
    assert ours.matrices.keys() == pefts.matrices.keys()
    jax.tree.map(np.testing.assert_array_equal, *(
        {leaf: dataclasses.asdict(m) for leaf, m in a.matrices.items()} for a in (ours, pefts)
    ))  # fmt: skip


def test_sizes_ranks_and_the_line_for_the_log(tmp_path: Path) -> None:
    one = recorded("llama-patterns")
    adapter = one.read(one.write(tmp_path), dtype=ml_dtypes.bfloat16)
    assert adapter.rank == 5
    assert adapter.num_tensors == 28
    gate_up, qkv = adapter.matrices["gate_up"], adapter.matrices["qkv"]
    assert gate_up.a.dtype == gate_up.b.dtype == ml_dtypes.bfloat16
    assert gate_up.a.shape == (2, 1, 2, 5, 64)
    assert gate_up.b.shape == (2, 1, 5, 2 * one.spec.intermediate_size)
    np.testing.assert_array_equal(gate_up.ranks[:, 0], [[2, 2], [2, 5]])
    np.testing.assert_allclose(gate_up.scales[:, 0], [[2, 2], [2, 4 / 5]])
    np.testing.assert_array_equal(qkv.ranks[:, 0], [[3, 2, 2]] * 2)
    np.testing.assert_allclose(qkv.scales[:, 0], [[4 / 3, 4.5, 2], [4 / 3, 2, 2]])
    assert not gate_up.a[0, 0, :, 2:].any()
    assert not gate_up.b[0, 0, 2:].any()
    line = f"adapter sql: 28 tensors of 14 matrices, ranks 2 to 5, {adapter.num_bytes / 2**20:.1f} MiB"
    assert describe_adapter("sql", adapter) == line


@pytest.mark.parametrize("name", ["llama-patterns", "llama-qv", "gpt-neox"])
def test_separate_leaves_have_the_parts_of_the_fused_ones(name: str, tmp_path: Path) -> None:
    one = recorded(name)
    folder = one.write(tmp_path)
    layout = WeightLayout(split_qkv=True, split_gate_up=True)
    fused, split = one.read(folder), one.read(folder, layout=layout)
    targets = {target.leaf: target for target in adapter_targets(one.spec, layout)}
    whole = {target.leaf: target for target in adapter_targets(one.spec)}
    assert split.matrices.keys() <= targets.keys()
    assert ("k" in split.matrices) == (name != "llama-qv")
    s = one.spec
    for layer in range(s.num_layers):
        found = {leaf: delta(targets[leaf], split.matrices[leaf], layer) for leaf in split.matrices}
        qkv = delta(whole["qkv"], fused.matrices["qkv"], layer)
        qkv = qkv.reshape(s.num_kv_heads, s.q_per_kv + 2, s.head_dim, -1)
        parts = {"q": qkv[:, :-2], "k": qkv[:, -2], "v": qkv[:, -1]}
        if "gate_up" in fused.matrices:
            gate_up = delta(whole["gate_up"], fused.matrices["gate_up"], layer)
            parts |= dict(zip(("gate", "up"), gate_up.reshape(2, -1, s.hidden_size), strict=True))
        for leaf, part in parts.items():
            if leaf in found:
                np.testing.assert_array_equal(found[leaf], part.reshape(found[leaf].shape))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_files_of_other_dtypes_are_converted(stored: Any, tmp_path: Path) -> None:
    one = recorded("llama-qv")
    folder = one.write(tmp_path)
    tensors = {name: tensor.astype(stored) for name, tensor in tensors_of(folder).items()}
    write_safetensors(folder / TENSORS, tensors)
    a = one.read(folder).matrices["qkv"].a
    assert a.dtype == np.float32
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
    np.testing.assert_array_equal(a[1, 0, 2], tensors[name].astype(np.float32))


def test_memory_is_that_of_the_adapter(tmp_path: Path) -> None:
    """float32 is the largest dtype. Tensors are converted one at a time, and the file is only mapped."""
    one = recorded("llama")
    name = "base_model.model.model.layers.{}.{}.lora_{}.weight"
    shapes = {"self_attn.o_proj": (64, 64), "mlp.down_proj": (one.spec.intermediate_size, 64)}
    tensors = {}
    for layer in (0, 1):
        for module, (inputs, outputs) in shapes.items():
            tensors[name.format(layer, module, "A")] = np.ones((1000, inputs), np.float16)
            tensors[name.format(layer, module, "B")] = np.ones((outputs, 1000), np.float16)
    one.write(tmp_path)
    write_safetensors(tmp_path / TENSORS, tensors)
    options = {"r": 1000, "target_modules": ["o_proj", "down_proj"]}
    (tmp_path / CONFIG).write_text(json.dumps(one.values["config"] | options))
    one.read(tmp_path, max_rank=1000)  # finds the model's modules
    tracemalloc.start()
    adapter = one.read(tmp_path, max_rank=1000, dtype=np.float16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert adapter.num_bytes == pytest.approx((tmp_path / TENSORS).stat().st_size, rel=0.01)
    assert peak < 1.4 * adapter.num_bytes


RENAMED: dict[str, Callable[[str], str]] = {
    "as saved": lambda name: name,
    "without PEFT's prefix": lambda name: name.removeprefix("base_model.model."),
    "of the base model": lambda name: name.replace("base_model.model.model.", "base_model.model."),
    "bare": lambda name: name.removeprefix("base_model.model.model.").removeprefix("base_model.model."),
    "state dictionary": lambda name: re.sub("(lora_[AB])", r"\1.default", name),
    "of a multimodal model": lambda name: name.replace("model.model.", "model.model.language_model."),
}


@pytest.mark.parametrize("names", RENAMED)
def test_arrays_are_read_like_a_folder(names: str, tmp_path: Path) -> None:
    one = recorded("llama-embeddings")
    folder = one.write(tmp_path)
    arrays = {RENAMED[names](n): jnp.asarray(t) for n, t in tensors_of(folder).items() if "lora" in n}
    live = read_arrays(arrays, family_of(one.config), one.spec, alpha=4, max_rank=8, dtype=np.float32)
    stored = one.read(folder)
    assert live.num_tensors == stored.num_tensors == 8
    for leaf, matrix in stored.matrices.items():
        jax.tree.map(
            np.testing.assert_array_equal, dataclasses.asdict(live.matrices[leaf]), dataclasses.asdict(matrix)
        )


def test_arrays_have_the_scale_of_their_options() -> None:
    name = "model.layers.{}.self_attn.o_proj.lora_{}.weight"
    arrays = {name.format(n, "A"): np.ones((4, 64), np.float32) for n in (0, 1)}
    arrays |= {name.format(n, "B"): np.ones((64, 4), np.float32) for n in (0, 1)}
    config = CHECKPOINTS["llama"].config
    adapter = read_arrays(
        arrays, family_of(config), spec_of(config), alpha=8, use_rslora=True, alpha_pattern={"layers.1.*": 3},
        max_rank=4, dtype=np.float16,
    )  # fmt: skip
    np.testing.assert_array_equal(adapter.matrices["o"].scales[:, 0, 0], [4, 1.5])


def test_patterns_match_as_in_peft() -> None:
    """PEFT takes the first key for which re.match(f"(.*\\.)?({key})$", path) is true."""
    keys = ("q_proj", "layers.1.mlp.up_proj", r"layers\.[0-9]+\.self_attn.k_proj", "^model.layers.0.mlp.(gate|up)_proj",
            "mlp.*", "lm_head", "model.layers.1.self_attn.v_proj", "proj", ".*_proj")  # fmt: skip
    patterns = {key: number for number, key in enumerate(keys)}
    found = ModulePatterns(patterns, "rank_pattern")
    modules = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.a.b")
    paths = [f"model.layers.{layer}.{module}" for layer in (0, 1, 11) for module in modules]
    seen = set()
    for path in (*paths, "lm_head", "model.embed_tokens", "q_proj", "xq_proj"):
        first = next((k for k in keys if re.match(rf"(.*\.)?({k})$", path)), None)
        assert found.find(path, None) == (None if first is None else patterns[first]), path
        seen.add(first)
    assert seen >= {*keys[:6], keys[8], None}
