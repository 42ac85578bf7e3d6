"""Records how compressed-tensors decompresses weights in NVFP4 and MXFP4.

    python tools/record_fp4.py      # needs the extra `reference` (torch, compressed-tensors)

The weights are random numbers that the library packs, or random bytes with extreme scales. The file
tests/golden/quantized/fp4.json has the packed tensors and the bits of the decompressed tensors, in bfloat16.
tests/loading/test_fp4.py compares jpaged's tensors with them.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.checkpoints import GOLDEN

OUT, IN = 6, 64
NVFP4 = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
MXFP4 = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)
COMPRESSORS = {"nvfp4": (NVFP4PackedCompressor, NVFP4), "mxfp4": (MXFP4PackedCompressor, MXFP4)}


def main() -> None:
    torch.manual_seed(0)
    cases = []
    for kind, (compressor, args) in COMPRESSORS.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        for name, state in (("packed by the library", packed(kind, compressor, scheme)), ("extremes", extremes(kind))):
            weight = compressor.decompress(state, scheme)["weight"]
            assert weight.dtype == torch.bfloat16
            tensors = {key: bits(tensor) for key, tensor in (state | {"weight": weight}).items()}
            cases.append({"kind": kind, "name": name, "out": OUT, "in": IN, **tensors})
    found = {"compressed_tensors": compressed_tensors.__version__, "cases": cases}
    (GOLDEN / "quantized" / "fp4.json").write_text(json.dumps(found, indent=1) + "\n")


def packed(kind: str, compressor: Any, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """Pack normally distributed weights, with the largest magnitude of each group as 6."""
    weight = torch.randn(OUT, IN) * 0.02
    group = scheme.weights.group_size
    scale = weight.reshape(OUT, -1, group).abs().amax(-1) / 6
    if kind == "mxfp4":
        return compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    factor = (448 / scale.max()).reshape(1)
    scale = (scale * factor).to(torch.float8_e4m3fn).to(torch.float32)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": factor}
    return compressor.compress(state, scheme)


def extremes(kind: str) -> dict[str, torch.Tensor]:
    """Random codes with the smallest and largest scales, and some between.

    MXFP4 has no scale bytes 0 and 1 here: XLA on CPU rounds numbers below 2^-126 to 0.
    """
    codes = torch.randint(0, 256, (OUT, IN // 2), dtype=torch.uint8)
    if kind == "mxfp4":
        scale = torch.tensor([2, 3, 60, 119, 120, 126, 127, 128, 134, 200, 253, 254], dtype=torch.uint8)
        return {"weight_packed": codes, "weight_scale": scale.reshape(OUT, -1)}
    scale = torch.tensor([0, 1, 2, 7, 8, 9, 15, 16, 56, 57, 100, 119, 120, 125, 126, 63], dtype=torch.uint8)
    scale = scale.repeat(2)[: OUT * IN // 16].reshape(OUT, -1).view(torch.float8_e4m3fn)
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": torch.tensor([2688.7])}


def bits(tensor: torch.Tensor) -> str:
    """The bytes of a tensor in base64."""
    return base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode()


if __name__ == "__main__":
    main()
