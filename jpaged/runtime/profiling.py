"""Records a profile of host and device with `jax.profiler`, for TensorBoard or Perfetto."""

import logging
import threading

import jax

from jpaged.errors import EngineError

logger = logging.getLogger(__name__)


class Profiler:
    """Starts and stops profiles. JAX has one profiler per process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = False

    def start(self, folder: str) -> None:
        """Record into a new folder below `folder/plugins/profile`. Raises EngineError if a profile is running."""
        with self._lock:
            try:
                jax.profiler.start_trace(folder)
            except (RuntimeError, OSError) as error:
                raise EngineError(f"the profile cannot start: {error}") from None
            self._running = True

    def stop(self) -> None:
        """Write the profile. Raises EngineError if no profile is running, or if it cannot be written."""
        with self._lock:
            if not self._running:
                raise EngineError("no profile is running")
            self._running = False
            try:
                jax.profiler.stop_trace()
            except (RuntimeError, OSError) as error:
                raise EngineError(f"the profile cannot be written: {error}") from None

    def close(self) -> None:
        """Write the profile if one is running. Logs a failure."""
        if self._running:
            try:
                self.stop()
            except EngineError as error:
                logger.warning("%s", error)
