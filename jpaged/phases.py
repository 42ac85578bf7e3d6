"""Phases of an engine's start: logged at level DEBUG, and printed to the terminal if the start takes long.

`jpaged bench startup` prints the phases.

Imported late: tqdm, where there is a terminal or a notebook to show a bar.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0  # a start or a wait that takes less prints nothing

_starts: "list[_Start]" = []  # running starts that print their phases, innermost last


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Log the wall-clock seconds of the code inside, and the CPU seconds of all threads of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    if _starts:
        _starts[-1].enter(name)
    try:
        yield
    finally:
        logger.debug("%s: %.3f s, %.3f s of CPU", name, time.perf_counter() - wall, time.process_time() - cpu)


def tell(message: str) -> None:
    """Print a message to a terminal or notebook, unless the process logs messages of level INFO."""
    if not logger.isEnabledFor(logging.INFO) and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        from tqdm import tqdm

        tqdm.write(f"jpaged: {message}", file=sys.stderr)  # above a progress bar


@contextlib.contextmanager
def told_start() -> Iterator[None]:
    """Print the phases of the start inside, and the native kernels that it compiles, after PATIENCE_SECONDS."""
    start, kernels = _Start(), logging.getLogger("pallas_kernels")
    level = kernels.level
    _starts.append(start)
    kernels.addHandler(start)
    kernels.setLevel(level or logging.INFO)
    try:
        yield
        start.end()
    finally:
        kernels.setLevel(level)
        kernels.removeHandler(start)
        start.cancel()
        _starts.remove(start)


class _Start(logging.Handler):
    """Prints the phases of one start. A timer prints the first line, which names the phase that takes long."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._began = time.perf_counter()
        self._name = "reads the options"
        self._telling = threading.Lock()
        self._talks = False
        self._timer = threading.Timer(PATIENCE_SECONDS, self._first)
        self._timer.daemon = True
        self._timer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record of `pallas_kernels`, which cannot call `phase`."""
        self.enter(record.getMessage())

    def enter(self, name: str) -> None:
        with self._telling:
            self._name = name
            if self._talks:
                self._tell(name)

    def end(self) -> None:
        if self._talks:
            self._tell("ready")

    def cancel(self) -> None:
        self._timer.cancel()

    def _first(self) -> None:
        with self._telling:
            self._talks = True
            self._tell(self._name)

    def _tell(self, name: str) -> None:
        tell(f"start, {time.perf_counter() - self._began:.0f} s: {name}")
