"""Programs as StableHLO on disk, so that later starts need not trace and lower the model.

The key of a stored program is known before tracing. Even the start that stores a program compiles the stored module.
So the next start has the same key in XLA's compile cache, and compiles nothing. For the demo model on CPU, tracing and
lowering take 1.5 s of CPU time, reading and lowering stored programs 0.3 s.

Programs for one CPU or NVIDIA device are stored. JAX does not promise that another version reads the kernels in them.
So the key has the exact versions of jax, jaxlib and the plugin for NVIDIA.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
from jax import export

import jpaged.models
import pallas_kernels
from jpaged.models.adapters import AdapterPool
from jpaged.models.quantization import JoinedWeight
from jpaged.phases import phase
from jpaged.runtime.jax_compat import with_old_partitioner
from jpaged.runtime.state import DeviceState, SamplingState
from jpaged.runtime.store.cache import cache_hits, not_a_hit, persistent_cache
from pallas_kernels import KVPages, QuantizedWeight
from pallas_kernels.cpu_kernels import load_kernels
from pallas_kernels.private_folder import private_folder, read_file, write_file

logger = logging.getLogger(__name__)

_WITHOUT = "every start traces the programs again"
_KEEP_DAYS = 30
_VERSIONS = ("jax", "jaxlib", "numpy", "ml_dtypes")
_PLUGINS = tuple(f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt"))
# Custom calls of Pallas kernels for NVIDIA: Triton's and Mosaic GPU's.
_NVIDIA_CALLS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu_v2")
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}  # of a device -> of a lowered program
# Parts of the names of JAX's settings that do not change a traced program: devices, caches and logs.
_NOT_TRACED = ("device", "platform", "cache", "log", "dump", "dir", "traceback", "profile", "distributed")


class Elsewhere(Protocol):
    """Another process that compiles stored programs."""

    def compile(self, path: pathlib.Path, donate: Sequence[int]) -> None:
        """Compile a stored program into XLA's compile cache. May fail silently."""
        ...


@dataclasses.dataclass(frozen=True)
class ProgramStore:
    """A private folder of exported programs."""

    folder: pathlib.Path
    key: str                  # digest of sources, versions, settings, the kind of device and native kernels
    kernels: tuple[tuple[str, str], ...]  # (module, XLA name) of native kernels that a program may call
    platform: str = "cpu"     # "cpu" or "gpu"
    # Compiles programs that are not in XLA's compile cache. None: the calling thread compiles them.
    elsewhere: Elsewhere | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def open(
        cls, cache_folder: pathlib.Path | None, platform: str, kernels: Sequence[str], device_kind: str = ""
    ) -> Self | None:
        """The store next to XLA's compile cache. None: on another platform, or no private folder can be written.

        kernels:     modules of the native kernels that programs may call on CPU; see `kernels_of_model`.
        device_kind: of the GPU, by which kernels choose their tiles.
        """
        if cache_folder is None or platform not in _PLATFORMS:
            return None
        folder = private_folder(cache_folder / "exported", _WITHOUT)
        if folder is None:
            return None
        _remove_old(folder)
        loaded: dict[str, str | None] = {}
        if platform == "cpu":
            with phase("native kernels"):
                loaded = load_kernels(kernels)
        names = tuple((module, name) for module, name in loaded.items() if name is not None)
        key = _digest(program_key(), _settings(), sorted(loaded.items()), device_kind)
        return cls(folder, key, names, platform)

    @property
    def custom_calls(self) -> list[str]:
        """Names of custom calls that a stored program may have."""
        return [name for _, name in self.kernels] if self.platform == "cpu" else list(_NVIDIA_CALLS)

    def path(self, call: functools.partial[Any], arguments: Any) -> pathlib.Path:
        """The file of the program `call(*arguments)`."""
        leaves, structure = jax.tree.flatten(arguments)
        described = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
        key = _digest(self.key, call.func.__qualname__, sorted(call.keywords.items()), structure, described)
        return self.folder / f"{call.func.__name__}-{key}"

    def load(self, path: pathlib.Path, call: functools.partial[Any], arguments: Any) -> export.Exported:
        """Read a program, or trace, lower and store it.

        Raises ValueError for another custom call or an unknown pytree, NotImplementedError for a callback.
        """
        stored = read_file(path)
        if stored is not None:
            _touch(path)
            return export.deserialize(bytearray(stored))
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in self.custom_calls]
        jitted, platforms = jax.jit(call, keep_unused=True), [_PLATFORMS[self.platform]]
        exported = export.export(jitted, disabled_checks=checks, platforms=platforms)(*arguments)
        write_file(path, bytes(exported.serialize()), _WITHOUT)
        return exported

    def compile(
        self, call: functools.partial[Any], arguments: Any, donate: Sequence[int],
        compiler_options: Mapping[str, str] | None = None,
    ) -> jax.stages.Compiled:  # fmt: skip
        """Compile the stored program. Raises ValueError and NotImplementedError as `load`."""
        path = self.path(call, arguments)
        exported = self.load(path, call, arguments)
        # This empty file marks that the program was compiled with these XLA flags.
        compiled = path.with_name(f"{path.name}.{_digest(os.environ.get('XLA_FLAGS'))[:8]}.compiled")
        if self.elsewhere is None:
            program = compile_exported(exported, arguments, donate, compiler_options)
        else:
            new = path.exists() and not compiled.exists()
            if new:
                self.elsewhere.compile(path, donate)
            before = cache_hits()
            with persistent_cache(str(self.folder.parent)):
                program = compile_exported(exported, arguments, donate)
            if new and cache_hits() > before:
                not_a_hit()
        _touch(compiled)
        return program


