"""Reads checkpoints of `jpaged quantize` with Transformers and compressed-tensors, and measures them.

    python tools/record_quantized.py FOLDER [FOLDER ...] --model DENSE --text FILE --out RESULTS.json

Needs torch, Transformers and compressed-tensors. It compares the dequantised weights with an unpacking in numpy, bit by
bit, and scores the text in float32, in windows as `jpaged bench quality` does. The dense model is printed first.
"""

import argparse
import json
import math
import pathlib
from importlib import metadata
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

WINDOW = 1024


def unpack(words: np.ndarray, count: int) -> np.ndarray:
    """Unpack int32[rows, n] to 4-bit codes minus 8, float32[rows, count]."""
    nibbles = words.view("<u4")[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return nibbles.reshape(words.shape[0], -1)[:, :count].astype(np.float32) - 8


def dequantized(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The quantised matrices in float32, by the names of the dense tensors."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = {}
    for name, scales in tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        stem, scales = name.removesuffix("_scale"), scales.float().numpy()
        if stem in tensors:
            codes = tensors[stem].float().numpy()
        else:
            codes = unpack(tensors[f"{stem}_packed"].numpy(), int(tensors[f"{stem}_shape"][1]))
        found[stem] = codes * np.repeat(scales, codes.shape[1] // scales.shape[1], 1)
    return found


def scale_dtype(folder: pathlib.Path) -> torch.dtype:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return next(file.get_tensor(name).dtype for name in file.keys() if name.endswith("_scale"))  # noqa: SIM118


def perplexity(model: torch.nn.Module, windows: list[list[int]]) -> float:
    total, count = 0.0, 0
    for window in windows:
        ids = torch.tensor([window])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--model", required=True, help="folder of the dense model")
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--characters", type=int, help="score only this many characters of the text")
    arguments = parser.parse_args()

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer.encode(arguments.text.read_text("utf-8")[: arguments.characters], add_special_tokens=False)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    load = transformers.AutoModelForCausalLM.from_pretrained
    dense = perplexity(load(arguments.model, dtype=torch.float32), windows)
    print(f"{'dense':20} {dense:8.4f}", flush=True)
    rows = []
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "compressed-tensors")}
    tokens = sum(len(window) - 1 for window in windows)
    result = {"text": arguments.text.name, "characters": arguments.characters, "tokens": tokens}
    result |= {"perplexity_dense": dense, "rows": rows}
    for folder in arguments.folders:
        expected = dequantized(folder)
        # The first forward pass decompresses the weights. Activations are rounded if the scheme quantises them.
        model = load(folder, dtype=torch.float32)
        found = perplexity(model, windows)
        weights = model.state_dict()
        equal = [np.array_equal(weights[name].numpy(), value) for name, value in expected.items()]
        # `dequantize` loads dense weights, without rounding of activations. It multiplies in the dtype of the scales.
        plain = transformers.CompressedTensorsConfig(dequantize=True)
        model = load(folder, dtype=torch.float32, quantization_config=plain)
        weights, dtype = model.state_dict(), scale_dtype(folder)
        equal += [np.array_equal(weights[name].numpy(), torch.from_numpy(value).to(dtype).float().numpy())
                  for name, value in expected.items()]  # fmt: skip
        weights_only = perplexity(model, windows)
        rows.append({
            "checkpoint": folder.name, "matrices": len(expected), "equal_to_the_bit": all(equal),
            "perplexity_weights_only": weights_only, "perplexity": found, "ratio": found / dense,
        })  # fmt: skip
        print(f"{folder.name:20} {found:8.4f}  ratio {found / dense:.4f}  weights only {weights_only:8.4f}  "
              f"{sum(equal)} of {len(equal)} comparisons equal to the bit", flush=True)  # fmt: skip
        arguments.out.write_text(json.dumps(result | {"versions": versions}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
