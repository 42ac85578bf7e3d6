"""Packers of quantised formats in numpy: from numbers to the tensors of a file.

`store_*` put codes, scales and zeros into a format's tensors. tests/quantized/test_engines.py compares these tensors
with the files of the formats' own packers, byte for byte. The packers round a matrix. They return its tensors by part,
and the weights that these represent, float32[out, in].
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Parts = dict[str, np.ndarray]
Packer = Callable[[np.ndarray], tuple[Parts, np.ndarray]]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each 4 bits of a word
GROUP = 32


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32[rows, words]: each row of codes, uint8[rows, n], as a stream of bits."""
    wide = np.unpackbits(codes[:, :, None], axis=2, bitorder="little", count=bits).reshape(len(codes), -1)
    wide = np.pad(wide, ((0, 0), (0, -wide.shape[1] % 32)))
    return np.packbits(wide, axis=1, bitorder="little").view(np.int32)


def store_awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Parts:
    """codes uint8[out, in], zeros uint8[out, groups]."""

    def words(array: np.ndarray) -> np.ndarray:
        by_word = array.T.reshape(array.shape[1], -1, 8)[:, :, AWQ_ORDER]
        return stream(by_word.reshape(array.shape[1], -1), 4)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": np.ascontiguousarray(scales.T)}


