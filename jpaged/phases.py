"""Phases of a start, logged at level DEBUG. `jpaged bench startup` prints them."""

import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Log the seconds of the code inside: of the clock, and of the processor in all threads of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        logger.debug("%s: %.3f s, %.3f s of CPU", name, time.perf_counter() - wall, time.process_time() - cpu)
