"""Records small checkpoints packed by the formats' own libraries, and the SHA-256 of their dequantised weights.

    pip download --no-deps --no-binary :all: autoawq gptqmodel   # then unpack both archives into SOURCES
    pip download --no-deps nvidia-modelopt                       # then unpack the wheel into SOURCES/modelopt
    pip install --target SOURCES/extra --no-deps device-smi logbar tokenicer defuser pypcre \
        threadpoolctl omegaconf antlr4-python3-runtime==4.9.3 pulp
    PYTHONPATH=.:SOURCES/extra python tests/golden/record_quantized.py SOURCES

Needs torch, transformers and compressed-tensors. The packers of autoawq, gptqmodel and ModelOpt are imported from their
sources without the packages' own __init__, which would compile or load GPU kernels.
Writes NAME.safetensors, cases.json and presets.json to tests/golden/quantized. cases.json names the versions.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parent / "quantized"
LAYER = "model.layers.0.mlp."


@dataclasses.dataclass
class Case:
    """One checkpoint: its quantization_config, its tensors, and the dequantised matrices [out, in] by name."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    expected: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    library: str = ""

    @property
    def is_fp4(self) -> bool:
        """True if the codes are E2M1."""
        return "fp4" in json.dumps(self.config).lower()


def weights(outputs: int, inputs: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed numbers, with a few large ones and a mean that differs between outputs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, inputs, generator=generator) * 0.05
    values[seed % outputs] *= 6
    return (values + torch.randn(outputs, 1, generator=generator) * 0.02).to(dtype)


def without_init(package: str, folder: Path, *inner: str) -> types.ModuleType:
    """Make packages importable without their __init__. Returns the outermost package."""
    for name in (package, *inner):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    return sys.modules[package]


def version_of(folder: Path) -> str:
    """Version in a source archive's PKG-INFO or a wheel's METADATA."""
    found = next(iter([*folder.glob("PKG-INFO"), *folder.glob("*.dist-info/METADATA")]))
    return re.search(r"^Version: (\S+)", found.read_text(), re.M).group(1)


# -- AWQ ------------------------------------------------------------------------------------------------------------


