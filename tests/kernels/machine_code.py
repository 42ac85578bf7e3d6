"""The machine code of kernels compiled for an H200: NVIDIA's assembler and disassembler, from pip, need no card."""

import dataclasses
import importlib
import pathlib
import re
import subprocess

import jax

from tests.support.deviceless import H200

# of a multiprocessor of compute capability 9.0, as in runtime/targets.py
REGISTERS, SHARED_BYTES = 65_536, 233_472
RESERVED_BYTES = 1_024  # shared memory that the driver takes for each block
HGMMA_RATE = 2048  # multiply-adds of 16-bit numbers per cycle and multiprocessor: 64x256x16 takes 128 cycles
MUFU_CYCLES = 8    # a scheduler issues a warp's special function in as many: it has 4 units for 32 threads
DUMP_PTX = {"xla_dump_emitter_re": "ptx"}  # an option of XLA, for `xla_dump_to`


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel and its launch."""

    registers: int       # of a thread
    spilled_bytes: int   # of a thread
    blocks: int
    threads: int         # of a block
    shared_bytes: int    # of a block
    loops: list[list[str]]  # instructions of each loop that contains no other

    @property
    def resident_blocks(self) -> int:
        """Blocks that a multiprocessor holds at once."""
        by_registers = REGISTERS // (self.registers * self.threads)
        return min(by_registers, SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES))


@dataclasses.dataclass(frozen=True)
class MatmulLoop:
    """One iteration of a loop with Hopper's matmuls (HGMMA), as a warp issues it."""

    instructions: int
    matmul_cycles: int  # of the tensor cores
    exponentials: int   # and other special functions (MUFU)
    overlapped: int     # instructions between the first wait for a matmul and the wait for the last matmul
    passes_turn: bool   # an arrival at a barrier follows the last matmul, before any wait for a matmul
    spills: int         # loads and stores of spilled registers

    @classmethod
    def of(cls, loop: list[str]) -> "MatmulLoop":
        """Read a loop's instructions. HGMMA is asynchronous; WARPGROUP.DEPBAR waits for all but the last n groups."""
        names = [re.sub(r"^@!?U?P\w+ ", "", text).split()[0] for text in loop]
        matmuls = [index for index, name in enumerate(names) if name.startswith("HGMMA")]
        waits = [index for index, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
        shapes = [map(int, re.findall(r"\d+", names[index].split(".")[1])) for index in matmuls]
        return cls(
            instructions=len(loop),
            matmul_cycles=sum(m * n * k for m, n, k in shapes) // HGMMA_RATE,
            exponentials=sum(name.startswith("MUFU") for name in names),
            overlapped=waits[-1] - waits[0] - 1,
            passes_turn=any(name.startswith("SYNCS.ARRIVE") for name in names[matmuls[-1] : waits[0]]),
            spills=sum(name.startswith(("LDL", "STL")) for name in names),
        )


def compile_for(target, call, arguments, **options):
    """compiler_options: of XLA. Other options: of `jax.jit`."""
    compiler_options = options.pop("compiler_options", None)
    sharding = target.sharding()
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with target.tracing():
        return jax.jit(call, **options).trace(*placed).lower().compile(compiler_options=compiler_options)


def tool(name: str) -> pathlib.Path | None:
    """Path of a program of NVIDIA's wheels (nvidia-cuda-nvcc, nvidia-cuda-nvdisasm); None if it is not installed."""
    try:
        folders = importlib.import_module("nvidia").__path__
    except ImportError:
        return None
    return next((path for folder in folders for path in pathlib.Path(folder).glob(f"*/bin/{name}")), None)


def kernels_of(call, arguments, folder: pathlib.Path, only: str | None = None) -> dict[str, Kernel]:
    """The kernels of a program, by name. folder: for files of the compiler. only: the kernel to assemble; None: all."""
    compile_for(H200, call, arguments, compiler_options={"xla_dump_to": str(folder), **DUMP_PTX})
    return kernels_in(folder, only)


def kernels_in(folder: pathlib.Path, only: str | None = None) -> dict[str, Kernel]:
    """The kernels of the program that was compiled with `xla_dump_to=folder` and `DUMP_PTX`, by name.

    only: a regular expression of the names of kernels to assemble; None: all. Kernels with equal code have one entry.
    """
    (sequence,) = folder.glob("*thunk_sequence.txt")
    launch = re.compile(r" (\w+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+),.*shared_memory: (\d+)")
    launches = {name: [int(n) for n in numbers] for name, *numbers in launch.findall(sequence.read_text())}
    kernels = {}
    for source in folder.glob("*.ptx"):
        for name in re.findall(r"\.entry (\w+)", source.read_text()):
            if only is not None and not re.fullmatch(only, name):
                continue
            x, y, z, threads, shared = launches[name]
            registers, spilled, lines = _assembled(source)
            kernels[name] = Kernel(registers, spilled, x * y * z, threads, shared, _loops(lines))
    return kernels


@dataclasses.dataclass(frozen=True)
class MosaicKernel:
    """A compiled kernel of Mosaic GPU. XLA does not know its launch."""

    registers: int       # of a thread, at the start
    spilled_bytes: int   # of a thread
    loops: list[list[str]]  # instructions of each loop that contains no other
    code: list[str]         # all instructions


def mosaic_kernel(call, arguments, folder: pathlib.Path, monkeypatch) -> MosaicKernel:
    """The only kernel of Mosaic GPU in a program. folder: for files of the compiler."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    compile_for(H200, call, arguments)
    for log in folder.glob("*.log"):
        log.unlink()  # 94 MB
    (source,) = folder.glob("*.ptx")
    registers, spilled, lines = _assembled(source)
    return MosaicKernel(registers, spilled, _loops(lines), [text for _, text in lines if text])


def _assembled(source: pathlib.Path) -> tuple[int, int, list[tuple[str, str]]]:
    """Registers, spilled bytes, and (label, instruction) of each line, for a file of PTX with one kernel."""
    binary = source.with_suffix(".cubin")
    report = subprocess.run(
        [tool("ptxas"), "-v", "-arch=sm_90a", "-o", binary, source], check=True, capture_output=True, text=True
    ).stderr  # fmt: skip
    code = subprocess.run([tool("nvdisasm"), "-c", binary], check=True, capture_output=True, text=True).stdout
    (registers,) = re.findall(r"Used (\d+) registers", report)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    lines = re.findall(r"^\s*(\.L\w+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.MULTILINE)
    return int(registers), spilled, lines


def _loops(lines: list[tuple[str, str]]) -> list[list[str]]:
    """Instructions of each loop that contains no other: from a label to a branch back to it."""
    label = {name: index for index, (name, _) in enumerate(lines) if name}
    found = []
    for end, (_, instruction) in enumerate(lines):
        target = re.search(r"\bBRA.*`\((\.L\w+)\)", instruction)
        # a branch to itself pads the end of a kernel
        if target and label[target[1]] < end - 1:
            found.append((label[target[1]], end))
    inner = [one for one in found if not any(one[0] <= b and e <= one[1] and (b, e) != one for b, e in found)]
    return [[text for _, text in lines[begin : end + 1] if text] for begin, end in inner]
