"""Python runs this when it starts a child process of a test while `pytest --reach` records: see tests/recording."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("jpaged_tests_lines", Path(__file__).parents[1] / "lines.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.start_child()
