"""All native kernels for CPUs. A program that is stored on disk calls them by name."""

from pallas_kernels.dot.cpu import KERNEL as DOT
from pallas_kernels.dot.cpu import kernel as dot
from pallas_kernels.paged_attention.cpu import KERNEL as PAGED_ATTENTION
from pallas_kernels.paged_attention.cpu import kernel as paged_attention
from pallas_kernels.quantized_dot.cpu import KERNEL as QUANTIZED_DOT
from pallas_kernels.quantized_dot.cpu import kernel as quantized_dot
from pallas_kernels.row_ops.cpu import KERNEL as ROW_OPS
from pallas_kernels.row_ops.cpu import kernel as row_ops
from pallas_kernels.write_qkv.cpu import KERNEL as WRITE_QKV
from pallas_kernels.write_qkv.cpu import kernel as write_qkv

_KERNELS = {
    DOT: dot, PAGED_ATTENTION: paged_attention, QUANTIZED_DOT: quantized_dot, ROW_OPS: row_ops, WRITE_QKV: write_qkv,
}  # fmt: skip


def cpu_kernel_names(*, quantized: bool) -> dict[str, str | None]:
    """Load the native kernels. Returns the name under which XLA knows it, by module; None if it cannot run here.

    quantized: also load those for quantised weights.

    The first call on a machine compiles them, about 10 s each. Later ones load machine code in milliseconds.
    """
    return {module: kernel().name for module, kernel in _KERNELS.items() if quantized or module != QUANTIZED_DOT}
