"""A call from XLA's foreign function interface: its arrays, and the threads that share its work.

The offsets are those of `xla/ffi/api/c_api.h`, which jaxlib ships. `tests/kernels/test_native.py` compares them.

A call is a *job*: an array of int64 in memory from malloc. The job is divided into units. Threads claim units one by
one until none is left. The calling thread works too, and waits only for units that another thread has begun. So a call
ends also when no thread of XLA's pool is free. A helper may start after the call has returned: it finds no unit, and
touches nothing but the job. The last thread frees the job.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from pallas_kernels.native.memory import (
    call,
    fetch_add,
    free,
    load_int32,
    load_int64,
    malloc,
    pause,
    store_int32,
    store_int64,
    yield_processor,
)

NATIVE = {"nogil": True, "error_model": "numpy", "boundscheck": False}  # options of numba

# struct sizes and offsets in bytes
FRAME_SIZE, FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGS, FRAME_RETS = 0, 8, 16, 24, 72, 112
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
METADATA_VERSION, API_VERSION, VERSION_NUMBERS = 8, 16, 16
API_SCHEDULE, API_NUM_THREADS = 136, 144
BUFFER_DATA, BUFFER_DIMS = 24, 40
SCHEDULE_SIZE, NUM_THREADS_SIZE = 40, 32  # their fields: size, extension, context, then those of `_run`
METADATA_EXTENSION = 1

NEXT, DONE, USERS, UNITS, ARGUMENTS = 0, 8, 16, 24, 32  # offsets in a job; the kernel's own words follow
SPINS = 4096  # looks at the other threads before the processor is offered to them


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
    """Whether XLA only asks for the version of the interface. Answers with its own version."""
    extension = load_int64(frame + FRAME_EXTENSION)
    if extension == 0 or load_int32(extension + EXTENSION_TYPE) != METADATA_EXTENSION:
        return False
    theirs = load_int64(frame + FRAME_API) + API_VERSION + VERSION_NUMBERS
    ours = load_int64(extension + EXTENSION_METADATA) + METADATA_VERSION + VERSION_NUMBERS
    store_int32(ours, load_int32(theirs))
    store_int32(ours + 4, load_int32(theirs + 4))
    return True


@njit(**NATIVE)
def leave(job: int) -> None:
    """Free the job if the calling thread is the last one."""
    if fetch_add(job + USERS, -1) == 1:
        free(job)


def make_task(work: Callable[[int, int], None], scratch_bytes: Callable[[int], int]) -> Any:
    """The function that a helper thread runs. work(job, scratch) claims and computes units until none is left."""

    @njit(**NATIVE)
    def task(job: int) -> int:
        if fetch_add(job + NEXT, 0) < load_int64(job + UNITS):
            scratch = malloc(scratch_bytes(job))
            if scratch != 0:
                work(job, scratch)
                free(scratch)
        leave(job)
        return 0

    return task


def make_share(work: Callable[[int, int], None]) -> Any:
    """A function that runs a job with the threads of XLA's pool. task: address of the C function of `make_task`."""

    @njit(**NATIVE)
    def share(frame: int, task: int, job: int, scratch: int, most_threads: int) -> None:
        api, units = load_int64(frame + FRAME_API), load_int64(job + UNITS)
        request = scratch  # memory for the arguments of the pool; free again before the work begins
        helpers = min(most_threads, units) - 1
        if helpers > 0:
            store_int64(request, NUM_THREADS_SIZE)
            store_int64(request + 8, 0)
            store_int64(request + 16, load_int64(frame + FRAME_CONTEXT))
            store_int64(request + 24, request + 48)
            store_int64(request + 48, 1)
            call(load_int64(api + API_NUM_THREADS), request)
            helpers = min(helpers, load_int64(request + 48) - 1)
        store_int64(job + USERS, 1 + max(helpers, 0))
        if helpers > 0:
            store_int64(request, SCHEDULE_SIZE)
            store_int64(request + 24, task)
            store_int64(request + 32, job)
            for _ in range(helpers):
                if call(load_int64(api + API_SCHEDULE), request) != 0:
                    leave(job)
        work(job, scratch)
        spins = 0
        while fetch_add(job + DONE, 0) < units:
            spins += 1
            pause()
            if spins % SPINS == 0:
                yield_processor(0)
        leave(job)

    return share
