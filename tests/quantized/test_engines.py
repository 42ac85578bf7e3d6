"""Engines over checkpoints of every quantised format give the answers of engines with the dequantised weights.

A row of the table is a tiny checkpoint. If a format allows it, each matrix is packed in another way, so that few
engines cover all ways. tests/support/packers.py writes the same bytes as the formats' libraries.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.gguf_blocks import KEPT
from jpaged.loading.packed_checkpoint import PackedCheckpoint
from jpaged.models.quantization import quantized_parts
from jpaged.planning import plan
from tests.golden.checkpoints import BY_NAME, Variant, prompts, write_checkpoint, write_safetensors
from tests.golden.tensor_shapes import tensor_shapes
from tests.loading.ggml_blocks import HALVES, blocks_of
from tests.loading.gguf_files import add_metadata, converted, finish
from tests.support import packers
from tests.support.dense_leaves import dense
from tests.support.packers import E2M1, Packer
from tests.support.tiny_engine import sampling_programs

GOLDEN = Path(__file__).parents[1] / "golden/quantized"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())

PACKED = [
    case for case in CASES
    if case.startswith(("awq", "gptq", "ct-w", "ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4")) and case != "ct-w8a8"
]  # fmt: skip

# -- The packers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PACKED)
def test_the_packers_write_the_libraries_bytes(case: str, tmp_path: Path) -> None:
    """The codes that jpaged reads are those of the library: test_packed_checkpoint.py compares the weights."""
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / f"{case}.safetensors").read_bytes())
    with Checkpoint(tmp_path) as checkpoint:
        reader = PackedCheckpoint(checkpoint, {"quantization_config": CASES[case]["quantization_config"]})
        for name in reader.packed:
            module, weight = name.removesuffix(".weight"), jax.tree.map(np.array, reader.quantized(name))
            for part, array in packed_again(CASES[case]["quantization_config"], module, weight).items():
                stored = checkpoint.array(f"{module}.{part}").copy()
                assert (array.dtype, array.shape) == (stored.dtype, stored.shape), part
                np.testing.assert_array_equal(array.view(np.uint8), stored.view(np.uint8), err_msg=part)


def packed_again(config: Mapping[str, Any], module: str, weight: Any) -> packers.Parts:
    """The tensors of a matrix, from its numbers."""
    if weight.kind == "fp4":
        return {"weight" if config["quant_method"] == "modelopt" else "weight_packed": packers.store_fp4(weight.codes)}
    bits = bits_of(config, module)
    middle = 2 ** (bits - 1)
    # int4 and unsigned numbers of GPTQ and AWQ are as in the file. int8 and compressed-tensors have signed numbers.
    zero = 8 if weight.kind == "int4" else 0
    is_signed = weight.kind == "int8" or config["quant_method"] == "compressed-tensors"
    unsigned = lambda numbers: (numbers.astype(np.int16) + (middle - zero if is_signed else 0)).astype(np.uint8)  # noqa: E731
    codes, zeros = unsigned(weight.codes), None if weight.zeros is None else unsigned(weight.zeros)
    if config["quant_method"] == "compressed-tensors":
        return packers.store_packed(codes, zeros, weight.scales, bits)
    if config["quant_method"] == "awq":
        return packers.store_awq(codes, zeros, weight.scales)
    order = np.arange(codes.shape[1]) if weight.order is None else weight.order
    groups, natural = np.empty_like(order), np.empty_like(codes)
    groups[order], natural[:, order] = np.arange(len(order)) // weight.group_size, codes
    zeros = np.full(weight.scales.shape, middle, np.uint8) if zeros is None else zeros
    return packers.store_gptq(natural, zeros, weight.scales, groups, bits, int(config["checkpoint_format"] == "gptq"))


def bits_of(config: Mapping[str, Any], module: str) -> int:
    if config["quant_method"] != "compressed-tensors":
        return 8 if "dynamic" in config and module.endswith("down_proj") else config["bits"]
    group = next(iter(config["config_groups"].values()))
    return group["weights"]["num_bits"] if isinstance(group, dict) else 4


# -- The table ------------------------------------------------------------------------------------------------------

PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
LAYERS = [f"model.layers.{layer}." for layer in range(2)]
MODULES = [layer + part for layer in LAYERS for part in PARTS]
SIZES = {"hidden_size": 256, "intermediate_size": 256}  # blocks of GGUF's K types have 256 weights
LLAMA = dataclasses.replace(BY_NAME["llama"], config=BY_NAME["llama"].config | SIZES)
Writer = Callable[[Path], tuple[Path, Path]]  # writes the packed and the dense checkpoint into a folder


def model(config: dict[str, Any], modules: Mapping[str, Packer], variant: Variant = LLAMA) -> Writer:
    """A checkpoint with these packed matrices."""

    def write(folder: Path) -> tuple[Path, Path]:
        write_checkpoint(variant, 0, folder / "dense")
        tensors, plain = read(folder / "dense"), {}
        for module, pack in modules.items():
            parts, plain[f"{module}.weight"] = pack(tensors.pop(f"{module}.weight"))
            tensors |= packers.tensors_of(module, parts)
        rewrite(folder / "dense", plain)
        (folder / "packed").mkdir()
        (folder / "packed/config.json").write_text(json.dumps(variant.config | {"quantization_config": config}))
        write_safetensors(folder / "packed/model.safetensors", tensors)
        return folder / "packed", folder / "dense"

    return write


def read(folder: Path) -> dict[str, np.ndarray]:
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.array(name).copy() for name in checkpoint.names}


def rewrite(folder: Path, changed: Mapping[str, np.ndarray]) -> None:
    """Put tensors in the place of those of a checkpoint."""
    write_safetensors(folder / "model.safetensors", read(folder) | dict(changed))


def by_part(*packs: Packer) -> dict[str, Packer]:
    """Packers of the seven matrices of each layer."""
    return {layer + part: pack for layer in LAYERS for part, pack in zip(PARTS, packs, strict=True)}


def awq(group: int) -> Writer:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return model(config, dict.fromkeys(MODULES, packers.awq(256 if group == -1 else group)))


def gptq(version: int, *, is_act: bool) -> Writer:
    """Bits and symmetry differ between the matrices."""
    kinds = ((4, True), (4, False), (3, False), (8, False), (2, True), (3, True), (8, True))
    dynamic = {rf"+:.*\.{part}$": {"bits": b, "sym": s} for part, (b, s) in zip(PARTS, kinds, strict=True)}
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": is_act, "dynamic": dynamic,
        "checkpoint_format": "gptq_v2" if version == 2 else "gptq",
    }  # fmt: skip
    return model(config, by_part(*(packers.gptq(b, version, symmetric=s, is_act=is_act) for b, s in kinds)))


INT, FLOAT = {"type": "int"}, {"type": "float", "num_bits": 8}
GROUPS = {"strategy": "group", "group_size": 32}


def stream(bits: int, *, symmetric: bool = True) -> tuple[str, dict[str, Any], Packer]:
    args = INT | GROUPS | {"num_bits": bits, "symmetric": symmetric}
    return "pack-quantized", args, packers.packed(bits, symmetric=symmetric)


def integers(strategy: str, *, symmetric: bool = True) -> tuple[str, dict[str, Any], Packer]:
    args = INT | {"num_bits": 8, "strategy": strategy, "symmetric": symmetric}
    return "int-quantized", args, packers.integers(strategy, symmetric=symmetric)


CHANNELS = (
    "pack-quantized", INT | {"num_bits": 8, "strategy": "channel"}, packers.packed(8, symmetric=True, group=None)
)  # fmt: skip
FP8 = {
    "tensor": ("float-quantized", FLOAT | {"strategy": "tensor"}, packers.fp8((None, None))),
    "channel": ("float-quantized", FLOAT | {"strategy": "channel"}, packers.fp8((1, None))),
    "block": (
        "float-quantized", FLOAT | {"strategy": "block", "block_structure": [128, 128]}, packers.fp8((128, 128))
    ),
}  # fmt: skip
NVFP4 = ("nvfp4-pack-quantized", FLOAT | {"num_bits": 4, "group_size": 16}, packers.nvfp4(divides=True))
MXFP4 = ("mxfp4-pack-quantized", FLOAT | {"num_bits": 4, "group_size": 32}, packers.mxfp4)


def compressed(*schemes: tuple[str, dict[str, Any], Packer]) -> Writer:
    """compressed-tensors, a scheme for each matrix."""
    groups = {
        f"group_{i}": {"targets": [module], "format": form, "weights": args}
        for i, (module, (form, args, _)) in enumerate(zip(MODULES, schemes, strict=True))
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    return model(config, {module: pack for module, (_, _, pack) in zip(MODULES, schemes, strict=True)})


def modelopt(algorithm: str, pack: Packer) -> Writer:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return model(config, dict.fromkeys(MODULES, pack))


def modelopt_experts() -> Writer:
    """Qwen3 MoE in NVFP4, one tensor for each expert, as ModelOpt writes it. Each has a factor of its own."""
    variant = BY_NAME["qwen3-moe"]
    names = [name.removesuffix(".weight") for name in tensor_shapes(variant.config) if name.endswith("_proj.weight")]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}
    return model(config, dict.fromkeys(names, packers.nvfp4(divides=False)), variant)


def modelopt_mixed() -> Writer:
    """Qwen3 MoE in MIXED_PRECISION: experts in NVFP4, named together; q, k and v in FP8; the rest not quantised."""
    variant, algorithms, modules = BY_NAME["qwen3-moe"], {}, {}
    for name in tensor_shapes(variant.config):
        module = name.removesuffix(".weight")
        if ".mlp.experts." in module:
            algorithms[module.partition(".experts.")[0] + ".experts"] = {"quant_algo": "NVFP4", "group_size": 16}
            modules[module] = packers.nvfp4(divides=False)
        elif module.endswith(("q_proj", "k_proj", "v_proj")):
            algorithms[module] = {"quant_algo": "FP8"}
            modules[module] = packers.fp8((None, None))
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
    return model(config, modules, variant)


def unlike_layers(name: str, scheme: tuple[str, dict[str, Any], Packer]) -> Writer:
    """All projections of a model whose layers have unlike keys and values, some of them without values."""
    form, args, pack = scheme
    variant = BY_NAME[name]
    names = [each.removesuffix(".weight") for each in tensor_shapes(variant.config) if each.endswith("_proj.weight")]
    groups = {"group_0": {"targets": ["Linear"], "format": form, "weights": args}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return model(config, dict.fromkeys(names, pack), variant)


def fp8(block: list[int] | None, pack: Packer) -> Writer:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    return model(config, dict.fromkeys(MODULES, pack))


def ggml(folder: Path) -> tuple[Path, Path]:
    """A GGUF file with all types that are kept, in turn."""
    write_checkpoint(LLAMA, 0, folder / "dense")
    tensors = read(folder / "dense")
    raw, types = dict(tensors), {}
    for i, name in enumerate(f"{module}.weight" for module in MODULES):
        types[name] = kind = GGMLQuantizationType[KEPT[i % len(KEPT)]]
        raw[name] = ggml_matrix(kind.name, tensors[name])
        tensors[name] = dequantize(raw[name], kind).reshape(tensors[name].shape)
    rewrite(folder / "dense", tensors)
    writer = gguf.GGUFWriter(folder / "packed.gguf", "llama")
    add_metadata(writer, LLAMA.config)
    for name, array in raw.items():
        ((source, values),) = converted(LLAMA.config, {name: array}).items()
        writer.add_tensor(source, np.ascontiguousarray(values), raw_dtype=types.get(name))
    finish(writer)
    return folder / "packed.gguf", folder / "dense"


def ggml_matrix(kind: str, values: np.ndarray) -> np.ndarray:
    """A matrix as blocks, uint8[out, bytes]. The gguf package packs no types of K: they get random blocks."""
    if not kind.endswith("K"):
        return gguf.quantize(values, GGMLQuantizationType[kind])
    block, _ = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = blocks_of(kind, values.size // block, lambda rng, count: rng.uniform(0.5, 1, count).astype(np.float16))
    # Factors for the deviation of the values, and a mean of 0: minima are the middle code times as large as scales.
    middle = {"Q4_K": 7.5, "Q5_K": 15.5, "Q6_K": 1}[kind]
    for at in HALVES[kind][1:]:
        blocks[:, at : at + 2].view(np.float16)[...] *= np.float16(middle)
    share = values.std() / dequantize(blocks, GGMLQuantizationType[kind]).std()
    for at in HALVES[kind]:
        halves = blocks[:, at : at + 2].view(np.float16)
        halves[...] = halves * share
    return blocks.reshape(len(values), -1)


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """gpt-oss with its experts in MXFP4. The dense checkpoint has the names of its bfloat16 release."""
    variant = BY_NAME["gpt-oss-mxfp4"]
    write_checkpoint(variant, 0, folder / "packed")
    tensors = read(folder / "packed")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:3], 32)
        values = E2M1[codes] * np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
        tensors[name.removesuffix("_blocks")] = values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
    (folder / "dense").mkdir()
    config = {key: value for key, value in variant.config.items() if key != "quantization_config"}
    (folder / "dense/config.json").write_text(json.dumps(config))
    write_safetensors(folder / "dense/model.safetensors", tensors)
    return folder / "packed", folder / "dense"


TABLE: dict[str, Writer] = {
    "compressed-tensors": compressed(
        stream(4), stream(4, symmetric=False), stream(2), stream(3, symmetric=False), stream(6, symmetric=False),
        CHANNELS, stream(8, symmetric=False),
        integers("channel"), integers("tensor"), integers("channel", symmetric=False), FP8["tensor"], FP8["channel"],
        FP8["block"], stream(7),
    ),
    "compressed-tensors fp4": compressed(*[NVFP4] * 3, *[MXFP4] * 2, *[NVFP4] * 2, *[MXFP4] * 3, *[NVFP4] * 4),
    "gguf": ggml,
}  # fmt: skip
MORE: dict[str, Writer] = {
    "awq": awq(32),
    "gptq": gptq(1, is_act=False),
    "fp8 block": fp8([128, 128], packers.fp8((128, 128), "weight_scale_inv")),
    "modelopt nvfp4": modelopt("NVFP4", packers.nvfp4(divides=False)),
    "awq one group": awq(-1),
    "gptq v2 desc_act": gptq(2, is_act=True),
    "fp8 tensor": fp8(None, packers.fp8((None, None), "weight_scale_inv")),
    "modelopt fp8": modelopt("FP8", packers.fp8((None, None))),
    "modelopt channel": modelopt("FP8_PER_CHANNEL_PER_TOKEN", packers.fp8((1, None))),
    "modelopt blocks": modelopt("FP8_PB_WO", packers.fp8((128, 128), four_axes=True)),
    "modelopt experts": modelopt_experts(),
    "modelopt mixed": modelopt_mixed(),
    "gpt-oss": gpt_oss,
    "gemma4 in 4 bits": unlike_layers("gemma4", stream(4)),
    "gemma4 with experts in fp8": unlike_layers("gemma4-moe", FP8["channel"]),
    "gemma3n in 8 bits": unlike_layers("gemma3n", integers("channel")),
}
SLOW = pytest.mark.slow  # each of these compiles an engine, and differs from a row of TABLE in its reader only
ROWS = [
    *(pytest.param(write, id=name, marks=[SLOW] * (name != "gguf")) for name, write in TABLE.items()),
    *(pytest.param(write, id=name, marks=SLOW) for name, write in MORE.items()),
]
# DeepSeek V4 as it is released: matrices of several blocks in fp8, experts in MXFP4
_RELEASE = BY_NAME["deepseek-v4-release"]
RELEASE = dataclasses.replace(
    _RELEASE, config=_RELEASE.config | {"expert_dtype": "fp4", "hidden_size": 160, "q_lora_rank": 136}
)
RELEASED_FP8 = re.compile(r".*\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|.*\.shared_experts\.w\d")


def released(folder: Path) -> tuple[Path, Path]:
    config = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    modules = [name.removesuffix(".weight") for name in tensor_shapes(RELEASE.config)]
    packs = {module: packers.released_fp8 for module in modules if RELEASED_FP8.fullmatch(module)}
    packs |= {module: packers.released_fp4 for module in modules if ".experts." in module}
    return model(config, packs, RELEASE)(folder)


# two engines of a model that compiles slowly
ROWS.append(pytest.param(released, id="deepseek v4", marks=[SLOW, pytest.mark.timeout(900)]))


@SLOW
def test_a_released_deepseek_v4_is_read_as_it_is_stored(tmp_path: Path) -> None:
    """Experts stay in fp4, and other matrices in fp8, with scales that are exact in bfloat16."""
    packed, plain = released(tmp_path)
    load = lambda path: load_model(EngineConfig(model=str(path), dtype="float32", quantized_activations="float")).params  # noqa: E731
    loaded = load(packed)
    assert {(weight.kind, weight.scales.dtype.name) for weight in quantized_parts(loaded)} == {
        ("fp4", "bfloat16"), ("fp8", "bfloat16")
    }  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, dense(loaded), load(plain))


def test_a_plan_knows_the_formats_of_deepseek_v4(tmp_path: Path) -> None:
    """Without weights, config.json alone says how many bytes they take. `expert_dtype` is outside of the method."""
    packed, _ = released(tmp_path)
    with_files = plan(str(packed), {"max_model_len": 64}, target="h200").weight_bytes
    (packed / "model.safetensors").unlink()
    assert plan(str(packed), {"max_model_len": 64}, target="h200").weight_bytes == with_files


OPTIONS: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,),
    "dtype": "float32", "enable_prefix_caching": False,
}  # fmt: skip


def answers(path: Path, **options: Any) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens, and the log-probabilities of all prompts' tokens."""
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts(LLAMA.config["vocab_size"], (4, 19, 33))]
    with sampling_programs(), LLM(str(path), **OPTIONS, **options) as llm:
        outputs = llm.generate(given, params, use_tqdm=False)
        assert llm.stats().compiles_after_ready == 0
    scores = [one.logprob for out in outputs for found in out.prompt_logprobs[1:] for one in found.values()]
    return [list(out.outputs[0].token_ids) for out in outputs], np.array(scores)


