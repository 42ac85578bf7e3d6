"""Compiles kernels for this processor, keeps the machine code on disk, and registers it with XLA.

Compiling needs numba and takes seconds. Loading machine code from disk needs llvmlite only, and takes milliseconds.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import platform
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import platformdirs

logger = logging.getLogger(__name__)

PACKAGE = pathlib.Path(__file__).parents[1]
NEEDED = {"x86_64": ("fma", "avx2", "f16c"), "AMD64": ("fma", "avx2", "f16c"), "aarch64": (), "arm64": ()}
HANDLER, TASK = "handle_call", "help_with_job"  # C functions of every kernel
_lock = threading.RLock()


class Native(NamedTuple):
    """A native kernel of this process."""

    name: str | None            # under which XLA knows it; None: it cannot run
    reason: str | None          # why it cannot run
    is_new: bool = False        # compiled by this process, not loaded from disk


def native(kernel: str, check: Callable[[str], None] | None = None) -> Native:
    """Load or compile a kernel and register it with XLA, at the first call.

    kernel: a module with the numba functions `task` and `handler`: "pallas_kernels.paged_attention.cpu_kernel".
    check:  called with the kernel's name after it was compiled; raises an error if its results are wrong.

    Never raises: callers have another way to compute.
    """
    with _lock:  # a kernel is registered once
        return _native(kernel, check)


@functools.cache
def _native(kernel: str, check: Callable[[str], None] | None) -> Native:
    reason = _unsupported()
    if reason is not None:
        return Native(None, reason)
    try:
        made = _registered(kernel)
        if check is not None and made.is_new and made.name is not None:
            try:
                check(made.name)
            except Exception:
                discard(kernel)
                raise
        return made
    except Exception as error:  # whatever goes wrong inside numba, LLVM or XLA
        logger.warning("native kernels do not work here, so XLA operations are used: %r", error)
        return Native(None, f"it does not work here: {error!r}")


@functools.cache
def has_feature(name: str) -> bool:
    """Whether this processor has a feature, by LLVM's name. False without llvmlite."""
    try:
        from llvmlite import binding

        return bool(binding.get_host_cpu_features().get(name))
    except Exception:  # a broken installation raises what its loader raises
        return False


def discard(kernel: str) -> None:
    """Remove a kernel's machine code from disk: its results are wrong."""
    folder = _folder()
    for path in folder.glob(f"{kernel}.*") if folder else ():
        path.unlink(missing_ok=True)


def _unsupported() -> str | None:
    if platform.machine() not in NEEDED or sys.platform not in ("linux", "darwin"):
        return f"it runs on Linux and macOS on x86-64 and ARM64, not on {sys.platform} {platform.machine()}"
    for package in ("numba", "llvmlite"):
        if importlib.util.find_spec(package) is None:
            return f"it needs {package}, which is not installed"
    return None


def _registered(kernel: str) -> Native:
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    lacking = [name for name in NEEDED[platform.machine()] if not features.get(name)]
    if lacking:
        return Native(None, f"it needs a processor with {', '.join(lacking)}")
    digest = _digest()
    name = f"{kernel}.{digest[:16]}"  # a program that XLA has stored calls the kernel that it was compiled with
    folder = _folder()
    path = folder / f"{kernel}.{digest}" if folder else None
    code = _read(path)
    is_new = code is None
    if code is None:
        logger.info("compiling %s for this processor: about 10 s, once", kernel)
        code = _compile(kernel)
        _write(path, code)
    _register(name, code)
    return Native(name, None, is_new)


def _register(name: str, code: bytes) -> None:
    """Load machine code into this process, and tell XLA of its handler."""
    from llvmlite import binding

    engine = _engine()
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address(HANDLER))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")


def _digest() -> str:
    """SHA-256 over all that machine code depends on: sources, versions and the processor."""
    from llvmlite import binding

    whole = hashlib.sha256()
    for path in sorted([*PACKAGE.glob("native/*.py"), *PACKAGE.glob("*/cpu*.py")]):
        whole.update(path.read_bytes())
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    features = binding.get_host_cpu_features().flatten()
    parts = [versions, sys.version_info[:2], platform.machine(), binding.get_host_cpu_name(), features]
    whole.update(json.dumps(parts).encode())
    return whole.hexdigest()


def _compile(kernel: str) -> bytes:
    """Machine code of a kernel: an object file with the C functions HANDLER and TASK."""
    from llvmlite import binding

    module = importlib.import_module(kernel)
    whole, names = binding.parse_assembly(""), []
    for function, signature in ((module.task, "int64(int64)"), (module.handler, "int64(int64, int64)")):
        function.compile(signature)
        (made,) = function.overloads.values()
        whole.link_in(binding.parse_assembly(made.library.get_llvm_str()))
        names.append(made.fndesc.llvm_func_name)
    whole.link_in(binding.parse_assembly(_ENTRIES.format(*names, task_entry=TASK, handler_entry=HANDLER)))
    for function in whole.functions:
        if function.name not in (HANDLER, TASK) and not function.is_declaration:
            function.linkage = "internal"  # so that unused ones are removed: those for calls from Python
    machine = _machine()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(whole, passes)
    whole.verify()
    return machine.emit_object(whole)


# C functions that call numba's, which return their results through a pointer. The status is always 0: native kernels
# raise nothing. numba's own C functions would need Python to report errors.
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
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True,
        codemodel="jitdefault", reloc="default",
    )  # fmt: skip


@functools.cache
def _engine() -> Any:
    """The engine that holds all machine code, for the life of the process."""
    from llvmlite import binding

    machine = _machine()
    empty = binding.parse_assembly("")
    empty.triple = machine.triple
    return binding.create_mcjit_compiler(empty, machine)


@functools.cache
def _folder() -> pathlib.Path | None:
    """The folder of machine code, which only this user can write; None if there is no such folder.

    Machine code of another user would run with this user's rights.
    """
    folder = pathlib.Path(platformdirs.user_cache_dir("pallas_kernels")) / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError as error:
        logger.warning("%s cannot be used (%s): native kernels compile at every start", folder, error)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        logger.warning("%s is not a private folder of this user: native kernels compile at every start", folder)
        return None
    return folder


def _read(path: pathlib.Path | None) -> bytes | None:
    """The machine code in a file; None if there is no whole one."""
    if path is None:
        return None
    try:
        checksum, _, code = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s): the native kernel compiles again", path, error)
        return None
    if checksum != hashlib.sha256(code).hexdigest().encode():
        logger.warning("%s is damaged: the native kernel compiles again", path)
        return None
    return code


def _write(path: pathlib.Path | None, code: bytes) -> None:
    """Store machine code, whole or not at all."""
    if path is None:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
        pathlib.Path(file.name).replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the native kernel compiles at the next start", path, error)
