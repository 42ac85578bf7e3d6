"""Programs of real models with quantised weights, compiled for an H200 without the device.

The models are checkpoints with headers and no data. Weight bytes are counted in the arguments that kernels read.
"""

import dataclasses
import json
import math
import re

import pytest

from jpaged import planning
from jpaged.loading.model_description import describe
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.memory.weight_bytes import tree_bytes, weight_parts
from jpaged.runtime.placement import Placement
from jpaged.runtime.prediction.program_text import Program
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.output_programs import SampleShape
from tests.kernels.machine_code import DUMP_PTX, kernels_in, tool
from tests.support.deviceless import H200, marks
from tests.support.hollow_checkpoint import write_headers
from tests.support.published_configs import LLAMA, LLAMA_PARTS, QWEN_MOE

pytestmark = [pytest.mark.codegen, *marks(H200)]

LAYERS = LLAMA["num_hidden_layers"]
HIDDEN, INTERMEDIATE, KV, VOCAB = 4096, 14336, 1024, 128256
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}  # fmt: skip
LAYER = 2 * sum(math.prod(shape) for shape in MATRICES.values())  # bytes in bf16
ROWS, BLOCKS = 16, 128


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A scheme of compressed-tensors, as published checkpoints of the model have it."""

    bits: int
    group: int | None  # None: all inputs
    is_float: bool = False

    @property
    def config(self):
        """quantization_config."""
        weights = {
            "num_bits": self.bits, "type": "float" if self.is_float else "int", "symmetric": True,
            "strategy": "group" if self.group else "channel", "group_size": self.group,
        }  # fmt: skip
        form = "float-quantized" if self.is_float else "pack-quantized"
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": groups}

    def tensors(self, name, shape):
        """dtype and shape of the tensors of a matrix."""
        outputs, inputs = shape
        scale = "BF16", (outputs, inputs // (self.group or inputs))
        if self.is_float:
            return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.weight_scale": scale}
        packed = "I32", (outputs, inputs * self.bits // 32)
        return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale, f"{name}.weight_shape": ("I64", (2,))}


W4A16, W8A16, FP8 = Scheme(4, 128), Scheme(8, 128), Scheme(8, None, is_float=True)


def write_llama(folder, scheme, layers):
    """The first layers of Llama 3.1 8B."""
    tensors = {f"{name}.weight": ("BF16", (VOCAB, HIDDEN)) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = "BF16", (HIDDEN,)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = "BF16", (HIDDEN,)
        for name, shape in MATRICES.items():
            tensors |= scheme.tensors(prefix + name, shape)
    write_headers(folder, LLAMA | {"num_hidden_layers": layers, "quantization_config": scheme.config}, tensors)
    return folder


# openai/gpt-oss-20b with one layer
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "intermediate_size": 2880, "layer_types": ["full_attention"],
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 1, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def write_gpt_oss(folder):
    hidden, heads, kv, experts = 2880, 64 * 64, 8 * 64, 32
    plain = {
        "model.embed_tokens.weight": (201088, hidden), "lm_head.weight": (201088, hidden),
        "model.norm.weight": (hidden,),
    }  # fmt: skip
    shapes = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden), "self_attn.q_proj.bias": (heads,),
        "self_attn.k_proj.weight": (kv, hidden), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden), "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, heads), "self_attn.o_proj.bias": (hidden,), "self_attn.sinks": (64,),
        "mlp.router.weight": (experts, hidden), "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * hidden), "mlp.experts.down_proj_bias": (experts, hidden),
    }  # fmt: skip
    plain |= {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    tensors = {name: ("BF16", shape) for name, shape in plain.items()}
    for name, outputs in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
        prefix = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{prefix}_blocks"] = "U8", (experts, outputs, hidden // 32, 16)
        tensors[f"{prefix}_scales"] = "U8", (experts, outputs, hidden // 32)
    write_headers(folder, GPT_OSS, tensors)


def write_qwen_moe(folder):
    """Qwen3 30B A3B with one layer, for `--quantization int4`: only its config."""
    (folder / "config.json").write_text(json.dumps(QWEN_MOE | {"num_hidden_layers": 1}))


class PtxPlacement(Placement):
    """Also writes the PTX of each kernel."""

    @property
    def compiler_options(self):
        return super().compiler_options | DUMP_PTX


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, and the build that it is of."""

    build: object
    program: object

    @property
    def text(self):
        return self.program.as_text()

    def weight_bytes(self, kernel):
        """Bytes of the weights that are operands of the kernels of a name, each time that a kernel reads them."""
        shapes = dict(re.findall(r"^  %(weights_\S+) = (\S+) parameter", self.text, re.MULTILINE))
        renamed = dict(re.findall(r"^  %(\S+) = \S+ bitcast\(%([\w.]+)\)", self.text, re.MULTILINE))
        total = 0
        for operation in Program(self.text).operations():
            if operation.kernel == kernel:
                names = [renamed.get(name, name) for name in operation.operands]
                total += sum(array_bytes(shapes[name]) for name in names if name in shapes)
        return total