def store_gptq(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray, bits: int, offset: int
) -> Parts:
    """codes uint8[out, in] in the order of the inputs. groups: int[in], of each input. offset: 1 for v1, else 0."""
    return {
        "qweight": np.ascontiguousarray(stream(codes, bits).T),
        "qzeros": stream(np.ascontiguousarray((zeros - np.uint8(offset)).T), bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": groups.astype(np.int32),
    }


def store_packed(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, bits: int) -> Parts:
    """pack-quantized, from unsigned codes and zeros."""
    parts = {
        "weight_packed": stream(codes, bits), "weight_scale": scales, "weight_shape": np.array(codes.shape, np.int64)
    }  # fmt: skip
    if zeros is not None:
        parts["weight_zero_point"] = np.ascontiguousarray(stream(np.ascontiguousarray(zeros.T), bits).T)
    return parts


def store_fp4(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, uint8[out, in / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def rounded(values: np.ndarray, bits: int, group: int, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes uint8[out, in], zeros uint8[out, groups] and scales float16[out, groups]."""
    by_group, top = values.reshape(len(values), -1, group), 2**bits - 1
    if symmetric:
        scales = np.abs(by_group).max(-1) * 2 / top
        zeros = np.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = np.minimum(by_group.min(-1), 0), np.maximum(by_group.max(-1), 0)
        scales = (high - low) / top
        zeros = np.clip(np.round(-low / scales), 1, top)  # v1 of GPTQ cannot store the zero 0
    scales, zeros = scales.astype(np.float16), zeros.astype(np.uint8)
    codes = np.round(by_group / scales.astype(np.float32)[..., None]) + zeros[..., None]
    return np.clip(codes, 0, top).astype(np.uint8).reshape(values.shape), zeros, scales


def numbers(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(code - zero) * scale."""
    by_group = codes.reshape(*zeros.shape, -1).astype(np.float32) - zeros.astype(np.float32)[..., None]
    return (by_group * scales.astype(np.float32)[..., None]).reshape(codes.shape)


def awq(group: int = GROUP) -> Packer:
    def pack(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        found = rounded(values, 4, group, symmetric=False)
        return store_awq(*found), numbers(*found)

    return pack


def gptq(bits: int, version: int, *, symmetric: bool, is_act: bool = False) -> Packer:
    """is_act: a group has inputs at random positions, the same for matrices with equally many inputs."""

    def pack(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        inputs = values.shape[1]
        order = np.random.default_rng(inputs).permutation(inputs) if is_act else np.arange(inputs)
        sorted_codes, zeros, scales = rounded(values[:, order], bits, GROUP, symmetric=symmetric)
        codes, groups = np.empty_like(sorted_codes), np.empty(inputs, np.int32)
        codes[:, order], groups[order] = sorted_codes, np.arange(inputs) // GROUP
        dense = np.empty(values.shape, np.float32)
        dense[:, order] = numbers(sorted_codes, zeros, scales)
        return store_gptq(codes, zeros, scales, groups, bits, 2 - version), dense

    return pack


def packed(bits: int, *, symmetric: bool, group: int | None = GROUP) -> Packer:
    """pack-quantized. group None: the strategy channel."""

    def pack(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, zeros, scales = rounded(values, bits, group or values.shape[1], symmetric=symmetric)
        return store_packed(codes, None if symmetric else zeros, scales, bits), numbers(codes, zeros, scales)

    return pack


def integers(strategy: str, *, symmetric: bool = True) -> Packer:
    """int-quantized. strategy: channel or tensor."""

    def pack(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        flat = values.reshape(1, -1) if strategy == "tensor" else values
        codes, zeros, scales = rounded(flat, 8, flat.shape[1], symmetric=symmetric)
        signed = (codes ^ 128).view(np.int8).reshape(values.shape)
        parts = {"weight": signed, "weight_scale": scales.reshape(-1) if strategy == "tensor" else scales}
        if not symmetric:
            parts["weight_zero_point"] = (zeros ^ 128).view(np.int8)
        return parts, numbers(codes, zeros, scales).reshape(values.shape)

    return pack


def fp8(block: tuple[int | None, int | None], part: str = "weight_scale", *, four_axes: bool = False) -> Packer:
    """block: outputs and inputs that share a scale; None: all of them. four_axes: ModelOpt's shape of scales."""

    def pack(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        rows, columns = (size or whole for size, whole in zip(block, values.shape, strict=True))
        blocks = values.reshape(values.shape[0] // rows, rows, -1, columns)
        scales = (np.abs(blocks).max((1, 3), keepdims=True) / 448).astype(np.float32)
        codes = (blocks / scales).astype(ml_dtypes.float8_e4m3fn)
        stored = scales if four_axes else scales.reshape(scales.shape[0], scales.shape[2])
        parts = {"weight": codes.reshape(values.shape), part: stored.reshape(1) if block == (None, None) else stored}
        return parts, (codes.astype(np.float32) * scales).reshape(values.shape)

    return pack


def nvfp4(*, divides: bool) -> Packer:
    """divides: weights are scales divided by the factor, as in compressed-tensors. False: times it, as in ModelOpt."""

    def pack(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        most = np.abs(values.reshape(len(values), -1, 16)).max(-1) / 6
        factor = np.float32(448 / most.max() if divides else most.max() / 448)
        scales = (most * factor if divides else most / factor).astype(ml_dtypes.float8_e4m3fn)
        wide = scales.astype(np.float32) / factor if divides else scales.astype(np.float32) * factor
        codes, dense = nearest(values, wide)
        shape = (1,) if divides else ()
        names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
        return {names[0]: store_fp4(codes), "weight_scale": scales, names[1]: factor.reshape(shape)}, dense

    return pack


def mxfp4(values: np.ndarray) -> tuple[Parts, np.ndarray]:
    most = np.abs(values.reshape(len(values), -1, 32)).max(-1)
    exponents = np.floor(np.log2(most / 4)).astype(np.int32)  # the largest weight is between 4 and 8 times the scale
    codes, dense = nearest(values, np.ldexp(np.float32(1), exponents))
    return {"weight_packed": store_fp4(codes), "weight_scale": (exponents + 127).astype(np.uint8)}, dense


def released_fp4(values: np.ndarray) -> tuple[Parts, np.ndarray]:
    """An expert of DeepSeek V4's release: MXFP4 under other names and dtypes."""
    parts, dense = mxfp4(values)
    scale = parts["weight_scale"].view(ml_dtypes.float8_e8m0fnu)
    return {"weight": parts["weight_packed"].view(np.int8), "scale": scale}, dense


def released_fp8(values: np.ndarray) -> tuple[Parts, np.ndarray]:
    """Another matrix of DeepSeek V4's release: fp8, with a power of two for each block of 128 x 128."""
    rows, columns = (np.arange(size) // 128 for size in values.shape)
    most = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(most, (rows[:, None], columns), np.abs(values))
    scales = np.exp2(np.ceil(np.log2(most / 448))).astype(np.float32)
    codes = (values / scales[rows[:, None], columns]).astype(ml_dtypes.float8_e4m3fn)
    dense = codes.astype(np.float32) * scales[rows[:, None], columns]
    return {"weight": codes, "scale": scales.astype(ml_dtypes.float8_e8m0fnu)}, dense


def nearest(values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of the nearest numbers of fp4, uint8[out, in], and the weights that they represent."""
    by_group = values.reshape(*scales.shape, -1) / scales[..., None]
    codes = np.abs(by_group[..., None] - E2M1).argmin(-1).astype(np.uint8)
    return codes.reshape(values.shape), (E2M1[codes] * scales[..., None]).reshape(values.shape)


def tensors_of(module: str, parts: dict[str, Any]) -> dict[str, np.ndarray]:
    """Tensors of a file, by name."""
    return {f"{module}.{part}": np.ascontiguousarray(array).reshape(array.shape) for part, array in parts.items()}
