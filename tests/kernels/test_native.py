"""Native CPU kernels: the offsets of XLA's structs, machine code on disk, threads, and the same bits everywhere."""

import ctypes
import errno
import functools
import importlib
import logging
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from pallas_kernels import cpu_kernels, paged_attention, private_folder
from pallas_kernels.native import c_api, disk, library, processors
from pallas_kernels.paged_attention import IMPLEMENTATIONS, choose_implementation, cpu
from tests.kernels.native_calls import (
    LARGE,
    LARGE_OPTIONS,
    LARGE_SHAPE,
    large_call,
    write_call,
    write_calls_of_eight_devices,
)
from tests.kernels.oracle import Shape, attend, make_case

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(library.native(cpu.KERNEL).name is None, reason="native kernels cannot run here"),
]


def test_another_header_is_refused(monkeypatch, tmp_path, caplog):
    """No kernel is compiled for structs that differ from the header that jaxlib ships, and the reason is logged."""
    text = c_api.HEADER.read_text()
    assert not list(c_api.differences(text))
    changed = text.replace("  void* data;\n  int64_t rank;", "  int64_t rank;\n  void* data;")
    changed = changed.replace("XLA_FFI_Error_Code_RESOURCE_EXHAUSTED = 8", "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED = 9")
    changed = changed.replace("_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_ThreadPool_NumThreads);", "")
    assert list(c_api.differences(changed)) == [
        "Buffer.data is at 32, not at 24", "Api.XLA_FFI_ThreadPool_NumThreads is missing",
        "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED = 9, not 8",
    ]  # fmt: skip
    (tmp_path / "c_api.h").write_text(changed)
    monkeypatch.setattr(c_api, "HEADER", tmp_path / "c_api.h")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module, name in ((library, "_warn"), (disk, "folder")):
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))
    with caplog.at_level(logging.WARNING):
        made = library._native.__wrapped__(cpu.KERNEL, None)
    assert made.name is None
    assert "Buffer.data is at 32, not at 24" in made.reason
    assert "so XLA operations are used" in caplog.text


# --- the same bits ---------------------------------------------------------------------------------------------------

SAME = {
    "bf16": LARGE_SHAPE,
    "window-softcap": Shape(heads=6, tokens=320, rows=8, window=50, softcap=2.0),
    "mqa-20-sinks-alibi": Shape(heads=20, kv_heads=1, head_dim=40, tokens=320, rows=8, sinks=True, slopes=True),
    "int8-block-8": Shape(kv_dtype="int8", block_size=8, width=40, num_blocks=128, tokens=320, rows=8),
}


@pytest.mark.parametrize("name", SAME)
def test_bits_of_a_query_depend_on_its_own_row_only(name):
    """The same for a whole prompt, in chunks of any size, token by token, and together with other rows."""
    shape, length = SAME[name], 150
    whole_case = make_case(shape, ((length, length),))
    whole, whole_q = attend(shape, whole_case, "cpu"), np.asarray(whole_case["q"])
    neighbours = ((1, 300), (40, 41), (1, 1), (1, 7))
    parts = [(first, 1, ()) for first in (0, 1, 15, 16, 71, 149)]
    parts += [(100, 50, ()), (0, 7, neighbours), (71, 1, neighbours), (33, 17, neighbours[:1])]
    for first, count, others in parts:
        case = make_case(shape, ((count, first + count), *others))
        q = np.array(case["q"])
        q[:count] = whole_q[first : first + count]
        tables = np.array(case["block_tables"])
        tables[0] = np.asarray(whole_case["block_tables"])[0]
        data = np.array(case["pages"].data)
        own = tables[0, : -(-length // shape.block_size)]
        others_own = set(tables[1:].ravel()) - {10**6}
        if others_own & set(own.tolist()):
            continue  # the neighbours' blocks would be overwritten
        data[own] = np.asarray(whole_case["pages"].data)[own]
        scales = case["pages"].scales
        if scales is not None:
            scales = np.array(scales)
            scales[own] = np.asarray(whole_case["pages"].scales)[own]
        pages = type(case["pages"])(*jax.device_put((data, scales)))
        case |= {"q": q, "pages": pages, "block_tables": tables}
        np.testing.assert_array_equal(attend(shape, case, "cpu")[:count], whole[first : first + count])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "function"),
    [
        pytest.param({"NPROC": "1"}, write_call, id="one thread"),
        pytest.param(
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, write_calls_of_eight_devices, id="eight devices"
        ),
    ],
)
def test_bits_are_the_same_with_one_thread_and_on_eight_devices(tmp_path, environment, function):
    code = f"import sys; from tests.kernels.native_calls import {function.__name__}; {function.__name__}(sys.argv[1])"
    if "XLA_FLAGS" in environment:
        environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {environment['XLA_FLAGS']}"}
    command, root = [sys.executable, "-c", code, str(tmp_path / "out.npy")], pathlib.Path(__file__).resolve().parents[2]
    subprocess.run(command, env={**os.environ, **environment}, check=True, cwd=root, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), large_call())


