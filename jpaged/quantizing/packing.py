"""Tensors of a quantised matrix, as compressed-tensors stores them."""

import numpy as np

from jpaged.quantizing.schemes import Scheme
from pallas_kernels import QuantizedWeight
from pallas_kernels.quantized_dot.weight import PLAIN_DTYPES

_PER_WORD = 8  # 4-bit codes per int32


def pack(codes: np.ndarray) -> np.ndarray:
    """Pack 4-bit codes uint8[rows, n] into int32[rows, ceil(n / 8)]. Code i is in the 4 bits from 4 * (i % 8) on."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % _PER_WORD))).reshape(codes.shape[0], -1, _PER_WORD)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(codes.astype(np.uint32) << shifts, axis=-1).view(np.int32)


def tensors_of(weight: QuantizedWeight) -> dict[str, np.ndarray]:
    """Tensors of a matrix in the layout "plain", by the last part of their names.

    compressed-tensors stores int4 values -8 to 7 as 0 to 15, like the codes of `QuantizedWeight`.
    """
    scales = np.asarray(weight.scales)
    if weight.kind != "int4":
        return {"weight": np.asarray(weight.codes), "weight_scale": scales}
    shape = np.array(weight.shape, np.int64)
    return {"weight_packed": pack(np.asarray(weight.codes)), "weight_scale": scales, "weight_shape": shape}


def shapes_of(
    scheme: Scheme, shape: tuple[int, int], group_size: int | None, scales: np.dtype
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """dtypes and shapes of the tensors of `tensors_of`, for a matrix [out, in]. scales: dtype of the scales."""
    outputs, inputs = shape
    groups = inputs // (group_size or inputs)
    if scheme.kind != "int4":
        return {"weight": (np.dtype(PLAIN_DTYPES[scheme.kind]), shape), "weight_scale": (scales, (outputs, groups))}
    return {
        "weight_packed": (np.dtype(np.int32), (outputs, -(-inputs // _PER_WORD))),
        "weight_scale": (scales, (outputs, groups)),
        "weight_shape": (np.dtype(np.int64), (2,)),
    }
