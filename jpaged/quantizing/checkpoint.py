"""Writes a quantised checkpoint in the format of compressed-tensors.

1. Check everything that needs no weights: the scheme, the model's family, the sizes, the calibration text.
2. Create the files at their full size in a temporary folder, which is renamed at the end.
3. Copy all unquantised tensors, bit for bit.
4. Quantise the layers in order, with one layer in memory at a time, in float32. GPTQ and AWQ run the calibration text
   through each layer before and after, so later layers see earlier errors. AWQ also changes norms and biases.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.checkpoint import CONVERTED, INDEX, Checkpoint, is_converted, read_json
from jpaged.loading.folder import (
    SPARE,
    TensorWriter,
    check_out,
    check_space,
    complete_or_gone,
    copy_small_files,
    create_safetensors,
    size_of,
)
from jpaged.loading.hub import find_model, is_gguf
from jpaged.loading.safetensors_file import DTYPES
from jpaged.loading.tokenizer import load_tokenizer
from jpaged.loading.weights import HEAD, LeafPlan, WeightPlan, assemble, check_depth, is_bare, plan_weights
from jpaged.models.families import family_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.wrappers import wrapper_of
from jpaged.quantizing.awq import fold_scales, refuse_awq
from jpaged.quantizing.calibration import FEWEST_TOKENS, Calibration
from jpaged.quantizing.gptq import gptq
from jpaged.quantizing.packing import shapes_of, tensors_of
from jpaged.quantizing.rounding import find_grid, input_error, output_error, round_to_nearest
from jpaged.quantizing.schemes import GROUP_SIZES, SCHEMES, Scheme, quantization_config, scale_dtype

METHODS = ("rtn", "gptq", "awq")
# Leaves of a layer that are quantised. q and k: of layers without values of their own (Gemma 4)
QUANTIZED = frozenset({"qkv", "q", "k", "o", "gate_up", "up", "down"})
_SHARD = 5 << 30  # maximum bytes of a safetensors file, unless one tensor is larger
_HEADS = ("lm_head", "score")


@dataclasses.dataclass(frozen=True)
class Written:
    """Summary of a quantised checkpoint."""

    folder: Path
    group_size: int | None
    matrices: int      # number of quantised matrices
    num_bytes: int     # bytes of all files
    source_bytes: int  # bytes of the source's weights
    calibration_tokens: int


@dataclasses.dataclass(frozen=True)
class _Job:
    plan: WeightPlan
    checkpoint: Checkpoint
    scheme: Scheme
    method: str
    group_size: int | None = None

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of the tensors to quantise, by their names in the files."""
        names = [name for plan in self.plan.leaves if _is_quantized(plan) for name in plan.files]
        return {name: _matrix_shape(self.checkpoint.entry(name).shape) for name in names}