@pytest.mark.slow
def test_bits_are_the_same_in_a_spawned_child(tmp_path):
    child = multiprocessing.get_context("spawn").Process(target=write_call, args=(str(tmp_path / "child.npy"),))
    child.start()
    child.join(120)
    np.testing.assert_array_equal(np.load(tmp_path / "child.npy"), large_call())


def test_threads_of_one_process_call_it_at_once():
    expected, wrong = large_call(), []

    def repeat() -> None:
        wrong.extend(1 for _ in range(50) if not np.array_equal(large_call(), expected))

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_calls_leave_no_memory():
    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    case = make_case(LARGE_SHAPE, LARGE)
    call = jax.jit(lambda *args: paged_attention(*args, **LARGE_OPTIONS))
    growth = []
    for _ in range(5):  # the heap may still settle: 9 MB in 1,000 calls, then nothing
        before = resident()
        for _ in range(300):
            call(*case.values()).block_until_ready()
        growth.append(resident() - before)
        if growth[-1] < 2**18:
            break
    assert growth[-1] < 2**18  # a job or a scratch of each call would be 18 MB


def test_padding_tokens_are_zero():
    shape = LARGE_SHAPE
    case = make_case(shape, ((3, 20),))
    out = jax.jit(lambda *args: paged_attention(*args, scale=0.125, max_query_len=320, implementation="cpu"))(
        *case.values()
    )
    assert not np.asarray(out, np.float32)[3:].any()


# --- machine code on disk --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no kernel in this process. Compiling is replaced: it takes seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, compiled = b"machine code\n" * 1000, []

    def compile_again(kernel: str) -> bytes:
        compiled.append(kernel)
        return code

    monkeypatch.setattr(library, "_compile", compile_again)
    monkeypatch.setattr(library, "_register", lambda name, code: None)

    def start() -> library.Native:
        # new caches: XLA does not register a kernel of this process twice
        for module, name in ((library, "_native"), (library, "_warn"), (disk, "folder")):
            monkeypatch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))
        return library.native(cpu.KERNEL)

    return start, compiled, tmp_path / "pallas_kernels/native"


def stored(folder: pathlib.Path) -> pathlib.Path:
    """The file of the kernel's machine code."""
    (path,) = (path for path in folder.glob(f"{cpu.KERNEL}.*") if path.suffix != ".lock")
    return path


def test_machine_code_is_kept_in_a_private_folder(fresh):
    start, compiled, folder = fresh
    first, second = start(), start()
    assert (first.is_new, second.is_new) == (True, False)
    assert first.name == second.name
    assert compiled == [cpu.KERNEL]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {*folder.iterdir()} == {stored(folder), folder / f"{cpu.KERNEL}.lock"}
    assert stored(folder).name.startswith(first.name)


@pytest.mark.parametrize("harm", ["cut", "changed", "empty", "others can write", "a link", "another user's"])
def test_harmed_machine_code_is_compiled_again(fresh, caplog, harm, tmp_path, monkeypatch):
    start, compiled, folder = fresh
    start()
    path = stored(folder)
    code = bytearray(path.read_bytes())
    if harm == "cut":
        path.write_bytes(code[:-100])
    elif harm == "changed":
        code[5000] ^= 1
        path.write_bytes(code)
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif harm == "another user's":
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    else:
        folder.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        assert start().is_new
    assert len(compiled) == 2
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_made_is_no_error(fresh, caplog):
    start, _, folder = fresh
    folder.parent.write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert start().name is not None
    assert "native kernels compile at every start" in caplog.text


def test_a_folder_that_cannot_be_written_is_one_log_line(fresh, caplog, monkeypatch):
    start, compiled, folder = fresh
    folder.mkdir(parents=True, mode=0o700)

    disk_lock = disk._lock

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(private_folder.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(disk, "_lock", lambda stack, path: disk_lock(stack, folder))  # a folder cannot be opened either
    with caplog.at_level(logging.WARNING):
        assert start().is_new
        assert library.native("pallas_kernels.dot.cpu_kernel").is_new
    assert len(compiled) == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} cannot be written (Read-only file system): native kernels compile at every start"
    ]


def test_a_user_without_a_home_has_no_folder(fresh, caplog, monkeypatch):
    start, _, _ = fresh
    monkeypatch.setattr(disk.platformdirs, "user_cache_dir", lambda name: f"~/.cache/{name}")
    with caplog.at_level(logging.WARNING):
        assert start().is_new
    assert "not an absolute path" in caplog.text
    assert not pathlib.Path("~").exists()


