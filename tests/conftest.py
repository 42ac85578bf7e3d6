"""Shared by all tests: the CPU, a persistent compile cache, and array shapes checked at run time.

docs/testing.md says which tests run where.
"""

import ctypes
import gc
import importlib.metadata
import math
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

# Before jax is imported anywhere, in child processes of tests too.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Compile with less optimisation: a tiny engine then starts in 7.7 s of CPU time instead of 15.5, and runs as fast. Set
# XLA_FLAGS, empty or not, to test the programs that users run. .ci/run does so, except for the README's command and
# tests of several devices that compare no bits.
# With jaxlib 0.11 the process exits while it compiles the sampler without fusion emitters.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=1"
    + (" --xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib").startswith("0.10.") else ""),
)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # saves 6% of the time of tests that trace and lower
# A client of httpx reads all trusted authorities when it is made: 40 ms. Tests trust one, which has signed nothing.
os.environ["SSL_CERT_FILE"] = str(pathlib.Path(__file__).parent / "support/one_authority.pem")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach no network; those of the hub start one on loopback

import platformdirs
import pytest
from hypothesis import HealthCheck, settings

ROOT = pathlib.Path(__file__).parents[1]

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
if hasattr(LIBC, "mallopt"):
    # M_MMAP_THRESHOLD: memory of large arrays goes back when they are freed. glibc's own limit rises to 32 MiB.
    LIBC.mallopt(-3, 1 << 20)

# Failed assertions of helper modules show their values, as those of test modules do.
folders = (path.name for path in (ROOT / "tests").iterdir() if path.is_dir())
pytest.register_assert_rewrite(*(f"tests.{name}" for name in folders))

from tests.support.array_types import CheckArrays  # noqa: E402

# Compiled programs are kept between test runs: most of a run's time is compiling. An environment variable, so that
# workers and the child processes of tests share one folder.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(platformdirs.user_cache_path("jpaged") / "test-programs")

# Annotated shapes and dtypes hold, or the test fails. Only in tests: an eager call costs about 0.1 ms more.
CheckArrays(["jpaged.loading", "jpaged.models", "jpaged.runtime", "pallas_kernels"]).install()

# Shared machines are slow at times: no deadline per example, and the same examples on every run.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests/recording. Name tests on the command line as well, or workers do not know them."""
    parser.addoption("--costs", metavar="FOLDER", help="write the cost of each test to files in FOLDER")
    parser.addoption("--reach", metavar="FOLDER", help="write the lines that each test reaches to files in FOLDER")


def pytest_configure(config: pytest.Config) -> None:
    """Keep every compiled program on disk, also those that take a moment to compile. Let JAX see 8 CPU devices."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)  # of tests/parallel; all others use the first
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if "PYTEST_XDIST_WORKER" not in os.environ and config.getoption("numprocesses", None):
        if not config.getoption("collectonly"):
            _compile_native_kernels()
        return  # this process hands out tests, and runs none
    from tests.recording.costs import CostsPlugin
    from tests.recording.reach import ReachPlugin

    for name, plugin in (("--costs", CostsPlugin), ("--reach", ReachPlugin)):
        if config.getoption(name):
            config.pluginmanager.register(plugin(pathlib.Path(config.getoption(name))))


def _compile_native_kernels() -> None:
    """Compile the native kernels that are not stored, in two processes: 15 s, once per Python.

    A worker that compiles them grows by 600 MiB.
    """
    from pallas_kernels.cpu_kernels import KERNELS
    from pallas_kernels.native import library

    missing = library.not_stored(tuple(KERNELS))
    command = [sys.executable, "-m", "pallas_kernels.cpu_kernels"]
    for child in [subprocess.Popen([*command, *order], cwd=ROOT) for order in (missing, missing[::-1]) if missing]:
        child.wait()  # a failure is one of the tests


@pytest.fixture(autouse=True, scope="session")
def _share_programs() -> Iterator[None]:
    """Share compiled programs among the engines of this process."""
    from tests.support.shared_programs import shared_programs

    with shared_programs():
        yield


@pytest.fixture
def own_programs() -> Iterator[None]:
    """Compile all programs of the engines that this test creates."""
    from tests.support.shared_programs import own_programs

    with own_programs():
        yield


def _resident_mib() -> float:
    """Memory of this process. Infinite where the system does not say it."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if statm.exists() else math.inf


@pytest.fixture(autouse=True, scope="module")
def _free_programs() -> Iterator[None]:
    """Free what the module's tests have compiled.

    Otherwise a worker grows past 4 GB: jitted functions hold their executables until the process ends. Each module
    begins without any, so the programs it asks for do not depend on what ran before it.
    """
    yield
    if "jax" in sys.modules:
        import jax

        jax.clear_caches()
    if _resident_mib() < 800:  # the rest takes 70 ms
        return
    gc.collect()  # engines are in reference cycles
    # Imported modules and the tests themselves are left: collections need not visit them again. Without this, they
    # take a sixth of the test run.
    gc.freeze()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)  # glibc keeps freed memory otherwise


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Handle SIGINT in this test and in its child processes, even if the test run was started with SIGINT ignored.

    A shell ignores SIGINT in what it starts in the background, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
