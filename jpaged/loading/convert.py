"""Converts a Hugging Face checkpoint to a folder with the engine's own parameter tree, and back.

converted_folder.py describes the folder. Both directions keep one leaf in memory at a time. They write to a temporary
folder next to `out`, and rename it when it is complete.
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.checkpoint import CONVERTED, INDEX, Checkpoint, TensorSource, is_converted, read_json
from jpaged.loading.converted_folder import AGAIN, PARAMS, SOURCE, Manifest, check_converted
from jpaged.loading.dtypes import BY_NAME, checkpoint_dtype, main_dtype
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
from jpaged.loading.hub import find_model
from jpaged.loading.orbax_tree import NewLeaf, read_leaf, save_tree
from jpaged.loading.safetensors_file import DTYPES, SafetensorsFile
from jpaged.loading.source import open_source
from jpaged.loading.tokenizer import load_tokenizer
from jpaged.loading.weights import HEAD, WeightPlan, assemble, check_depth, is_bare, plan_weights
from jpaged.models.families import family_of
from jpaged.models.families.base import LeafTensors
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import leaf_dtype, param_shapes

# With several devices, each device stores some columns of these leaves. A shard of columns is spread over a whole file,
# unlike a shard of rows, so these leaves are cut into files that are read one by one.
_BY_COLUMNS, _PIECES = ("o", "down"), 8


@dataclasses.dataclass(frozen=True)
class Written:
    """Summary of a conversion."""

    folder: Path
    dtype: np.dtype
    num_bytes: int     # size of all files
    same_files: bool   # the original files can be restored bit for bit (convert), or were (export)


def convert(model: str, out: Path, *, dtype: str = "auto", revision: str | None = None) -> Written:
    """Write a model as the folder that converted_folder.py describes.

    dtype: dtype of the arrays. auto keeps the checkpoint's own dtype, on CPU too.
    Raises ModelLoadError for the model and RequestError for the other arguments, before anything is written.
    """
    if dtype != "auto" and dtype not in BY_NAME:
        raise RequestError("dtype", dtype, f"must be auto, {', '.join(BY_NAME)}")
    path = find_model(model, revision)
    check_out(out, path)
    if path.is_dir() and is_converted(path):
        raise RequestError("model", model, f"is converted already ({CONVERTED}); to get the files back: --to hf")
    with open_source(path) as (values, checkpoint):
        family, config = family_of(values), CheckpointConfig(values)
        check_depth(config, len(list(checkpoint.names)))
        spec = family.spec(config)
        if is_bare(family, checkpoint) and HEAD not in checkpoint:  # an embedding model
            spec = dataclasses.replace(spec, pools=True)
        plan = plan_weights(family, spec, family.constants(config), checkpoint)
        kind = checkpoint_dtype(config, checkpoint) if dtype == "auto" else BY_NAME[dtype]
        shapes = param_shapes(plan.spec, kind)
        total = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        check_space(out, total + SPARE)
        # The files can be restored only if no value changes. GGUF files and packed tensors are unpacked, and a change
        # of dtype rounds.
        files = checkpoint.files if isinstance(checkpoint, Checkpoint) and main_dtype(checkpoint) == kind else []
        with complete_or_gone(out) as work:
            _write_small_files(path, values, work)
            (work / SOURCE).mkdir()
            held = _held(plan, checkpoint, kind, exactly=bool(files))
            if files:
                _keep_rest(work / SOURCE, checkpoint.folder, files, held)
            with _progress(checkpoint.num_bytes) as progress:
                save_tree(work / PARAMS, _new_leaves(plan, checkpoint, kind, progress.update))
            Manifest(kind.name, {file.path.name: file.size for file in files}, held).write(work)
    return Written(out, kind, size_of(out), bool(files))


def export(model: str, out: Path) -> Written:
    """Write the Hugging Face files of a converted folder: the original bytes, unless `convert` changed the dtype."""
    folder = find_model(model)
    check_out(out, folder)
    if not is_converted(folder):
        raise RequestError("model", model, f"has no {CONVERTED}: --to hf is for folders that jpaged convert wrote")
    manifest = Manifest.read(folder)
    values = read_json(folder / "config.json", required=True)
    family, config = family_of(values), CheckpointConfig(values)
    spec = family.spec(config)
    if HEAD not in manifest.tensors.values():
        spec = dataclasses.replace(spec, pools=True)
    tree = check_converted(folder, spec, config)
    check_space(out, (sum(manifest.files.values()) or tree.num_bytes) + SPARE)
    leaves = [leaf for leaf in family.tensors(tree.shapes) if leaf.leaf not in family.constants(config)]
    kind = BY_NAME[manifest.dtype]
    with complete_or_gone(out) as work:
        copy_small_files(folder, work)
        if manifest.files:
            names = _restore_rest(folder / SOURCE, work, manifest)
        else:
            called = {table: name for name, table in manifest.tensors.items()}
            names = _new_file(work, leaves, tree.shapes, kind, called)
            key = "torch_dtype" if "torch_dtype" in values else "dtype"
            values.pop("quantization_config", None)  # it describes MXFP4 tensors, which are unpacked now
            (work / "config.json").write_text(json.dumps(values | {key: kind.name}, indent=2) + "\n", encoding="utf-8")
        with TensorWriter(work) as outputs, _progress(tree.num_bytes) as progress:
            for leaf in leaves:
                array = read_leaf(folder / PARAMS, _name(leaf))
                for tensor in leaf.tensors:
                    for name in names.get(tensor.name, ()):
                        outputs.write(name, tensor.rule.gather(leaf.block(array, tensor)))
                progress.update(array.nbytes)
    return Written(out, kind, size_of(out), bool(manifest.files))


def _progress(total: int) -> tqdm:
    return tqdm(total=total, unit="B", unit_scale=True, desc="converting", delay=2, disable=None)


def _new_leaves(plan: WeightPlan, checkpoint: TensorSource, dtype: np.dtype, on_read: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"layers": tuple({} for _ in range(plan.spec.num_layers))}
    for leaf_plan in plan.leaves:
        make = functools.partial(assemble, leaf_plan, checkpoint, dtype, on_read)
        place = tree if leaf_plan.leaf.layer is None else tree["layers"][leaf_plan.leaf.layer]
        pieces = _PIECES if leaf_plan.leaf.leaf in _BY_COLUMNS else 1
        place[leaf_plan.leaf.leaf] = NewLeaf(leaf_plan.shape, leaf_dtype(leaf_plan.leaf.leaf, dtype), make, pieces)
    return tree


def _held(plan: WeightPlan, checkpoint: TensorSource, dtype: np.dtype, *, exactly: bool) -> dict[str, str]:
    """Map the tensors in the tree from their names in the files to their names in the family's table.

    exactly: leave out tensors with a dtype in the files that differs from their leaf's dtype.
    """
    held = {}
    for leaf_plan in plan.leaves:
        kind = leaf_dtype(leaf_plan.leaf.leaf, dtype)
        for tensor, name in zip(leaf_plan.leaf.tensors, leaf_plan.files, strict=True):
            if exactly and DTYPES.get(checkpoint.entry(name).dtype) != kind:
                continue
            held[name] = tensor.name
            if leaf_plan.leaf.leaf == "embed":
                held |= dict.fromkeys(plan.copies, tensor.name)
    return held


def _keep_rest(folder: Path, source: Path, files: Iterable[SafetensorsFile], held: Mapping[str, str]) -> None:
    """Copy headers, the index, and the tensors that are not in the tree (not in `held`)."""
    if (source / INDEX).is_file():
        shutil.copyfile(source / INDEX, folder / INDEX)
    for file in files:
        (folder / f"{file.path.name}.header").write_bytes(file.header())
        with (folder / f"{file.path.name}.rest").open("wb") as rest:
            for name in file.entries:
                if name not in held:
                    rest.write(file.data(name))
                    file.release(name)


def _restore_rest(source: Path, out: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Write the original files at full length, with everything except the tensors of the tree.

    Returns the names in the files of each tensor of the tree, by its name in the family's table.
    """
    names: dict[str, list[str]] = {}
    for file, size in manifest.files.items():
        try:
            header, rest = ((source / f"{file}.{part}").read_bytes() for part in ("header", "rest"))
        except OSError as error:
            raise ModelLoadError(f"{source}: the saved parts of {file} cannot be read ({error}): {AGAIN}") from None
        path = out / file
        path.write_bytes(header)
        os.truncate(path, size)
        opened = SafetensorsFile(path)
        entries = opened.entries
        opened.close()
        taken = 0
        with path.open("r+b") as writer:
            for name, entry in entries.items():
                if name in manifest.tensors:
                    names.setdefault(manifest.tensors[name], []).append(name)
                    continue
                writer.seek(entry.begin)
                length = entry.end - entry.begin
                writer.write(rest[taken : taken + length])
                taken += length
        if taken != len(rest):
            raise ModelLoadError(f"{source / file}.rest has {len(rest):,} bytes instead of {taken:,}: {AGAIN}")
    if (source / INDEX).is_file():
        shutil.copyfile(source / INDEX, out / INDEX)
    return names