# A process that locks a file, says so, and waits.
LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["stores its code", "dies", "takes too long"])
def test_only_one_process_compiles_a_kernel(fresh, caplog, monkeypatch, end):
    start, compiled, folder = fresh
    made = start()
    path = stored(folder)
    code = path.read_bytes()
    path.unlink()
    if end == "takes too long":
        monkeypatch.setattr(disk, "LOCK_SECONDS", 0.2)
    command = [sys.executable, "-c", LOCK, str(folder / f"{cpu.KERNEL}.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other, caplog.at_level(logging.WARNING):
        assert other.stdout.readline() == b"\n"
        found: list[library.Native] = []
        thread = threading.Thread(target=lambda: found.append(start()))
        thread.start()
        if end != "takes too long":
            thread.join(0.3)
            assert thread.is_alive()
            assert len(compiled) == 1
            if end == "stores its code":
                path.write_bytes(code)
            other.kill()
        thread.join(30)
        other.kill()
    assert found[0] == made._replace(is_new=end != "stores its code")
    assert len(compiled) == (1 if end == "stores its code" else 2)
    assert len(caplog.records) == (end == "takes too long")


@pytest.mark.slow
@pytest.mark.skipif(processors.usable() == 1, reason="one processor compiles one kernel after the other")
def test_child_processes_compile_kernels_ahead(fresh, monkeypatch, tmp_path):
    """They import nothing from the current folder, which may hold a stranger's files."""
    start, compiled, _ = fresh
    start()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "random.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(foreign)
    monkeypatch.setattr(cpu_kernels, "_ahead", set())
    modules = (cpu_kernels.PAGED_ATTENTION, cpu_kernels.ROW_OPS)
    assert library.not_stored(modules) == [cpu_kernels.ROW_OPS]
    (child,) = cpu_kernels.compile_ahead(modules)
    assert not cpu_kernels.compile_ahead(modules)  # the child is at it
    assert child.wait(120) == 0
    assert not library.not_stored(modules)
    assert not library.native(cpu_kernels.ROW_OPS).is_new
    assert compiled == [cpu.KERNEL]
    monkeypatch.setattr(cpu_kernels, "_ahead", set())
    assert not cpu_kernels.compile_ahead(modules)


@pytest.mark.parametrize("executable", [None, ""])
def test_a_program_that_contains_python_has_no_child_processes(fresh, monkeypatch, executable):
    monkeypatch.setattr(cpu_kernels, "_ahead", set())
    monkeypatch.setattr(sys, "executable", executable)
    assert cpu_kernels.compile_ahead((cpu_kernels.ROW_OPS,)) == []


@pytest.fixture
def default_sigint():
    """Python's own handler of Ctrl-C. Under nohup a process ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_control_c_ends_compiling(fresh, monkeypatch):
    """It arrives while LLVM calls a Python function, where ctypes drops the error that it raises."""
    start, _, folder = fresh
    compiled = library._compile
    called = []

    @ctypes.CFUNCTYPE(None)
    def callback() -> None:
        called.append(True)
        signal.raise_signal(signal.SIGINT)

    def compile_and_call_back(kernel: str) -> bytes:
        callback()
        return compiled(kernel)

    monkeypatch.setattr(library, "_compile", compile_and_call_back)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert called
    assert not [path for path in folder.iterdir() if path.suffix != ".lock"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_kernel_with_wrong_results_is_not_used(fresh, caplog):
    start, _, folder = fresh
    start()

    def check(name: str) -> None:
        raise ValueError("differs by 3")

    for path in folder.iterdir():
        path.unlink()
    library._native.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert "differs by 3" in library.native(cpu.KERNEL, check).reason
    assert not [path for path in folder.iterdir() if path.suffix != ".lock"]
    assert "XLA operations are used" in caplog.text


@pytest.mark.parametrize("fault", ["no numba", "numba fails", "no fma", "other machine"])
def test_without_numba_the_xla_operations_are_used(fresh, monkeypatch, caplog, fault):
    start, _, _ = fresh
    if fault == "no numba":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name))
    elif fault == "numba fails":

        def fail(kernel: str) -> bytes:
            raise ImportError("numba is broken")

        monkeypatch.setattr(library, "_compile", fail)
    elif fault == "no fma":
        monkeypatch.setitem(library.NEEDED, library.platform.machine(), ("a feature",))
    else:
        monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    with caplog.at_level(logging.WARNING):
        assert start().name is None
    case = make_case(Shape())
    call = (jax.devices("cpu")[0], case["q"], case["pages"], case["block_tables"], 64)
    assert choose_implementation(*call) == "xla_loop"
    expected = {
        "no numba": "needs numba, which is not installed", "numba fails": "numba is broken",
        "no fma": "needs a processor with a feature", "other machine": "not on linux riscv64",
    }  # fmt: skip
    assert expected[fault] in IMPLEMENTATIONS["cpu"].refuse(*call)
    assert len(caplog.records) == (fault == "numba fails")
    with pytest.raises(ValueError, match=r"implementation='cpu' cannot take this: .*Leave it out"):
        paged_attention(**case, scale=1.0, max_query_len=64, implementation="cpu")
