"""Describes the machine, and waits until other processes are quiet."""

import os
import pathlib
import platform
import time

from peers.common import machine_cpu_seconds

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimddp", "bf16")


def describe() -> dict[str, str | int | float]:
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
    """Measure the busy share of the machine's CPUs while this process sleeps for some seconds."""
    start, before = time.perf_counter(), machine_cpu_seconds()
    time.sleep(seconds)
    return (machine_cpu_seconds() - before) / ((time.perf_counter() - start) * (os.cpu_count() or 1))


def wait_until_quiet(most_busy: float, most_seconds: float) -> bool:
    """Wait until the busy share is at most `most_busy`. Returns False after `most_seconds`."""
    end = time.monotonic() + most_seconds
    while time.monotonic() < end:
        if busy_share() <= most_busy:
            return True
    return False
