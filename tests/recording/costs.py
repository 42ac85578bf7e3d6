"""Cost of each test, for `python -m pytest tests --costs FOLDER` and tools/costs.py.

Each worker writes a line of JSON per test: seconds, CPU seconds, engines started, compile keys, and child processes.
A compile key names one compiled program. JAX logs it when it looks for the program in the compile cache. Engines of one
process share programs (tests/support/shared_programs.py). A program of an engine therefore has its own key here, so
that the keys of a test do not depend on earlier tests. Keys that depend on the machine do not count. They are the keys
of child processes, of self-checks of newly compiled native kernels, and of programs compiled in the background.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jpaged.runtime.compile.background import THREAD_NAME

_KEY = re.compile(r"(?i)persistent compilation cache (?:hit|miss) for '.*' with key '(.*)'")
_LOGGER = "jax._src.compiler"  # a name, not an import. If JAX renames it, no key is found, and a test fails


class Recorder(logging.Filter):
    """Counts of the test that runs now."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()
        self.engines = self.children = 0
        self._inside = threading.local()  # .depth: blocks of this thread in which JAX's keys do not count

    def reset(self) -> None:
        """Forget the counts of the previous test."""
        self.keys, self.engines, self.children = set(), 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Read a compile key from a line of JAX's log. Only warnings and errors are logged further."""
        found = _KEY.match(record.getMessage())
        if found and not getattr(self._inside, "depth", 0):
            self.keys.add(found[1])
        return record.levelno >= logging.WARNING

    @contextlib.contextmanager
    def shared_program(self, key: Any) -> Iterator[None]:
        """Count a program of an engine. The block may compile the program or find it: its key is the same."""
        if threading.current_thread().name != THREAD_NAME:
            self.keys.add("engine-" + hashlib.sha256(repr(key).encode()).hexdigest())
        with self.uncounted():
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no program that this thread compiles in the block."""
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1


recorder = Recorder()


def _counted(function: Any, name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        setattr(recorder, name, getattr(recorder, name) + 1)
        return function(*args, **kwargs)

    return call


class CostsPlugin:
    """Writes a line for each test to a file of this process in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl").open("a")
        self._stack = contextlib.ExitStack()
        self._skipped = False

    def pytest_sessionstart(self) -> None:
        from jpaged.runtime.runner import ModelRunner

        create = ModelRunner.__dict__["create"].__func__
        for target, name, value in (
            (ModelRunner, "create", classmethod(_counted(create, "engines"))),
            (subprocess.Popen, "__init__", _counted(subprocess.Popen.__init__, "children")),
            (BaseProcess, "start", _counted(BaseProcess.start, "children")),
        ):
            self._stack.enter_context(mock.patch.object(target, name, value))
        logger = logging.getLogger(_LOGGER)
        logger.setLevel(logging.DEBUG)
        logger.addFilter(recorder)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with its fixtures."""
        recorder.reset()
        self._skipped = False
        start, before = time.perf_counter(), os.times()
        result = yield
        after = os.times()
        line = {
            "test": item.nodeid,
            "marks": sorted({mark.name for mark in item.iter_markers()} & {"slow", "codegen", "soak", "deviceless"}),
            "seconds": round(time.perf_counter() - start, 4),
            "cpu_seconds": round(sum(after[:4]) - sum(before[:4]), 2),
            "engines": recorder.engines,
            "children": recorder.children,
            "skipped": self._skipped,
            "keys": sorted(recorder.keys),
            "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        self._file.write(json.dumps(line) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._skipped = self._skipped or report.skipped

    def pytest_sessionfinish(self) -> None:
        """Close the file, and stop counting."""
        self._file.close()
        self._stack.close()
