"""All native kernels for CPUs. A program that is stored on disk calls them by name."""

from collections.abc import Iterable

from pallas_kernels.dot.cpu import KERNEL as DOT
from pallas_kernels.dot.cpu import kernel as dot
from pallas_kernels.grouped_dot.cpu import KERNEL as GROUPED_DOT
from pallas_kernels.grouped_dot.cpu import kernel as grouped_dot
from pallas_kernels.paged_attention.cpu import KERNEL as PAGED_ATTENTION
from pallas_kernels.paged_attention.cpu import kernel as paged_attention
from pallas_kernels.quantized_dot.cpu import KERNEL as QUANTIZED_DOT
from pallas_kernels.quantized_dot.cpu import kernel as quantized_dot
from pallas_kernels.row_ops.cpu import KERNEL as ROW_OPS
from pallas_kernels.row_ops.cpu import kernel as row_ops
from pallas_kernels.write_qkv.cpu import KERNEL as WRITE_QKV
from pallas_kernels.write_qkv.cpu import kernel as write_qkv

_KERNELS = {
    DOT: dot, GROUPED_DOT: grouped_dot, PAGED_ATTENTION: paged_attention, QUANTIZED_DOT: quantized_dot,
    ROW_OPS: row_ops, WRITE_QKV: write_qkv,
}  # fmt: skip


def kernels_of_model(*, quantized: bool, experts: bool) -> tuple[str, ...]:
    """Modules of the kernels that a model's programs may call. quantized, experts: the model has such weights."""
    unused = {QUANTIZED_DOT: not quantized, GROUPED_DOT: not experts}
    return tuple(module for module in _KERNELS if not unused.get(module))


def load_kernels(modules: Iterable[str]) -> dict[str, str | None]:
    """Load kernels. Returns the name under which XLA knows each, by module; None if it cannot run here.

    The first call on a machine compiles them, about 3 to 8 s each. Later ones load machine code in milliseconds.
    """
    return {module: _KERNELS[module]().name for module in modules}
