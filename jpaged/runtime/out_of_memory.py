"""Says what to lower, and by how much, when a device has no memory left. XLA's own message names only the bytes."""

import contextlib
import math
import re
from collections.abc import Generator

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, first_line

_NUMBER = re.compile(r"allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SPARE = 1.1  # the allocator's blocks are larger than the arrays


def advice(error: BaseException, config: EngineConfig, device_bytes: int | None) -> str | None:
    """A sentence for an error of XLA. None: memory is not its reason.

    device_bytes: memory of the device in bytes; None: not known, as on CPU.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
        return None
    if re.search(r"shared memory|vmem|scoped memory", text, re.IGNORECASE):  # of a kernel: a smaller pool does not help
        return None
    found = _NUMBER.search(text)
    missing = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    what = f"{missing / 2**30:.2f} GiB could not be allocated" if found else first_line(error)
    if not device_bytes:
        return f"no memory is left: {what}. Lower kv_cache_memory_bytes, or max_num_batched_tokens"
    share = max(missing * _SPARE, 2**28) / device_bytes
    lower = math.floor(100 * (config.gpu_memory_utilization - share)) / 100
    others = f"lower max_num_batched_tokens or max_num_seqs (now {_now(config)})"
    if lower <= 0:
        return f"the device's memory is full: {what}. Free memory on it, or {others}"
    return (
        f"the device's memory is full: {what}. Lower gpu_memory_utilization from {config.gpu_memory_utilization:g} to "
        f"{lower:g}, or {others}"
    )


def _now(config: EngineConfig) -> str:
    values = (config.max_num_batched_tokens, config.max_num_seqs)
    return " and ".join("the default" if value is None else f"{value:,}" for value in values)


@contextlib.contextmanager
def explained(config: EngineConfig, device_bytes: int | None) -> Generator[None]:
    """Raise a lack of device memory inside as ModelLoadError that says what to lower."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        sentence = advice(error, config, device_bytes)
        if sentence is None:
            raise
        raise ModelLoadError(sentence) from error
