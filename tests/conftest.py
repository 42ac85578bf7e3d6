"""What all tests share: the CPU, a persistent compile cache, and array shapes checked at run time."""

import os
import signal
from collections.abc import Iterator

# Before jax is imported anywhere, in child processes of tests too.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach no network; those of the hub start one on loopback

import jaxtyping
import platformdirs
import pytest
from hypothesis import HealthCheck, settings

# Annotated shapes and dtypes hold, or the test fails. Only in tests: an eager call costs about 0.1 ms more. Only where
# arrays are: the host side is plain Python (beartype cannot read all of its annotations: typing.Self in __new__).
ARRAY_MODULES = ["jpaged.loading", "jpaged.models", "jpaged.runtime", "pallas_kernels"]
jaxtyping.install_import_hook(ARRAY_MODULES, "beartype.beartype")

# Shared machines are slow at times: no deadline per example, and the same examples on every run.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between test runs: most of a run's time is compiling."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(platformdirs.user_cache_path("jpaged") / "test-programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Handle SIGINT in this test and in its child processes, even if the test run was started with SIGINT ignored.

    A shell ignores SIGINT in what it starts in the background, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
