"""An update with a checkpoint: a folder, a folder that `jpaged convert` wrote, or a GGUF file."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import is_converted
from jpaged.loading.hub import is_gguf
from jpaged.loading.model import open_weights
from jpaged.loading.source import open_source
from jpaged.loading.updates.described import difference
from jpaged.loading.updates.engine_weights import EngineWeights
from jpaged.loading.updates.tree_update import in_layout
from jpaged.loading.weights import StoredWeights
from jpaged.models.new_leaves import NewDrafter, NewLeaf
from jpaged.models.spec import WeightLayout

_PIECES, _PIECE_BYTES = 16, 4096  # of a file, for `sample`


def prepare_path(path: str, engine: EngineWeights) -> Callable[[], Iterator[NewLeaf | NewDrafter]]:
    """Check a checkpoint. Returns a function that reads its leaves. Errors as in `prepare`.

    The files are checked again before the first leaf is read.
    """
    with _opened(path, engine), _new_drafters(path, engine):
        pass
    return lambda: _leaves(path, engine)


def sample(path: str) -> str:
    """16 hex digits of SHA-256, of 16 pieces of each file with weights. Two steps of a trainer differ in every piece.

    Reads at most 64 KiB of a file. Raises OSError.
    """
    whole, where = hashlib.sha256(), pathlib.Path(path)
    kind = "*" if is_converted(where) else "*.safetensors"
    for file in [where] if where.is_file() else sorted(each for each in where.rglob(kind) if each.is_file()):
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            for number in range(_PIECES):
                opened.seek(max(0, size - _PIECE_BYTES) * number // (_PIECES - 1))
                whole.update(opened.read(_PIECE_BYTES))
    return whole.hexdigest()[:16]


def _leaves(path: str, engine: EngineWeights) -> Iterator[NewLeaf | NewDrafter]:
    with _opened(path, engine) as stored:
        for leaf in stored.leaves(engine.dtype, engine.placer):
            made = dataclasses.replace(engine.on_device(leaf), owned=not engine.shared)
            yield from in_layout(made, engine)
    with _new_drafters(path, engine) as drafters:
        yield from drafters


@contextlib.contextmanager
def _new_drafters(path: str, engine: EngineWeights) -> Iterator[list[NewDrafter]]:
    """The checkpoint's MTP layer, while its files are open, if the engine drafts with one."""
    folder = pathlib.Path(path).expanduser()
    if engine.mtp is None or not folder.is_dir() or is_converted(folder):
        yield []
        return
    with open_source(folder, engine.config.hf_overrides or {}) as (_, source):
        yield engine.mtp.new(source)


@contextlib.contextmanager
def _opened(path: str, engine: EngineWeights) -> Iterator[StoredWeights]:
    """Open a checkpoint, and check that its weights fit the engine. Raises ModelLoadError."""
    where = pathlib.Path(path).expanduser()
    if not where.exists():
        known = "new weights come from a folder or a .gguf file on this machine, not from a hub id or 'demo'"
        raise ModelLoadError(f"{path}: there is no such file or folder: {known}")
    if where.is_file() and not is_gguf(where):
        raise ModelLoadError(f"{path} is a file: pass the folder of the checkpoint, {where.parent}, or a .gguf file")
    config = dataclasses.replace(engine.config, model=str(where), load_format="auto")
    with open_weights(config, where) as (_, stored):
        _check(path, stored, engine)
        yield stored


def _check(path: str, stored: StoredWeights, engine: EngineWeights) -> None:
    if stored.spec != engine.spec:
        names = [field.name for field in dataclasses.fields(engine.spec)]
        changes = [
            f"{name} {getattr(stored.spec, name)} instead of {getattr(engine.spec, name)}"
            for name in names if getattr(stored.spec, name) != getattr(engine.spec, name)
        ]  # fmt: skip
        raise ModelLoadError(f"{path}: the weights are of another model than the engine's: {'; '.join(changes)}")
    if repr(stored.kv_scales) != repr(engine.kv_scales):
        raise ModelLoadError(f"{path}: the scales of keys and values differ from the engine's, which are compiled in")
    if engine.layout != WeightLayout():  # of live arrays, which are dense
        if stored.format is not None:
            raise ModelLoadError(f"{path}: the weights are quantised ({stored.format}), and the engine's are not")
        return
    if differs := difference(stored.shapes(engine.dtype, engine.placer), _trees(engine)):
        name, have, want = differs
        raise ModelLoadError(
            f"{path}: {name} is {have}, and the engine has {want}: the weights must be quantised as those that the "
            "engine started with"
        )


def _trees(engine: EngineWeights) -> Any:
    return tuple(engine.slots) if len(engine.slots) > 1 else engine.slots[0]
