"""Compiled programs kept on disk between starts, and the count of compiles that should not have happened."""

import contextlib
import pathlib
import threading
from collections.abc import Iterator

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # fires for programs read from the disk cache, too

_lock = threading.Lock()
_in_use = 0
_saved: dict[str, object] = {}


def default_folder() -> pathlib.Path:
    """Where compiled programs lie unless somebody says otherwise: in the platform's cache folder."""
    return pathlib.Path(platformdirs.user_cache_dir("jpaged")) / "programs"


@contextlib.contextmanager
def persistent_cache(folder: str | None) -> Iterator[pathlib.Path]:
    """Keep every program compiled inside on disk, however quick it was; JAX's own settings are put back after.

    folder: None = the folder JAX is already told to use, else `default_folder()`. Engines may start at the same
    time: the settings belong to the first and go back with the last.
    """
    global _in_use
    with _lock:
        if _in_use == 0:
            current = jax.config.jax_compilation_cache_dir
            wanted = {
                "jax_compilation_cache_dir": str(folder or current or default_folder()),
                "jax_persistent_cache_min_compile_time_secs": 0.0,
                "jax_persistent_cache_min_entry_size_bytes": -1,
                "jax_enable_compilation_cache": True,
            }
            _saved.clear()
            for name, value in wanted.items():
                _saved[name] = getattr(jax.config, name)
                jax.config.update(name, value)
            if wanted["jax_compilation_cache_dir"] != current:
                # JAX decides at its first compile whether there is a cache, and where: make it look again.
                compilation_cache.reset_cache()
        _in_use += 1
        used = pathlib.Path(str(jax.config.jax_compilation_cache_dir))
    used.mkdir(parents=True, exist_ok=True)
    try:
        yield used
    finally:
        with _lock:
            _in_use -= 1
            if _in_use == 0:
                moved = _saved["jax_compilation_cache_dir"] != jax.config.jax_compilation_cache_dir
                for name, value in _saved.items():
                    jax.config.update(name, value)
                if moved:
                    compilation_cache.reset_cache()


class CompileCounter:
    """Counts the programs that this thread compiles inside `watching()`: in the step there should be none."""

    def __init__(self) -> None:
        self.count = 0
        self._here = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compiles of this thread count while inside: those of other threads are somebody else's."""
        self._here.active = True
        try:
            yield
        finally:
            self._here.active = False

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(ValueError):
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT and getattr(self._here, "active", False):
            self.count += 1