@pytest.mark.parametrize("write", ROWS)
def test_the_answers_of_the_dequantised_weights(write: Writer, tmp_path: Path) -> None:
    packed, plain = write(tmp_path)
    load = lambda path: load_model(EngineConfig(model=str(path), dtype="float32", quantized_activations="float")).params  # noqa: E731
    loaded = load(packed)
    assert len(list(quantized_parts(loaded))) >= 4  # of two layers
    jax.tree.map(np.testing.assert_array_equal, dense(loaded), load(plain))
    tokens, scores = answers(packed, quantized_activations="float")
    wanted, exact = answers(plain)
    assert tokens == wanted
    assert len({token for answer in wanted for token in answer}) > 8
    np.testing.assert_allclose(scores, exact, atol=2e-4, rtol=0)


NATIVE = [
    pytest.param(TABLE["gguf"], id="gguf"),  # int4 and int8, with one and two levels of scales and minima
    *(pytest.param((TABLE | MORE)[name], id=name, marks=SLOW) for name in ("awq", "gptq", "compressed-tensors fp4")),
]
# Rounding a row to 8 bits changes a product by 0.7% if the inputs are normal numbers (largest: 3 deviations), and by 2%
# if they are products of gate and up, whose largest is 8. Eight products in sequence make 2 to 6% of the deviation of
# the log-probabilities. Measured: 2.8 to 5.5%. Weights in a wrong order would make 140%.
CLOSE = 0.08