def ranges(values: torch.Tensor, group: int, bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 scales and integer zeros [out, groups], rounded to nearest, of unsigned codes."""
    groups = values.reshape(values.shape[0], -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(-1) * 2 / top
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(1, top)  # v1 of GPTQ cannot store the zero 0
    return scales.half(), zeros.int()


def awq_cases(folder: Path) -> dict[str, Case]:
    without_init("awq", folder, "awq.modules", "awq.modules.linear", "awq.utils")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    cases = {}
    for name, group in (("awq", 32), ("awq-one-group", -1)):
        config = {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["gate"],
        }  # fmt: skip
        case = Case(config, library=f"autoawq {version_of(folder)}")
        for seed, (module, outputs, inputs) in enumerate((("gate_proj", 32, 64), ("down_proj", 64, 96))):
            values, size = weights(outputs, inputs, seed), inputs if group == -1 else group
            scales, zeros = ranges(values, size, 4, symmetric=False)
            linear = torch.nn.Linear(inputs, outputs, bias=seed == 0)
            # The packer rounds and does not clip. Clip first, to the numbers that the codes represent.
            wide, middle = (t.float().repeat_interleave(size, 1) for t in (scales, zeros))
            codes = (values / wide + middle).round().clamp(0, 15)
            linear.weight.data = (codes - middle) * wide
            scales, zeros = scales.T.contiguous(), zeros.T.contiguous()
            packed = WQLinear_GEMM.from_linear(linear, 4, size, scales=scales, zeros=zeros)
            add(case, LAYER + module, packed.state_dict())
            dense = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, size)
            case.expected[LAYER + module] = dense.T
        cases[name] = case
    return cases


# -- GPTQ -----------------------------------------------------------------------------------------------------------


def gptq_cases(folder: Path) -> dict[str, Case]:
    stub = without_init("gptqmodel", folder, "gptqmodel.models", "gptqmodel.nn_modules")
    stub.DEBUG_ON, stub.DEVICE_THREAD_POOL = False, None
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    def pack(case: Case, module: str, shape: tuple[int, int], bits: int, group: int, seed: int) -> None:
        symmetric, is_act = case.config["sym"], case.config["desc_act"]
        outputs, inputs = shape
        values = weights(outputs, inputs, seed)
        index = torch.arange(inputs) // group
        if is_act:
            index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        order = torch.argsort(index, stable=True)
        scales, zeros = ranges(values[:, order], group, bits, symmetric=symmetric)
        wide, middle = (t.float()[:, index] for t in (scales, zeros))
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = ((values / wide + middle).round().clamp(0, 2**bits - 1) - middle) * wide
        packed = TorchLinear(
            bits=bits, group_size=group, sym=symmetric, desc_act=is_act, in_features=inputs, out_features=outputs
        )
        packed.pack_original(linear, scales=scales, zeros=zeros, g_idx=index.int())
        packed.post_init()
        case.expected[module] = packed.dequantize_weight().T.half()
        if case.config["checkpoint_format"] == "gptq":
            convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits))
        parts = ("qweight", "qzeros", "scales", "g_idx")
        add(case, module, {name: value for name, value in packed.state_dict().items() if name in parts})

    class QuantizeConfig:  # fields that the conversion reads
        pack_dtype = torch.int32

        def __init__(self, bits: int):
            self.bits = bits

    def case_of(bits: int, group: int, version: str, *, symmetric: bool, is_act: bool, **more: Any) -> Case:
        config = {
            "quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version, "sym": symmetric,
            "desc_act": is_act, "pack_dtype": "int32", **more,
        }  # fmt: skip
        case = Case(config, library=f"gptqmodel {version_of(folder)}")
        pack(case, LAYER + "up_proj", (32, 96), bits, 96 if group == -1 else group, bits)
        return case

    cases = {
        "gptq-2": case_of(2, 32, "gptq", symmetric=True, is_act=False),
        "gptq-3": case_of(3, 32, "gptq", symmetric=False, is_act=False),
        "gptq-3-v2-act": case_of(3, 32, "gptq_v2", symmetric=False, is_act=True),
        "gptq-4": case_of(4, 32, "gptq", symmetric=True, is_act=False),
        "gptq-4-act": case_of(4, 32, "gptq", symmetric=False, is_act=True),
        "gptq-4-v2": case_of(4, -1, "gptq_v2", symmetric=False, is_act=False),
        "gptq-8": case_of(8, 32, "gptq", symmetric=False, is_act=True),
        "gptq-8-v2": case_of(8, 32, "gptq_v2", symmetric=True, is_act=False),
    }
    dynamic = {r"+:.*\.down_proj": {"bits": 8, "group_size": 16}, r"-:.*\.gate_proj": {}}
    mixed = case_of(4, 32, "gptq", symmetric=True, is_act=False, dynamic=dynamic, lm_head=True)
    pack(mixed, LAYER + "down_proj", (32, 64), 8, 16, 1)
    pack(mixed, "lm_head", (64, 32), 4, 32, 2)
    mixed.tensors[LAYER + "gate_proj.weight"] = weights(8, 8, 3, torch.float16)
    return cases | {"gptq-dynamic": mixed}


# -- compressed-tensors ---------------------------------------------------------------------------------------------


def compressed_cases() -> dict[str, Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    library = f"compressed-tensors {importlib.metadata.version('compressed-tensors')}"

    def group_of(form: str, targets: list[str], inputs: dict | None = None, **args: Any) -> dict[str, Any]:
        return {"targets": targets, "format": form, "weights": args, "input_activations": inputs}

    def pack(case: Case, module: str, group: dict[str, Any], shape: tuple[int, int], seed: int, dtype: Any) -> None:
        activations = group["input_activations"]
        scheme = QuantizationScheme(
            targets=group["targets"], weights=QuantizationArgs(**group["weights"]), format=group["format"],
            input_activations=None if activations is None else QuantizationArgs(**activations),
        )  # fmt: skip
        values, args = weights(*shape, seed, dtype), scheme.weights
        blocks, axes = in_blocks(values, args)
        low, high = blocks.amin(axes), blocks.amax(axes)
        factor = generate_gparam(values.amin(), values.amax()) if args.strategy == "tensor_group" else None
        scale, zero = calculate_qparams(low, high, args, factor)
        scale = (scale if args.scale_dtype else scale.to(dtype)).reshape(low.shape)
        state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero.reshape(scale.shape)}
        if factor is not None:
            state["weight_global_scale"] = factor
        compressor = BaseCompressor.load_from_registry(group["format"])
        stored = compressor.compress(state, scheme)
        case.expected[module] = compressor.decompress(stored, scheme)["weight"]
        add(case, module, stored)

    def in_blocks(values: torch.Tensor, args: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        outputs, inputs = values.shape
        match args.strategy:
            case "tensor":
                return values.reshape(1, -1), (1,)
            case "channel":
                return values.reshape(outputs, 1, inputs), (2,)
            case "group" | "tensor_group":
                return values.reshape(outputs, -1, args.group_size), (2,)
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(values, (0, -inputs % columns, 0, -outputs % rows))
        return padded.reshape(padded.shape[0] // rows, rows, -1, columns), (1, 3)

    def case_of(groups: dict[str, Any], modules: list[tuple], dtype: Any = torch.bfloat16, **more: Any) -> Case:
        forms = {group["format"] for group in groups.values()}
        config = {
            "quant_method": "compressed-tensors", "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": groups, **more,
        }  # fmt: skip
        case = Case(config, library=library)
        for seed, (module, group, shape) in enumerate(modules):
            pack(case, module, groups[group], shape, seed, dtype)
        return case

    token = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    static = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    four = functools.partial(dict, num_bits=4, type="int")
    eight = functools.partial(dict, num_bits=8, type="int")
    real = functools.partial(dict, num_bits=8, type="float", symmetric=True)
    packed, plain, floats, up = "pack-quantized", "int-quantized", "float-quantized", LAYER + "up_proj"
    everything = ["Linear"]
    one = lambda group, shape, **more: case_of({"group_0": group}, [(up, "group_0", shape)], **more)  # noqa: E731
    cases = {
        "ct-w4": one(group_of(packed, everything, **four(symmetric=True, strategy="group", group_size=32)), (32, 96)),
        "ct-w4-asymmetric": one(
            group_of(packed, everything, **four(symmetric=False, strategy="group", group_size=32)), (36, 96),
            dtype=torch.float16,
        ),
        "ct-w8": one(group_of(packed, everything, **eight(symmetric=True, strategy="channel")), (32, 64)),
        "ct-w8-asymmetric": one(
            group_of(packed, everything, **eight(symmetric=False, strategy="group", group_size=32)), (32, 64)
        ),
        "ct-w8a8": one(group_of(plain, everything, token, **eight(symmetric=True, strategy="channel")), (32, 64)),
        "ct-int8-asymmetric": one(group_of(plain, everything, **eight(symmetric=False, strategy="channel")), (32, 64)),
        "ct-int8-tensor": one(group_of(plain, everything, **eight(symmetric=True, strategy="tensor")), (32, 64)),
        "ct-fp8": one(group_of(floats, everything, static, **real(strategy="tensor")), (32, 64), dtype=torch.float32),
        "ct-fp8-channel": one(group_of(floats, everything, **real(strategy="channel")), (32, 64)),
        "ct-fp8-block": one(
            group_of(floats, everything, **real(strategy="block", block_structure=[128, 128])), (136, 160),
            dtype=torch.float32,
        ),
    }
    for bits, symmetric in ((1, True), (2, True), (2, False), (3, True), (3, False), (5, True), (6, False), (7, True)):
        width = functools.partial(dict, num_bits=bits, type="int", strategy="group", group_size=32)
        name = f"ct-w{bits}" if symmetric else f"ct-w{bits}-asymmetric"
        cases[name] = one(group_of(packed, everything, **width(symmetric=symmetric)), (36, 96), dtype=torch.float16)
    cases["ct-w3-channel"] = one(
        group_of(packed, everything, num_bits=3, type="int", symmetric=True, strategy="channel"), (20, 64)
    )
    halves = functools.partial(dict, num_bits=4, type="float", symmetric=True, dynamic=False)
    nvfp4 = halves(strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
    local = nvfp4 | {"dynamic": "local", "observer": "static_minmax"}
    cases["ct-nvfp4"] = one(group_of("nvfp4-pack-quantized", everything, local, **nvfp4), (32, 96))
    cases["ct-nvfp4"].tensors[f"{up}.input_global_scale"] = torch.tensor([321.0])
    cases["ct-mxfp4"] = one(
        group_of(
            "mxfp4-pack-quantized", everything, **halves(strategy="group", group_size=32, scale_dtype="torch.uint8")
        ),
        (32, 96),
    )
    preset = QuantizationConfig(config_groups={"W4A16": everything}).config_groups["W4A16"]
    args = {"num_bits": preset.weights.num_bits, "type": "int", "strategy": "group", "group_size": 128}
    cases["ct-preset"] = one(group_of(packed, everything, **args), (8, 256))
    cases["ct-preset"].config["config_groups"] = {"W4A16": everything}
    kv = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    mixed = case_of(
        {
            "group_0": group_of(packed, everything, **four(symmetric=True, strategy="group", group_size=32)),
            "group_1": group_of(floats, [r"re:.*\.down_proj$"], **real(strategy="channel")),
            "group_2": group_of(plain, [LAYER + "gate_proj"], token, **eight(symmetric=True, strategy="channel")),
        },
        [
            (up, "group_0", (32, 64)), (LAYER + "down_proj", "group_1", (16, 64)),
            (LAYER + "gate_proj", "group_2", (16, 64)),
        ],
        kv_cache_scheme=kv,
    )  # fmt: skip
    mixed.tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.03])
    mixed.tensors["model.layers.0.self_attn.v_scale"] = torch.tensor([0.05])
    mixed.tensors["lm_head.weight"] = weights(8, 8, 3, torch.bfloat16)
    return cases | {"ct-mixed": mixed}


def presets() -> dict[str, Any]:
    """The config group of every preset, by name, with the format that the library chooses for it."""
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme

    found = {}
    for name in PRESET_SCHEMES:
        scheme = preset_name_to_scheme(name, ["Linear"])
        group = json.loads(scheme.model_dump_json(exclude_none=True))
        found[name] = group | {"format": infer_module_format(torch.nn.Linear, scheme).value}
    return found


# -- fp8 ------------------------------------------------------------------------------------------------------------


def fp8_cases() -> dict[str, Case]:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    cases = {}
    for name, block, shape in (("fp8-block", (128, 128), (128, 256)), ("fp8-tensor", None, (32, 64))):
        quantizer = types.SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block))
        config = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": None if block is None else list(block), "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
        case = Case(config, library=f"transformers {importlib.metadata.version('transformers')}")
        module = LAYER + "up_proj"
        stored = Fp8Quantize(quantizer).convert({f"{module}.weight": weights(*shape, 0)})
        case.tensors |= {key: value.contiguous() for key, value in stored.items()}
        pair = {"weight": [stored[f"{module}.weight"]], "weight_scale_inv": [stored[f"{module}.weight_scale_inv"]]}
        case.expected[module] = Fp8Dequantize(quantizer).convert(pair)["weight"]
        cases[name] = case
    return cases


def modelopt_cases(folder: Path) -> dict[str, Case]:
    quantization = "modelopt.torch.quantization"
    inner = (quantization, f"{quantization}.qtensor", f"{quantization}.backends")
    stub = without_init("modelopt", folder, "modelopt.torch", *inner)
    stub.__version__ = version_of(folder)
    sys.path.append(str(folder))  # for modelopt_recipes
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    cases = {}
    for name, algorithm, axis in (("modelopt-fp8", "FP8", None), ("modelopt-channel", "FP8_PER_CHANNEL_PER_TOKEN", 0)):
        quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head*"]}
        config = {"quant_method": "modelopt", "quantization": quantization}
        case = Case(config, library=f"nvidia-modelopt {version_of(folder)}")
        tensor, scale = FP8QTensor.quantize(weights(32, 64, 5), axis=axis)
        module = LAYER + "up_proj"
        case.expected[module] = tensor.dequantize(torch.float32, scale=scale)
        scale = scale.reshape(()) if axis is None else scale.reshape(-1)
        add(case, module, {"weight": tensor._quantized_data, "weight_scale": scale, "input_scale": torch.tensor(0.02)})
        cases[name] = case
    quantization = {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head", "*.gate"]
    }  # fmt: skip
    case = Case({"quant_method": "modelopt", "quantization": quantization}, library=case.library)
    for seed, module in enumerate(("gate_proj", "up_proj")):  # they have different factors
        tensor, scale, factor = NVFP4QTensor.quantize(weights(32, 96, seed), 16)
        dense = tensor.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
        case.expected[LAYER + module] = dense
        parts = {"weight": tensor._quantized_data, "weight_scale": scale, "weight_scale_2": factor.squeeze()}
        add(case, LAYER + module, parts | {"input_scale": torch.tensor(0.02)})
    return cases | {"modelopt-nvfp4": case}


def add(case: Case, module: str, tensors: dict[str, torch.Tensor]) -> None:
    case.tensors |= {f"{module}.{name}": value.detach().contiguous() for name, value in tensors.items()}


def main(sources: Path) -> None:
    find = lambda pattern: next(iter(sorted(sources.glob(pattern))))  # noqa: E731
    cases = compressed_cases() | fp8_cases() | awq_cases(find("autoawq-*/")) | gptq_cases(find("gptqmodel-*/"))
    cases |= modelopt_cases(sources / "modelopt")
    OUT.mkdir(exist_ok=True)
    table = {}
    for name, case in sorted(cases.items()):
        save_file(case.tensors, OUT / f"{name}.safetensors")
        matrices = {}
        for module, dense in sorted(case.expected.items()):
            if case.is_fp4:  # the libraries differ in the sign of zeros
                dense = dense + 0.0
            data = dense.contiguous().view(torch.uint8).numpy().tobytes()
            dtype = str(dense.dtype).removeprefix("torch.")
            digest = hashlib.sha256(data).hexdigest()
            matrices[module] = {"shape": list(dense.shape), "dtype": dtype, "sha256": digest}
        table[name] = {"library": case.library, "quantization_config": case.config, "expected": matrices}
    (OUT / "presets.json").write_text(json.dumps(presets(), indent=1) + "\n")
    (OUT / "cases.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
