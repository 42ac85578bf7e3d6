"""All native kernels for CPUs. A program that is stored on disk calls them by name.

`python -m pallas_kernels.cpu_kernels MODULE...` compiles kernels, checks them, and stores their machine code.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence

from pallas_kernels.causal_conv.cpu import KERNEL as CAUSAL_CONV
from pallas_kernels.causal_conv.cpu import kernel as causal_conv
from pallas_kernels.dot.cpu import KERNEL as DOT
from pallas_kernels.dot.cpu import kernel as dot
from pallas_kernels.grouped_dot.cpu import KERNEL as GROUPED_DOT
from pallas_kernels.grouped_dot.cpu import kernel as grouped_dot
from pallas_kernels.grouped_lora.cpu import KERNEL as GROUPED_LORA
from pallas_kernels.grouped_lora.cpu import kernel as grouped_lora
from pallas_kernels.native import library, processors
from pallas_kernels.paged_attention.cpu import KERNEL as PAGED_ATTENTION
from pallas_kernels.paged_attention.cpu import kernel as paged_attention
from pallas_kernels.quantized_dot.cpu import KERNEL as QUANTIZED_DOT
from pallas_kernels.quantized_dot.cpu import kernel as quantized_dot
from pallas_kernels.quantized_grouped_dot.cpu import KERNEL as QUANTIZED_GROUPED_DOT
from pallas_kernels.quantized_grouped_dot.cpu import kernel as quantized_grouped_dot
from pallas_kernels.row_ops.cpu import KERNEL as ROW_OPS
from pallas_kernels.row_ops.cpu import kernel as row_ops
from pallas_kernels.set_rows.cpu import KERNEL as SET_ROWS
from pallas_kernels.set_rows.cpu import kernel as set_rows
from pallas_kernels.state_scan.cpu import KERNEL as STATE_SCAN
from pallas_kernels.state_scan.cpu import kernel as state_scan
from pallas_kernels.write_kv.cpu import KERNEL as WRITE_QKV
from pallas_kernels.write_kv.cpu import kernel as write_qkv

# by module of the native kernel: the function that loads it into this process
KERNELS = {
    CAUSAL_CONV: causal_conv, DOT: dot, GROUPED_DOT: grouped_dot, GROUPED_LORA: grouped_lora,
    PAGED_ATTENTION: paged_attention, QUANTIZED_DOT: quantized_dot, QUANTIZED_GROUPED_DOT: quantized_grouped_dot,
    ROW_OPS: row_ops, SET_ROWS: set_rows, STATE_SCAN: state_scan, WRITE_QKV: write_qkv,
}  # fmt: skip
_ROOT = pathlib.Path(__file__).parents[1]
_ahead: set[str] = set()  # modules that `compile_ahead` has seen


def kernels_of_model(
    *, quantized: bool, experts: bool, adapters: bool = False, convolutions: bool = False, scans: bool = False
) -> tuple[str, ...]:
    """Modules of the kernels that a model's programs may call.

    quantized, experts: the model has such weights. adapters: its programs take LoRA adapters.
    convolutions: its layers call `causal_conv`. scans: they call `gated_delta` or `mamba2`.
    """
    unused = {
        QUANTIZED_DOT: not quantized, GROUPED_DOT: not experts, QUANTIZED_GROUPED_DOT: not (quantized and experts),
        GROUPED_LORA: not adapters, CAUSAL_CONV: not convolutions, STATE_SCAN: not scans,
    }  # fmt: skip
    return tuple(module for module in KERNELS if not unused.get(module))


def load_kernels(modules: Iterable[str]) -> dict[str, str | None]:
    """Load kernels. Returns the name under which XLA knows each, by module; None if it cannot run here.

    The first call on a machine compiles them, 2 to 25 s each. Later ones load machine code in milliseconds.
    """
    return {module: KERNELS[module]().name for module in modules}


def compile_ahead(modules: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Compile the kernels that are not on disk in child processes, while the caller goes on.

    Threads would not help, because numba holds the GIL. `disk.only_one` lets the first process compile a kernel, and
    the others wait for it. So the children start at the end of `modules`, and `load_kernels` at its start. Attention
    is left to the caller, which compares it with the reference at the model's shape.

    Returns the processes, which end by themselves. None are started on a machine with one processor, if the system
    starts no process, or if Python is embedded in another program.
    """
    new = [module for module in reversed(modules) if module != PAGED_ATTENTION and module not in _ahead]
    _ahead.update(new)
    missing = library.not_stored(new) if new else []
    count = min(processors.usable() - 1, len(missing)) if sys.executable else 0
    with contextlib.suppress(OSError, RuntimeError):  # no process or no thread can be started
        return [_child(missing[first:] + missing[:first]) for first in range(count)]
    return []


def _child(modules: Sequence[str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *modules],  # -P: import nothing from the current folder
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # `load_kernels` meets the same error, and logs it
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    )
    threading.Thread(target=child.wait, daemon=True).start()
    return child


if __name__ == "__main__":
    load_kernels(sys.argv[1:])
