"""Lines of the project that a process reaches, by `sys.monitoring`, and files that it opens. Needs Python 3.12.

Child processes of tests load this file alone, so it imports nothing of the tests.
"""

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("jpaged", "models", "serving", "pallas_kernels", "benchmarks", "tools", "examples")
FOLDER = "JPAGED_TEST_REACH"  # environment variable: folder that child processes write to
_PREFIX = f"{ROOT}{os.sep}"
_TOOL = 4  # a free tool id of sys.monitoring
# Python files that open a module to import it, or to show its lines in a traceback.
_IMPORTERS = ("<frozen importlib._bootstrap_external>", "_pytest/assertion/rewrite.py", "linecache.py", "tokenize.py")


class Reach:
    """Collects lines that run. `reached` has the lines since the last `restart`, by file. `out` gets each line at once.

    Line 0 means that the file was opened, but not to import it. Files that Rust or C++ opens are not seen. `out` is a
    file descriptor, because a file object's lock may be held when a thread forks, and the child would wait for ever.
    """

    def __init__(self, out: int | None = None) -> None:
        self.reached: dict[str, set[int]] = {}
        self._out = out
        self._files: dict[str, str | None] = {}

    def start(self) -> None:
        monitoring = sys.monitoring
        monitoring.use_tool_id(_TOOL, "reach")
        monitoring.register_callback(_TOOL, monitoring.events.PY_START, self._function)
        monitoring.register_callback(_TOOL, monitoring.events.LINE, self._line)
        monitoring.set_events(_TOOL, monitoring.events.PY_START)
        sys.addaudithook(self._audit)

    def restart(self) -> None:
        """Forget the lines. Each is reported again when it runs."""
        self.reached = {}
        sys.monitoring.restart_events()

    def _function(self, code: CodeType, _offset: int) -> Any:
        if self._file(code.co_filename) is not None:
            sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
        return sys.monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> Any:
        file = self._file(code.co_filename)
        if file is not None:
            self._add(file, line)
        return sys.monitoring.DISABLE

    def _add(self, file: str, line: int) -> None:
        lines = self.reached.setdefault(file, set())
        if line not in lines:
            lines.add(line)
            if self._out is not None:
                os.write(self._out, f"{file}:{line}\n".encode())

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[0].startswith(_PREFIX):
            path = os.path.normpath(args[0])
            if not path.startswith(_PREFIX) or "/__pycache__/" in path or path.endswith(".pyc"):
                return
            if not path.endswith(".py") or not _opener().endswith(_IMPORTERS):
                self._add(path[len(_PREFIX):], 0)

    def _file(self, name: str) -> str | None:
        """Path of a file of the project, relative to the checkout; None for other files."""
        if name not in self._files:
            self._files[name] = None
            path = Path(name)
            if path.is_absolute() and path.exists() and path.resolve().is_relative_to(ROOT):
                relative = path.resolve().relative_to(ROOT)
                if relative.parts[0] in PRODUCT:
                    self._files[name] = relative.as_posix()
        return self._files[name]


def _opener() -> str:
    """Python file whose code opens a file."""
    try:
        return sys._getframe(2).f_code.co_filename
    except ValueError:  # no such function: Python opens the script that it runs
        return _IMPORTERS[0]


def start_child() -> None:
    """Collect the lines of a child process of a test. Writes each at once, because tests kill some processes."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    folder = os.environ.get(FOLDER)
    if folder and test and sys.version_info >= (3, 12):
        path = Path(folder, f"child-{os.getpid()}-{os.urandom(4).hex()}.lines")
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(out, f"{test}\n".encode())
        Reach(out).start()