def array_bytes(shape):
    """Bytes of an array of HLO."""
    item, dimensions = re.match(r"[a-z]+(\d+)\w*\[([\d,]*)\]", shape).groups()
    return int(item) // 8 * math.prod(int(n) for n in dimensions.split(",") if n)


def compiled(folder, kind, index=0, **options):
    """The program of a kind for ROWS rows. folder: of the model. index: of the program, by size."""
    sizes = {"max_num_seqs": ROWS, "max_num_batched_tokens": 64, "max_model_len": 2048}
    config = planning.engine_config(str(folder), sizes | options)
    model = describe(config, H200.platform)
    placed = Placement.for_target(H200)
    placement = PtxPlacement(placed.device, placed.sharding, str(folder / "dump"))
    build = Blueprint.draw(ServedModel(model.spec, model.params), config, placement).with_blocks(BLOCKS)
    shapes = [shape for shape in build.blueprint.program_shapes if isinstance(shape, kind) and shape.rows == ROWS]
    with H200.tracing():
        return Compiled(build, build.compile(shapes[index]))


def check_no_copy(made, most):
    """No array but the arguments has `most` numbers. A loop, whose arrays are not looked at, would read matrices."""

    def largest(shape):
        return max((math.prod(map(int, found.split(","))) for found in re.findall(r"\[([\d,]+)\]", shape)), default=1)

    program = Program(made.text)
    assert not program.loops()
    # the write of keys and values returns the pages, in place
    computed = [one for one in program.operations() if one.kernel != "write_qkv"]
    assert not [(one.name, one.shape) for one in computed if largest(one.shape) >= most]


def check_arguments(made):
    """The bytes that `jpaged plan` counts are those of the program's arguments."""
    blueprint = made.build.blueprint
    state = made.build.state_shapes()
    counted = tree_bytes(blueprint.model.params) + BLOCKS * blueprint.block_bytes
    counted += blueprint.table_bytes - tree_bytes(state.sampling)  # a forward program does not take it
    assert made.program.memory_analysis().argument_size_in_bytes == pytest.approx(counted, rel=1e-4)


