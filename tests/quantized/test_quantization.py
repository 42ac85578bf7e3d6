"""Engines with quantised weights: the option, its bytes, its answers and its quality."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams, cli
from jpaged.cli.bench import quality as bench_quality
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.model import quantizer_of
from jpaged.models import decoder
from jpaged.models.quantization import quantized_parts
from jpaged.models.spec import param_shapes
from jpaged.planning import plan
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.memory.weight_bytes import tree_bytes
from jpaged.runtime.placement import Placement
from jpaged.runtime.targets import TARGETS
from pallas_kernels import QuantizedWeight
from tests.golden.checkpoints import BY_NAME, VARIANTS, write_checkpoint
from tests.support.tiny_engine import FULL, sampling_programs

SLOW = pytest.mark.slow
SMALL = {"max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 64, "row_buckets": (8, 32)}
SMALL |= {"token_buckets": (64,), "enable_prefix_caching": False}
PROMPTS = [f"def f{i}(x):\n    return {i} +" * (1 + i % 3) for i in range(32)]


@pytest.mark.slow
@pytest.mark.codegen
@pytest.mark.parametrize("quantization", ["int4"])  # test_kv_cache_dtype.py has both kinds, with a tiny model
def test_the_same_bits_alone_and_in_a_batch_of_32(quantization):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    with sampling_programs(SamplerVariant.FULL), LLM("demo", quantization=quantization, **SMALL) as llm:
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        alone = [llm.generate(PROMPTS[i], params, use_tqdm=False)[0] for i in (0, 7, 31)]
        assert llm.stats().compiles_after_ready == 0
    for output, i in zip(alone, (0, 7, 31), strict=True):
        assert output.outputs[0].token_ids == together[i].outputs[0].token_ids
        assert output.outputs[0].logprobs == together[i].outputs[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "ratio"), [("int8", 0.507), ("int4", 0.329)])
def test_a_plan_counts_the_bytes_that_a_load_takes(quantization, ratio):
    loaded = load_model(EngineConfig(model="demo", dtype="bfloat16", quantization=quantization))
    planned = plan("demo", {"dtype": "bfloat16", "quantization": quantization})
    assert planned.weight_bytes == tree_bytes(loaded.params)
    whole = plan("demo", {"dtype": "bfloat16"})
    assert planned.weight_bytes / whole.weight_bytes == pytest.approx(ratio, abs=0.005)
    assert planned.weight_parts.keys() == whole.weight_parts.keys()


@pytest.mark.slow
def test_leaves_keep_their_meaning():
    """Every quantised leaf has the shape of the leaf before, and is close to it."""
    exact = load_model(EngineConfig(model="demo")).params
    for quantization, limit in (("int8", 0.01), ("int4", 0.11)):
        params = load_model(EngineConfig(model="demo", quantization=quantization)).params
        kept = jax.tree.map(lambda leaf: leaf, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
        leaves = jax.tree.leaves(kept, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
        assert sum(isinstance(leaf, QuantizedWeight) for leaf in leaves) == 1 + 4 * 6
        assert params["embed"].bits == 8
        assert params["layers"][0]["down"].bits == int(quantization[3:])
        for before, after in zip(jax.tree.leaves(exact), leaves, strict=True):
            assert before.shape == after.shape
            if isinstance(after, QuantizedWeight):
                a, b = (np.asarray(x, np.float32) for x in (before, after.dequantize()))
                assert np.sqrt(((a - b) ** 2).mean() / (a**2).mean()) < limit


@pytest.mark.parametrize(
    ("model", "leaves"),
    [
        ("qwen3.5", {"delta_qkvz", "delta_o"}), pytest.param("lfm2", {"conv_in", "conv_out"}, marks=SLOW),
        pytest.param("kimi-linear", {"delta_qkv", "delta_o", "expert_down"}, marks=SLOW),
    ],
)
def test_recurrent_layers(model, leaves, tmp_path):
    """Their matrices are quantised, and multiplied as the numbers that they stand for."""
    write_checkpoint(BY_NAME[model], 0, tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", quantization="int8", quantized_activations="float")
    loaded = load_model(config)
    quantized = {
        name for layer in loaded.params["layers"] for name, leaf in layer.items() if isinstance(leaf, QuantizedWeight)
    }
    assert leaves <= quantized
    assert not quantized & {"delta_ba", "delta_low", "delta_forget", "delta_gate", "delta_conv", "conv_kernel"}
    rounded = jax.tree.map(
        lambda leaf: leaf.dequantize() if isinstance(leaf, QuantizedWeight) else leaf, loaded.params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight),
    )  # fmt: skip
    exact = load_model(EngineConfig(model=str(tmp_path), dtype="float32")).params
    found, wanted, unrounded = (hidden_states(loaded.spec, params) for params in (loaded.params, rounded, exact))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(found - unrounded).max() > 1e-3


def hidden_states(spec, params):
    @jax.jit
    def run(params, ids):
        attend, kept = decoder.dense_causal_attend, (None,) * spec.num_layers
        return decoder.decode(spec, params, ids, jnp.arange(24), kept, ids[None], attend)[0]

    return np.asarray(run(params, np.arange(24, dtype=np.int32) * 7 % spec.vocab_size))


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "limit"), [("int8", 1.003), ("int4", 1.03)])
def test_perplexity(quantization, limit, tmp_path, capsys, monkeypatch):
    """On 6,000 tokens. On all 28,899: 1.0011 and 1.022."""
    text = tmp_path / "held_out.txt"
    text.write_text(bench_quality.HELD_OUT.read_text("utf-8")[:18_000], "utf-8")
    words = ["bench", "quality", "demo", "--quantization", quantization, "--against", "demo", "--text", str(text)]
    words += ["--max-num-seqs", "8", "--row-buckets", "8", "--token-buckets", "512", "--max-model-len", "1100"]
    words += ["--output-json", str(tmp_path / "out.json")]
    if importlib.util.find_spec("matplotlib") is not None:
        words += ["--plot", str(tmp_path / "kl.png")]
    with sampling_programs():
        assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert f"demo ({quantization})" in said
    ratio = next(line for line in said.splitlines() if line.startswith("Perplexity ratio: "))
    assert 1 < float(ratio.rpartition(" ")[2]) < limit
    found = json.loads((tmp_path / "out.json").read_text())["divergence"]
    assert 0 < found["mean"] < found["p99"] < 0.2  # of int4, on all tokens: 0.034 and 0.175
    assert 0.89 < found["top1_agreement"] < 1  # of int4, on all tokens: 0.902
    assert f"mean {found['mean']:.4g}, P99 {found['p99']:.4g} nats" in said
    if "--plot" in words:
        assert (tmp_path / "kl.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "1"], "window must be at least 2 tokens, got 1"),
        (["--text", "/nowhere.txt"], "cannot be read"),
        pytest.param(
            ["--window", "300", "--max-model-len", "256"],
            "window must be at most 255 with this model, got 300",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_arguments_of_bench_quality(words, message, capsys):
    assert cli.main(["bench", "quality", "demo", *words]) == 2
    assert message in capsys.readouterr().err


def test_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="live arrays are used without a copy, so they are not quantised"):
        LLM(FULL, params=param_shapes(FULL, np.float32), quantization="int8")
    with pytest.raises(ModelLoadError, match="quantization='awq': the checkpoint is not quantised: leave it out, or"):
        LLM("demo", quantization="awq")


@pytest.mark.parametrize(
    ("target", "quantization", "activations", "message"),
    [
        ("a100", "fp8", "fp8", r"quantized_activations='fp8' needs .* 8\.9 .*A100.* has 8\.0: leave it at auto"),
        ("h200", "int8", "fp8", "quantized_activations='fp8': the model has no weights in fp8 .* checkpoint in fp8 or"),
        ("h200", None, "fp8", "quantized_activations='fp8': the model has no weights in fp8"),
        ("h200", "fp8", "int8", "quantized_activations='int8': the model has no weights in 8 bits .* w8a8 checkpoint"),
        ("h200", None, "int8", "quantized_activations='int8': the model has no weights in 8 bits"),
        *((target, "fp8", "fp8", None) for target in ("l4", "h200", "cpu", "v5e")),
        ("h200", "int8", "int8", None), ("cpu", "int4", "int8", None),
    ],
)  # fmt: skip
def test_rounded_activations_need_weights_and_a_device_for_them(target, quantization, activations, message):
    config = EngineConfig(model="test", quantization=quantization, quantized_activations=activations)
    placement = Placement(TARGETS[target], None)
    params = quantizer_of(config, placement.platform).shapes(param_shapes(FULL, "bfloat16"))
    draw = lambda: Blueprint.draw(ServedModel(FULL, params), config, placement)  # noqa: E731
    if message is not None:
        with pytest.raises(ModelLoadError, match=message):
            draw()
        return
    draw()
    assert activations in {weight.activations for weight in quantized_parts(params)}


@pytest.mark.parametrize(
    "quantization", ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "w8a8", "fp8"))]
)
def test_experts_are_quantised(quantization, tmp_path):
    write_checkpoint(next(v for v in VARIANTS if v.name == "mixtral"), 0, tmp_path)
    whole = load_model(EngineConfig(model=str(tmp_path), dtype="bfloat16")).params
    found = load_model(EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization=quantization)).params
    for name in ("expert_gate_up", "expert_down"):
        before, after = whole["layers"][0][name], found["layers"][0][name]
        assert after.layout == ("rows" if quantization == "fp8" else "tiles")
        assert after.shape == before.shape
        a, b = (np.asarray(x, np.float32) for x in (before, after.dequantize()))
        assert np.sqrt(((a - b) ** 2).mean() / (a**2).mean()) < (0.11 if quantization == "int4" else 0.03)
        assert tree_bytes(after) / tree_bytes(before) < 0.8  # the matrices are small, and have scales of 4 bytes
