"""A checkpoint folder: its JSON files, and its tensors in one or several shards."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.mapped_file import check_file
from jpaged.loading.safetensors_file import SafetensorsFile, TensorEntry
from pallas_kernels import QuantizedWeight

_SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 32 << 20  # bytes. DeepSeek-V3's index of 92,000 tensors has 9 MB, Gemma 3's tokenizer_config.json 1.2 MB
_MAX_NAME = 255  # bytes of a file's name, on common file systems
CONVERTED = "jpaged.json"  # the manifest of a folder that `jpaged convert` wrote


def is_converted(folder: Path) -> bool:
    """Return True if `jpaged convert` wrote the folder."""
    return (folder / CONVERTED).is_file()


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object. A missing file gives {} unless it is required. Raises ModelLoadError for anything else."""
    if not path.is_file():
        if required:
            raise ModelLoadError(f"{path} is missing: model must be a folder with a Hugging Face checkpoint")
        return {}
    value = _parsed(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must contain a JSON object, not a {type(value).__name__}")
    return value


def read_json_list(path: Path) -> list[Any]:
    """Read a JSON array. A missing file gives []. Raises ModelLoadError for anything else."""
    value = _parsed(path) if path.is_file() else []
    if not isinstance(value, list):
        raise ModelLoadError(f"{path} must contain a JSON array, not a {type(value).__name__}")
    return value


def _parsed(path: Path) -> Any:
    try:
        check_file(path, MAX_JSON)
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from None


@runtime_checkable
class TensorSource(Protocol):
    """Tensors under Hugging Face's names. They come from safetensors files, packed or not, or from a GGUF file."""

    folder: Path      # the folder or GGUF file; error messages name it
    config_name: str  # where the expected tensors are defined; error messages name it

    @property
    def names(self) -> Iterable[str]: ...
    @property
    def num_bytes(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def entry(self, name: str) -> TensorEntry: ...
    def path(self, name: str) -> Path: ...
    def label(self, name: str) -> str: ...
    def array(self, name: str) -> np.ndarray: ...
    # Weights in the layout "plain" with numpy arrays, or with ShapeDtypeStructs; None: the tensor is not quantised
    def quantized(self, name: str) -> QuantizedWeight | None: ...
    def quantized_shape(self, name: str) -> QuantizedWeight | None: ...
    def release(self, name: str) -> None: ...


class Checkpoint:
    """All tensors of a checkpoint folder, by name. A context manager: its exit unmaps the files."""

    config_name = "config.json"

    def __init__(self, folder: Path):
        """Open every shard and check every header. Raises ModelLoadError that names the file and the remedy."""
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    @property
    def files(self) -> Sequence[SafetensorsFile]:
        """All shards."""
        return self._files

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype and position in the file of a tensor."""
        return self._file_of[name].entries[name]

    def path(self, name: str) -> Path:
        """Path of the file that contains a tensor."""
        return self._file_of[name].path

    def label(self, name: str) -> str:
        """Name of a tensor in error messages."""
        return name

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as a view of the mapped file. Drop the view before the checkpoint is closed."""
        return self._file_of[name].array(name)

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Always None, because no tensor is quantised."""
        return None

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """Always None, because no tensor is quantised."""
        return None

    def release(self, name: str) -> None:
        """Release the memory pages of a tensor. A later read loads them again."""
        self._file_of[name].release(name)

    def close(self) -> None:
        """Unmap and close all files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception, its frames may still hold views, and a map with views cannot be closed. Python closes the
        # map with its last view.
        if error is None:
            self.close()

    def _open(self) -> None:
        index = self.folder / INDEX
        if index.is_file():  # also next to model.safetensors, which may be left over
            self._open_shards(index)
        elif (self.folder / _SINGLE).is_file():
            self._add(self.folder / _SINGLE)
        else:
            self._open_only_file()

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ModelLoadError(f"{index}: weight_map must map the names of tensors to the names of files")
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard or len(shard.encode("utf-8", "replace")) > _MAX_NAME:
                raise ModelLoadError(
                    f"{index}: shard {shard!r} must be a file in the same folder, with a name of at most {_MAX_NAME} "
                    "bytes"
                )
            if not (self.folder / shard).is_file():
                name = next(n for n, s in weight_map.items() if s == shard)
                raise ModelLoadError(
                    f"{self.folder / shard} is missing; {INDEX} lists {name} in it: fetch the checkpoint again"
                )
            self._add(self.folder / shard)
        for name, shard in weight_map.items():
            if name not in self._file_of or self._file_of[name].path.name != shard:
                raise ModelLoadError(
                    f"{self.folder / shard} has no tensor {name}, but {INDEX} lists it there: index and shards are "
                    "from different checkpoints, fetch them again"
                )

    def _open_only_file(self) -> None:
        found = sorted(self.folder.glob("*.safetensors"))
        if len(found) == 1:
            self._add(found[0])
        elif found:
            raise ModelLoadError(f"{self.folder} has {len(found)} safetensors files but no {INDEX}: fetch the index")
        else:
            others = [p.name for p in sorted(self.folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            pickled = f", only {others[0]}, a pickle, which could run code" if others else ""
            raise ModelLoadError(
                f"{self.folder} has no safetensors file{pickled}. Supported are {_SINGLE} and shards with {INDEX}. "
                "Convert other formats with Transformers: model.save_pretrained(folder)"
            )

    def _add(self, path: Path) -> None:
        file = SafetensorsFile(path)
        self._files.append(file)
        for name in file.entries:
            if name in self._file_of:
                raise ModelLoadError(f"{path}: tensor {name} is also in {self._file_of[name].path.name}")
            self._file_of[name] = file
