"""`read_adapter` and `read_arrays`: an adapter in host memory, from a PEFT folder or from arrays."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from jpaged.errors import ModelLoadError, RequestError, shown
from jpaged.loading.adapters.config import CONFIG, AdapterConfig, parse_config, read_config
from jpaged.loading.adapters.matrices import LeafArrays, LoraModule, in_layout
from jpaged.loading.adapters.modules import Modules, modules_of
from jpaged.loading.adapters.names import AdapterNames, TensorPair, ends_of, listed, pair_names
from jpaged.loading.safetensors_file import DTYPES, SafetensorsFile
from jpaged.models.adapters import Adapter
from jpaged.models.families.base import Family
from jpaged.models.spec import DecoderSpec, WeightLayout

TENSORS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_CONVERTIBLE = tuple(np.dtype(DTYPES[code]) for code in ("F64", "F32", "F16", "BF16"))


class _Tensors(Protocol):
    """The tensors of an adapter, by PEFT's names."""

    label: str  # where they come from; for error messages

    @property
    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def array(self, name: str) -> np.ndarray: ...
    def release(self, name: str) -> None: ...


class _FileTensors:
    """Tensors of a safetensors file."""

    def __init__(self, file: SafetensorsFile):
        self.label, self._file = str(file.path), file

    @property
    def names(self) -> Iterable[str]:
        return self._file.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.entries[name].shape

    def array(self, name: str) -> np.ndarray:
        return self._file.read_array(name)  # a trainer may write the next adapter over the file

    def release(self, name: str) -> None:
        pass


class _LiveTensors:
    """Arrays of the caller."""

    def __init__(self, arrays: Mapping[str, np.ndarray | jax.Array]):
        self.label, self._arrays = "arrays", arrays

    @property
    def names(self) -> Iterable[str]:
        return self._arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def array(self, name: str) -> np.ndarray:
        return np.asarray(self._arrays[name])

    def release(self, name: str) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Sizes and dtype of the pools that the adapter goes into."""

    max_rank: int
    dtype: np.dtype


def read_adapter(
    folder: str | Path, family: Family, spec: DecoderSpec, layout: WeightLayout = WeightLayout(), *, max_rank: int,
    dtype: DTypeLike,
) -> Adapter:  # fmt: skip
    """Read a LoRA adapter from a PEFT folder: adapter_config.json and adapter_model.safetensors.

    family, spec, layout: of the base model. spec is that of the whole model, before it is split over devices.
    max_rank: largest rank that the pools hold.
    dtype:    of A and B in the result.

    Every tensor of the file must be used. Only the two files are read. They may be links into the folder itself, or
    into the blobs of the Hugging Face cache. Shapes and ranks are checked before any array is allocated.
    Raises ModelLoadError with the file, the tensor or key, and what to change.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        _check_inside(folder, name)
    config = read_config(folder)
    path = folder / TENSORS
    if not path.is_file():
        pickled = f", only {_PICKLED}, a pickle, which could run code" if (folder / _PICKLED).is_file() else ""
        raise ModelLoadError(
            f"{path} is missing{pickled}: save the adapter with PEFT's save_pretrained(folder), which writes it"
        )
    file = SafetensorsFile(path)
    adapter = _read(_FileTensors(file), config, modules_of(family, spec), layout, _Limits(max_rank, np.dtype(dtype)))
    file.close()
    return adapter


def read_arrays(
    arrays: Mapping[str, np.ndarray | jax.Array], family: Family, spec: DecoderSpec,
    layout: WeightLayout = WeightLayout(), *, alpha: float, max_rank: int, dtype: DTypeLike, use_rslora: bool = False,
    alpha_pattern: Mapping[str, float] | None = None,
) -> Adapter:  # fmt: skip
    """Read a LoRA adapter from arrays in memory, for example those of a trainer.

    arrays: float arrays with the names of PEFT's tensors, such as
        "model.layers.0.self_attn.q_proj.lora_A.weight" [rank, in] and "….lora_B.weight" [out, rank]. They are copied.
    alpha, use_rslora, alpha_pattern: `lora_alpha`, `use_rslora` and `alpha_pattern` of PEFT's LoraConfig. B (A x) is
        multiplied by alpha / rank, with rsLoRA by alpha / sqrt(rank).
    Other parameters and errors: as in `read_adapter`. Raises RequestError for arrays that are not arrays of floats.
    """
    if not isinstance(arrays, Mapping) or not arrays:
        raise RequestError("arrays", arrays, "must map the names of PEFT's tensors to arrays")
    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, (np.ndarray, jax.Array)):
            raise RequestError(f"arrays[{shown(name)}]", type(array).__name__, "must be a numpy or JAX array")
        if isinstance(array, jax.Array) and array.is_deleted():
            raise RequestError(f"arrays[{shown(name)}]", "a deleted array", "must be alive: it was donated or deleted")
    values = {
        "peft_type": "LORA", "r": 1, "lora_alpha": alpha, "use_rslora": use_rslora,
        "alpha_pattern": dict(alpha_pattern or {}),
    }  # fmt: skip
    config = dataclasses.replace(parse_config(values, "add_lora"), rank=None)
    limits = _Limits(max_rank, np.dtype(dtype))
    return _read(_LiveTensors(arrays), config, modules_of(family, spec), layout, limits)


