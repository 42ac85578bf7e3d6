"""Child processes record the lines that they reach, and behave as without recording."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recording.lines import FOLDER

HOOK = Path(__file__).parents[1] / "recording/child"
SCRIPT = Path(__file__).parents[2] / "tools/calibrate.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in Python 3.12")
def test_a_script_runs_and_is_recorded(tmp_path: Path):
    """Python opens the script before any Python function runs."""
    ours = {"PYTHONPATH": str(HOOK), FOLDER: str(tmp_path), "PYTEST_CURRENT_TEST": "test_x.py::y (call)"}
    subprocess.run([sys.executable, SCRIPT, "--help"], env=os.environ | ours, check=True, capture_output=True)
    (lines,) = tmp_path.iterdir()
    test, *reached = lines.read_text().splitlines()
    assert test == "test_x.py::y"
    assert any(line.startswith("tools/calibrate.py:") for line in reached)