def quantize_checkpoint(
    model: str,
    out: Path,
    *,
    scheme: str,
    method: str = "rtn",
    calibration: str | None = None,
    group_size: int | None = None,
    revision: str | None = None,
) -> Written:
    """Write a quantised copy of a model into a new folder. Embeddings and the output matrix keep their dtype.

    calibration: text that resembles the model's inputs; gptq and awq need it.
    group_size:  inputs that share a scale, in schemes with groups. None: the first in GROUP_SIZES that fits.
    Raises ModelLoadError for the model and RequestError for other arguments. Then nothing is written.
    """
    chosen = _checked(scheme, method, calibration, group_size)
    path = find_model(model, revision)
    check_out(out, path)
    _check_source(model, path)
    values = read_json(path / "config.json", required=True)
    if (wrapper := wrapper_of(values)) is not None:
        raise ModelLoadError(
            f"{path}: the text model inside {wrapper} cannot be quantised yet: serve it with quantization=..., or save "
            "it as a model of its own with Transformers"
        )
    if "quantization_config" in values:
        kind = values["quantization_config"]
        kind = kind.get("quant_method", "unknown") if isinstance(kind, dict) else kind
        raise ModelLoadError(f"{path}: is quantised already ({kind}): name the checkpoint that it was made from")
    with Checkpoint(path) as checkpoint:
        plan = _plan(path, values, checkpoint, method)
        job = _Job(plan, checkpoint, chosen, method)
        matrices = job.matrices()
        if chosen.grouped:
            job = dataclasses.replace(job, group_size=_group_size(matrices, group_size))
        ids = [] if calibration is None else _token_ids(path, plan, calibration)
        files = _files(job, matrices)
        check_space(out, sum(map(_bytes, files.values())) + SPARE)
        with complete_or_gone(out) as work:
            copy_small_files(path, work)
            ignore = _ignored(job, matrices)
            values["quantization_config"] = quantization_config(chosen, job.group_size, ignore)
            (work / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            _create(work, files)
            with TensorWriter(work) as writer:
                _copy_rest(job, matrices, writer)
                used = _quantize(job, ids, writer)
        source = sum(_bytes_of(checkpoint, name) for name in checkpoint.names)
    return Written(out, job.group_size, len(matrices), size_of(out), source, used)


def _checked(scheme: str, method: str, calibration: str | None, group_size: int | None) -> Scheme:
    if scheme not in SCHEMES:
        raise RequestError("scheme", scheme, f"must be one of {', '.join(SCHEMES)}")
    if method not in METHODS:
        raise RequestError("method", method, f"must be one of {', '.join(METHODS)}")
    if method != "rtn" and calibration is None:
        accepted = f"{method} needs a text that resembles the model's inputs: --calibration FILE"
        raise RequestError("calibration", None, accepted)
    if method == "rtn" and calibration is not None:
        raise RequestError("method", method, "uses no calibration text: leave --calibration out, or choose gptq or awq")
    if method == "awq" and not SCHEMES[scheme].grouped:
        raise RequestError("method", method, f"is for weights in 4 bits, and {scheme} has 8: choose rtn or gptq")
    if group_size is not None and not SCHEMES[scheme].grouped:
        raise RequestError("group_size", group_size, f"scheme {scheme} has one scale an output: leave it out")
    return SCHEMES[scheme]


def _check_source(model: str, path: Path) -> None:
    if is_gguf(path):
        raise RequestError("model", model, "is a GGUF file: name a folder of safetensors files")
    if is_converted(path):
        raise RequestError("model", model, f"is converted ({CONVERTED}): restore it with jpaged convert --to hf first")


def _plan(path: Path, values: Mapping[str, Any], checkpoint: Checkpoint, method: str) -> WeightPlan:
    family, config = family_of(values), CheckpointConfig(values)
    check_depth(config, len(list(checkpoint.names)))
    spec = family.spec(config)
    if is_bare(family, checkpoint) and HEAD not in checkpoint:
        spec = dataclasses.replace(spec, pools=True)
    plan = plan_weights(family, spec, family.constants(config), checkpoint)
    reason = None
    if spec.experts is not None:
        reason = "the experts of a mixture of experts"
    elif spec.latent is not None:
        reason = "the matrices of latent attention"
    elif spec.encoder is not None:
        reason = "the matrices of an encoder"
    elif spec.recurrence is not None:
        reason = "a model with recurrent layers"
    elif any(tensor.rule.transposed for leaf in plan.leaves if _is_quantized(leaf) for tensor in leaf.leaf.tensors):
        reason = "matrices that are stored [in, out]"
    kinds = values.get("architectures") or [values.get("model_type")]
    if method == "awq" and reason is None and (bad := refuse_awq(spec)) is not None:
        raise ModelLoadError(f"{path}: awq cannot fold its scales into {kinds[0]}, because {bad}: choose --method gptq")
    if method != "rtn" and reason is None and spec.layer_kv:
        raise ModelLoadError(
            f"{path}: {method} runs a text through one layer after another, and layers of {kinds[0]} read keys and "
            "values of earlier ones: choose --method rtn"
        )
    if reason is not None:
        raise ModelLoadError(f"{path}: {reason} cannot be quantised yet: {kinds[0]} is not supported by quantize")
    return plan


def _is_quantized(plan: LeafPlan) -> bool:
    return plan.leaf.layer is not None and plan.leaf.leaf in QUANTIZED and bool(plan.files)


def _group_size(matrices: Mapping[str, tuple[int, int]], asked: int | None) -> int:
    """The group size that fits all matrices. matrices: shapes by name. asked: the caller's; None: choose one."""
    inputs = [shape[1] for shape in matrices.values()]
    for size in GROUP_SIZES if asked is None else (asked,):
        if size > 0 and size % 16 == 0 and all(count % size == 0 for count in inputs):
            return size
    common = math.gcd(*inputs)
    fitting = [size for size in (*GROUP_SIZES, 16) if common % size == 0]
    advice = f"{', '.join(map(str, fitting))} fit all matrices" if fitting else "no size fits: choose w8a8 or fp8"
    size = asked if asked is not None and asked > 0 else 16
    bad = next((name for name, shape in matrices.items() if shape[1] % size), next(iter(matrices)))
    accepted = f"must be a multiple of 16 that divides the {matrices[bad][1]} inputs of {bad}"
    raise RequestError("group_size", asked, f"{accepted}: {advice}")


def _token_ids(path: Path, plan: WeightPlan, text: str) -> list[int]:
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise RequestError("calibration", "a text", f"needs a tokenizer, which {path} lacks: leave it out, with rtn")
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(ids) < FEWEST_TOKENS:
        accepted = f"has {len(ids):,} tokens, and at least {FEWEST_TOKENS:,} are needed: name a longer text"
        raise RequestError("calibration", f"{len(text):,} characters", accepted)
    if max(ids) >= plan.spec.vocab_size:
        raise ModelLoadError(f"{path}: the tokenizer has more tokens than the model's {plan.spec.vocab_size:,}")
    return ids


Files = dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtypes and shapes by name


def _files(job: _Job, matrices: Mapping[str, tuple[int, int]]) -> Files:
    """All tensors of the new checkpoint, in the old checkpoint's order."""
    found: Files = {}
    for name in job.checkpoint.names:
        entry = job.checkpoint.entry(name)
        kind = np.dtype(DTYPES[entry.dtype]) if entry.dtype in DTYPES else None
        if kind is None:
            raise ModelLoadError(f"{job.checkpoint.path(name)}: {name} has the unknown dtype {entry.dtype}")
        if name in matrices:
            shapes = shapes_of(job.scheme, matrices[name], job.group_size, scale_dtype(kind))
            found |= {f"{name.removesuffix('weight')}{part}": shape for part, shape in shapes.items()}
        else:
            found[name] = kind, entry.shape
    return found


def _create(folder: Path, files: Files) -> None:
    """Create the safetensors files, and an index if there is more than one."""
    shards: list[Files] = [{}]
    filled = 0
    for name, tensor in files.items():
        if filled and filled + _bytes(tensor) > _SHARD:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += _bytes(tensor)
    if len(shards) == 1:
        create_safetensors(folder / "model.safetensors", shards[0])
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        create_safetensors(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(map(_bytes, files.values()))}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _ignored(job: _Job, matrices: Mapping[str, tuple[int, int]]) -> list[str]:
    """Modules with an unquantised matrix. A tied output matrix has no tensor, but its module is listed, too."""
    kept = [name for name in job.checkpoint.names if len(job.checkpoint.entry(name).shape) == 2]
    modules = {name.removesuffix(".weight") for name in kept if name not in matrices}
    if not job.plan.spec.pools:
        modules.add(_HEADS[0])
    return sorted(modules)


def _quantize(job: _Job, ids: list[int], writer: TensorWriter) -> int:
    """Quantise and write all layers. Returns the number of calibration tokens."""
    calibration = None
    if ids:
        calibration = Calibration(job.plan.spec, dict(_shared_leaves(job)), ids)
    layers: dict[int, list[LeafPlan]] = {}
    for plan in job.plan.leaves:
        if plan.leaf.layer is not None:
            layers.setdefault(plan.leaf.layer, []).append(plan)
    total = sum(math.prod(shape) for shape in job.matrices().values())
    with tqdm(total=total, unit="weight", unit_scale=True, desc="quantizing", delay=2, disable=None) as progress:
        for layer, plans in sorted(layers.items()):
            leaves = {
                plan.leaf.leaf: assemble(plan, job.checkpoint, np.dtype(np.float32))
                for plan in plans
                if calibration is not None or _is_quantized(plan)
            }
            products: dict[str, np.ndarray] = {}
            if calibration is not None:
                leaves |= calibration.vectors(layer)
                products = calibration.input_grams(layer, _on_device(leaves))
            if job.method == "awq":
                _fold(job, layer, leaves, products, writer)
            for plan in plans:
                if _is_quantized(plan):
                    name = plan.leaf.leaf
                    _quantize_leaf(job, plan, leaves[name], products.get(name), writer, progress)
            if calibration is not None:
                calibration.advance(layer, _on_device(leaves))
    return 0 if calibration is None else calibration.num_tokens


def _shared_leaves(job: _Job) -> Iterator[tuple[str, Any]]:
    """The embedding and the vectors of all layers, in float32."""
    for plan in job.plan.leaves:
        if plan.leaf.layer is None and plan.leaf.leaf not in _HEADS:
            yield plan.leaf.leaf, jnp.asarray(assemble(plan, job.checkpoint, np.dtype(np.float32)))


def _on_device(leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: jnp.array(leaf) for name, leaf in leaves.items()}  # copies: the leaves change later


def _fold(
    job: _Job, layer: int, leaves: dict[str, np.ndarray], products: dict[str, np.ndarray], writer: TensorWriter
) -> None:
    """Scale the layer's leaves for AWQ, and write the changed vectors."""
    assert job.group_size is not None, "awq is for schemes with groups"
    # (leaf, rule, tensor's name in the files) of everything but quantised matrices
    tensors = [
        (plan.leaf.leaf, tensor.rule, name)
        for plan in job.plan.leaves if not _is_quantized(plan)
        for tensor, name in zip(plan.leaf.tensors, plan.files, strict=True) if tensor.layer == layer
    ]  # fmt: skip
    dtypes = {leaf: np.dtype(DTYPES[job.checkpoint.entry(name).dtype]) for leaf, _, name in tensors}
    changed = fold_scales(job.plan.spec, leaves, products, job.scheme, job.group_size, dtypes)
    for leaf, rule, name in tensors:
        if leaf in changed:
            writer.write(name, rule.gather(leaves[leaf]).astype(dtypes[leaf]))


def _quantize_leaf(
    job: _Job, plan: LeafPlan, leaf: np.ndarray, product: np.ndarray | None, writer: TensorWriter, progress: tqdm
) -> None:
    """Quantise and write the tensors of a leaf. Replaces the leaf's weights by their dequantised values."""
    for tensor, name in zip(plan.leaf.tensors, plan.files, strict=True):
        block = plan.leaf.block(leaf, tensor)
        matrix = tensor.rule.gather(block)
        if not np.isfinite(matrix).all():
            raise ModelLoadError(f"{job.checkpoint.path(name)}: {name} has values that are not finite")
        kind = np.dtype(DTYPES[job.checkpoint.entry(name).dtype])
        search = functools.partial(find_grid, matrix, job.scheme, job.group_size, scale_dtype(kind))
        size = job.group_size or matrix.shape[1]
        inputs = matrix.shape[1] // size, size
        if product is None:
            grid = search()
            codes = round_to_nearest(matrix, grid)
        elif job.method == "awq":
            grid = search(output_error(product, inputs))
            codes = round_to_nearest(matrix, grid)
        else:
            grid = search(input_error(product, inputs))
            codes = gptq(matrix, product, grid)
        for part, array in tensors_of(grid.weight(codes, kind)).items():
            writer.write(f"{name.removesuffix('weight')}{part}", array)
        tensor.rule.store(grid.matrix(codes), block)
        progress.update(matrix.size)


def _copy_rest(job: _Job, matrices: Mapping[str, tuple[int, int]], writer: TensorWriter) -> None:
    for name in job.checkpoint.names:
        if name not in matrices:
            writer.write(name, job.checkpoint.array(name))
            job.checkpoint.release(name)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    outputs, inputs = shape
    return outputs, inputs


def _bytes(tensor: tuple[np.dtype, tuple[int, ...]]) -> int:
    return tensor[0].itemsize * math.prod(tensor[1])


def _bytes_of(checkpoint: Checkpoint, name: str) -> int:
    entry = checkpoint.entry(name)
    return entry.end - entry.begin
