"""Stores a parameter tree as an Orbax checkpoint: written leaf by leaf, read shard by shard.

A leaf is an uncompressed zarr array in one file or in files of equal size. So file lengths can be checked before
anything is read. A file is mapped, and the bytes of a shard are copied once, to their final memory.

Orbax's own array handler copies the file to memory, to an array, and to the device, which takes at least 1.5 times as
long (docs/decisions.md). That handler can still read the result: it is an ordinary Orbax checkpoint.
"""

import asyncio
import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from jpaged.errors import ModelLoadError, first_line
from jpaged.loading.weights import aligned_empty

_MAPPED = ts.Context({"file_io_mode": {"mode": "memmap"}})
_AT_ONCE = 4  # leaves that are read, and are in host memory, at the same time


@dataclasses.dataclass(frozen=True)
class NewLeaf:
    """A leaf to write. `make` is called just before the write, and returns its array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    pieces: int = 1  # the last axis is cut into gcd(its size, pieces) files


def save_tree(folder: Path, tree: Any) -> None:
    """Write a tree of NewLeafs as an Orbax checkpoint, with one leaf in memory at a time."""
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """Leaves of a checkpoint and its size."""

    leaves: dict[str, jax.ShapeDtypeStruct]  # by name: "layers.0.qkv"
    num_bytes: int


def check_tree(folder: Path) -> StoredTree:
    """Read a checkpoint's metadata and check the lengths of its files. Raises ModelLoadError."""
    _metadata(folder / "_METADATA", "tree_metadata")
    leaves, total = {}, 0
    for path in sorted(child for child in folder.iterdir() if child.is_dir()):
        file = path / ".zarray"
        try:
            shape, chunks, dtype, compressor = _metadata(file, "shape", "chunks", "dtype", "compressor")
            leaf = jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
            grid = [divmod(size, piece) for size, piece in zip(shape, chunks, strict=True)]
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise _damaged(file, f"it cannot be read ({first_line(error)})") from None
        if compressor is not None or any(rest for _, rest in grid):
            raise _damaged(file, "the leaf is not in equal, uncompressed pieces")
        wanted = math.prod(chunks) * leaf.dtype.itemsize
        for place in itertools.product(*(range(count) for count, _ in grid)):
            piece = path / ".".join(map(str, place))
            if not piece.is_file():
                raise _damaged(piece, "it is missing")
            if piece.stat().st_size != wanted:
                raise _damaged(piece, f"it has {piece.stat().st_size:,} bytes instead of {wanted:,}")
            total += wanted
        leaves[path.name] = leaf
    return StoredTree(leaves, total)


def load_tree(folder: Path, target: Any, on_read: Callable[[int], Any] = lambda _: None) -> Any:
    """Read a checkpoint to the device. `target` is a tree of ShapeDtypeStructs: shape, dtype and sharding of each leaf.

    A process reads only the shards of its own devices. A leaf without a sharding is put on the default device.
    on_read: called after each leaf with its size in bytes. Raises ModelLoadError.
    """

    def argument(leaf: jax.ShapeDtypeStruct) -> type_handlers.ArrayRestoreArgs:
        return type_handlers.ArrayRestoreArgs(
            restore_type=np.ndarray, dtype=leaf.dtype, sharding=leaf.sharding, global_shape=leaf.shape
        )

    arguments = jax.tree.map(argument, target)
    with _checkpointer(on_read) as checkpointer:
        return checkpointer.restore(
            folder.absolute(), args=ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True)
        )


def read_leaf(folder: Path, name: str, dtype: np.dtype | None = None) -> np.ndarray:
    """Read one leaf to the host. dtype: to convert to. Raises ModelLoadError."""
    try:
        store = ts.open(_spec(folder / name), open=True, context=_MAPPED).result()
        if dtype is not None:
            return asyncio.run(_read_part(folder / name, store, dtype))
        return store.read().result()
    except ModelLoadError:
        raise
    except Exception as error:  # tensorstore raises several types for damaged files
        raise _damaged(folder / name, f"it cannot be read ({first_line(error)})") from None


