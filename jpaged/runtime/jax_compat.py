"""Private JAX names without a public counterpart. Tried with JAX 0.10.2, 0.11.2 and 0.12.0.1."""

import contextlib
from collections.abc import Iterator

from jax._src import config, lru_cache, xla_bridge


def backends_are_started() -> bool:
    """True once JAX has started a backend. Backend options that are set later have no effect."""
    return xla_bridge.backends_are_initialized()


def with_old_partitioner() -> contextlib.AbstractContextManager[None]:
    """Lower and compile without Shardy, in this thread.

    Shardy's canonicaliser in JAX 0.11.2 crashes the process if a `shard_map` has an unused input: a constant of code
    that was simplified away. A program of `Placement.on_each_device` needs no partitioner.
    """
    return config.use_shardy_partitioner(False)


@contextlib.contextmanager
def damaged_programs_replaced() -> Iterator[None]:
    """Let JAX's compile cache replace a file that it could not read.

    JAX keeps the damaged file, so every later start would compile it. Killed processes and full disks leave such files.
    """
    write = lru_cache.LRUCache.put

    def put(self: lru_cache.LRUCache, key: str, value: bytes) -> None:
        with contextlib.suppress(OSError):
            (self.path / f"{key}{lru_cache._CACHE_SUFFIX}").unlink()
        write(self, key, value)

    lru_cache.LRUCache.put = put
    try:
        yield
    finally:
        lru_cache.LRUCache.put = write
