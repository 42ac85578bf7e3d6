"""Runs a batch on several engines, each on a thread, for `LLM` with data_parallel_size."""

import queue
import threading
from collections.abc import Callable, Sequence

from jpaged.engine.engine import Output

POLL_SECONDS = 0.05  # interval of `check`, and of `idle` for an engine without requests


def run_engines(
    turns: Sequence[Callable[[], list[Output]]],
    idle: Callable[[int], None],
    ids: Sequence[set[str]],
    note: Callable[[list[Output]], None],
    check: Callable[[], None],
) -> None:
    """Run engines until their requests have ended.

    turns: by engine, a function that runs one step and returns its outputs. Called on the engine's thread.
    idle:  called with an engine's index between two steps, and every POLL_SECONDS once its requests have ended.
    ids:   by engine, the ids of its requests.
    note:  called on this thread with the last outputs of requests that have ended.
    check: called on this thread every POLL_SECONDS; its errors end the run.
    An error of one engine ends all engines' runs, and is raised. All threads have ended when this returns or raises.
    """
    ended: queue.SimpleQueue[list[Output] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    def work(index: int) -> None:
        left = set(ids[index])
        try:
            while not stop.is_set():
                idle(index)
                if not left:
                    stop.wait(POLL_SECONDS)
                    continue
                outputs = [output for output in turns[index]() if output.request_id in left]
                if outputs:
                    left.difference_update(output.request_id for output in outputs)
                    ended.put(outputs)
        except BaseException as error:  # raised on the caller's thread
            ended.put(error)

    threads = [
        threading.Thread(target=work, args=(index,), name=f"jpaged-engine-{index}", daemon=True)
        for index in range(len(turns))
    ]
    count = sum(map(len, ids))
    try:
        for thread in threads:
            thread.start()
        while count:
            check()
            try:
                outputs = ended.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(outputs, BaseException):
                raise outputs
            count -= len(outputs)
            note(outputs)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