CASES = [
    # most bytes, as a share of bf16's. A scale in bf16 for 128 codes adds 0.125 bits
    (W4A16, 0.2579), (pytest.param(W8A16, 0.5079, marks=pytest.mark.slow)),
    (pytest.param(FP8, 0.5003, marks=pytest.mark.slow)),
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(("scheme", "most"), CASES, ids=str)
def test_a_decode_step_reads_the_codes_and_no_copy_of_a_matrix(scheme, most, tmp_path):
    """One layer. Four kernels read its matrices, each once, and spill no registers."""
    made = compiled(write_llama(tmp_path, scheme, 1), ForwardShape)
    read = made.weight_bytes("quantized_dot")
    names = [operation.kernel for operation in Program(made.text).operations()]
    assert names.count("quantized_dot") == 4  # qkv, o, gate and up, down
    parts = weight_parts(made.build.blueprint.model.params)
    assert read == parts["attention"] + parts["feed-forward"]
    assert read <= most * LAYER
    check_no_copy(made, HIDDEN * HIDDEN // 8)
    check_arguments(made)
    kernels = kernels_in(tmp_path / "dump", only=r"quantized_dot\w*")
    assert len(kernels) >= 3
    assert {kernel.spilled_bytes for kernel in kernels.values()} == {0}
    temporaries = made.program.memory_analysis().temp_size_in_bytes
    assert temporaries < HIDDEN * HIDDEN // 8  # bytes; the smallest matrix has 32 MiB in bf16
    print(f"{scheme}: {read:,} bytes of {LAYER:,} a layer ({read / LAYER:.4f}); {temporaries:,} bytes of temporaries")
    heads = parts["embedding"] + parts["output matrix"]
    ours, bf16 = (heads + LAYERS * size for size in (read, LAYER))
    print(f"{LAYERS} layers, embeddings and lm_head: {ours:,} bytes of {bf16:,} ({ours / bf16:.4f})")
    for name, kernel in kernels.items():
        print(f"{name}: {kernel.blocks} programs, {kernel.registers} registers, {kernel.resident_blocks} resident")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_layer_adds_its_bytes_and_no_temporaries(tmp_path):
    """So one layer shows what 32 read. The output matrix is another program's, and is read once by it in bf16."""
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    one, three = (
        compiled(write_llama(tmp_path / name, W4A16, n), ForwardShape) for name, n in (("one", 1), ("three", 3))
    )  # fmt: skip
    check_no_copy(three, HIDDEN * HIDDEN // 8)
    assert three.weight_bytes("quantized_dot") == 3 * one.weight_bytes("quantized_dot")
    temporaries = [made.program.memory_analysis().temp_size_in_bytes for made in (one, three)]
    assert temporaries[1] <= 1.1 * temporaries[0]
    sample = compiled(tmp_path / "one", SampleShape)
    moved = sum(traffic.read for traffic in Program(sample.text).traffic())
    assert LLAMA_PARTS["output matrix"] <= moved < 1.05 * LLAMA_PARTS["output matrix"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_with_activations_in_fp8(tmp_path):
    """Four products of fp8 a layer and no copy of a matrix: through Triton for 16 tokens, and Mosaic GPU for 512.

    Attention of the 512 tokens is Mosaic GPU's, too.
    """
    options = {"quantized_activations": "fp8", "max_num_batched_tokens": 512}
    decode, prompt = (compiled(write_llama(tmp_path, FP8, 1), ForwardShape, index, **options) for index in (0, -1))
    parts = weight_parts(decode.build.blueprint.model.params)
    assert decode.weight_bytes("quantized_dot") == parts["attention"] + parts["feed-forward"]
    check_no_copy(decode, HIDDEN * HIDDEN)
    assert prompt.text.count('custom_call_target="mosaic_gpu') == 4 + 1
    assert 'name = "quantized_dot"' not in prompt.text
    check_no_copy(prompt, HIDDEN * HIDDEN)


EXPERTS = [
    # matrices [outputs, inputs] of an expert; most bytes of the layer's experts, as a share of bf16's
    (write_gpt_oss, {}, [(5760, 2880), (2880, 2880)], 32, 0.2813),              # 4 bits, and 16 for 32 codes
    (write_qwen_moe, {"quantization": "int4"}, [(1536, 2048), (2048, 768)], 128, 0.2891),  # 4 bits, and 40 for 64
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(("write", "options", "shapes", "num", "most"), EXPERTS, ids=["gpt-oss", "qwen3-moe"])
def test_experts_are_multiplied_in_their_codes(write, options, shapes, num, most, tmp_path):
    """Two kernels a layer read them, in the one CUDA graph, without a loop. No array is as large as a matrix.

    As XLA operations the layer has two loops, and 48 MB of temporaries for gpt-oss.
    """
    write(tmp_path)
    made = compiled(tmp_path, ForwardShape, **options)
    names = [operation.kernel for operation in Program(made.text).operations()]
    assert names.count("quantized_grouped_dot") == 2
    check_no_copy(made, max(map(math.prod, shapes)))
    bf16 = 2 * num * sum(map(math.prod, shapes))
    read = made.weight_bytes("quantized_grouped_dot")
    assert read <= most * bf16
    (commands,) = (tmp_path / "dump").glob("*thunk_sequence_after_thunk_passes.txt")
    assert len(re.findall(r"^\d+: k", commands.read_text(), re.MULTILINE)) == 1
    kernels = kernels_in(tmp_path / "dump", only=r"quantized\w+")
    assert {kernel.spilled_bytes for kernel in kernels.values()} == {0}
    temporaries = made.program.memory_analysis().temp_size_in_bytes
    print(f"{tmp_path.name}: {read:,} bytes of {bf16:,} ({read / bf16:.4f}); {temporaries:,} bytes of temporaries")
    for name, kernel in kernels.items():
        print(f"{name}: {kernel.blocks} programs, {kernel.registers} registers, {kernel.resident_blocks} resident")
