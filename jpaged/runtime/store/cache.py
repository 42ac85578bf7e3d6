"""The disk cache of compiled programs, and counters of cache hits and of programs compiled after ready."""

import contextlib
import logging
import pathlib
import tempfile
import threading
from collections.abc import Iterator

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache

from jpaged.errors import ModelLoadError
from jpaged.runtime.jax_compat import damaged_programs_replaced

logger = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # also fires for programs read from the disk cache

HIT_EVENT, MISS_EVENT = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"

_lock = threading.Lock()


def default_folder() -> pathlib.Path:
    """Default folder of compiled programs, inside the platform's cache folder."""
    return pathlib.Path(platformdirs.user_cache_dir("jpaged")) / "programs"


@contextlib.contextmanager
def persistent_cache(folder: str | None) -> Iterator[pathlib.Path | None]:
    """Keep every program compiled inside on disk, even if compiling was fast. Replaces damaged files.

    folder: None = the folder of JAX's own setting, else `default_folder()`. Yields the folder in use. If the default
    folder cannot be written, logs a warning, yields None and keeps nothing. Raises ModelLoadError if the caller's
    folder cannot be written. Restores JAX's settings on exit. They are process-wide: start engines one after another.
    """
    current = jax.config.jax_compilation_cache_dir
    used = pathlib.Path(folder or current or default_folder())
    try:
        used.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=used).close()
    except OSError as error:
        if folder is not None:
            message = f"compilation_cache_dir={folder!r} cannot be written: {error}; name a folder that can be written"
            raise ModelLoadError(message) from None
        logger.warning("%s cannot be written (%s): compiled programs are not kept for the next start", used, error)
        yield None
        return
    settings = {
        "jax_compilation_cache_dir": str(used),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_enable_compilation_cache": True,
    }
    with _lock:
        before = {name: getattr(jax.config, name) for name in settings}
        moved = before["jax_compilation_cache_dir"] != str(used) or not before["jax_enable_compilation_cache"]
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            if moved:
                # JAX reads these settings only at its first compile, and again after a reset.
                compilation_cache.reset_cache()
            with damaged_programs_replaced():
                yield used
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            if moved:
                compilation_cache.reset_cache()


class _Hits(threading.local):
    count = 0


_hits = _Hits()


def _count_hit(event: str, **kwargs: str | int) -> None:
    _hits.count += event == HIT_EVENT


jax.monitoring.register_event_listener(_count_hit)  # JAX calls it in the thread that compiles


def cache_hits() -> int:
    """Number of programs that this thread found in JAX's compile cache, minus calls of `not_a_hit`."""
    return _hits.count


def not_a_hit() -> None:
    """Discount the last hit, because another process has just compiled that program for this thread."""
    _hits.count -= 1


class CacheCounter:
    """Counts this process's hits and misses in JAX's compile cache."""

    def __init__(self) -> None:
        self.hits = self.misses = 0
        jax.monitoring.register_event_listener(self._on_event)

    def close(self) -> None:
        """Stop listening to JAX's events."""
        with contextlib.suppress(ValueError):
            jax.monitoring.unregister_event_listener(self._on_event)

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        self.hits += event == HIT_EVENT
        self.misses += event == MISS_EVENT


class CompileCounter:
    """Counts programs that a thread compiles inside its own `watching()`. A step should compile none."""

    def __init__(self) -> None:
        self.count = 0
        self._here = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count this thread's compiles inside the context. Compiles in other threads are not part of a step."""
        self._here.active = True
        try:
            yield
        finally:
            self._here.active = False

    def close(self) -> None:
        """Stop listening to JAX's events."""
        with contextlib.suppress(ValueError):
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT and getattr(self._here, "active", False):
            self.count += 1
