"""A call from XLA's foreign function interface: its arrays, and the threads that share its work.

A call is a *job*: an array of int64 from malloc, divided into units of work. Threads claim units one by one until none
is left. The calling thread works too, and waits only for units that another thread has begun. So a call ends even if
no thread of XLA's pool is free. A helper that starts after the call has returned finds no unit, and touches only the
job. The last thread frees the job.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from pallas_kernels.native.c_api import (
    API_ERROR_CREATE,
    API_NUM_THREADS,
    API_SCHEDULE,
    BUFFER_DATA,
    BUFFER_DIMS,
    EXTENSION_METADATA,
    EXTENSION_TYPE,
    FRAME_API,
    FRAME_ARGS,
    FRAME_CONTEXT,
    FRAME_EXTENSION,
    FRAME_RETS,
    LEAST_API,
    LEAST_FRAME,
    LEAST_METADATA,
    MAJOR_VERSION,
    METADATA_EXTENSION,
    METADATA_VERSION,
    MINOR_VERSION,
    NUM_THREADS_SIZE,
    POOL_CONTEXT,
    RESOURCE_EXHAUSTED,
    SCHEDULE_DATA,
    SCHEDULE_SIZE,
    SCHEDULE_TASK,
    THREADS_NUMBER,
    VERSION_NUMBERS,
)
from pallas_kernels.native.memory import (
    call,
    error,
    fetch_add,
    free,
    load_int32,
    load_int64,
    malloc,
    pause,
    store_int32,
    store_int64,
    thread_limit,
    yield_processor,
)

NATIVE = {"nogil": True, "error_model": "numpy", "boundscheck": False}  # options of numba

NO_VERSION = -1  # XLA refuses to register a kernel that answers with it

NEXT, DONE, USERS, UNITS, ARGUMENTS = 0, 8, 16, 24, 32  # offsets in a job; the kernel's own words follow
MOST_THREADS = 1024  # for a call that is worth sharing; `thread_limit` and the pool allow fewer
POOL_REQUEST = 64  # bytes for the arguments of a call to the thread pool
CACHE_LINE = 64
SPINS = 4096  # polls of the other threads before this one yields its processor


@njit(inline="always", **NATIVE)
def argument(frame: int, index: int) -> int:
    """Address of the data of an argument."""
    return load_int64(load_int64(load_int64(frame + FRAME_ARGS) + 8 * index) + BUFFER_DATA)


@njit(inline="always", **NATIVE)
def result(frame: int, index: int) -> int:
    """Address of the data of a result."""
    return load_int64(load_int64(load_int64(frame + FRAME_RETS) + 8 * index) + BUFFER_DATA)


@njit(inline="always", **NATIVE)
def dimension(frame: int, index: int, axis: int) -> int:
    """Size of an argument along an axis."""
    return load_int64(load_int64(load_int64(load_int64(frame + FRAME_ARGS) + 8 * index) + BUFFER_DIMS) + 8 * axis)


@njit(**NATIVE)
def asks_for_metadata(frame: int) -> bool:
    """True if XLA only asks for the version. XLA rejects `NO_VERSION`, the reply if its structs are too small."""
    extension = load_int64(frame + FRAME_EXTENSION)
    if extension == 0 or load_int32(extension + EXTENSION_TYPE) != METADATA_EXTENSION:
        return False
    metadata = load_int64(extension + EXTENSION_METADATA)
    fits = (
        load_int64(frame) >= LEAST_FRAME
        and load_int64(load_int64(frame + FRAME_API)) >= LEAST_API
        and load_int64(metadata) >= LEAST_METADATA
    )
    version = metadata + METADATA_VERSION + VERSION_NUMBERS
    store_int32(version, MAJOR_VERSION if fits else NO_VERSION)
    store_int32(version + 4, MINOR_VERSION)
    return True


_no_memory = error(
    RESOURCE_EXHAUSTED, "a native kernel for CPU got no working memory from malloc: free memory on this machine"
)


@njit(**NATIVE)
def out_of_memory(frame: int) -> int:
    """The error that a handler returns if malloc has returned 0."""
    return _no_memory(load_int64(load_int64(frame + FRAME_API) + API_ERROR_CREATE))


@njit(**NATIVE)
def leave(job: int) -> None:
    """Free the job if the calling thread is the last one."""
    if fetch_add(job + USERS, -1) == 1:
        free(job)


@njit(inline="always", **NATIVE)
def aligned(scratch: int) -> int:
    """The first cache line of a thread's scratch. A vector that spans two cache lines takes twice as long."""
    return (scratch + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@njit(**NATIVE)
def wait_until(job: int, units: int) -> None:
    """Wait until `units` units are computed. Threads must have begun all of them."""
    spins = 0
    while fetch_add(job + DONE, 0) < units:
        spins += 1
        pause()
        if spins % SPINS == 0:
            yield_processor(0)


def make_task(work: Callable[[int, int], None], scratch_bytes: Callable[[int], int]) -> Any:
    """The function that a helper thread runs. work(job, scratch) claims and computes units until none is left."""

    @njit(**NATIVE)
    def task(job: int) -> int:
        if fetch_add(job + NEXT, 0) < load_int64(job + UNITS):
            scratch = malloc(scratch_bytes(job) + CACHE_LINE)
            if scratch != 0:
                work(job, aligned(scratch))
                free(scratch)
        leave(job)
        return 0

    return task


def make_share(work: Callable[[int, int], None]) -> Any:
    """A function that runs a job with the threads of XLA's pool. task: address of the C function of `make_task`."""

    @njit(**NATIVE)
    def share(frame: int, task: int, job: int, scratch: int, most_threads: int) -> None:
        api, units = load_int64(frame + FRAME_API), load_int64(job + UNITS)
        request = scratch  # holds the arguments for the pool, before the work begins
        helpers = min(most_threads, units, thread_limit()) - 1
        if helpers > 0:
            store_int64(request, NUM_THREADS_SIZE)
            store_int64(request + 8, 0)
            store_int64(request + POOL_CONTEXT, load_int64(frame + FRAME_CONTEXT))
            store_int64(request + THREADS_NUMBER, request + 48)
            store_int64(request + 48, 1)
            call(load_int64(api + API_NUM_THREADS), request)
            helpers = min(helpers, load_int64(request + 48) - 1)
        store_int64(job + USERS, 1 + max(helpers, 0))
        if helpers > 0:
            store_int64(request, SCHEDULE_SIZE)
            store_int64(request + SCHEDULE_TASK, task)
            store_int64(request + SCHEDULE_DATA, job)
            for _ in range(helpers):
                if call(load_int64(api + API_SCHEDULE), request) != 0:
                    leave(job)
        work(job, aligned(scratch))
        wait_until(job, units)
        leave(job)

    return share


def make_run(work: Callable[[int, int], None], scratch_bytes: Callable[[int], int]) -> Any:
    """A function that runs a job of `units` units, frees it, and returns the handler's result. See `make_share`."""
    share = make_share(work)

    @njit(**NATIVE)
    def run(frame: int, task: int, job: int, units: int, most_threads: int) -> int:
        store_int64(job + NEXT, 0)
        store_int64(job + DONE, 0)
        store_int64(job + UNITS, units)
        scratch = malloc(max(scratch_bytes(job) + CACHE_LINE, POOL_REQUEST))
        if scratch == 0:
            free(job)
            return out_of_memory(frame)
        share(frame, task, job, scratch, most_threads)
        free(scratch)
        return 0

    return run


def words(count: int) -> tuple[int, ...]:
    """Offsets of a kernel's own int64 words in a job, then the size of the job in bytes."""
    return tuple(ARGUMENTS + 8 * index for index in range(count + 1))


@njit(**NATIVE)
def no_scratch(job: int) -> int:
    """Bytes of a thread's scratch that is not used."""
    return CACHE_LINE


def make_work(compute: Callable[[int, int, int], None]) -> Any:
    """A function work(job, scratch) that claims units and computes them until none is left.

    compute(job, unit, scratch) computes one unit.
    """

    @njit(**NATIVE)
    def work(job: int, scratch: int) -> None:
        units = load_int64(job + UNITS)
        unit = fetch_add(job + NEXT, 1)
        while unit < units:
            compute(job, unit, scratch)
            fetch_add(job + DONE, 1)
            unit = fetch_add(job + NEXT, 1)

    return work


def make_work_in_two_passes(
    count_first: Callable[[int], int], first: Callable[[int, int, int], None], second: Callable[[int, int, int], None]
) -> Any:
    """As `make_work`, but the second pass starts when all units of the first are computed.

    count_first(job): number of units in the first pass. first, second: compute(job, unit, scratch) of a pass. Units
    count from 0 in each pass.
    """

    @njit(**NATIVE)
    def work(job: int, scratch: int) -> None:
        units, before = load_int64(job + UNITS), count_first(job)
        unit = fetch_add(job + NEXT, 1)
        while unit < min(before, units):
            first(job, unit, scratch)
            fetch_add(job + DONE, 1)
            unit = fetch_add(job + NEXT, 1)
        if unit < units:
            wait_until(job, before)  # a thread has begun each unit of the first pass
        while unit < units:
            second(job, unit - before, scratch)
            fetch_add(job + DONE, 1)
            unit = fetch_add(job + NEXT, 1)

    return work


def make_kernel(
    prepare: Callable[[int, int], tuple[int, bool]],
    work: Callable[[int, int], None],
    job_bytes: Callable[[int], int] | int,
    scratch_bytes: Callable[[int], int] = no_scratch,
) -> tuple[Any, Any]:
    """The two functions of a kernel: `task`, which a helper thread runs, and `handler`, which XLA calls.

    prepare(frame, job) writes the kernel's words, and returns the number of units and whether threads share them.
    work, scratch_bytes: as in `make_task`. job_bytes: size of the job, or a function of the frame that computes it.
    """
    run = make_run(work, scratch_bytes)
    if isinstance(job_bytes, int):
        fixed = job_bytes
        size = njit(**NATIVE)(lambda frame: fixed)
    else:
        size = job_bytes

    @njit(**NATIVE)
    def handler(frame: int, task: int) -> int:
        if asks_for_metadata(frame):
            return 0
        job = malloc(size(frame))
        if job == 0:
            return out_of_memory(frame)
        units, is_shared = prepare(frame, job)
        return run(frame, task, job, units, MOST_THREADS if is_shared else 1)

    return make_task(work, scratch_bytes), handler
