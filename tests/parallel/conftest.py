"""Shared by the tests of several devices: a small checkpoint, and a limit on what a process has compiled."""

import gc
import pathlib
import time
from collections.abc import Iterator

import jax
import pytest

from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.support.shared_programs import forget_programs

MOST_MAPPINGS = 25_000  # see `_free_mappings`


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(next(v for v in VARIANTS if v.name == "llama"), 0, folder)
    return str(folder)


def _num_mappings() -> int:
    """Memory mappings of this process. 0 where the system does not say it."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture(autouse=True)
def _free_mappings() -> Iterator[None]:
    """Free what a module has compiled before the module ends, if it is much.

    A process may have 65,530 memory mappings (vm.max_map_count), and a program of several devices has about 500. With
    none left, LLVM cannot load another program, and the process ends with a segmentation fault.
    """
    began = time.monotonic()
    yield
    # only long tests compile much: the others need not count, which takes a millisecond for 1,000 mappings
    if time.monotonic() - began > 0.5 and _num_mappings() > MOST_MAPPINGS:
        forget_programs()
        jax.clear_caches()
        gc.collect()
