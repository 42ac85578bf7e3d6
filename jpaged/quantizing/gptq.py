"""GPTQ (arXiv:2210.17323): rounds a matrix by columns, and corrects later columns for each column's error."""

import numpy as np

from jpaged.quantizing.rounding import Grid

BLOCK = 128   # columns per block; later columns are corrected once per block, in one matmul
DAMPING = 0.01  # share of the mean of the Hessian's diagonal that is added to the diagonal


def gptq(weights: np.ndarray, hessian: np.ndarray, grid: Grid) -> np.ndarray:
    """Codes float32[out, in] with a small squared error of the outputs for the calibration inputs.

    weights: float32[out, in].
    hessian: float64[in, in], the sum of x x^T over the inputs x.
    grid:    fixed scales, so columns may be rounded in any order. Columns with the largest inputs come first.
    """
    inputs = weights.shape[1]
    size = inputs // grid.scales.shape[1]
    order = np.argsort(-np.diag(hessian), kind="stable")
    factor = _factor(hessian[np.ix_(order, order)])
    rest = weights[:, order]  # a copy
    codes = np.empty_like(rest)
    for start in range(0, inputs, BLOCK):
        block = slice(start, min(start + BLOCK, inputs))
        errors = np.zeros((weights.shape[0], block.stop - start), np.float32)
        for i in range(start, block.stop):
            group = int(order[i]) // size
            column = grid.codes(rest[:, i : i + 1], group)
            codes[:, i] = column[:, 0]
            error = (rest[:, i] - grid.numbers(column, group)[:, 0]) / factor[i, i]
            rest[:, i : block.stop] -= np.outer(error, factor[i, i : block.stop])
            errors[:, i - start] = error
        rest[:, block.stop :] -= errors @ factor[block, block.stop :]
    result = np.empty_like(codes)
    result[:, order] = codes
    return result


def _factor(hessian: np.ndarray) -> np.ndarray:
    """Upper triangular U, float32[in, in], with U^T U = inverse of the damped Hessian."""
    diagonal = np.diag(hessian)
    damped = hessian + np.diag(DAMPING * diagonal.mean() + np.where(diagonal > 0, 0.0, 1.0))
    return np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
