"""Finds the scales of a matrix by a search, and rounds to nearest. Computes in float32 with numpy."""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jpaged.quantizing.schemes import Scheme
from pallas_kernels import QuantizedWeight
from pallas_kernels.quantized_dot.weight import LARGEST, LEVELS, PLAIN_DTYPES, SHARES

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_HIGHEST = {"int4": LEVELS // 2 - 1, "int8": LARGEST, "fp8": float(ml_dtypes.finfo(_FP8).max)}
_LOWEST = {"int4": -LEVELS // 2, "int8": -LARGEST, "fp8": -_HIGHEST["fp8"]}


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values that a matrix's weights are rounded to: scale * code."""

    scheme: Scheme
    scales: np.ndarray  # [out, groups] in the dtype of the file, never 0

    def codes(self, weights: np.ndarray, group: slice | int = slice(None)) -> np.ndarray:
        """Codes of weights float32[out, groups, n], or [out, n] with one group. The codes are float32, too."""
        kind = self.scheme.kind
        codes = np.clip(weights / self.scales.astype(np.float32)[:, group, None], _LOWEST[kind], _HIGHEST[kind])
        return codes.astype(_FP8).astype(np.float32) if kind == "fp8" else np.rint(codes)

    def numbers(self, codes: np.ndarray, group: slice | int = slice(None)) -> np.ndarray:
        """Dequantised weights of codes, float32. Shapes: as in `codes`."""
        return codes * self.scales.astype(np.float32)[:, group, None]

    def matrix(self, codes: np.ndarray) -> np.ndarray:
        """Dequantised matrix float32[out, in] of codes float32[out, in]."""
        return self.numbers(codes.reshape(*self.scales.shape, -1)).reshape(codes.shape)

    def weight(self, codes: np.ndarray, dtype: np.dtype) -> QuantizedWeight:
        """A QuantizedWeight of codes float32[out, in], in the layout "plain". dtype: of the unquantised matrix."""
        kind = self.scheme.kind
        if kind == "int4":
            codes = codes + LEVELS // 2
        activations = "int8" if self.scheme.activations == "int8" else "float"
        return QuantizedWeight(
            codes.astype(PLAIN_DTYPES[kind]), self.scales, None, None, None, None, None, kind, codes.shape, dtype,
            activations,
        )  # fmt: skip


def largest_grid(weights: np.ndarray, scheme: Scheme, group_size: int | None, dtype: np.dtype) -> Grid:
    """The grid in which each group's largest magnitude gets the largest code. weights: float32[out, in].

    group_size: inputs that share a scale; None: all inputs. dtype: of the scales.
    """
    groups = weights.reshape(weights.shape[0], -1, group_size or weights.shape[1])
    return Grid(scheme, _stored(np.abs(groups).max(-1) / _HIGHEST[scheme.kind], dtype))


def find_grid(
    weights: np.ndarray,
    scheme: Scheme,
    group_size: int | None,
    dtype: np.dtype,
    error_of: Callable[[np.ndarray], np.ndarray] = lambda errors: (errors**2).sum(-1),
) -> Grid:
    """The grid with the smallest error after rounding to nearest. Tries each of SHARES of `largest_grid`'s scales.

    weights, group_size, dtype: as in `largest_grid`.
    error_of: function of the weights' errors float32[out, groups, n]. Returns the error [out, groups] of each group.
    """
    largest = largest_grid(weights, scheme, group_size, np.dtype(np.float32)).scales
    groups = weights.reshape(*largest.shape, -1)
    best, least = _stored(largest, dtype), np.full(largest.shape, np.inf)
    for share in SHARES:
        grid = Grid(scheme, _stored(share * largest, dtype))
        error = error_of(grid.numbers(grid.codes(groups)) - groups)
        better = error < least
        best, least = np.where(better, grid.scales, best), np.where(better, error, least)
    return Grid(scheme, best)


def input_error(product: np.ndarray, shape: tuple[int, int]) -> Callable[[np.ndarray], np.ndarray]:
    """`error_of`: squared errors of weights, weighted with the sum of squares of their input.

    product: float64[in, in], the sum of x x^T over the inputs x. shape: [groups, n] of the inputs.
    """
    importance = np.diag(product).astype(np.float32).reshape(shape)
    return lambda errors: (importance * errors**2).sum(-1)


def output_error(product: np.ndarray, shape: tuple[int, int]) -> Callable[[np.ndarray], np.ndarray]:
    """`error_of`: squared errors of the outputs if all other groups are exact. Arguments as in `input_error`."""
    groups, n = shape
    blocks = np.stack([product[i : i + n, i : i + n] for i in range(0, groups * n, n)]).astype(np.float32)
    return lambda errors: ((errors.swapaxes(0, 1) @ blocks).swapaxes(0, 1) * errors).sum(-1)


def round_to_nearest(weights: np.ndarray, grid: Grid) -> np.ndarray:
    """Codes float32[out, in] of weights float32[out, in]."""
    return grid.codes(weights.reshape(*grid.scales.shape, -1)).reshape(weights.shape)


def _stored(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Scales in the file's dtype. Groups of zeros get the scale 1, because other engines refuse or divide by 0."""
    smallest = float(ml_dtypes.finfo(dtype).tiny)
    return np.where(scales > 0, np.maximum(scales, smallest), 1).astype(dtype)
