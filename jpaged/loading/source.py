"""Where tensors come from: a folder of safetensors files, packed ones among them, or a GGUF file, opened alike."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jpaged.loading.checkpoint import Checkpoint, TensorSource, read_json
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from jpaged.loading.hub import is_gguf
from jpaged.loading.mxfp4 import Mxfp4Checkpoint
from jpaged.models.families import family_of


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[tuple[dict[str, Any], TensorSource]]:
    """config.json, or what it would be, and the tensors; a `Checkpoint` where they lie in the files as they are.

    Raises ModelLoadError; for a family that is not supported before any file of weights is opened.
    """
    if is_gguf(path):
        with GgufCheckpoint(path) as checkpoint:
            yield checkpoint.config, checkpoint
        return
    values = read_json(path / "config.json", required=True)
    family_of(values)
    with Checkpoint(path) as checkpoint:
        packed = Mxfp4Checkpoint(checkpoint)
        yield values, packed if packed.is_packed else checkpoint
