"""Advice for out-of-memory errors: which option to lower, and by how much. XLA's message only names the bytes."""

import contextlib
import math
import re
from collections.abc import Generator

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, first_line

_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|[KMGT](?:iB)?)\b"
# XLA's messages on CPU, CUDA and TPU (jaxlib 0.10 and 0.11, libtpu 0.0.48). TPU's are in docs/errors of openxla/xla.
_ASKED = re.compile(rf"\b(?:allocat(?:e|ing)|reserve) (?:request for )?{_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"There are {_SIZE} free")
_EXCEEDED = re.compile(rf"Exceeded hbm capacity by {_SIZE}", re.IGNORECASE)
_CORES = re.compile(rf"Hbm usage: {_SIZE}, SparseCore Hbm usage {_SIZE}, exceeding available bytes: {_SIZE}")
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
# memory of a kernel or on the chip: a smaller pool does not help
_OTHER_MEMORY = re.compile(r"shared memory|scoped memory|vmem|memory space (?!hbm)", re.IGNORECASE)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SPARE = 1.1  # the allocator's chunks are larger than the arrays


def advice(error: BaseException, config: EngineConfig, device_bytes: int | None) -> str | None:
    """Advice for an error of XLA. None if it is not about device memory.

    device_bytes: memory of the device in bytes; None: not known, as on CPU.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
        return None
    if _OTHER_MEMORY.search(text) and not _EXCEEDED.search(text):
        return None
    missing = _missing_bytes(text)
    size = f"{missing / 2**30:.2f} GiB"
    smaller_steps = f"lower max_num_batched_tokens or max_num_seqs (now {_now(config)})"
    if _TEMPORARIES.search(text):  # a smaller KV pool does not help
        return f"the largest program does not fit the device's memory: {size} are missing. {smaller_steps.capitalize()}"
    what = f"{size} could not be allocated" if missing else first_line(error)
    if not device_bytes:
        return f"no memory is left: {what}. Lower kv_cache_memory_bytes, or max_num_batched_tokens"
    share = max(missing * _SPARE, 2**28) / device_bytes
    lower = math.floor(100 * (config.gpu_memory_utilization - share)) / 100
    if lower <= 0:
        return f"the device's memory is full: {what}. Free memory on it, or {smaller_steps}"
    return (
        f"the device's memory is full: {what}. Lower gpu_memory_utilization from {config.gpu_memory_utilization:g} to "
        f"{lower:g}, or {smaller_steps}"
    )


def _missing_bytes(text: str) -> int:
    """Missing bytes in an error message; 0 if it has none."""
    if found := _EXCEEDED.search(text):
        (missing,) = _sizes(found)
    elif found := _TEMPORARIES.search(text):
        needed, available = _sizes(found)
        missing = needed - available
    elif found := _CORES.search(text):
        tensor_core, sparse_core, available = _sizes(found)
        missing = tensor_core + sparse_core - available
    elif found := _ASKED.search(text):
        (missing,) = _sizes(found)
        if free := _FREE.search(text):  # a TPU's message; the free memory may be fragmented
            missing = max(missing - _sizes(free)[0], missing // 2)
    else:
        missing = 0
    return missing


def _sizes(found: re.Match[str]) -> list[int]:
    """All sizes of a match, in bytes."""
    groups = found.groups()
    pairs = zip(groups[::2], groups[1::2], strict=True)
    return [int(float(number) * _UNITS.get(unit[0], 1)) for number, unit in pairs]


def _now(config: EngineConfig) -> str:
    values = (config.max_num_batched_tokens, config.max_num_seqs)
    return " and ".join("the default" if value is None else f"{value:,}" for value in values)


@contextlib.contextmanager
def explained(config: EngineConfig, device_bytes: int | None) -> Generator[None]:
    """Raise out-of-memory errors inside as ModelLoadError with `advice`."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        sentence = advice(error, config, device_bytes)
        if sentence is None:
            raise
        raise ModelLoadError(sentence) from None
