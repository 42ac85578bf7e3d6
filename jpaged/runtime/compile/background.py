"""Compiles the rest of the program table while the engine runs.

1. The engine starts with the largest programs, which can replace each missing one. On CPU a row's bits are the same in
   every bucket, so answers do not depend on which programs exist.
2. Threads trace and store the missing programs, one by one. Tracing a program holds Python's GIL for up to 0.3 s, but
   Python switches threads every 5 ms.
3. Child processes compile them (`worker`). The threads then read the result and add it to the table.

On GPU and TPU a row's bits may differ between buckets, so all programs are compiled before the engine runs.
"""

import dataclasses
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence

from jpaged.errors import EngineError
from jpaged.lifetime import call_at_exit
from jpaged.runtime.compile.blueprint import FittedBuild
from jpaged.runtime.compile.program_table import ProgramTable, compiled
from jpaged.runtime.compile.worker import FAILURES, CompileWorker
from jpaged.runtime.step.program_shapes import FIRST_KINDS, Shape, kind_of, size
from jpaged.runtime.store.stored_programs import ProgramStore

logger = logging.getLogger(__name__)

THREAD_NAME = "jpaged-compile"
MAX_WORKERS = 4  # each uses up to 550 MiB (demo model, peak while compiling)
CORES_PER_WORKER = 2  # the engine needs cores, too


class BackgroundCompiler:
    """Threads that compile the missing programs of a table. `close` ends them."""

    def __init__(self, build: FittedBuild, store: ProgramStore, table: ProgramTable, on_ready: Callable[[], None]):
        """Start the threads. on_ready: called in one of them when all programs exist."""
        self._build = build
        self._store = store
        self._table = table
        self._on_ready = on_ready
        self._left = in_order(table.missing)
        self._lock = threading.Lock()
        self._closing = False
        cores = os.cpu_count() or 1
        count = min(max(1, cores // CORES_PER_WORKER), MAX_WORKERS, len(self._left))
        kernels = [module for module, _ in store.kernels]
        self._workers = [CompileWorker(store.folder.parent, kernels) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=THREAD_NAME, daemon=True)
            for worker in self._workers
        ]
        self._forget_exit = call_at_exit(self.close)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Kill the child processes and end the threads. Waits while a thread traces or reads a program."""
        self._forget_exit()
        self._closing = True
        self._table.fail(EngineError("the engine is closed"))
        for thread in self._threads:
            while thread.is_alive():
                for worker in self._workers:
                    worker.kill()  # repeated, because a worker may be starting
                thread.join(0.02)

    def _run(self, worker: CompileWorker) -> None:
        guarded = _Guarded(worker, lambda: self._closing)
        build = dataclasses.replace(self._build, store=dataclasses.replace(self._store, elsewhere=guarded))
        try:
            while (shape := self._next()) is not None:
                if self._table.add(compiled(shape, build.compile)):
                    self._on_ready()
        except _Closed:
            pass
        except Exception as error:
            logger.exception("a program could not be compiled")
            self._table.fail(error)
        finally:
            worker.close()

    def _next(self) -> Shape | None:
        """The next program to compile: one that a request waits for, else the largest."""
        with self._lock:
            if self._closing or not self._left:
                return None
            shape = next(filter(self._table.is_awaited, self._left), self._left[0])
            self._left.remove(shape)
            return shape


class _Closed(Exception):
    """The engine was closed while a program was compiled."""


@dataclasses.dataclass
class _Guarded:
    """A worker that may fail. Then the calling thread compiles, unless the engine is closed."""

    worker: CompileWorker
    is_closing: Callable[[], bool]
    failure: Exception | None = None

    def compile(self, path: pathlib.Path, donate: Sequence[int]) -> None:
        """See `CompileWorker.compile`. A failed worker is not started again. Raises _Closed if the engine closes."""
        failure = None
        if not self.is_closing() and self.failure is None:
            try:
                self.worker.compile(path, donate)
            except FAILURES as error:
                failure = error
        if self.is_closing():
            raise _Closed
        if failure is not None:
            self.failure = failure
            logger.warning("a thread compiles programs, because its child process failed: %r", failure)


def in_order(shapes: Iterable[Shape]) -> list[Shape]:
    """First the largest of each kind, so that every request can run soon. Then the others, largest first.

    Of the kinds in FIRST_KINDS, the largest program exists already, so they come after the other kinds.
    """
    largest_first = sorted(shapes, key=size, reverse=True)
    kinds = {kind_of(shape): shape for shape in reversed(largest_first)}
    first = sorted(kinds.values(), key=lambda shape: kind_of(shape) in FIRST_KINDS)
    return [*first, *(shape for shape in largest_first if shape not in first)]