@pytest.mark.slow
@pytest.mark.parametrize("write", NATIVE)
def test_activations_in_8_bits_are_close(write: Writer, tmp_path: Path) -> None:
    """The default on CPU: the native kernel, which rounds activations."""
    packed, plain = write(tmp_path)
    loaded = load_model(EngineConfig(model=str(packed), dtype="float32")).params
    assert {weight.layout for weight in quantized_parts(loaded)} == {"tiles"}
    del loaded
    _, exact = answers(plain)
    _, scores = answers(packed)
    deviation = np.sqrt(((scores - exact) ** 2).mean())
    assert 0 < deviation < CLOSE * exact.std()


# Rounding to e4m3 changes a number by 2.3% (root of the mean square), about 4 times as much. Measured: 17%.
CLOSE_FP8 = 0.25


@SLOW
@pytest.mark.parametrize("write", [pytest.param(MORE[name], id=name) for name in ("fp8 block", "modelopt channel")])
def test_activations_in_fp8_are_close(write: Writer, tmp_path: Path) -> None:
    packed, plain = write(tmp_path)
    loaded = load_model(EngineConfig(model=str(packed), dtype="float32", quantized_activations="fp8")).params
    assert {(one.kind, one.activations) for one in quantized_parts(loaded)} == {("fp8", "fp8")}
    del loaded
    _, exact = answers(plain)
    _, scores = answers(packed, quantized_activations="fp8")
    deviation = np.sqrt(((scores - exact) ** 2).mean())
    assert 0 < deviation < CLOSE_FP8 * exact.std()
