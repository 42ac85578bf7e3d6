"""Checkpoints with headers and no data, in the sizes of real models. Their file is sparse, and reads as zeros."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

ITEM_BYTES = {"BF16": 2, "I32": 4, "I64": 8, "F8_E4M3": 1, "U8": 1}


def write_headers(
    folder: pathlib.Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Write config.json and model.safetensors. tensors: dtype and shape by name."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(values))
