"""A GGUF file as a checkpoint: its tensors have Hugging Face's names and order of rows.

Reading a tensor undoes three changes of llama.cpp's converter. Query and key rows of llama are ordered for interleaved
rotary embedding. Gemma's norms have 1 added. The experts of a layer are one tensor.

`quantized` unpacks tensors of common quantised types and keeps their codes (gguf_blocks.py). `array` dequantises all
types to float32 in numpy, one tensor at a time, at 160 to 330 million weights per second and core (Q8_0, Q4_0, Q4_K,
Q5_K, Q6_K; docs/decisions.md). A model of 8 billion weights in Q4_K takes about 40 s.
"""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading import gguf_blocks
from jpaged.loading.gguf_config import ROPE_TENSORS, hugging_face_config
from jpaged.loading.gguf_file import PLAIN, GgufFile, numbers
from jpaged.loading.safetensors_file import TensorEntry
from pallas_kernels import QuantizedWeight

logger = logging.getLogger(__name__)

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_ALL_EXPERTS = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)_exps\.weight")
_ONE_EXPERT = re.compile(r"(ffn_gate|ffn_up|ffn_down)\.(\d+)")  # in files from before April 2024
_BUFFER = re.compile(r"(blk\.\d+\.)?attn_rot_embd\.(weight|bias)")  # old buffers, which llama.cpp ignores too

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_OF = {  # differences from _LAYER, by architecture
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},  # Mixtral
}
_EXPERTS = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
_GEMMAS = ("gemma", "gemma2")


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the Hugging Face model, and its source in the file."""

    entry: TensorEntry
    file: GgufFile
    source: str       # name in the file
    expert: int = 0   # index of the expert, if `source` has several
    experts: int = 1  # number of experts in `source`


class GgufCheckpoint:
    """All tensors of a GGUF model in one or several files, by Hugging Face's names. A context manager.

    It has the interface of `checkpoint.Checkpoint`. `config` has the values of an equivalent config.json.
    """

    config_name = "the file's metadata"

    def __init__(self, path: Path):
        """Open the file and check its header. Raises ModelLoadError that names the file, the tensor or the key."""
        self.folder = path
        self._files: list[GgufFile] = []
        self._tensors: dict[str, _Tensor] = {}
        self._has_logged = False  # True once the types that only `array` reads are logged
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All keys of the file; of the first file if there are several."""
        return self._files[0].metadata

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype (of `array`) and position in the file of a tensor."""
        return self._tensors[name].entry

    def path(self, name: str) -> Path:
        """Path of the file that contains a tensor."""
        return self._tensors[name].file.path

    def label(self, name: str) -> str:
        """Name of a tensor in error messages: its name in the file, then Hugging Face's."""
        source = self._tensors[name].source if name in self._tensors else self._source_of(name)
        return name if source == name else f"{source} ({name})"

    def array(self, name: str) -> np.ndarray:
        """Return a tensor: float32 if it is quantized, else a view of the mapped file in the stored dtype.

        Raises ModelLoadError if a quantized tensor has a number that is NaN or infinite.
        """
        tensor = self._tensors[name]
        raw = tensor.file.raw(tensor.source, tensor.expert, tensor.experts)
        try:
            values = numbers(raw, tensor.file.entries[tensor.source].dtype).reshape(tensor.entry.shape)
        except ValueError as error:
            raise self._damaged(name, str(error)) from None
        if heads := self._permuted_heads(name):
            return _halves_first(values, heads)
        if self._architecture in _GEMMAS and tensor.source.endswith("norm.weight"):
            return values - np.float32(1)
        return values

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Return a tensor without dequantising it: numpy arrays, in the layout "plain".

        None: the tensor is not quantised, is a vector, or has a type that only `array` reads. These types are logged
        once per file. Raises ModelLoadError for a block with a factor that is NaN or infinite.
        """
        kind = self._quantized_type(name)
        if kind is None:
            return None
        if kind not in gguf_blocks.KEPT:
            self._log_dequantized()
            return None
        tensor = self._tensors[name]
        raw = tensor.file.raw(tensor.source, tensor.expert, tensor.experts)
        if heads := self._permuted_heads(name):  # a row of bytes is a row of weights
            raw = _halves_first(raw, heads)
        try:
            return gguf_blocks.quantized(raw, kind, tensor.entry.shape)
        except ValueError as error:
            raise self._damaged(name, str(error)) from None

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """As `quantized`, with a jax.ShapeDtypeStruct in place of each array. It reads the header only."""
        kind = self._quantized_type(name)
        return None if kind is None else gguf_blocks.quantized_shape(kind, self._tensors[name].entry.shape)

    def release(self, name: str) -> None:
        """Release the memory pages of a tensor. A later read loads them again."""
        tensor = self._tensors[name]
        tensor.file.release_bytes(tensor.entry.begin, tensor.entry.end)

    def close(self) -> None:
        """Unmap and close all files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> "GgufCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # as in Checkpoint
            self.close()

    def _open(self, path: Path) -> None:
        self._files.append(GgufFile(path))
        count = self.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            self._open_parts(path, count)
        entries: dict[str, TensorEntry] = {}
        for file in self._files:
            for name, entry in file.entries.items():
                if name in entries:
                    raise ModelLoadError(f"{file.path}: tensor {name} is also in another part of the model")
                entries[name] = entry
        self._architecture = str(self.metadata.get("general.architecture"))
        divisors = {}
        for name in ROPE_TENSORS.get(self._architecture, ()):
            if (entry := entries.pop(name, None)) is not None:
                divisors[name] = self._divisors(entry)
        self.config = hugging_face_config(path, self.metadata, entries, divisors)
        for file in self._files:
            for name, entry in file.entries.items():
                if name in entries and not _BUFFER.fullmatch(name):
                    for tensor in self._tensors_of(file, entry):
                        self._tensors[tensor.entry.name] = tensor

    def _divisors(self, entry: TensorEntry) -> np.ndarray:
        """Return divisors of the rotary frequencies, float32. Raises ModelLoadError for a factor not above 0."""
        file = next(file for file in self._files if entry.name in file.entries)
        if entry.dtype not in PLAIN:
            raise ModelLoadError(
                f"{file.path}: tensor {entry.name} is {entry.dtype}{list(entry.shape)}, but must be "
                f"{', '.join(PLAIN)}: use another conversion of the model"
            )
        found = numbers(file.raw(entry.name), entry.dtype).astype(np.float32).ravel()
        if (bad := ~(np.isfinite(found) & (found > 0))).any():
            raise ModelLoadError(
                f"{file.path}: tensor {entry.name} has a factor of {found[bad][0]:g}: must be finite and above 0; the "
                "file is damaged, fetch it again"
            )
        return found

    def _open_parts(self, path: Path, count: int) -> None:
        """Open all parts of a split model. The first part has the metadata."""
        self.close()
        self._files.clear()
        match = _PART.fullmatch(path.name)
        if match is None or int(match[3]) != count:
            raise ModelLoadError(
                f"{path}: split.count={count}: this is a part of a model in {count} files. They must have their "
                f"original names, NAME-00001-of-{count:05d}.gguf"
            )
        for number in range(1, count + 1):
            part = path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf")
            if not part.is_file():
                raise ModelLoadError(f"{part} is missing: the model is split into {count} files, fetch all of them")
            self._files.append(GgufFile(part))
        wanted, found = self.metadata.get("split.tensors.count"), sum(len(file.entries) for file in self._files)
        if wanted is not None and wanted != found:
            raise ModelLoadError(f"{path}: split.tensors.count={wanted}, but the {count} files have {found} tensors")

    def _tensors_of(self, file: GgufFile, entry: TensorEntry) -> Iterable[_Tensor]:
        """Yield the Hugging Face tensors in a tensor of the file: one, or one per expert. An unknown name is kept."""
        dtype = entry.dtype if entry.dtype in PLAIN else "F32"
        if (match := _ALL_EXPERTS.fullmatch(entry.name)) and len(entry.shape) == 3:
            experts, *shape = entry.shape
            size = (entry.end - entry.begin) // experts
            for expert in range(experts):
                name, begin = _expert_name(match[1], match[2], expert), entry.begin + expert * size
                one = TensorEntry(name, dtype, tuple(shape), begin, begin + size)
                yield _Tensor(one, file, entry.name, expert, experts)
            return
        name = self._name_of(entry.name)
        yield _Tensor(dataclasses.replace(entry, name=name, dtype=dtype), file, entry.name)

    def _name_of(self, source: str) -> str:
        """Return Hugging Face's name of a tensor of the file, or the unchanged name if there is none."""
        stem, _, kind = source.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        match = _IN_LAYER.fullmatch(source)
        if match and (one := _ONE_EXPERT.fullmatch(match[2])):
            return _expert_name(match[1], one[1], int(one[2]))
        names = self._layer_names()
        return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}" if match and match[2] in names else source

    def _source_of(self, name: str) -> str:
        """Return the GGUF name of a Hugging Face tensor, for errors about missing tensors."""
        stem, _, kind = name.rpartition(".")
        for source, known in _TOP.items():
            if stem == known:
                return f"{source}.{kind}"
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
            for source, known in self._layer_names().items():
                if match[2] == known:
                    return f"blk.{match[1]}.{source}.{kind}"
            for source, known in _EXPERTS.items():
                if re.fullmatch(rf"block_sparse_moe\.experts\.\d+\.{known}", match[2]):
                    return f"blk.{match[1]}.{source}_exps.{kind}"
        return name

    def _quantized_type(self, name: str) -> str | None:
        """Return ggml's type name of a quantised matrix; None for plain types, and for vectors such as norms."""
        tensor = self._tensors[name]
        kind = tensor.file.entries[tensor.source].dtype
        return None if kind in PLAIN or len(tensor.entry.shape) < 2 else kind

    def _log_dequantized(self) -> None:
        """Log the types that `quantized` does not keep, once."""
        if self._has_logged:
            return
        self._has_logged = True
        sources = {tensor.source: self._quantized_type(name) for name, tensor in self._tensors.items()}
        counts = Counter(kind for kind in sources.values() if kind is not None and kind not in gguf_blocks.KEPT)
        types = ", ".join(f"{kind} ({count})" for kind, count in sorted(counts.items()))
        logger.info(
            "%s: tensors of these types are dequantised: %s. Types kept quantised: %s",
            self.folder, types, ", ".join(gguf_blocks.KEPT),
        )  # fmt: skip

    def _damaged(self, name: str, found: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path(name)}: {self.label(name)} has {found}: the file is damaged, fetch it again or use another "
            "quantization of the model"
        )

    def _layer_names(self) -> dict[str, str]:
        return _LAYER | _LAYER_OF.get(self._architecture, {})

    def _permuted_heads(self, name: str) -> int:
        """Return the number of heads if the converter has reordered the tensor's rows within each head, else 0."""
        if self._architecture != "llama":
            return 0
        if ".self_attn.q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".self_attn.k_proj." in name else 0


def _expert_name(layer: str, source: str, expert: int) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{_EXPERTS[source]}.weight"


def _halves_first(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of every head from [pair, pair, ...] to [first half, second half]."""
    count, *rest = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows.shape)
