"""Native kernels for other processors than this machine's. Each in a new process: numba compiles a function once."""

import multiprocessing
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize, quantized_dot, self_check
from pallas_kernels.cpu_kernels import kernels_of_model, load_kernels
from pallas_kernels.dot import cpu as dot
from pallas_kernels.native import disk, library
from pallas_kernels.paged_attention import cpu as attention
from pallas_kernels.quantized_dot import cpu as products
from tests.kernels.integer_matmul import SHAPES, arrays

AVX2 = {"fma", "avx2", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl"}
DOT, QUANTIZED, ATTENTION = dot.KERNEL, products.KERNEL, attention.KERNEL


class Case(NamedTuple):
    """A processor, by the features that decide which code is made, and the kernels that no case before it covers."""

    processor: library.Processor
    kernels: tuple[str, ...]


CASES = [
    Case(library.Processor("haswell", frozenset(AVX2)), kernels_of_model(quantized=True, experts=True)),
    Case(library.Processor("alderlake", frozenset(AVX2 | {"avxvnni"})), (QUANTIZED,)),
    Case(library.Processor("skylake-avx512", frozenset(AVX512)), (DOT, QUANTIZED, ATTENTION)),
    Case(library.Processor("cascadelake", frozenset(AVX512 | {"avx512vnni"})), (QUANTIZED,)),
    Case(library.Processor("znver4", frozenset(AVX512 | {"avx512vnni", "avx512bf16"})), (DOT, ATTENTION)),
]
ARM = Case(library.Processor("apple-m1", frozenset({"neon"})), (DOT, QUANTIZED, ATTENTION))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.codegen,
    pytest.mark.skipif(library.native(attention.KERNEL).name is None, reason="native kernels cannot run here"),
]


def own_features():
    return library.processor().features & frozenset().union(*(case.processor.features for case in CASES))


def run(function, *arguments):
    child = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    child.start()
    child.join(550)
    assert child.exitcode == 0


@pytest.mark.timeout(600)  # 90 s of compiling, which takes longer on a busy machine
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.processor.name)
def test_results_on_lesser_processors(case, tmp_path):
    """The code for processors with fewer features than this machine's agrees with the references."""
    if case.processor.features < own_features():
        run(_compare, *case, tmp_path / case.processor.name)


def _compare(processor, kernels, folder):
    folder.mkdir(mode=0o700)
    library.processor, disk.folder = lambda: processor, lambda: folder
    names = load_kernels(kernels)  # compares most of them with their references
    assert None not in names.values()
    if ATTENTION in kernels:
        options = {"head_dim": 64, "implementation": "cpu", "cases": ["decode", "mixed"]}
        for dtype in (jnp.float32, jnp.bfloat16):
            self_check(q_heads=6, kv_heads=2, dtype=dtype, **options)
        self_check(dtype=jnp.float32, kv_dtype=jnp.int8, **options | {"head_dim": 24})
    if QUANTIZED in kernels:
        _compare_quantized()


@pytest.mark.soak  # 140 s of compiling
def test_products_without_instructions_for_them(tmp_path):
    """The code for processors whose products of integers are not known, such as ARM64."""
    run(_compare_portable, tmp_path)


def _compare_portable(folder):
    from pallas_kernels.native import integers

    integers._products, disk.folder = lambda: None, lambda: folder
    assert load_kernels((QUANTIZED,))[QUANTIZED] is not None
    _compare_quantized()


def _compare_quantized():
    for shape in SHAPES:
        x, weight = arrays(*shape)
        native, xla = (quantized_dot(x, weight, shape[0], implementation=name) for name in ("cpu", "xla"))
        np.testing.assert_array_equal(native, xla)
    # the largest codes and inputs: no sum of two or four products may leave its integers
    x, numbers = jnp.ones((3, 256)).at[:, ::3].set(-1), jnp.ones((16, 256)).at[::2].set(-1)
    for bits in (4, 8):
        weight = quantize(numbers, bits, 64)
        native, xla = (quantized_dot(x, weight, 3, implementation=name) for name in ("cpu", "xla"))
        np.testing.assert_array_equal(native, xla)


@pytest.mark.timeout(600)  # 285 s for ARM on a machine with ten processes on two cores
@pytest.mark.parametrize("case", [*CASES, ARM], ids=lambda case: case.processor.name)
def test_kernels_compile_for_a_processor(case):
    """Whether this machine has it or not. LLVM ends the process if a processor lacks an instruction."""
    triple, machine_of_elf = ("aarch64", 183) if case is ARM else ("x86_64", 62)
    run(_compile, *case, f"{triple}-unknown-linux-gnu", machine_of_elf)


def _compile(processor, kernels, triple, machine_of_elf):
    from llvmlite import binding
    from numba.core import codegen
    from numba.core.registry import cpu_target

    def without_machine_code(made, *_):
        made._ensure_finalized()
        return [].append  # numba knows a function by its entry point: a builtin function

    library.processor = lambda: processor
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    library._machine = lambda: binding.Target.from_triple(triple).create_target_machine(
        cpu=processor.name, opt=3, jit=True, codemodel="jitdefault", reloc="default"
    )
    # numba would also compile each function for this machine
    codegen.JITCodeLibrary._finalize_specific = lambda library: None
    codegen.JITCPUCodegen._add_module = lambda self, module: None
    cpu_target.target_context.get_executable = without_machine_code
    for kernel in kernels:
        code = library._compile(kernel)
        assert code[:4] == b"\x7fELF"
        assert int.from_bytes(code[18:20], "little") == machine_of_elf
