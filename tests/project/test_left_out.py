"""The gate leaves out test files if nothing that they use has changed (.ci/left_out.py)."""

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREE = {
    "pyproject.toml": "",
    "README.md": "",
    "jpaged/__init__.py": "from jpaged.engine import Engine",
    "jpaged/sizes.py": "SIZE = 16",
    "jpaged/engine.py": "from jpaged.sizes import SIZE\ndef Engine():\n    from jpaged.late import x\n    return x",
    "jpaged/late.py": "x = 1",
    "jpaged/plugin.py": "def plugin(): pass",
    "jpaged/page.html": "",
    "jpaged/tuning.json": "{}",
    "jpaged/grammar.py": "def parse(): pass",
    "tests/conftest.py": "",
    "tests/helper.py": "def help(): pass",
    "tests/golden/answers.json": "{}",
    "tests/engine/conftest.py": "",
    "tests/engine/test_engine.py": "import jpaged\nfrom tests.helper import help",
    "tests/test_grammar.py": "from jpaged.grammar import parse",
    "tests/test_child.py": "import subprocess",
    "tests/test_kernel.py": "from pallas_kernels.dot import dot\nimport plot",
    "tests/test_skipped.py": "",
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/dot.py": "KERNEL = 'pallas_kernels.dot_cpu'\ndef dot(): pass",
    "pallas_kernels/dot_cpu.py": "from pallas_kernels.vectors import width",
    "pallas_kernels/vectors.py": "width = 8",
    "tools/plot.py": "def plot(): pass",
    "docs/words.md": "",
}
KEPT = {"test_engine", "test_grammar", "test_child", "test_kernel"}  # left out if nothing has changed
STEP, OPTIONS = "slow", "Python 3.12, jax 1, jaxlib 1, XLA_FLAGS None"


def load(tree: Path):
    """The script, as a copy in a tree."""
    spec = importlib.util.spec_from_file_location("left_out", tree / ".ci/left_out.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def left_out(tree: Path, options: str = OPTIONS) -> set[str]:
    return {Path(name).stem for name in load(tree).unchanged(STEP, options)}


@pytest.fixture
def tree(tmp_path):
    """A small project after a complete pass. `tests/test_child.py` started a process that recorded nothing."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests/recording").mkdir()
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/left_out.py", tmp_path / ".ci")
    reached = {
        "tests/engine/test_engine.py::test_one": {"jpaged/engine.py": [2, 3, 4], "jpaged/page.html": [0]},
        "tests/test_grammar.py::test_two": {"jpaged/grammar.py": [1]},
        "tests/test_child.py::test_three": {},
        "tests/test_kernel.py::test_four": {},
        "tests/test_skipped.py::test_five": {},
        "*": {"docs/words.md": [0], "tests/helper.py": [0]},
    }
    for folder in ("costs", "reach"):
        (tmp_path / folder / STEP).mkdir(parents=True)
    with (tmp_path / "reach" / STEP / "main.jsonl").open("w") as reach, \
            (tmp_path / "costs" / STEP / "main.jsonl").open("w") as costs:  # fmt: skip
        for test, lines in reached.items():
            reach.write(json.dumps({"test": test, "lines": lines}) + "\n")
            children, skipped = int("three" in test or "one" in test), "five" in test
            costs.write(json.dumps({"test": test, "children": children, "skipped": skipped}) + "\n")
    child = ["tests/engine/test_engine.py::test_one", "jpaged/plugin.py:1", "jpaged/plu"]
    (tmp_path / "reach" / STEP / "child-1.lines").write_text("\n".join(child))
    module = load(tmp_path)
    (tmp_path / "options").mkdir()
    (tmp_path / "options" / STEP).write_text(f"{OPTIONS}\n")
    module.write(module.record(tmp_path / "options", tmp_path / "costs", tmp_path / "reach"))
    return tmp_path


def test_nothing_has_changed(tree):
    """A file with a test that was skipped always runs: another machine may have what it needs."""
    assert left_out(tree) == KEPT
    (tree / "README.md").write_text("changed")
    (tree / "tests/recording/budget.json").write_text("{}")
    assert left_out(tree) == KEPT


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ("jpaged/engine.py", {"test_engine", "test_child"}),   # reached
        ("jpaged/late.py", {"test_engine", "test_child"}),     # imported by a line that was reached
        ("jpaged/sizes.py", {"test_engine", "test_child"}),    # imported, and has no function
        ("jpaged/plugin.py", {"test_engine", "test_child"}),   # reached in a child process
        ("jpaged/page.html", {"test_engine", "test_child"}),   # opened
        ("jpaged/grammar.py", {"test_grammar", "test_child"}),
        ("jpaged/__init__.py", {"test_engine", "test_grammar", "test_child"}),  # runs before a module of the package
        ("jpaged/new.py", {"test_child"}),
        ("jpaged/late/__init__.py", {"test_engine", "test_child"}),  # would be imported in place of late.py
        ("pallas_kernels/vectors.py", {"test_kernel", "test_child"}),  # named in a string, from which it is compiled
        ("tools/plot.py", {"test_kernel", "test_child"}),      # imported by its bare name
        ("docs/words.md", KEPT),                               # opened while tests were collected
        ("tests/helper.py", {"test_engine"}),
        ("tests/engine/conftest.py", {"test_engine"}),
        ("tests/test_grammar.py", {"test_grammar"}),
        ("tests/conftest.py", KEPT),
        ("tests/golden/answers.json", KEPT),
        ("jpaged/tuning.json", KEPT),
        ("pyproject.toml", KEPT),
        ("pytest.ini", KEPT),
    ],
)  # fmt: skip
def test_a_file_has_changed(tree, changed, runs):
    """A child process that recorded nothing may have used any file of the project."""
    path = tree / changed
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n\n")
    assert left_out(tree) == KEPT - runs


def test_other_options_steps_and_files(tree):
    assert left_out(tree, OPTIONS.replace("1", "2")) == left_out(tree, OPTIONS.replace("None", "''")) == set()
    assert load(tree).unchanged("h200", OPTIONS) == []
    (tree / "tests/test_child.py").unlink()
    assert left_out(tree) == KEPT - {"test_child"}
    (tree / "tests/golden/new.json").write_text("{}")
    assert left_out(tree) == set()
    (tree / "tests/golden/new.json").unlink()
    assert left_out(tree) == KEPT - {"test_child"}
    (tree / "tests/recording/complete_pass.json").unlink()
    assert left_out(tree) == set()


def test_a_file_that_changed_meanwhile_is_not_recorded(tree):
    os.utime(tree / "jpaged/late.py", (time.time() + 9,) * 2)
    with pytest.raises(SystemExit, match=r"jpaged/late\.py has changed since step slow began"):
        load(tree).record(*(tree / name for name in ("options", "costs", "reach")))
