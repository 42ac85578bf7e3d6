"""Makes the registry of an engine's LoRA adapters, and reads adapters for it.

Imported late: JAX and all that uses it.
"""

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.config import DTYPES, EngineConfig
from jpaged.engine.adapters.adapter_registry import AdapterRegistry
from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.errors import ModelLoadError, shown
from jpaged.loading import LoadedModel
from jpaged.loading.adapters import describe_adapter, read_adapter, read_arrays
from jpaged.models.adapters import Adapter
from jpaged.models.families import family_of
from jpaged.models.families.llama import LLAMA
from jpaged.runtime.adapter_pool import AdapterOptions


def adapter_options(loaded: LoadedModel, config: EngineConfig) -> AdapterOptions | None:
    """Sizes of the pools of adapters; None without `enable_lora`. Raises RequestError if the model cannot have any."""
    stored = loaded.dtype if loaded.stored_dtype is None else loaded.stored_dtype
    dtype = stored if stored.name in DTYPES else loaded.dtype
    return AdapterOptions.of(loaded.spec, config, dtype, loaded.layout, stored=loaded.stored_spec)


def adapter_registry(loaded: LoadedModel, config: EngineConfig, options: AdapterOptions) -> AdapterRegistry:
    """The registry of an engine's adapters."""
    read = functools.partial(_read, loaded=_description(loaded), options=options)
    return AdapterRegistry(read, max_loaded=config.adapters_in_host_memory)


@dataclasses.dataclass(frozen=True)
class _Model:
    """Parts of a model that reading an adapter needs: no weights."""

    family: Any
    spec: Any
    layout: Any


def _description(loaded: LoadedModel) -> _Model:
    family = family_of(loaded.config) if loaded.config else LLAMA  # live arrays of a DecoderSpec: Llama's names
    return _Model(family, loaded.spec if loaded.stored_spec is None else loaded.stored_spec, loaded.layout)


def _read(name: str, source: Any, generation: int, *, loaded: _Model, options: AdapterOptions) -> LoadedAdapter:
    """See `adapter_registry.Read`."""
    model = (loaded.family, loaded.spec, loaded.layout)
    sizes: dict[str, Any] = {"max_rank": options.rank, "dtype": options.dtype}
    if isinstance(source, str):
        try:
            adapter = read_adapter(_folder(source), *model, **sizes)
        except OSError as error:  # such as a folder that this user may not read
            raise ModelLoadError(f"{source}: the adapter cannot be read: {error.strerror}") from error
    else:
        arrays, more = source
        adapter = read_arrays(arrays, *model, **sizes, **more)
    key = f"{name} {generation} {_digest(adapter)}"
    return LoadedAdapter(name, key, adapter.rank, options.content(adapter), describe_adapter(name, adapter))


def _folder(source: str) -> Path:
    try:
        folder = Path(source).expanduser()
        folder.resolve()
    except (RuntimeError, ValueError) as error:  # an unknown user, or a name that no file can have
        raise ModelLoadError(f"{shown(source)} is not the path of a folder: {error}") from None
    return folder


def _digest(adapter: Adapter) -> str:
    """Digest of an adapter's numbers. A folder that has changed since it was read gives another one."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf, matrix in sorted(adapter.matrices.items()):
        digest.update(leaf.encode())
        for array in (matrix.a, matrix.b, matrix.ranks, matrix.scales):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
