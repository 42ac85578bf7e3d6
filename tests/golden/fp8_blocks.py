"""Layout of fp8 matrices with a scale for each block of 128 x 128, as in DeepSeek-V3's release. Numpy only."""

import math
from typing import Any

import numpy as np

BLOCK = 128  # outputs and inputs
# Codes by random byte: sign, exponent 8 to 14 and three bits of mantissa. Their numbers are 2 to 240; none is NaN.
CODES = np.array([b & 0x80 | (8 + (b >> 4 & 7) % 7) << 3 | b & 7 for b in range(256)], np.uint8)
DEVIATION = 80  # of numbers with these codes


def packed(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Names of the fp8 matrices: all of the layers, except routers and the weights of indexers."""
    if config.get("quantization_config", {}).get("quant_method") != "fp8":
        return []
    dense = ("embed_tokens", "lm_head", "mlp.gate.", "shared_head", "eh_proj", "weights_proj")
    return [n for n, shape in shapes.items() if len(shape) == 2 and not any(part in n for part in dense)]


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.ceil(size / BLOCK) for size in shape)
