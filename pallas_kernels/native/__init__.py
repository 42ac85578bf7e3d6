"""Kernels for CPUs, written in numba and called by XLA without Python.

- `memory.py`: reads and writes of memory by address.
- `vectors.py`: arithmetic on vectors of 16 float32 numbers, as LLVM IR.
- `frame.py`: the arguments of a call from XLA, and the threads that share its work.
- `library.py`: compiles a kernel to machine code, keeps it on disk, and registers it with XLA.

Only `library.py` is imported by programs that run kernels. The other modules import numba, which takes 0.5 s: they are
imported to compile.
"""