def describe_adapter(name: str, adapter: Adapter) -> str:
    """One line for the log: "adapter sql: 84 tensors of 42 matrices, rank 16, 1.3 MiB"."""
    used = [matrix.ranks[matrix.ranks > 0] for matrix in adapter.matrices.values()]
    ranks = np.concatenate(used) if used else np.zeros(1, np.int32)
    low, high = int(ranks.min()), int(ranks.max())
    rank = f"rank {high}" if low == high else f"ranks {low} to {high}"
    matrices = adapter.num_tensors // 2
    return (
        f"adapter {name}: {adapter.num_tensors} tensors of {matrices} matrices, {rank}, "
        f"{adapter.num_bytes / 2**20:.1f} MiB"
    )


def _check_inside(folder: Path, name: str) -> None:
    """Refuse a link that leaves the folder. In the Hugging Face cache, files of snapshots/REVISION are in blobs."""
    try:
        file, root = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a link to itself
        return
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not (file.is_relative_to(root) or file.is_relative_to(blobs)):
        raise ModelLoadError(f"{folder / name} is a link to a file outside the folder: copy the file into the folder")


def _read(tensors: _Tensors, config: AdapterConfig, modules: Modules, layout: WeightLayout, limits: _Limits) -> Adapter:
    names = pair_names(tensors.names, tensors.label)
    _check_others(names, tensors, modules)
    if not names.pairs:
        raise ModelLoadError(f"{tensors.label} has no tensors of LoRA (….lora_A.weight): it is not an adapter")
    loras = [_checked(pair, tensors, config, modules, limits.max_rank) for pair in names.pairs]
    _check_complete(names.pairs, loras, tensors.label, config, modules)
    by_target: dict[str, list[LoraModule]] = {}
    for lora in loras:
        by_target.setdefault(lora.module.target.name, []).append(lora)
    matrices = {}
    for name, of_target in by_target.items():
        host = LeafArrays(of_target[0].module.target, max(lora.rank for lora in of_target), limits.dtype)
        for lora in of_target:
            if host.is_filled(lora.module):
                raise ModelLoadError(f"{tensors.label}: tensor {lora.a}: the adapter has this matrix twice")
            host.store(lora, _finite(lora.a, tensors, limits.dtype), _finite(lora.b, tensors, limits.dtype))
            tensors.release(lora.a)
            tensors.release(lora.b)
        matrices[name] = host.matrix()
    return Adapter(in_layout(matrices, modules.spec, layout), num_tensors=2 * len(loras))


def _checked(
    pair: TensorPair, tensors: _Tensors, config: AdapterConfig, modules: Modules, max_rank: int
) -> LoraModule:
    """Find the module of a pair, and check the shapes of A and B."""
    a, b = tensors.shape(pair.a), tensors.shape(pair.b)
    label = f"{tensors.label}: tensor {pair.a}"
    if len(a) != 2 or len(b) != 2:
        wrong, shape = (pair.a, a) if len(a) != 2 else (pair.b, b)
        raise ModelLoadError(
            f"{tensors.label}: tensor {wrong} has shape {list(shape)}, it must have two axes: save the adapter again, "
            "after gathering its shards"
        )
    layer = None if pair.is_embedding else modules.fused_layer(pair.path)
    path, experts = pair.path, 1
    if layer is None:
        module = modules.find(path, label)
    else:
        module, parameter = modules.fused(layer, a[1], b[0], label)
        path, experts = f"{path}.{parameter}", module.target.experts
    if pair.is_embedding != (module.target.leaf == "embed"):
        name = "lora_embedding_A" if module.target.leaf == "embed" else "lora_A.weight"
        raise ModelLoadError(f"{label}: {path} needs {name}: save the adapter with PEFT's save_pretrained")
    rank = a[0] // experts
    _check_rank(rank, label, path, config, max_rank)
    if pair.is_embedding:  # the leaf is [vocab, width], and rows are looked up
        inputs, outputs = module.block
    else:
        inputs, outputs = module.inputs, module.outputs
    for name, shape, wanted in ((pair.a, a, (rank * experts, inputs)), (pair.b, b, (outputs, rank * experts))):
        if shape != wanted:
            raise ModelLoadError(
                f"{tensors.label}: tensor {name} has shape {list(shape)}, the model calls for {list(wanted)} at rank "
                f"{rank}: the adapter is for another model"
            )
    return LoraModule(module, pair.a, pair.b, rank, config.scale(path, rank))


