"""Runs the command line of jpaged with a wall clock that another process moves: `chaos_clock.py FILE COMMAND ...`.

FILE has the seconds to add to `time.time`, as a double. `time.monotonic` does not jump, as when a real clock jumps.
`chaos.py` starts its servers with this script. It replaces two Python functions and not the system clock: times that C
code reads, such as file times, do not jump.
"""

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

_real = time.time


def wrap(file: Path) -> None:
    """Replace `time.time` and `time.time_ns` by functions that add the seconds in a file of 8 bytes."""
    with file.open("rb") as opened:
        shared = mmap.mmap(opened.fileno(), 8, access=mmap.ACCESS_READ)

    def moved() -> float:
        return _real() + struct.unpack_from("<d", shared)[0]

    vars(time).update(time=moved, time_ns=lambda: int(moved() * 1e9))


def write(file: Path, seconds: float) -> None:
    """Move the clock of the processes that run with this file."""
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(struct.pack("<d", seconds))


if __name__ == "__main__":
    wrap(Path(sys.argv[1]))
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("jpaged", run_name="__main__", alter_sys=True)
