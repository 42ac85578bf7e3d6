"""Chooses the dtype of the weights on the device."""

import logging

import jax
import ml_dtypes
import numpy as np

from jpaged.errors import RequestError
from jpaged.loading.checkpoint import TensorSource
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.linear import has_native_matmul
from jpaged.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

BY_NAME = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

_FORMAT_NAMES = {"BF16": BY_NAME["bfloat16"], "F16": BY_NAME["float16"], "F32": BY_NAME["float32"]}


def checkpoint_dtype(config: CheckpointConfig, checkpoint: TensorSource) -> np.dtype:
    """Return the dtype in config.json (`dtype`, formerly `torch_dtype`), else `main_dtype`."""
    named = config.get("dtype", "torch_dtype")
    return BY_NAME[named] if isinstance(named, str) and named in BY_NAME else main_dtype(checkpoint)


def main_dtype(checkpoint: TensorSource) -> np.dtype:
    """Return the dtype that most of the weights' bytes have."""
    sizes = dict.fromkeys(_FORMAT_NAMES, 0)
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        if entry.dtype in sizes:
            sizes[entry.dtype] += entry.end - entry.begin
    return _FORMAT_NAMES[max(sizes, key=lambda name: sizes[name])]


def resolve_dtype(
    requested: str, checkpoint: np.dtype | None, spec: DecoderSpec, platform: str | None = None
) -> np.dtype:
    """Choose the dtype of the weights: the requested one, or for "auto" the checkpoint's (float32 if unknown).

    On CPU before JAX 0.11, auto stores 16-bit weights as float32, and logs why, if a matmul needs XLA.
    platform: platform of the weights' device; None: JAX's default.
    Raises RequestError for an unknown dtype.
    """
    if requested != "auto":
        if requested not in BY_NAME:
            raise RequestError("dtype", requested, f"must be auto, {', '.join(BY_NAME)}")
        return BY_NAME[requested]
    if checkpoint is None or checkpoint not in BY_NAME.values():
        return BY_NAME["float32"]
    is_slow = checkpoint.itemsize == 2 and (platform or jax.default_backend()) == "cpu"
    if is_slow and jax.__version_info__ < (0, 11) and not has_native_matmul(spec, checkpoint):
        logger.info(
            "dtype=auto: the checkpoint's %s weights become float32, because JAX %s on CPU converts every 16-bit "
            "matrix to float32 at every step, about five times slower. JAX 0.11 (Python 3.12) keeps their dtype. "
            "So do native kernels (numba), for bfloat16 models without experts.",
            checkpoint.name, jax.__version__,
        )  # fmt: skip
        return BY_NAME["float32"]
    return checkpoint