def _touch(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        path.touch()


def _remove_old(folder: pathlib.Path) -> None:
    """Remove programs not used for `_KEEP_DAYS`: each version and each set of options stores its own."""
    oldest = time.time() - _KEEP_DAYS * 86_400
    with contextlib.suppress(OSError):  # another process may remove them, too
        for path in folder.iterdir():
            if path.stat().st_mtime < oldest:
                path.unlink()


def compile_exported(
    exported: export.Exported, arguments: Any, donate: Sequence[int], compiler_options: Mapping[str, str] | None = None
) -> jax.stages.Compiled:
    """Compile a stored program for arguments that are placed on a device."""

    def program(*arguments: Any) -> Any:
        return exported.call(*arguments)

    program.__name__ = exported.fun_name  # profiles show it
    lowered = jax.jit(program, donate_argnums=donate, keep_unused=True).lower(*arguments)
    return lowered.compile(compiler_options=dict(compiler_options) if compiler_options else None)


def compile_program(
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    donate: tuple[int, ...],
    out_shardings: Any = None,
    store: ProgramStore | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> jax.stages.Compiled:
    """Compile `call(*arguments)`. Every argument is kept, used or not.

    call:          with a store: a partial whose keywords are plain values. Their text is part of the store's key.
    arguments:     trees of arrays or ShapeDtypeStructs.
    donate:        indices of donated arguments.
    out_shardings: as in `jax.jit`. Ignored for stored programs: their results are where the arguments are.
    store:         None = trace the function.
    compiler_options: of XLA.
    """
    one_device = isinstance(call, functools.partial)  # else `call` is of `Placement.on_each_device`
    if store is not None and one_device:
        try:
            return store.compile(call, arguments, donate, compiler_options)
        except (ValueError, NotImplementedError) as error:
            logger.warning("%s cannot be stored, so every start traces it: %s", call.func.__name__, error)
    jitted = jax.jit(call, donate_argnums=donate, keep_unused=True, out_shardings=out_shardings)
    with contextlib.nullcontext() if one_device else with_old_partitioner():
        return jitted.lower(*arguments).compile(compiler_options=dict(compiler_options) if compiler_options else None)


def _register_trees() -> None:
    """Register the pytree types of arguments and results with `jax.export`, which serializes them."""
    for kind in _TREES:
        export.register_pytree_node_serialization(
            kind,
            serialized_name=f"jpaged.{kind.__name__}",
            serialize_auxdata=lambda values: json.dumps(values).encode(),
            deserialize_auxdata=lambda data: tuple(json.loads(data)),
        )
    for layout in (QuantizedWeight, *QuantizedWeight.__subclasses__()):
        export.register_pytree_node_serialization(
            layout,
            serialized_name=f"jpaged.{layout.__name__}",
            serialize_auxdata=lambda values: json.dumps([*values[:2], values[2].name, *values[3:]]).encode(),
            deserialize_auxdata=_quantized_auxdata,
        )


def _quantized_auxdata(data: bytes) -> tuple[Any, ...]:
    """The static fields of a QuantizedWeight."""
    kind, shape, dtype, *others = json.loads(data)
    return kind, tuple(shape), jax.numpy.dtype(dtype), *others


_TREES = (DeviceState, SamplingState, KVPages, JoinedWeight, AdapterPool)
_register_trees()


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """SHA-256 of the Python files that a traced program can depend on."""
    package = pathlib.Path(__file__).parents[2]
    files = [*package.glob("*.py")]
    for name in ("runtime", "engine", "params"):
        files += (package / name).rglob("*.py")
    for other in (jpaged.models, pallas_kernels):
        files += pathlib.Path(other.__path__[0]).rglob("*.py")
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return whole.hexdigest()


def program_key() -> str:
    """Digest of the sources and versions that traced and compiled programs depend on."""
    return _digest(_sources(), _versions())


@functools.cache
def _versions() -> list[str]:
    found = [sys.version, *(importlib.metadata.version(package) for package in _VERSIONS)]
    for package in _PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return found


def _settings() -> list[tuple[str, str]]:
    """JAX's settings in this thread that change traced programs."""
    everywhere = jax.config.values  # attributes have this thread's values; a few settings have none
    names = sorted(name for name in everywhere if not any(part in name for part in _NOT_TRACED))
    return [(name, str(getattr(jax.config, name, everywhere[name]))) for name in names]
