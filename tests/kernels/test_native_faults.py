"""Faults of native CPU kernels: no memory, another interface of XLA, a busy pool, a container's limit.

Handlers are called with call frames that the tests build, so that each fault is exact.
"""

import contextlib
import ctypes
import importlib
import logging
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVPages, gated_delta, paged_attention, write_qkv
from pallas_kernels.causal_conv import cpu as conv_cpu
from pallas_kernels.cpu_kernels import KERNELS
from pallas_kernels.dot import cpu as dot_cpu
from pallas_kernels.grouped_dot import cpu as grouped_cpu
from pallas_kernels.grouped_lora import cpu as lora_cpu
from pallas_kernels.native import library, processors
from pallas_kernels.paged_attention import cpu as attention_cpu
from pallas_kernels.quantized_dot import cpu as quantized_cpu
from pallas_kernels.quantized_dot import quantize
from pallas_kernels.quantized_grouped_dot import cpu as quantized_grouped_cpu
from pallas_kernels.row_ops import cpu as row_cpu
from pallas_kernels.row_ops import silu_and_mul
from pallas_kernels.set_rows import cpu as rows_cpu
from pallas_kernels.state_scan import cpu as scan_cpu
from pallas_kernels.write_kv import cpu as write_cpu
from tests.kernels.oracle import Shape, make_case
from tests.support.device_arrays import device_array

POINTER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)

pytestmark = pytest.mark.skipif(library._unsupported() is not None, reason="native kernels cannot run here")


@pytest.fixture(scope="module")
def name():
    """The dot kernel, as XLA knows it."""
    made = dot_cpu.kernel()
    assert made.name is not None, made.reason
    return made.name


def words(*values: int) -> ctypes.Array:
    """Int64 numbers in memory."""
    return (ctypes.c_int64 * len(values))(*values)


# --- a call frame of our own -----------------------------------------------------------------------------------------


class Pool:
    """XLA's pool of threads, in the hands of a test. It runs no task by itself.

    threads: the number of threads that the pool reports. refuses: whether it returns an error for each task.
    """

    def __init__(self, threads: int, *, refuses: bool = False) -> None:
        self.tasks: list[tuple[int, int]] = []

        @POINTER
        def num_threads(request: int) -> int:
            ctypes.c_int64.from_address(ctypes.c_int64.from_address(request + 24).value).value = threads
            return 0

        @POINTER
        def schedule(request: int) -> int:
            if refuses:
                return 1
            self.tasks.append(tuple((ctypes.c_int64 * 2).from_address(request + 24)))
            return 0

        self._functions = (num_threads, schedule)
        pointers = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        self.api = words(192, 0, 24, 0, 0, 3, *[0] * 11, *reversed(pointers), *[0] * 5)

    def run(self) -> None:
        """Run all tasks that were scheduled."""
        for task, job in self.tasks:
            POINTER(task)(job)
        self.tasks.clear()


