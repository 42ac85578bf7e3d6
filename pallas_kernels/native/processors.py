"""Number of processors that this process may use. Only this module reads the limits of affinity and of containers.

XLA's pool of threads respects the affinity but not a container's quota: in a container with a quota of 2 processors on
a machine with 64, it has 64 threads. Kernels that use all of them spend a period's quota within its first 3 ms, and
stand still for the rest of its 100 ms.
"""

import math
import os
import pathlib

ROOT = pathlib.Path("/")


def usable(root: pathlib.Path = ROOT) -> int:
    """Processors for this process: its affinity, at most its container's quota, rounded up. root: has `proc`, `sys`."""
    # `os.process_cpu_count` needs Python 3.13; macOS has no affinity
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(count, quota(root)))


def quota(root: pathlib.Path) -> float:
    """Smallest quota, in processors, of this process's cgroup and its parents. Infinity if no quota can be read."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or /proc is not mounted
        return math.inf
    least = math.inf
    for line in lines:  # number:controllers:group; version 2 has no controllers here
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        folder = mount / group.lstrip("/")
        # a container may see its own group as the mount, and the path of the host in /proc
        for path in [folder, *folder.parents]:
            if path.is_relative_to(mount):
                least = min(least, _quota_of(path))
    return least


def _quota_of(folder: pathlib.Path) -> float:
    """Quota of one cgroup, in processors; infinity without a quota."""
    try:
        if (folder / "cpu.max").exists():  # version 2: "200000 100000", or "max 100000"
            granted, period = (folder / "cpu.max").read_text().split()
        else:
            granted, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if granted != "max" and int(granted) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # no such files, or not in these forms
        return math.inf
