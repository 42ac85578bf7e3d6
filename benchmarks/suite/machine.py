"""The machine: a description of it, and waiting until other processes leave it alone."""

import os
import pathlib
import platform
import time

from peers.common import machine_cpu_seconds

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimddp", "bf16")


def describe() -> dict[str, str | int | float]:
    """Describe the processor, memory and system."""
    information = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(":") for line in reversed(information))
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "processor": fields.get("model name", platform.machine()),
        "features": " ".join(name for name in FEATURES if name in flags),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def busy_share(seconds: float = 1.0) -> float:
    """Measure the share of the machine's CPUs that is busy, over some seconds in which this process sleeps."""
    start, before = time.perf_counter(), machine_cpu_seconds()
    time.sleep(seconds)
    return (machine_cpu_seconds() - before) / ((time.perf_counter() - start) * (os.cpu_count() or 1))


def wait_until_quiet(most_busy: float, most_seconds: float) -> bool:
    """Wait until at most `most_busy` of the machine is busy. Returns False after `most_seconds`."""
    end = time.monotonic() + most_seconds
    while time.monotonic() < end:
        if busy_share() <= most_busy:
            return True
    return False