def call_dot(name: str, pool: Pool, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Call the dot kernel's handler for float32 arrays."""
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    given = (np.zeros(2, np.int32), np.array([len(x)], np.int32), x, weight)  # FLOAT32 is kind 0
    keep, pointers = [], []
    for array in (*given, out):
        dims = words(*array.shape)
        buffer = words(48, 0, 0, array.ctypes.data, array.ndim, ctypes.addressof(dims))
        keep += [dims, buffer]
        pointers.append(ctypes.addressof(buffer))
    arguments, results = words(*pointers[:-1]), words(pointers[-1])
    frame = words(
        168, 0, ctypes.addressof(pool.api), 0, 0, 40, 0, 4, 0, ctypes.addressof(arguments),
        40, 0, 1, 0, ctypes.addressof(results), *[0] * 6,
    )  # fmt: skip
    assert handler(name)(ctypes.addressof(frame)) == 0
    return out


def handler(name: str):
    return POINTER(library.addresses[name].handler)


def thread_limit(name: str) -> ctypes.c_int64:
    """The kernel's variable with the most threads of a call."""
    return ctypes.c_int64.from_address(library.addresses[name].thread_limit)


@pytest.fixture
def product():
    """Operands with enough work to be shared, and their product."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 8, 512)), rng.standard_normal((640, 512))
    x, weight = x[0].astype(np.float32), weight.astype(np.float32)
    return x, weight, x.astype(np.float64) @ weight.T.astype(np.float64)


@contextlib.contextmanager
def limited(name: str, threads: int):
    """Let a kernel use at most this many threads."""
    limit = thread_limit(name)
    before, limit.value = limit.value, threads
    try:
        yield
    finally:
        limit.value = before


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "limit", "helpers"), [(64, 3, 2), (64, 1, 0), (2, 64, 1), (1, 64, 0), (64, 64, 9)])
def test_threads_are_those_of_the_pool_the_limit_and_the_work(name, product, pool, limit, helpers):
    """The work has 10 units. The calling thread is one of the threads."""
    x, weight, expected = product
    pool = Pool(pool)
    with limited(name, limit):
        out = call_dot(name, pool, x, weight)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    assert len(pool.tasks) == helpers
    out[:] = 7
    pool.run()  # helpers that begin after the call has returned touch nothing
    assert (out == 7).all()


def test_a_pool_that_refuses_tasks_is_not_waited_for(name, product):
    x, weight, expected = product
    with limited(name, 8):
        np.testing.assert_allclose(call_dot(name, Pool(8, refuses=True), x, weight), expected, atol=1e-4)


def test_kernels_are_loaded_with_the_processors_of_this_process(name):
    assert thread_limit(name).value == processors.usable()


# --- limits of containers --------------------------------------------------------------------------------------------

FILES = {  # of a Linux machine: what the process may use of 8 processors
    "no control groups": ({}, 8),
    "v2": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 3),
    "v2, no quota": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 8),
    "v2, a group above": (
        {
            "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "400000 200000\n", "sys/fs/cgroup/cpu.max": "700000 100000\n",
        }, 2,
    ),
    "v2, in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "v1": (
        {
            "proc/self/cgroup": "5:memory:/m\n3:cpu,cpuacct:/a\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        }, 2,
    ),
    "v1, no quota": (
        {
            "proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }, 8,
    ),
    "v1, the host's path": (
        {
            "proc/self/cgroup": "1:cpu:/docker/0f\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }, 4,
    ),
    "more than the processors": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
    "not numbers": ({"proc/self/cgroup": "0::/\nnonsense\n", "sys/fs/cgroup/cpu.max": "many\n"}, 8),
    "no period": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100 0\n"}, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_quotas_of_control_groups(case, tmp_path, monkeypatch):
    files, expected = FILES[case]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert processors.usable(tmp_path) == expected


def test_affinity_limits_without_quotas(tmp_path, monkeypatch):
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda pid: {5}, raising=False)
    assert processors.usable(tmp_path) == 1
    monkeypatch.delattr(processors.os, "sched_getaffinity")
    monkeypatch.setattr(processors.os, "cpu_count", lambda: 6)
    assert processors.usable(tmp_path) == 6


# --- memory ----------------------------------------------------------------------------------------------------------

# malloc that returns 0 when `left` has counted down to 0, once; `live` counts the allocations that are not freed
_COUNTING = """
@left = global i64 0
@live = global i64 0
declare ptr @malloc(i64)
declare void @free(ptr)
define ptr @counting_malloc(i64 %size) {
    %before = atomicrmw sub ptr @left, i64 1 seq_cst
    %fails = icmp eq i64 %before, 0
    br i1 %fails, label %none, label %some
none:
    ret ptr null
some:
    %count = atomicrmw add ptr @live, i64 1 seq_cst
    %memory = call ptr @malloc(i64 %size)
    ret ptr %memory
}
define void @counting_free(ptr %memory) {
    %count = atomicrmw sub ptr @live, i64 1 seq_cst
    call void @free(ptr %memory)
    ret void
}
"""


class Counted(NamedTuple):
    """The kernels with a malloc that is counted and can fail."""

    names: dict[str, str]     # kernel to the name under which XLA knows it
    left: ctypes.c_int64      # calls of malloc that succeed before one fails
    live: ctypes.c_int64      # allocations that are not freed


@pytest.fixture(scope="module")
def counted():
    from llvmlite import binding

    loaded = {kernel: load().name for kernel, load in KERNELS.items()}
    assert None not in loaded.values()
    module, machine = binding.parse_assembly(_COUNTING), library._machine()
    module.triple = machine.triple
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    own, names = {name: binding.address_of_symbol(name) for name in ("malloc", "free")}, {}
    for name in own:
        binding.add_symbol(name, engine.get_function_address(f"counting_{name}"))
    try:
        for kernel, registered in loaded.items():
            names[kernel] = f"{kernel}.counted"
            stored = next(library.disk.folder().glob(f"{registered}*"), None)  # its name goes on with the whole digest
            library._register(names[kernel], library.disk.read(stored) or library._compile(kernel))
    finally:
        for name, address in own.items():
            binding.add_symbol(name, address)
    variables = (ctypes.c_int64.from_address(engine.get_global_value_address(name)) for name in ("left", "live"))
    yield Counted(names, *variables)
    del engine  # until here its machine code is called


def programs():
    """For each kernel a call that is large enough to be shared, and its arguments."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((rows, 512)).astype(np.float32) for rows in (32, 640))
    blocks, matrices = x.reshape(4, 8, 512), weight.reshape(5, 128, 512)
    case = make_case(Shape(heads=8, head_dim=64, tokens=320, rows=8), ((1, 300), (100, 120), (150, 300)))
    qkv = rng.standard_normal((200, 4, 6, 64)).astype(np.float32)
    table = device_array(rng.standard_normal((700, 1024)), "bfloat16")
    pages = KVPages(device_array(np.zeros((16, 2, 4, 16, 64)), "float32"))
    quantize_in_program = jax.jit(quantize, static_argnums=(1, 2))

    def attention(*arguments):
        return paged_attention(*arguments, scale=0.125, max_query_len=320, implementation="cpu")

    def product(x, weight):
        return dot_cpu.dot(x, weight, jnp.int32(32), dtype=jnp.float32)

    def experts(x, weights):
        return grouped_cpu.grouped_dot(x, weights, jnp.array([3, 3, 0, 4]), jnp.int32(4), jnp.full(4, 7))

    def adapters(x, base, a, b):
        ranks, scales = jnp.full((1, 5, 1), 13), jnp.ones((1, 5, 1))
        slots = jnp.arange(32) % 6 - 1
        call = (x, base, a, b, ranks, scales, slots, jnp.int32(30))
        return lora_cpu.grouped_lora(*call, layer=jnp.int32(0), pattern=((0, 640),))

    def quantised(x, weight):
        return quantized_cpu.quantized_dot(x, weight, jnp.int32(32), dtype=jnp.float32)

    def quantised_experts(x, weights):
        blocks = (jnp.array([3, 3, 0, 4]), jnp.int32(4), jnp.full(4, 7))
        return quantized_grouped_cpu.quantized_grouped_dot(x, weights, *blocks)

    def gate(x):
        return silu_and_mul(x, 640)

    def scan(x, states, rows):
        k, decay = x.reshape(32, 4, 128), -abs(x[:, :8])
        v = jnp.concatenate([k, k], axis=1)
        return gated_delta(k, k, v, decay, decay, states, *rows, max_query_len=30, implementation="cpu")

    def convolve(x, weight, states, rows):
        return conv_cpu.causal_conv(
            x, weight[:4], weight[4], states, *rows, rows[0], max_query_len=30, activation="silu"
        )

    def write(pages, qkv, slots):
        return write_qkv(pages, qkv, slots, implementation="cpu")

    states, wide = np.ones((3, 8, 128, 128), np.float32), np.tile(weight[:128], 8)
    rows = tuple(np.array(index, np.int32) for index in ((1, 0), (0, 9), (0, 30, 32)))
    return {
        conv_cpu.KERNEL: (convolve, (wide[5:37], wide[:5], wide[:6].reshape(2, 3, 4096), rows)),
        scan_cpu.KERNEL: (scan, (x, states, rows)),
        dot_cpu.KERNEL: (product, (x, weight)),
        grouped_cpu.KERNEL: (experts, (blocks, matrices)),
        lora_cpu.KERNEL: (
            adapters, (x, weight[:, :32].T, matrices[:, :16][None, :, None], weight[:100].reshape(1, 5, 16, 640)),
        ),
        attention_cpu.KERNEL: (attention, tuple(case.values())),
        quantized_cpu.KERNEL: (quantised, (x, quantize_in_program(weight, 8, 64))),
        quantized_grouped_cpu.KERNEL: (
            quantised_experts, (blocks, quantize_in_program(matrices, 8, 64))
        ),
        row_cpu.KERNEL: (gate, (weight,)),
        rows_cpu.KERNEL: (rows_cpu.set_rows, (table, rng.permutation(600).astype(np.int32), table[:600])),
        write_cpu.KERNEL: (write, (pages, qkv, np.arange(200, dtype=np.int32))),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_call_without_memory_raises_and_all_memory_is_freed(kernel, counted, monkeypatch):
    """The first two allocations are those of the calling thread. A helper without memory leaves its work to others."""
    call, arguments = programs()[kernel]
    expected = jax.jit(call)(*arguments)
    monkeypatch.setattr(library, "native", lambda kernel, check=None: library.Native(counted.names[kernel], None))
    program = jax.jit(lambda *arguments: call(*arguments)).lower(*arguments).compile()
    for succeed in (0, 1):
        counted.left.value = succeed
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED.*no working memory from malloc"):
            jax.block_until_ready(program(*arguments))
    for succeed in (2, 3, 2**40, 2**40):  # also after errors the results are right
        counted.left.value = succeed
        jax.tree.map(np.testing.assert_array_equal, program(*arguments), expected)
    assert counted.left.value <= 2**40 - 2  # malloc was counted
    end = time.monotonic() + 30
    while counted.live.value != 0 and time.monotonic() < end:  # a helper may begin after the call has ended
        time.sleep(0.01)
    assert counted.live.value == 0


@pytest.mark.codegen
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_the_number_of_threads(kernel):
    call, arguments = programs()[kernel]
    program, name = jax.jit(call), KERNELS[kernel]().name
    with limited(name, 1):
        expected = jax.block_until_ready(program(*arguments))
    for threads in (2, 3, 64):
        for _ in range(5):
            with limited(name, threads):
                results = jax.block_until_ready(program(*arguments))
            jax.tree.map(np.testing.assert_array_equal, results, expected)


# --- XLA's interface -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [None, "frame", "api", "metadata"])
def test_the_kernel_gives_no_version_if_a_struct_is_too_small(name, small):
    c_api, frame_module = (importlib.import_module(f"pallas_kernels.native.{name}") for name in ("c_api", "frame"))
    api = words(192, 0, 24, 0, 0, 3, *[0] * 18)
    metadata = words(36, 24, 0, 7, 0)  # size, then a version: size, extension, two int32
    extension = words(32, 1, 0, ctypes.addressof(metadata))
    frame = words(168, ctypes.addressof(extension), ctypes.addressof(api), *[0] * 18)
    for struct, least in (("frame", frame), ("api", api), ("metadata", metadata)):
        if small == struct:
            least[0] = getattr(c_api, f"LEAST_{struct.upper()}") - 1
    assert handler(name)(ctypes.addressof(frame)) == 0
    major, minor = (ctypes.c_int32 * 2).from_address(ctypes.addressof(metadata) + 24)
    assert (major, minor) == (frame_module.NO_VERSION if small else 0, 3)


def test_a_kernel_that_xla_refuses_is_not_used(monkeypatch, caplog, tmp_path):
    """A handler that answers with version 9.9."""
    from llvmlite import binding

    text = f"""
    define i64 @{library.HANDLER}(ptr %frame) {{
        %a = getelementptr i8, ptr %frame, i64 8
        %extension = load ptr, ptr %a
        %b = getelementptr i8, ptr %extension, i64 24
        %metadata = load ptr, ptr %b
        %version = getelementptr i8, ptr %metadata, i64 24
        store i64 38654705673, ptr %version
        ret i64 0
    }}"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.disk.folder.cache_clear()
    library._warn.cache_clear()
    monkeypatch.setattr(library, "_digest", lambda: "0" * 64)
    code = library._machine().emit_object(binding.parse_assembly(text))
    monkeypatch.setattr(library, "_compile", lambda kernel: code)
    with caplog.at_level(logging.WARNING):
        made = library._native.__wrapped__("a.kernel", None)
    library.disk.folder.cache_clear()
    assert made.name is None
    assert "API version (9.9) is incompatible" in made.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "XLA operations are used" in caplog.text
    assert not list(tmp_path.rglob("a.kernel.0*"))
    assert jnp.arange(3).sum() == 3  # the platform still works


@pytest.mark.parametrize(
    ("module", "function"), [(dot_cpu, "_call"), (grouped_cpu, "_call"), (write_cpu, "call_kernel")]
)
def test_wrong_results_of_a_new_kernel_are_seen(module, function, monkeypatch):
    name, call, check = module.kernel().name, getattr(module, function), module._check

    def wrong(*arguments, **options):
        results = jax.tree.map(np.array, call(*arguments, **options))
        for array in jax.tree.leaves(results):
            array[0] += 0.5
        return results

    check(name)
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(ValueError, match="of float32 differ from float64 by"):
        check(name)
