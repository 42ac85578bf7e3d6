"""AWQ (arXiv:2306.00978): smaller rounding errors for weights whose inputs have large activations.

W x = (W diag(s)) (x / s). A search finds the scales s, one for each input of a matrix, and W diag(s) is rounded.
1 / s costs nothing: it is folded into the norm before q, k and v or gate and up, into v for o, and into up for down.
"""

import numpy as np

from jpaged.models.families.base import Part
from jpaged.models.spec import DecoderSpec, Norm, NormPosition
from jpaged.quantizing.rounding import largest_grid, round_to_nearest
from jpaged.quantizing.schemes import Scheme

EXPONENTS = np.linspace(0, 1, 21)  # scales = RMS of the inputs ** exponent; with 0 all scales are 1
MOST_OUTPUTS = 512  # outputs of a matrix that the search rounds; their errors are typical of all outputs
_SMALLEST = 1e-4    # minimum RMS of an input, as a share of the largest


def refuse_awq(spec: DecoderSpec) -> str | None:
    """Reason why scales cannot be folded into a model's norms; None if they can."""
    if spec.norm not in (Norm.RMS, Norm.RMS_OFFSET):
        return "its norms are not RMS norms"
    if spec.norm_position not in (NormPosition.PRE, NormPosition.SANDWICH):
        return "no norm comes directly before its matrices"
    return "two blocks share a norm" if spec.shared_norm else None


def fold_scales(
    spec: DecoderSpec,
    leaves: dict[str, np.ndarray],
    products: dict[str, np.ndarray],
    scheme: Scheme,
    group_size: int,
    dtypes: dict[str, np.dtype],
) -> set[str]:
    """Scale a layer's matrices, and the leaves that compute their inputs, in place. Returns names of changed vectors.

    leaves:   float32 matrices and vectors of the layer, by name.
    products: float64[in, in] by matrix, the sum of x x^T over its inputs x. Updated in place for x / s.
    dtypes:   of the vectors in the file.
    """
    changed = set()
    for norm, name in (("attn_norm", "qkv"), ("mlp_norm", "gate_up" if spec.gated else "up")):
        wanted = _search(leaves[name], products[name], scheme, group_size)
        _apply(leaves[name], products[name], _divide_norm(spec, leaves[norm], wanted, dtypes[norm]))
        changed.add(norm)
    sources = []
    if spec.num_heads == spec.num_kv_heads:  # else a value head feeds several query heads, which have their own scales
        sources.append(("qkv", Part.V, "o"))
    if spec.gated and spec.swiglu_limit is None:
        sources.append(("gate_up", Part.UP, "down"))
    for source, part, name in sources:
        scales = _search(leaves[name], products[name], scheme, group_size)
        _apply(leaves[name], products[name], scales)
        view = part.view(leaves[source])
        view /= scales.reshape(*view.shape[:-1], 1)
        bias = {"qkv": "qkv_bias", "gate_up": "up_bias"}[source]
        if bias in leaves:
            view = part.view(leaves[bias])
            view /= scales.reshape(view.shape)
            changed.add(bias)
    return changed


def _search(leaf: np.ndarray, product: np.ndarray, scheme: Scheme, group_size: int) -> np.ndarray:
    """Scales float32[in] with the smallest squared output error, among powers of the inputs' RMS."""
    weights = leaf.reshape(-1, leaf.shape[-1])
    weights = weights[:: -(-len(weights) // MOST_OUTPUTS)]
    sizes = np.sqrt(np.diag(product))
    if not sizes.any():
        return np.ones(len(sizes), np.float32)
    sizes = np.maximum(sizes, _SMALLEST * sizes.max())
    product = product.astype(np.float32)
    best, least = None, np.inf
    for exponent in EXPONENTS:
        scales = (sizes**exponent).astype(np.float32)
        scales /= np.sqrt(scales.max() * scales.min())
        scaled = weights * scales
        grid = largest_grid(scaled, scheme, group_size, np.dtype(np.float32))
        errors = grid.matrix(round_to_nearest(scaled, grid)) / scales - weights
        error = float(((errors @ product) * errors).sum())
        if best is None or error < least:
            best, least = scales, error
    assert best is not None, "there are exponents"
    return best


def _apply(leaf: np.ndarray, product: np.ndarray, scales: np.ndarray) -> None:
    leaf *= scales
    product /= np.outer(scales, scales)


def _divide_norm(spec: DecoderSpec, weights: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Divide a norm's weights by scales, in place. Returns the scales after rounding the weights to the file's dtype.

    So this rounding causes no error. An input has the scale 1 if its weight is 0 or becomes 0.
    """
    offset = np.float32(spec.norm is Norm.RMS_OFFSET)
    divided = ((weights + offset) / scales - offset).astype(dtype).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (weights + offset) / (divided + offset)
    usable = np.isfinite(found) & (found > 0)
    weights[:] = np.where(usable, divided, weights)
    return np.where(usable, found, 1).astype(np.float32)
