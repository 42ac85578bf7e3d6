"""tools/costs.py: sums by folder, and the budget."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import threading

import pytest

from jpaged.runtime.compile.background import THREAD_NAME
from tests.recording.costs import Recorder

pytestmark = pytest.mark.slow  # no default test: the engine does not depend on it

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("costs_tool", ROOT / "tools" / "costs.py")
tool = importlib.util.module_from_spec(_spec)
sys.modules["costs_tool"] = tool  # dataclasses looks here
_spec.loader.exec_module(tool)

ROWS = [
    {"test": "tests/a/test_x.py::test_1", "seconds": 1.5, "cpu_seconds": 2.0, "engines": 1, "children": 0,
     "keys": ["p", "q"], "max_rss_mib": 300, "marks": []},
    {"test": "tests/a/test_y.py::test_2[b::c]", "seconds": 0.5, "cpu_seconds": 0.5, "engines": 1, "children": 2,
     "keys": ["q"], "max_rss_mib": 900, "marks": ["codegen"]},
    {"test": "tests/b/test_z.py::test_3", "seconds": 4.0, "cpu_seconds": 1.0, "engines": 0, "children": 0,
     "keys": ["q", "r"], "max_rss_mib": 100, "marks": []},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for worker, rows in (("gw0", ROWS[:1]), ("gw1", ROWS[1:])):
        (tmp_path / f"{worker}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_program_that_two_tests_need_counts_once(folder):
    found = tool.costs(tool.read([folder]))
    assert list(found) == ["tests/b", "tests/a"]  # the most expensive first
    assert found["tests/a"] == tool.Cost(2.0, 2.5, 2, 2, 2, 2, 900)
    assert next(iter(tool.costs(ROWS, "file"))) == "tests/b/test_z.py"
    assert tool.costs(ROWS, "test")["tests/a/test_y.py::test_2[b::c]"].children == 2


@pytest.mark.parametrize(
    ("budget", "wrong"),
    [
        ({"tests/a": {"programs": 2, "engines": 2}, "tests/b": {"programs": 2, "engines": 0}}, []),
        ({"tests/a": {"programs": 1, "engines": 2}, "tests/b": {"programs": 2}}, ["tests/a: 2 programs"]),
        ({"tests/a": {"programs": 9, "engines": 1}}, ["tests/a: 2 engines", "tests/b: 2 programs"]),
    ],
)
def test_the_budget(folder, budget, wrong, monkeypatch, capsys):
    path = folder / "budget.json"
    path.write_text(json.dumps(budget))
    monkeypatch.setattr(sys, "argv", ["costs.py", str(folder), "--budget", str(path)])
    assert tool.main() == bool(wrong)
    printed = capsys.readouterr()
    assert all(line in printed.err for line in wrong)
    assert "tests/a" in printed.out


def test_a_run_records_what_a_test_costs(tmp_path):
    """In this run's own worker the plugin may be off, so a run of one test is started."""
    test = "tests/engine/test_block_pool.py"
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "not Machine", test, "--costs", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    found = tool.costs(tool.read([tmp_path]))
    assert found["tests/engine"].tests > 3
    assert found["tests/engine"].engines == 0


def test_programs_of_the_background_do_not_count():
    """How many an engine has compiled when its test ends depends on the machine."""
    recorder = Recorder()

    def ask(key):
        with recorder.shared_program(key):
            pass

    ask("at the start")
    thread = threading.Thread(target=ask, args=("later",), name=THREAD_NAME)
    thread.start()
    thread.join()
    assert len(recorder.keys) == 1