def _new_file(
    out: Path, leaves: list[LeafTensors], tree: Mapping[str, Any], dtype: np.dtype, names: Mapping[str, str]
) -> dict[str, list[str]]:
    """Create model.safetensors with its header and space for all tensors.

    names: name in the family's table -> name in the source. Returns name in the family's table -> names in the file.
    """
    tensors = {}
    for leaf in leaves:
        shape = (tree if leaf.layer is None else tree["layers"][leaf.layer])[leaf.leaf].shape
        kind = leaf_dtype(leaf.leaf, dtype)
        blank = np.broadcast_to(np.zeros((), kind), shape)  # gives views their shapes; needs no memory
        for tensor in leaf.tensors:
            tensors[names.get(tensor.name, tensor.name)] = kind, tensor.rule.shape(leaf.block(blank, tensor))
    create_safetensors(out / "model.safetensors", tensors)
    return {tensor.name: [names.get(tensor.name, tensor.name)] for leaf in leaves for tensor in leaf.tensors}


def _name(leaf: LeafTensors) -> str:
    return leaf.leaf if leaf.layer is None else f"layers.{leaf.layer}.{leaf.leaf}"


def _write_small_files(source: Path, values: Mapping[str, Any], out: Path) -> None:
    """Write config and tokenizer files: copied from a folder, or generated from a GGUF file."""
    if source.is_dir():
        copy_small_files(source, out)
        return
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(source)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(out))
