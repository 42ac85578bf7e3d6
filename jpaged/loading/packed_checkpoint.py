"""Presents a checkpoint quantised by AWQ, GPTQ, compressed-tensors, fp8 or ModelOpt: dequantised, or as codes.

A packed matrix MODULE appears as one tensor MODULE.weight [out, in]. `array` dequantises it. `quantized` returns its
codes unchanged.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import Checkpoint, TensorSource
from jpaged.loading.kv_scales import KV_SCALE
from jpaged.loading.quantized.awq import Awq
from jpaged.loading.quantized.compressed_tensors import CompressedTensors
from jpaged.loading.quantized.config import CONFIG, Values, method_of, refused
from jpaged.loading.quantized.formats import CODE_DTYPES, Format
from jpaged.loading.quantized.fp8 import Fp8
from jpaged.loading.quantized.gptq import Gptq
from jpaged.loading.quantized.kv_scheme import KvScheme, check_kv_zeros, is_kv_tensor, read_kv_scheme
from jpaged.loading.quantized.matrix_tensors import Header, Parts
from jpaged.loading.quantized.modelopt import ModelOpt
from jpaged.loading.safetensors_file import DTYPES, TensorEntry
from jpaged.models.families.config import QUANT_METHODS
from pallas_kernels.quantized_dot.weight import FP4_NUMBERS, PLAIN_DTYPES, QuantizedWeight

_FORMATS = dict(zip(QUANT_METHODS, (Awq, Gptq, CompressedTensors, Fp8, ModelOpt), strict=True))
EXPERT_DTYPE = "expert_dtype"
_ACTIVATIONS = np.dtype(ml_dtypes.bfloat16)
_CHUNK = 1 << 22  # numbers that are dequantised at once: 16 MiB of float32


def format_of(values: Mapping[str, Any]) -> Format:
    """Return the checked format of config.json's quantization_config. Raises ModelLoadError that names the key."""
    method = method_of(values)
    if method not in _FORMATS:
        raise refused("quant_method", method, f"must be {' or '.join(QUANT_METHODS)}")
    config = values[CONFIG]
    if method == "fp8" and values.get(EXPERT_DTYPE) is not None:  # DeepSeek V4 has it outside of quantization_config
        config = {EXPERT_DTYPE: values[EXPERT_DTYPE], **config}
    return _FORMATS[method](Values(config))


class PackedCheckpoint:
    """A quantised checkpoint whose packed matrices look like bfloat16 tensors."""

    config_name = Checkpoint.config_name

    def __init__(self, checkpoint: TensorSource, config: Mapping[str, Any]):
        """Check the headers of all parts, without reading data. Raises ModelLoadError for unsupported ones.

        config: the values of config.json, with quantization_config.
        """
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._format = format_of(config)
        self.kv_scheme: KvScheme | None = read_kv_scheme(_plain_values(config))
        self._headers: dict[str, Header] = {}  # by name of the matrix
        self._parts: dict[str, Parts] = {}
        check_kv_zeros(checkpoint)
        self._hidden = {name for name in checkpoint.names if is_kv_tensor(name) and not KV_SCALE.fullmatch(name)}
        for module in self._format.modules(checkpoint):
            self._add(Parts(checkpoint, module))
        if not self._headers:
            raise ModelLoadError(
                f"{self.folder}: {self.config_name} has {CONFIG} with quant_method {method_of(config)!r}, but no "
                f"tensor is quantised that way: delete {CONFIG} from {self.config_name}, or fetch the checkpoint again"
            )
        self._visible = [n for n in checkpoint.names if n not in self._hidden and n not in self._headers]
        self._visible += self._headers
        self._refuse_three_axes(config)

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors. A packed matrix has the name of its dense form."""
        return self._visible

    @property
    def packed(self) -> Iterable[str]:
        """Names of the packed matrices."""
        return self._headers.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._checkpoint.num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._headers or (name in self._checkpoint and name not in self._hidden)

    def label(self, name: str) -> str:
        """Name of a tensor in error messages."""
        return self._stored(name)

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype and position of a tensor. A packed one has its dense shape and the position of its codes."""
        entry = self._checkpoint.entry(self._stored(name))
        header = self._headers.get(name)
        return entry if header is None else dataclasses.replace(entry, name=name, dtype="BF16", shape=header.shape)

    def path(self, name: str) -> Path:
        """Path of the file that contains a tensor."""
        return self._checkpoint.path(self._stored(name))

    def array(self, name: str) -> np.ndarray:
        """Return a tensor. A packed one is dequantised, float32[out, in]. Raises ModelLoadError for invalid codes."""
        weight = self.quantized(name)
        return self._checkpoint.array(name) if weight is None else dequantized(weight)

    def release(self, name: str) -> None:
        """Release the memory pages of a tensor. A later read loads them again."""
        if name not in self._headers:
            self._checkpoint.release(name)
            return
        parts = self._parts[name]
        for part in (self._headers[name].codes, *self._format.parts, *self._format.hidden):
            if part in parts:
                self._checkpoint.release(parts.name(part))

    def quantized(self, name: str) -> QuantizedWeight | None:
        """A packed matrix [out, in] in the layout "plain", numpy arrays. None for other tensors.

        The codes may be a view of the mapped file: drop them before the checkpoint is closed.
        Raises ModelLoadError for scales that are NaN, infinite or 0 (in NVFP4: NaN or negative), and for codes or
        g_idx out of range.
        """
        if name not in self._headers:
            return None
        parts, header = self._parts[name], self._headers[name]
        order = self._format.order(parts, header)
        scales = np.array(header.widen(self._format.scales(parts, header)), order="C")  # small: never a view
        zeros = self._format.zeros(parts, header)
        outer = self._format.outer(parts, header)
        codes = self._format.codes(parts, header)
        return _weight(
            header, np.ascontiguousarray(codes if order is None else codes[:, order]), scales,
            None if zeros is None else np.array(header.widen(zeros), order="C"), outer, order,
        )  # fmt: skip

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """As `quantized`, with ShapeDtypeStructs. Reads the headers and g_idx only."""
        if name not in self._headers:
            return None
        header = self._headers[name]
        order = self._format.order(self._parts[name], header)
        return described_weight(header, has_order=order is not None)

    def _stored(self, name: str) -> str:
        """Name of the tensor with the codes, or the name itself."""
        return self._parts[name].name(self._headers[name].codes) if name in self._headers else name

    def _refuse_three_axes(self, config: Mapping[str, Any]) -> None:
        """Refuse a layer's experts that are quantised in one tensor, as ModelOpt writes Llama 4 and gpt-oss."""
        for name in self._visible:
            entry = self.entry(name)
            if entry.dtype in CODE_DTYPES and len(entry.shape) == 3:
                raise ModelLoadError(
                    f"{self.path(name)}: {name} is {entry.dtype}{list(entry.shape)}: quant_method "
                    f"{method_of(config)!r} with all experts of a layer in one tensor is not supported: use a "
                    "checkpoint with one tensor for each expert, or another quantization of the model"
                )

    def _add(self, parts: Parts) -> None:
        module = parts.module
        if (reason := self._format.excluded(module)) is not None:
            part = next(p for p in (*self._format.parts, "weight") if p in parts)
            raise ModelLoadError(
                f"{parts.path()}: {parts.name(part)} belongs to a packed matrix, but {module} is not quantised "
                f"according to {CONFIG} ({reason}): {self.config_name} is from another model"
            )
        header = self._format.header(parts)
        name = parts.name("weight")
        if header.codes != "weight" and "weight" in parts:
            raise ModelLoadError(
                f"{parts.path()}: has both {name} and {parts.name(header.codes)}, of one matrix: fetch the checkpoint "
                "again"
            )
        parts.refuse_more(self._format.parts)
        self._headers[name], self._parts[name] = header, parts
        hidden = (parts.name(part) for part in (*self._format.parts, *self._format.hidden))
        self._hidden.update(n for n in hidden if n in self._checkpoint)


