"""Opens the tensors of a model: a folder of safetensors files, with or without packed tensors, or a GGUF file."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jpaged.loading.checkpoint import Checkpoint, TensorSource, read_json
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from jpaged.loading.hub import is_gguf
from jpaged.loading.mxfp4 import Mxfp4Checkpoint
from jpaged.loading.packed_checkpoint import PackedCheckpoint, format_of
from jpaged.loading.quantized.config import MXFP4, method_of, with_quantization
from jpaged.models.families import family_of


@contextlib.contextmanager
def open_source(
    path: Path, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[dict[str, Any], TensorSource]]:
    """Open a folder or a GGUF file. Yields the values of config.json and the tensors.

    overrides: values that replace config.json's. The tensors are a `Checkpoint` if none of them is packed.
    Raises ModelLoadError; for an unsupported family or quantization_config, before any file with weights is opened.
    """
    if is_gguf(path):
        with GgufCheckpoint(path) as checkpoint:
            yield checkpoint.config | dict(overrides), checkpoint
        return
    values = with_quantization(path, read_json(path / "config.json", required=True) | dict(overrides))
    family_of(values)
    with open_tensors(path, values) as checkpoint:
        yield values, checkpoint


@contextlib.contextmanager
def open_tensors(folder: Path, values: Mapping[str, Any]) -> Iterator[TensorSource]:
    """Open a folder of safetensors files. values: of config.json, with quantization_config. Raises ModelLoadError."""
    is_packed = method_of(values) not in (None, MXFP4)
    if is_packed:
        format_of(values)  # raises if it is not supported
    with Checkpoint(folder) as checkpoint:
        if is_packed:
            yield PackedCheckpoint(checkpoint, values)
            return
        packed = Mxfp4Checkpoint(checkpoint)
        yield packed if packed.is_packed else checkpoint
