"""An install without numba, or with a broken one: XLA operations compute everything, and one log line says why."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Prints the warnings, the choice of an implementation, the reasons why kernels cannot run, and the error for asking.
SCRIPT = """
import json, logging, sys

if sys.argv[1] == "missing":  # as if the packages were not installed
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("numba", "llvmlite"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    import importlib.util
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name in ("numba", "llvmlite") else find(name, *rest)
    sys.meta_path.insert(0, Missing())

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

logging.getLogger("pallas_kernels").addHandler(Lines())

import jax
import jax.numpy as jnp
import numpy as np
from pallas_kernels import dot, paged_attention, self_check, write_qkv
from pallas_kernels.dot import cpu as dot_cpu
from pallas_kernels.paged_attention import IMPLEMENTATIONS, choose_implementation, cpu
from tests.kernels.oracle import Shape, make_case

case = make_case(Shape())
call = (jax.devices("cpu")[0], case["q"], case["pages"], case["block_tables"], 64)
x, weight = jnp.ones((8, 64)), jnp.ones((16, 64))
np.testing.assert_array_equal(dot(x, weight, 8), np.full((8, 16), 64))
assert self_check(cases="mixed", dtype=jnp.float32, q_heads=4, head_dim=16)
try:
    paged_attention(**case, scale=1.0, max_query_len=64, implementation="cpu")
except ValueError as error:
    text = str(error)
reasons = [cpu.refuse(*call), dot_cpu.refuse(call[0], x, weight, x.dtype)]
print(json.dumps([lines, choose_implementation(*call), *reasons, text]))
"""


# test_native.py has a numba that fails in the default run
@pytest.mark.parametrize("fault", ["missing", pytest.param("broken", marks=pytest.mark.slow)])
def test_without_numba_xla_operations_compute_everything(tmp_path, fault):
    path = [str(ROOT)]
    if fault == "broken":  # as with a library of another C runtime
        for package in ("numba", "llvmlite"):
            (tmp_path / package).mkdir()
            fault_code = "raise OSError('libllvmlite.so: cannot open shared object')"
            (tmp_path / package / "__init__.py").write_text(fault_code)
        path.insert(0, str(tmp_path))
    code = f"import sys; sys.path[:0] = {path!r}\n{SCRIPT}"
    run = subprocess.run([sys.executable, "-c", code, fault], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines, chosen, *reasons, error = json.loads(run.stdout)
    expected = "it needs numba, which is not installed" if fault == "missing" else "libllvmlite.so: cannot open shared"
    assert chosen == "xla_loop"
    assert all(expected in reason for reason in reasons)
    assert error.startswith("implementation='cpu' cannot take this: ")
    assert error.endswith("Leave it out to choose automatically")
    assert len(lines) == (fault == "broken")
    assert all("XLA operations are used" in line for line in lines)
