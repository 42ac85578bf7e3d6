"""Logs the program and the stack of a step that takes too long: the device may hang, or a function never return."""

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator

logger = logging.getLogger(__name__)

STALL_SECONDS = 120.0  # an engine with a longer step counts as stalled


class Watchdog:
    """Watches the steps of the engine's thread, from a thread of its own.

    seconds:  a longer step is logged when it exceeds this time, and when it ends.
    describe: returns the step's current call of the device, as text for the log.
    """

    def __init__(self, watched: threading.Thread, describe: Callable[[], str], seconds: float):
        self.seconds = seconds
        self._watched = watched
        self._describe = describe
        self._began: float | None = None  # of the step that runs, seconds of time.monotonic()
        self._logged: float | None = None  # value of `_began` of the step that was logged last
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jpaged-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Context that one step runs in."""
        self._began = began = time.monotonic()
        try:
            yield
        finally:
            self._began = None
            if self._logged == began:
                logger.warning("the step that was stuck has ended after %.1f s", time.monotonic() - began)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self.seconds / 4):
            began = self._began
            if began is None or began == self._logged or time.monotonic() - began <= self.seconds:
                continue
            self._logged = began
            frame = sys._current_frames().get(self._watched.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown\n"
            seconds = time.monotonic() - began
            logger.critical("a step has run for %.1f s: %s\nIts thread is here:\n%s", seconds, self._describe(), stack)
