"""Compiles kernels for this processor, keeps the machine code on disk, and registers it with XLA.

Compiling imports numba and takes seconds. Loading machine code from disk imports llvmlite and takes milliseconds. Both
must be installed, because the file's name has their versions. Without them no native kernel is used.

Imported late: numba and llvmlite, which may be missing.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import pathlib
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.native import c_api, disk, processors

logger = logging.getLogger(__name__)

PACKAGE = pathlib.Path(__file__).parents[1]
NEEDED = {"x86_64": ("fma", "avx2", "f16c"), "AMD64": ("fma", "avx2", "f16c"), "aarch64": (), "arm64": ()}
HANDLER, TASK = "handle_call", "help_with_job"  # C functions of every kernel
THREAD_LIMIT = "thread_limit"  # variable of every kernel, int64: the most threads of a call
_lock = threading.RLock()


class Native(NamedTuple):
    """A native kernel of this process."""

    name: str | None            # its name in XLA; None: it cannot run
    reason: str | None          # why it cannot run
    is_new: bool = False        # compiled by this process, not loaded from disk


def native(kernel: str, check: Callable[[str], None] | None = None) -> Native:
    """Load or compile a kernel and register it with XLA, at the first call.

    kernel: a module with the numba functions `task` and `handler`, like "pallas_kernels.paged_attention.cpu_kernel".
    check:  called with the kernel's name after it is compiled; raises an error if results are wrong.

    Never raises: callers can compute with XLA operations instead.
    """
    with _lock:  # a kernel is registered once
        return _native(kernel, check)


@functools.cache
def _native(kernel: str, check: Callable[[str], None] | None) -> Native:
    reason = _unsupported()
    if reason is not None:
        _log_unused(reason)
        return Native(None, reason)
    try:
        return _registered(kernel, check)
    except Exception as error:  # whatever goes wrong inside numba, LLVM or XLA
        _warn(repr(error))
        return Native(None, f"it does not work here: {error!r}")


@functools.cache  # one line, not one for each kernel
def _log_unused(reason: str) -> None:
    logger.info("native kernels are not used: %s", reason)


@functools.cache
def _warn(reason: str) -> None:
    logger.warning("native kernels do not work here, so XLA operations are used: %s", reason)


class Processor(NamedTuple):
    """A processor that kernels are compiled for."""

    name: str                 # LLVM's
    features: frozenset[str]  # LLVM's names
    flags: str = ""           # LLVM's list of features that it has or lacks, for the compiler


@functools.cache
def processor() -> Processor:
    """Return this machine's processor. Raises what a missing or broken llvmlite raises."""
    from llvmlite import binding

    found = binding.get_host_cpu_features()
    features = frozenset(name for name, is_there in found.items() if is_there)
    return Processor(binding.get_host_cpu_name(), features, found.flatten())


def not_stored(kernels: Sequence[str]) -> list[str]:
    """The kernels that are not on disk, and that `native` would compile and store. Loads nothing."""
    if _unsupported() is not None or _lacks():
        return []
    digest = _digest()
    return [kernel for kernel in kernels if (path := _path(kernel, digest)) is not None and not path.exists()]


def discard(kernel: str) -> None:
    """Remove a kernel's machine code from disk: its results are wrong."""
    folder = disk.folder()
    for path in folder.glob(f"{kernel}.*") if folder else ():
        path.unlink(missing_ok=True)


def _unsupported() -> str | None:
    if platform.machine() not in NEEDED or sys.platform not in ("linux", "darwin"):
        return f"it runs on Linux and macOS on x86-64 and ARM64, not on {sys.platform} {platform.machine()}"
    for package in ("numba", "llvmlite"):
        if importlib.util.find_spec(package) is None:
            return f"it needs {package}, which is not installed"
    return None


def _lacks() -> list[str]:
    """Features that kernels need and this processor does not have."""
    return [name for name in NEEDED[platform.machine()] if name not in processor().features]


def _path(kernel: str, digest: str) -> pathlib.Path | None:
    folder = disk.folder()
    return folder / f"{kernel}.{digest}" if folder else None


def _registered(kernel: str, check: Callable[[str], None] | None) -> Native:
    if lacking := _lacks():
        return Native(None, f"it needs a processor with {', '.join(lacking)}")
    digest = _digest()
    name = f"{kernel}.{digest[:16]}"  # a program in XLA's cache calls the kernel version that it was compiled with
    path = _path(kernel, digest)
    code = disk.read(path)
    if code is not None:
        _register(name, code)
        return Native(name, None)
    with disk.only_one(path):
        code = disk.read(path)  # stored by the process that had the lock
        is_new = code is None
        if code is None:
            c_api.check()
            logger.info("compiling the native kernel %s for this processor, once: 2 to 25 s", kernel.split(".")[1])
            with _interruptible():
                code = _compile(kernel)
        _register(name, code)
        if is_new:
            if check is not None:
                with jax.default_device(jax.devices("cpu")[0]):  # the default may be a GPU
                    check(name)
            disk.write(path, code)
    return Native(name, None, is_new)


