"""Calls of the native attention with enough work for several threads, for this process and for child processes."""

import threading

import jax
import numpy as np

from pallas_kernels import paged_attention
from tests.kernels.oracle import Shape, attend, make_case

LARGE_SHAPE = Shape(heads=8, head_dim=64, dtype="bfloat16", tokens=320, rows=8)
LARGE = ((1, 300), (100, 120), (1, 200), (150, 300), (1, 16))  # tokens and keys: enough work for several threads
LARGE_OPTIONS: dict = {"scale": 64**-0.5, "max_query_len": 320, "implementation": "cpu"}


def large_call() -> np.ndarray:
    """Results of a call with enough work for several threads."""
    return attend(LARGE_SHAPE, make_case(LARGE_SHAPE, LARGE), "cpu")


def write_call(path: str) -> None:
    """Save the results of `large_call`. Child processes run it."""
    np.save(path, large_call())


def write_calls_of_eight_devices(path: str) -> None:
    """Save the result of calls on all devices at once, a thread for each. The devices share one pool of threads."""
    shape, devices = LARGE_SHAPE, jax.devices()
    assert len(devices) == 8
    case = make_case(shape, LARGE)
    call = jax.jit(lambda *args: paged_attention(*args, **LARGE_OPTIONS))
    results: list[np.ndarray] = []

    def repeat(device: jax.Device) -> None:
        arguments = jax.device_put(tuple(case.values()), device)
        tokens = sum(count for count, _ in LARGE)
        results.extend(np.asarray(call(*arguments), np.float32)[:tokens] for _ in range(25))

    threads = [threading.Thread(target=repeat, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    assert all(np.array_equal(result, results[0]) for result in results)
    np.save(path, results[0])
