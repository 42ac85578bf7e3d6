"""The folder that `jpaged convert` writes, and the checks before its weights are read.

    OUT/config.json, generation_config.json, tokenizer files    unchanged
    OUT/params/       an Orbax checkpoint of the tree of `param_shapes` (orbax_tree.py)
    OUT/source/       the rest of the Hugging Face files: headers, the index, tensors that are not in the tree
    OUT/jpaged.json   a Manifest, which is written last
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import CONVERTED, read_json
from jpaged.loading.dtypes import BY_NAME
from jpaged.loading.orbax_tree import check_tree, leaf_name, load_tree, read_leaf
from jpaged.loading.weights import StoredWeights, check_depth
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.new_leaves import NewLeaf
from jpaged.models.quantization import LeafPlacer
from jpaged.models.spec import DecoderSpec, param_shapes
from jpaged.version import __version__

FORMAT = 2
PARAMS, SOURCE = "params", "source"
MISSING = "missing"
AGAIN = "convert the model again"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of jpaged.json."""

    dtype: str                         # dtype of all leaves
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    # Safetensors files that can be restored bit for bit, with their sizes in bytes. Empty if the dtype was changed.
    tensors: dict[str, str] = dataclasses.field(default_factory=dict)
    # Tensors in the tree: name in the files -> name in the family's table. With `files`, OUT/source has all others.
    version: str = __version__
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write jpaged.json into the folder."""
        (folder / CONVERTED).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read jpaged.json of a folder. Raises ModelLoadError if it is damaged or has another format."""
        path = folder / CONVERTED
        values = read_json(path, required=True)
        if values.get("format") != FORMAT:
            raise ModelLoadError(
                f"{path}: format {values.get('format')!r}, written by jpaged {values.get('version')}; this is jpaged "
                f"{__version__}, which reads format {FORMAT}: {AGAIN}"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if values.keys() != names or values["dtype"] not in BY_NAME:
            raise ModelLoadError(f"{path} is damaged: {AGAIN}")
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class ConvertedTree:
    """The parameter tree of a converted folder, after its checks."""

    spec: DecoderSpec
    shapes: dict[str, Any]  # `param_shapes` of the stored arrays
    num_bytes: int


def open_converted(folder: Path, spec: DecoderSpec, config: CheckpointConfig) -> StoredWeights:
    """Check a converted folder, and return its weights, which are loaded later. Raises as `check_converted`."""
    tree = check_converted(folder, spec, config)
    load = functools.partial(_load, folder / PARAMS, tree.spec)
    shapes = lambda dtype, quantizer: quantizer.finish(quantizer.shapes(param_shapes(tree.spec, dtype)))  # noqa: E731
    leaves = functools.partial(_leaves, folder / PARAMS, tree.spec)
    return StoredWeights(tree.spec, tree.shapes["embed"].dtype, tree.num_bytes, load, shapes, leaves)


def check_converted(folder: Path, spec: DecoderSpec, config: CheckpointConfig) -> ConvertedTree:
    """Check that the files are complete, and that names, shapes and dtype match the config. Raises ModelLoadError."""
    dtype = BY_NAME[Manifest.read(folder).dtype]
    tree = check_tree(folder / PARAMS)
    stored = tree.leaves
    check_depth(config, len(stored))
    if spec.pools:
        stored = {name: leaf for name, leaf in stored.items() if name != "lm_head"}
    if spec.tie_embeddings and "lm_head" in stored:
        spec = dataclasses.replace(spec, tie_embeddings=False)  # the checkpoint overrides its config
    shapes = param_shapes(spec, dtype)
    wanted = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]}
    for name in sorted(wanted.keys() | stored.keys()):
        have, want = (_show(leaves.get(name)) for leaves in (stored, wanted))
        if have != want:
            to_embed = "; to embed with it, start with runner='pooling'" if (name, have) == ("lm_head", MISSING) else ""
            raise ModelLoadError(
                f"{folder / PARAMS}: {name} is {have}, config.json calls for {want}: they are from different models, "
                f"or from different versions of jpaged; {AGAIN}{to_embed}"
            )
    return ConvertedTree(spec, shapes, tree.num_bytes)


def _load(folder: Path, spec: DecoderSpec, dtype: np.dtype, quantizer: LeafPlacer) -> dict[str, Any]:
    target = param_shapes(spec, dtype)
    total = len(jax.tree.leaves(target))
    with tqdm(total=total, unit="arrays", desc="loading weights", delay=2, disable=None) as progress:
        tree = load_tree(folder, target, lambda _: progress.update())
    for layer, leaves in ((None, tree), *enumerate(tree["layers"])):
        for name in leaves.keys() - {"layers"}:
            leaves[name] = quantizer.of_layer(layer)(name, leaves[name])
    return quantizer.finish(tree)


def _leaves(folder: Path, spec: DecoderSpec, dtype: np.dtype, quantizer: LeafPlacer) -> Iterator[NewLeaf]:
    """See `StoredWeights.leaves`."""

    def leaf_of(layer: int | None, name: str, shape: jax.ShapeDtypeStruct) -> NewLeaf:
        path = name if layer is None else f"layers.{layer}.{name}"

        def make() -> Any:
            return quantizer.of_layer(layer)(name, read_leaf(folder, path, shape.dtype))

        return NewLeaf(layer, name, make, owned=True)

    target = param_shapes(spec, dtype)
    for layer, shapes in ((None, target), *enumerate(target["layers"])):
        for name in shapes.keys() - {"layers"}:
            yield leaf_of(layer, name, shapes[name])


def _show(leaf: jax.ShapeDtypeStruct | None) -> str:
    return MISSING if leaf is None else f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
