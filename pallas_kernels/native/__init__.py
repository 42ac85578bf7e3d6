"""Kernels for CPUs, written in numba and called by XLA without Python.

- `memory.py`: reads and writes of memory by address.
- `vectors.py`: arithmetic on vectors of 16 or 8 float32 numbers, as LLVM IR.
- `frame.py`: the arguments of a call from XLA, and the threads that share its work.
- `library.py`: compiles a kernel to machine code and registers it with XLA.
- `disk.py`: the folder that keeps machine code.
- `processors.py`: the number of processors that the process may use.

Running a stored kernel needs only the last three. The other modules import numba, which takes 0.5 s: they are imported
to compile.
"""