class Addresses(NamedTuple):
    """Addresses of a kernel's parts, valid for the life of the process."""

    handler: int
    thread_limit: int  # 0: the kernel uses no other threads


addresses: dict[str, Addresses] = {}  # of the kernels in this process, by name


def _register(name: str, code: bytes) -> None:
    """Load machine code into this process, and register its handler with XLA."""
    from llvmlite import binding

    engine = _engine()
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    limit = engine.get_global_value_address(THREAD_LIMIT)
    if limit:
        ctypes.c_int64.from_address(limit).value = processors.usable()
    address = engine.get_function_address(HANDLER)
    addresses[name] = Addresses(address, limit)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    engine.detach()  # the code stays for the life of the process: XLA's threads may run it while Python ends
    # Initialise the platform first. Otherwise JAX would register the kernel during the initialisation, and a kernel
    # that XLA refuses would end the process.
    jax.devices("cpu")
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")


def _digest() -> str:
    """SHA-256 over all that machine code depends on: sources, versions and the processor."""
    whole = hashlib.sha256()
    for path in sorted([*PACKAGE.glob("native/*.py"), *PACKAGE.glob("*/cpu*.py")]):
        whole.update(path.read_bytes())
    # jaxlib: kernels are compiled and checked again for a new version of XLA's interface
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite", "jaxlib")]
    parts = [versions, sys.version_info[:2], platform.machine(), processor().name, processor().flags]
    whole.update(json.dumps(parts).encode())
    return whole.hexdigest()


def _compile(kernel: str) -> bytes:
    """Machine code of a kernel: an object file with the C functions HANDLER and TASK."""
    from llvmlite import binding

    module = importlib.import_module(kernel)
    whole, names = binding.parse_assembly(""), []
    with _without_optimisation():
        for function, signature in ((module.task, "int64(int64)"), (module.handler, "int64(int64, int64)")):
            function.compile(signature)
            (made,) = function.overloads.values()
            whole.link_in(binding.parse_assembly(made.library.get_llvm_str()))
            names.append(made.fndesc.llvm_func_name)
    whole.link_in(binding.parse_assembly(_ENTRIES.format(*names, task_entry=TASK, handler_entry=HANDLER)))
    for function in whole.functions:
        if function.name not in (HANDLER, TASK) and not function.is_declaration:
            function.linkage = "internal"  # LLVM removes unused ones, such as numba's for Python
    machine = _machine()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(whole, passes)
    whole.verify()
    return machine.emit_object(whole)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt by the block's end: ctypes drops one that is raised in a Python callback of LLVM."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _without_optimisation() -> Iterator[None]:
    """Keep numba from optimising: LLVM optimises the whole kernel afterwards. Halves the compile time."""
    from numba.core import config
    from numba.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:  # no other thread compiles with this level
        level = config.OPT
        config.OPT = type(level)(0)
        try:
            yield
        finally:
            config.OPT = level


# C functions that call numba's functions, which return results through a pointer. Native kernels raise nothing, so the
# status is always 0. numba's own C functions would need Python to report errors.
_ENTRIES = """
declare i32 @{0}(ptr, ptr, i64)
declare i32 @{1}(ptr, ptr, i64, i64)
define i64 @{task_entry}(i64 %job) {{
    %result = alloca i64
    %error = alloca ptr
    %status = call i32 @{0}(ptr %result, ptr %error, i64 %job)
    %value = load i64, ptr %result
    ret i64 %value
}}
define i64 @{handler_entry}(i64 %frame) {{
    %result = alloca i64
    %error = alloca ptr
    %task = ptrtoint ptr @{task_entry} to i64
    %status = call i32 @{1}(ptr %result, ptr %error, i64 %frame, i64 %task)
    %value = load i64, ptr %result
    ret i64 %value
}}
"""


def _machine() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=processor().name, features=processor().flags, opt=3, jit=True,
        codemodel="jitdefault", reloc="default",
    )  # fmt: skip


def _engine() -> Any:
    """A new engine for a kernel's machine code. Each kernel has its own, because all use the same symbols."""
    from llvmlite import binding

    machine = _machine()
    empty = binding.parse_assembly("")
    empty.triple = machine.triple
    return binding.create_mcjit_compiler(empty, machine)