def leaf_name(path: Sequence[Any]) -> str:
    """Return the name of a leaf at a path in the tree, such as "layers.0.qkv". Its folder has this name."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


class _OneFileHandler(type_handlers.NumpyHandler):
    """Writes NewLeafs and reads arrays as uncompressed zarr arrays."""

    def __init__(self, on_read: Callable[[int], Any]):
        super().__init__()
        self._on_read = on_read

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        for leaf, info in zip(values, infos, strict=True):
            store = await ts.open(
                _spec(info.path) | {"metadata": {"compressor": None, "chunks": _piece(leaf)}},
                create=True,
                dtype=ts.dtype(leaf.dtype),
                shape=leaf.shape,
            )
            await store.write(leaf.make(), can_reference_source_data_indefinitely=True)
        return []

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def read(info: Any, wanted: Any) -> jax.Array:
            async with turns:
                array = await _read(Path(info.path), wanted)
                self._on_read(array.nbytes)
                return array

        reads = [asyncio.ensure_future(read(info, wanted)) for info, wanted in zip(infos, args, strict=True)]
        try:
            return await asyncio.gather(*reads)
        except BaseException:
            for other in reads:
                other.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            raise


def _piece(leaf: NewLeaf) -> tuple[int, ...]:
    return (*leaf.shape[:-1], leaf.shape[-1] // math.gcd(leaf.shape[-1], leaf.pieces))


async def _read(path: Path, wanted: Any) -> jax.Array:
    store = await ts.open(_spec(path) | {"fill_missing_data_reads": False}, open=True, context=_MAPPED)
    if wanted.sharding is None:
        return jax.block_until_ready(jax.device_put(await _read_part(path, store, wanted.dtype)))
    sharding = wanted.sharding
    shape = tuple(store.shape)
    parts: dict[tuple[Any, ...], np.ndarray] = {}  # copies of a shard on several devices are read once
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        key = tuple(cut.indices(size) for cut, size in zip(index, shape, strict=True))
        if key not in parts:
            parts[key] = await _read_part(path, store[index], wanted.dtype)
        arrays.append(jax.device_put(parts[key], device))
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, sharding, arrays))


async def _read_part(path: Path, store: Any, dtype: np.dtype) -> np.ndarray:
    """Read a part of a leaf and convert its dtype. JAX on CPU uses the result's memory without a copy."""
    host = aligned_empty(store.shape, dtype)
    await ts.array(host).write(ts.cast(store[ts.d[:].translate_to[0]], ts.dtype(dtype)))
    if dtype == np.float16 and store.dtype != ts.dtype(dtype) and not np.isfinite(host).all():
        raise ModelLoadError(
            f"{path} has values beyond the range of float16 (65,504): use dtype bfloat16 or float32"
        )
    return host


def _spec(path: Any) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}


def _checkpointer(on_read: Callable[[int], Any] = lambda _: None) -> ocp.Checkpointer:
    # absl logs two harmless warnings: nothing to merge from several processes, and no metadata of Orbax's own arrays.
    logging.getLogger("absl").addFilter(_is_news)
    handler = _OneFileHandler(on_read)
    registry = type_handlers.create_type_handler_registry((np.ndarray, handler), (NewLeaf, handler))
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry))


def _is_news(record: logging.LogRecord) -> bool:
    """Drop the two warnings. A module-level function, because a logger adds the same filter only once."""
    message = record.getMessage()
    return "Skipping merge of OCDBT" not in message and "ArrayMetadata persistence is disabled" not in message


def _damaged(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {what}; the folder is damaged: convert the model again")


def _metadata(file: Path, *keys: str) -> list[Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
        return [values[key] for key in keys]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"it cannot be read ({first_line(error)})") from None