@functools.lru_cache(maxsize=256)  # a model has many matrices of a few shapes
def described_weight(header: Header, *, has_order: bool) -> QuantizedWeight:
    """Return a packed matrix with ShapeDtypeStructs."""
    by_group = (header.shape[0], header.groups)
    return _weight(
        header, jax.ShapeDtypeStruct(header.shape, PLAIN_DTYPES[header.kind]),
        jax.ShapeDtypeStruct(by_group, DTYPES[header.scales]),
        None if header.zeros is None else jax.ShapeDtypeStruct(by_group, header.zeros),
        jax.ShapeDtypeStruct((header.shape[0], 1), np.float32) if header.has_outer else None,
        jax.ShapeDtypeStruct(header.shape[1:], np.int32) if has_order else None,
    )  # fmt: skip


def dequantized(weight: QuantizedWeight) -> np.ndarray:
    """Return weights of the layout "plain" as float32[out, in] on the host, inputs in the order of x.

    The weight must have no `mins`, and one factor per output in `outer`.
    """
    outputs, inputs = weight.shape
    values = np.empty(weight.shape, np.float32)
    middle = np.float32(8 if weight.kind == "int4" else 0)
    rows = max(1, _CHUNK // inputs)
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        codes = weight.codes[part]
        wide = FP4_NUMBERS[codes] if weight.kind == "fp4" else codes.astype(np.float32)
        numbers = wide.reshape(-1, weight.groups, weight.group_size)
        numbers -= middle if weight.zeros is None else weight.zeros[part].astype(np.float32)[..., None]
        scales = weight.scales[part].astype(np.float32)
        if weight.outer is not None:
            scales = scales / weight.outer[part] if weight.divides else scales * weight.outer[part]
        with np.errstate(over="ignore"):  # 6 * 2^127 of MXFP4 is infinite
            numbers *= scales[..., None]
        columns = slice(None) if weight.order is None else weight.order
        values[part, columns] = numbers.reshape(-1, inputs)
    return values


def _plain_values(config: Mapping[str, Any]) -> Values:
    """Return quantization_config's values. hf_quant_config.json has them one level deeper."""
    values = Values(config[CONFIG])
    return values.inner("quantization") if "quantization" in values else values


def _weight(header: Header, codes: Any, scales: Any, zeros: Any, outer: Any, order: Any) -> QuantizedWeight:
    return QuantizedWeight(
        codes, scales, zeros, outer, None, None, order, header.kind, header.shape, _ACTIVATIONS, header.activations,
        header.divides,
    )  # fmt: skip