def _check_rank(rank: int, label: str, path: str, config: AdapterConfig, max_rank: int) -> None:
    if rank > max_rank:
        raise ModelLoadError(
            f"{label} has rank {rank}, and the engine has max_lora_rank={max_rank}: start with --max-lora-rank {rank}"
        )
    stated = config.rank_of(path)
    if rank < 1 or (stated is not None and rank != stated):
        raise ModelLoadError(
            f"{label} has rank {rank}, but {CONFIG} calls for {stated or 'at least 1'} (r or rank_pattern): config and "
            "tensors are from different adapters"
        )


def _check_others(names: AdapterNames, tensors: _Tensors, modules: Modules) -> None:
    """Refuse tensors other than A and B. Copies of the base model's embeddings are not read: only shapes are checked.

    PEFT saves these copies because a trainer may resize the embeddings. It does not train them.
    """
    for path, name in names.copies:
        wanted, shape = modules.copy_shape(path), tensors.shape(name)
        if wanted is None:
            raise ModelLoadError(f"{tensors.label}: tensor {name}: jpaged does not read copies of this weight")
        if shape != wanted:
            raise ModelLoadError(
                f"{tensors.label}: tensor {name} has shape {list(shape)}, the model's is {list(wanted)}: the adapter "
                "was trained with resized embeddings or for another model; merge it into its base model"
            )
    if names.others:
        full = [name for short, name in names.others if modules.is_weight(short)]
        if full:
            raise ModelLoadError(
                f"{tensors.label}: {listed(full)}: weights that are trained in full are not supported: train without "
                "modules_to_save, or merge the adapter into its base model"
            )
        raise ModelLoadError(
            f"{tensors.label}: {listed([name for _, name in names.others])}: unknown, so the adapter cannot be applied "
            "as it was trained: names must be MODULE.lora_A.weight and MODULE.lora_B.weight"
        )


def _check_complete(
    pairs: Sequence[TensorPair], loras: Sequence[LoraModule], label: str, config: AdapterConfig, modules: Modules
) -> None:
    """Compare the modules with `layers_to_transform` and `target_modules`."""
    if config.layers is not None:
        found = {lora.module.layer for lora in loras if lora.module.layer is not None}
        extra, missing = sorted(found - config.layers), sorted(config.layers - found)
        if extra or missing:
            what = f"has tensors of layer {extra[0]}" if extra else f"has no tensors of layer {missing[0]}"
            raise ModelLoadError(
                f"{label} {what}, but layers_to_transform={sorted(config.layers)} in {CONFIG}: config and tensors are "
                "from different adapters"
            )
    leaves = {lora.module.target.leaf for lora in loras}
    if config.ties_head and modules.spec.tie_embeddings and leaves & {"embed", "lm_head"} == {"embed"}:
        raise ModelLoadError(
            f"{label} has no tensors of lm_head, but ensure_weight_tying=True in {CONFIG}: save the adapter with PEFT "
            "0.21 or newer, which writes them"
        )
    if config.target_modules is None:
        return
    named, seen = set(config.target_modules), set()
    for pair, lora in zip(pairs, loras, strict=True):
        ends = ends_of(pair.path)
        seen |= ends
        by_other_option = lora.module.all_experts or (config.ties_head and lora.module.target.leaf == "lm_head")
        if not by_other_option and named.isdisjoint(ends):
            raise ModelLoadError(
                f"{label}: tensor {pair.a} is of a module that target_modules in {CONFIG} does not name: config and "
                "tensors are from different adapters"
            )
    missing_ends = sorted(end for end in named - seen if modules.has_end(end))
    if missing_ends and not config.has_exclusions:
        raise ModelLoadError(
            f"{label} has no tensors of {missing_ends[0]}, which target_modules in {CONFIG} names: the adapter is "
            "incomplete, fetch or save it again"
        )


def _finite(name: str, tensors: _Tensors, dtype: np.dtype) -> np.ndarray:
    """A tensor in the pools' dtype. Raises ModelLoadError for other dtypes, and for values that are not finite."""
    array: Any = tensors.array(name)
    if array.dtype not in _CONVERTIBLE:
        raise ModelLoadError(
            f"{tensors.label}: tensor {name} is {array.dtype}; supported are "
            f"{', '.join(kind.name for kind in _CONVERTIBLE)}: save the adapter in one of these"
        )
    with np.errstate(over="ignore"):  # overflow is checked below
        converted = array.astype(dtype, copy=False)
    if not np.isfinite(converted).all():
        if np.isfinite(array).all():
            raise ModelLoadError(
                f"{tensors.label}: tensor {name} has values beyond the range of {dtype.name}: use dtype bfloat16 or "
                "float32"
            )
        raise ModelLoadError(f"{tensors.label}: tensor {name} has NaN or infinite values: the adapter is damaged")
    return converted
