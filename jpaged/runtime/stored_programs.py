"""Programs as StableHLO on disk: a start that finds one neither traces nor lowers the model.

The key of a stored program is known before tracing. `compile_program` compiles the stored module in every case, also
at the start that makes it. So the key in XLA's compile cache is the same at the next start, and nothing is compiled.

For the demo model on CPU, tracing and lowering take 1.5 s of CPU time, reading and lowering stored programs 0.3 s.

Only programs for CPU are stored. Kernels for GPU and TPU are custom calls whose stored form JAX does not promise to
accept later, and deviceless compiling has no device to load for.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Self

import jax
from jax import export

import jpaged.models
import pallas_kernels
from jpaged.runtime.private_folder import private_folder, read_file, write_file
from pallas_kernels.cpu_kernels import cpu_kernel_names

logger = logging.getLogger(__name__)

_VERSIONS = ("jax", "jaxlib", "numpy", "ml_dtypes")
# Settings of JAX that do not change a traced program: where it runs and is cached, and what is logged.
_NOT_TRACED = ("device", "platform", "cache", "log", "dump", "dir", "traceback", "profile", "distributed")


@dataclasses.dataclass(frozen=True)
class ProgramStore:
    """A private folder of exported programs."""

    folder: pathlib.Path
    key: str                 # of everything that all programs of an engine depend on
    kernels: tuple[str, ...]  # native kernels that a program may call

    @classmethod
    def open(cls, cache_folder: pathlib.Path | None, platform: str, *, quantized: bool) -> Self | None:
        """The store next to XLA's compile cache. None: programs of this platform are not stored, or have no folder.

        quantized: programs may multiply with quantised weights.
        """
        if cache_folder is None or platform != "cpu":
            return None
        folder = private_folder(cache_folder / "exported", "tracing at the next start")
        if folder is None:
            return None
        kernels = cpu_kernel_names(quantized=quantized)
        names = tuple(name for name in kernels.values() if name is not None)
        return cls(folder, _digest(_sources(), _versions(), _settings(), sorted(kernels.items())), names)

    def load(self, call: functools.partial[Any], arguments: Any) -> export.Exported:
        """Read the program `call(*arguments)`, or trace, lower and store it.

        The program takes the leaves of the arguments, and returns the leaves of the results.
        Raises ValueError for a custom call that is not one of `kernels`, NotImplementedError for a call of Python.
        """
        leaves, structure = jax.tree.flatten(arguments)
        described = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
        key = _digest(self.key, call.func.__qualname__, sorted(call.keywords.items()), structure, described)
        path = self.folder / f"{call.func.__name__}-{key}"
        stored = read_file(path)
        if stored is not None:
            return export.deserialize(bytearray(stored))

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(call(*jax.tree.unflatten(structure, leaves)))

        checks = [export.DisabledSafetyCheck.custom_call(name) for name in self.kernels]
        exported = export.export(jax.jit(flat, keep_unused=True), disabled_checks=checks)(*leaves)
        write_file(path, bytes(exported.serialize()))
        return exported


def compile_program(
    call: functools.partial[Any],
    arguments: tuple[Any, ...],
    *,
    donate: tuple[int, ...],
    results: Any,
    out_shardings: Any = None,
    store: ProgramStore | None = None,
) -> jax.stages.Compiled:
    """Compile `call(*arguments)`. Every argument is kept, used or not.

    call:          a function with keywords that are plain values: a stored program is found by their text.
    arguments:     trees of arrays or ShapeDtypeStructs.
    donate:        indices of arguments whose memory the results take over.
    results:       a tree of the structure of the results.
    out_shardings: placement of the results, as for `jax.jit`. Stored programs have none: their results are where the
        arguments are.
    store:         None = trace the function.
    """
    function: Callable[..., Any] = call
    if store is not None:
        try:
            function, out_shardings = _stored(call, store.load(call, arguments), results), None
        except (ValueError, NotImplementedError) as error:
            logger.warning("%s cannot be stored, so every start traces it: %s", call.func.__name__, error)
    jitted = jax.jit(function, donate_argnums=donate, keep_unused=True, out_shardings=out_shardings)
    return jitted.lower(*arguments).compile()


def _stored(call: functools.partial[Any], exported: export.Exported, results: Any) -> Callable[..., Any]:
    """A function with the arguments and results of `call` that runs an exported program."""
    structure = jax.tree.structure(results)
    if structure.num_leaves != len(exported.out_avals):
        raise ValueError(f"it returns {len(exported.out_avals)} arrays, not {structure.num_leaves}")

    def program(*arguments: Any) -> Any:
        return jax.tree.unflatten(structure, exported.call(*jax.tree.leaves(arguments)))

    program.__name__ = call.func.__name__  # profiles show it
    return program


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """SHA-256 over the Python files that a traced program can depend on."""
    here = pathlib.Path(__file__)
    files = [*here.parents[1].glob("*.py")]
    for folder in (here.parent, here.parents[1] / "engine", here.parents[1] / "params"):
        files += folder.rglob("*.py")
    for package in (jpaged.models, pallas_kernels):
        files += pathlib.Path(package.__path__[0]).rglob("*.py")
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return whole.hexdigest()


@functools.cache
def _versions() -> list[str]:
    return [sys.version, *(importlib.metadata.version(package) for package in _VERSIONS)]


def _settings() -> list[tuple[str, str]]:
    """JAX's settings in this thread, as they change what is traced."""
    everywhere = jax.config.values  # an attribute has the value of this thread; a few settings have no attribute
    names = sorted(name for name in everywhere if not any(part in name for part in _NOT_TRACED))
    return [(name, str(getattr(jax.config, name, everywhere[name]))) for name in names]
