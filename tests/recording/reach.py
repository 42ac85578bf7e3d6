"""Lines of the project that each test reaches, for `python -m pytest tests --reach FOLDER`. Needs Python 3.12.

tools/mutations.py and .ci/left_out.py read them. Each worker writes a file of lines of JSON, one per test: the test,
and `{file: [line, ...]}`. Child processes of tests find tests/recording/child through PYTHONPATH, and the test's name
in pytest's variable PYTEST_CURRENT_TEST.

`sys.monitoring` reports a line once per test, so a run takes about as long as without it. A test that finds a program
compiled does not trace it, and does not reach the lines of the model again. Readers therefore merge the lines of all
tests of a file, and while lines are recorded, test files share no programs.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recording.lines import FOLDER, Reach
from tests.support.shared_programs import forget_programs


class ReachPlugin:
    """Writes a line for each test to a file of this process in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl"
        self._reach = Reach()

    def pytest_sessionstart(self) -> None:
        """Start to collect, in this process and in child processes of tests."""
        self._reach.start()
        os.environ[FOLDER] = str(self._folder)
        hook = str(Path(__file__).parent / "child")
        os.environ["PYTHONPATH"] = os.pathsep.join([hook, *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.path.append(hook)  # for child processes that inherit sys.path

    def pytest_collection_finish(self) -> None:
        """Write the files that were opened during collection. They belong to no test."""
        self._write("*", {name: {0} for name, lines in self._reach.reached.items() if 0 in lines})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Write the lines of a test, and of the fixtures made for it."""
        self._reach.restart()
        result = yield
        self._write(item.nodeid, self._reach.reached)
        if nextitem is None or nextitem.path != item.path:
            forget_programs()
        return result

    def _write(self, test: str, reached: dict[str, set[int]]) -> None:
        lines = {file: sorted(numbers) for file, numbers in sorted(reached.items())}
        with self._path.open("a") as out:
            out.write(json.dumps({"test": test, "lines": lines}) + "\n")
