"""Opens the tensors of a model: a folder of safetensors files, with or without packed tensors, or a GGUF file."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jpaged.loading.checkpoint import Checkpoint, TensorSource, read_json
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from jpaged.loading.hub import is_gguf
from jpaged.loading.mxfp4 import Mxfp4Checkpoint
from jpaged.loading.packed_checkpoint import PackedCheckpoint, format_of
from jpaged.loading.quantized.config import CONFIG, MXFP4, method_of, with_quantization
from jpaged.loading.quantized.expert_slices import ExpertSlices
from jpaged.loading.renamed_tensors import RenamedTensors
from jpaged.loading.weights import HEAD
from jpaged.models.families import family_of
from jpaged.models.families.wrappers import TEXT_PREFIXES, text_config, wrapper_of

logger = logging.getLogger(__name__)


def read_config(folder: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The values of a folder's config.json, with quantization_config. overrides: values that replace config.json's."""
    return with_quantization(folder, read_json(folder / "config.json", required=True) | dict(overrides))


@contextlib.contextmanager
def open_source(
    path: Path, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[dict[str, Any], TensorSource]]:
    """Open a folder or a GGUF file. Yields the values of config.json and the tensors.

    overrides: values that replace config.json's. The tensors are a `Checkpoint` if none of them is packed. Of a wrapper
    of a text model, values and tensors are the text model's.
    Raises ModelLoadError; for an unsupported family or quantization_config, before any file with weights is opened.
    """
    if is_gguf(path):
        with GgufCheckpoint(path) as checkpoint:
            yield checkpoint.config | dict(overrides), checkpoint
        return
    values = read_config(path, overrides)
    text = text_config(values)
    family_of(text)
    with open_tensors(path, text) as checkpoint:
        wrapper = wrapper_of(values)
        if wrapper is None:
            yield text, checkpoint
            return
        tensors = RenamedTensors(checkpoint, TEXT_PREFIXES)
        _log_other_parts(path, wrapper, checkpoint, set(checkpoint.names).difference(tensors.originals))
        # Some wrappers tie the embeddings by a key of their own, whatever the text model's says.
        yield text | {"tie_word_embeddings": HEAD not in tensors}, tensors


def _log_other_parts(path: Path, wrapper: str, checkpoint: TensorSource, names: Iterable[str]) -> None:
    sizes = Counter[str]()
    for name in sorted(names):
        entry = checkpoint.entry(name)
        sizes[name.removeprefix("model.").partition(".")[0]] += entry.end - entry.begin
    told = ", ".join(f"{part} ({size / 2**20:,.1f} MiB)" for part, size in sizes.items()) or "nothing"
    logger.info("%s: of %s, the text model is loaded; not loaded: %s", path, wrapper, told)


@contextlib.contextmanager
def open_tensors(folder: Path, values: Mapping[str, Any]) -> Iterator[TensorSource]:
    """Open a folder of safetensors files. values: of config.json, with quantization_config. Raises ModelLoadError."""
    is_packed = method_of(values) not in (None, MXFP4)
    if is_packed:
        format_of(values)  # raises if it is not supported
    with Checkpoint(folder) as checkpoint:
        if is_packed:
            block = values[CONFIG].get("weight_block_size")  # of outputs and inputs; `format_of` has checked it
            yield PackedCheckpoint(ExpertSlices(checkpoint, block[0] if block else None), values)
            return
        packed = Mxfp4Checkpoint(checkpoint)
        yield packed if packed.is_packed else checkpoint
