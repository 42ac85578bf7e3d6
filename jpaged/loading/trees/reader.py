"""`read_tree`: finds the kind of a trainer's tree and plans the engine's tree. It copies nothing until it is asked to.

1. Every leaf is matched with a row of the kind's table, and its shape is checked.
2. Every part of the model must have its leaf, in every layer.
3. An array is used as it is if its axes are outputs then inputs, or inputs then outputs: programs reshape it for free.
   All others are copied. Where q, k and v are all copied they become one leaf, and gate and up likewise.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading.live import EXPERT_GATE_UP
from jpaged.loading.trees.hugging_face import HUGGING_FACE
from jpaged.loading.trees.kinds import KINDS
from jpaged.loading.trees.leaves import Recipe, Step, TreeLeaf
from jpaged.loading.trees.paths import is_named, named_leaves
from jpaged.loading.trees.table import (
    EMBED,
    MATRICES,
    STACKED,
    TOP,
    UNLIKE,
    Kind,
    Row,
    axis_sizes,
    order_of,
    parts_of,
    row_shape,
)
from jpaged.models.spec import DecoderSpec, QKNorm, WeightLayout

_NUMBER = re.compile(r"\d+")
_Place = tuple[str, int | None]  # part, and layer
_OF_KEYS = ("k", "v", "k_norm")
_OWN_ENDS = (".kernel", ".embedding", ".scale", ".w", "_embedding")  # of names in trainers' trees
_ENGINE_LEAVES = (*STACKED, EMBED, "final_norm", "lm_head")


class LeafPlace(NamedTuple):
    """Place of a leaf in the engine's tree. layer: None for a leaf outside of `layers`."""

    name: str
    layer: int | None = None


@dataclasses.dataclass(frozen=True)
class TrainerTree:
    """The engine's tree of a trainer's weights, planned."""

    kind: str
    spec: DecoderSpec     # computes with these numbers. It differs from the config's spec in factors only
    layout: WeightLayout
    dtype: np.dtype
    leaves: Mapping[LeafPlace, TreeLeaf]

    @property
    def num_by_reference(self) -> int:
        """Number of leaves that are the trainer's own arrays."""
        return sum(leaf.is_reference for leaf in self.leaves.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes of all other leaves."""
        return sum(leaf.copied_bytes for leaf in self.leaves.values())

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The engine's tree. Its copies are made here, one leaf after another."""
        layers: list[dict[str, Any]] = [{} for _ in range(self.spec.num_layers)]
        tree: dict[str, Any] = {"layers": tuple(layers)}
        for place, leaf in self.leaves.items():
            into = tree if place.layer is None else layers[place.layer]
            into[place.name] = leaf.make()
        return tree


def is_engine_tree(tree: Any) -> bool:
    """True if a tree has the engine's own names, or no names."""
    if not is_named(tree) or (isinstance(tree, Mapping) and not tree):
        return True
    if not isinstance(tree, Mapping):
        return isinstance(tree, list | tuple)
    if any(hasattr(tree.get(name), "shape") for name in _ENGINE_LEAVES):
        return True
    layers = tree.get("layers")
    first = layers[0] if isinstance(layers, list | tuple) and layers else None
    return isinstance(first, Mapping) and any(hasattr(first.get(name), "shape") for name in ("q", "qkv", "o", "down"))


def is_trainer_tree(weights: Any) -> bool:
    """True if weights are no tree of the engine's and no dictionary by the names of Hugging Face's tensors."""
    if is_engine_tree(weights):
        return False
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        return True
    if any(isinstance(value, Mapping) for value in weights.values()) or any("/" in name for name in weights):
        return True
    if any(name.endswith(".weight") for name in weights):  # Gemma 4 also has a `router.scale`
        return False
    return any(name.endswith(_OWN_ENDS) for name in weights)


def refuse_layout(layout: WeightLayout | None) -> None:
    """Raise RequestError for a layout: a trainer's tree has its own."""
    if layout is not None:
        raise RequestError("layout", layout, "is for the engine's own tree: leave it out, the names show the layout")


def read_tree(
    spec: DecoderSpec, tree: Any, *, fold: bool = True, layout: WeightLayout | None = None
) -> TrainerTree:
    """Plan the engine's tree of a trainer's tree: any pytree whose names are those of one kind in `KINDS`.

    spec:   of the model.
    fold:   the returned spec may have other factors, so that fewer leaves are copied. False: numbers are converted.
    layout: of the result. None: the one with the fewest copies.
    Raises ModelLoadError that names the leaf, for an unknown name, a missing leaf or another shape.
    """
    is_plain = spec.query_scaling is None and spec.qk_norm in (None, QKNorm.HEAD) and spec.gated
    if (spec.experts is not None and not spec.layer_kv) or spec.latent is not None or not is_plain:
        raise ModelLoadError(
            "trees of trainers are read by name for Llama, Qwen 2 and 3, and Gemma only: pass the engine's own tree, "
            "which docs/live_arrays.md lists"
        )
    names = named_leaves(tree)
    if not names:
        raise ModelLoadError(f"params has no arrays: it is a {type(tree).__name__}")
    kind, rows = _recognise(spec, tuple(names))
    if spec.layer_kv and kind is not HUGGING_FACE:
        raise ModelLoadError(
            f"params has {kind.name}'s names, and trees of a model whose layers have unlike keys and values (Gemma 3n, "
            f"Gemma 4) are read with the names of {HUGGING_FACE.name} only"
        )
    folded = kind.folded(spec) if fold else spec
    if folded != spec:
        spec = folded
        kind, rows = _recognise(spec, tuple(names))
    parts = _match(kind, spec, names, rows)
    _check_complete(kind, spec, parts)
    return _Plan(kind, spec, parts, layout).tree()


@dataclasses.dataclass(frozen=True)
class _Source:
    """The array that has a part."""

    name: str
    array: Any
    row: Row
    stack_axis: int | None = None
    index: int = 0

    @property
    def letters(self) -> str:
        return self.row.letters

    @property
    def is_plain(self) -> bool:
        """True if the array's numbers are the part's, and the array has nothing else."""
        r = self.row
        exact = r.factor == 1 and r.offset == 0 and not r.interleaved
        return exact and len(r.parts) == 1 and self.stack_axis is None and isinstance(self.array, jax.Array)


@functools.lru_cache(maxsize=64)
def _table(kind: Kind, spec: DecoderSpec) -> dict[str, tuple[Row, ...]]:
    rows = sorted(kind.rows(spec), key=lambda one: one.name)
    return {name: tuple(same) for name, same in itertools.groupby(rows, lambda one: one.name)}


def _find(kind: Kind, spec: DecoderSpec, name: str) -> tuple[tuple[Row, ...], int] | None:
    """The rows of a name, and the layer's number in it."""
    table = _table(kind, spec)
    for prefix in sorted(kind.prefixes, key=len, reverse=True):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if name in table:
        return table[name], 0
    for number in _NUMBER.finditer(name):
        rows = table.get(f"{name[: number.start()]}{{i}}{name[number.end() :]}")
        if rows is not None:
            return rows, int(number[0])
    return None


@functools.lru_cache(maxsize=16)
def _recognise(spec: DecoderSpec, names: tuple[str, ...]) -> tuple[Kind, dict[str, tuple[tuple[Row, ...], int]]]:
    """The kind that knows all names, and for each name its rows and layer. Raises ModelLoadError if none does.

    Cached: it takes half the time of `read_tree`, and a training loop always has the same names.
    """
    found = {kind.name: {name: row for name in names if (row := _find(kind, spec, name))} for kind in KINDS}
    kind = max(KINDS, key=lambda one: len(found[one.name]))
    known = found[kind.name]
    unknown = [name for name in names if name not in known]
    if not unknown:
        return kind, known
    if not known:
        examples = "; ".join(f"{one.name}: {_example(one, spec)}" for one in KINDS)
        raise ModelLoadError(
            f"params has a leaf {unknown[0]}, which is no name of a known tree. Known are the engine's own tree "
            f"(docs/live_arrays.md), and, each with one of its names, {examples}"
        )
    raise ModelLoadError(
        f"params has a leaf {unknown[0]}, which is no name of {kind.name}'s for this config; {len(known)} other leaves "
        "have its names. Leave it out, merge it (adapters), or check that config and weights are of one model"
    )


def _example(kind: Kind, spec: DecoderSpec) -> str:
    return next(one.name.replace("{i}", "0") for one in kind.rows(spec) if "q" in one.parts)


def _match(
    kind: Kind, spec: DecoderSpec, names: Mapping[str, Any], known: Mapping[str, tuple[tuple[Row, ...], int]]
) -> dict[_Place, _Source]:
    parts: dict[_Place, _Source] = {}
    of_layers, top = parts_of(spec)
    every = top.union(*of_layers)
    for name, array in names.items():
        rows, number = known[name]
        first = rows[0]
        if first.is_stacked and spec.layer_kv:
            raise ModelLoadError(
                f"{name} is stacked over layers, and the layers of this model differ: pass one array for each layer"
            )
        if first.parts[0] in _OF_KEYS and _reads_earlier_keys(spec, number):
            continue  # published checkpoints have keys and values that no layer reads
        strange = [part for part in first.parts if part not in every and part != "lm_head"]
        if strange:
            raise ModelLoadError(f"params has a leaf {name} ({strange[0]}), which a model with this config has not")
        one, stack_axis = _fitting(kind, spec, name, array, rows, number)
        if one.parts[0] == "lm_head" and "lm_head" not in top:
            continue  # a tied model may have a copy of its embedding
        count = 1 if stack_axis is None else array.shape[stack_axis]
        for index in range(count):
            layer = None if one.parts[0] in TOP else one.first + one.stride * (index if one.is_stacked else number)
            if layer is not None and layer >= spec.num_layers:
                raise ModelLoadError(f"{name} is of layer {layer}, and the config has {spec.num_layers} layers")
            for part in one.parts:
                if layer is not None and part not in of_layers[layer]:
                    raise ModelLoadError(f"params has a leaf {name} ({part}), which layer {layer} has not")
                parts[part, layer] = _Source(name, array, one, stack_axis, index)
    return parts


def _reads_earlier_keys(spec: DecoderSpec, layer: int) -> bool:
    return layer < len(spec.kv_sources) and spec.kv_sources[layer] is not None


def _fitting(
    kind: Kind, spec: DecoderSpec, name: str, array: Any, rows: tuple[Row, ...], layer: int
) -> tuple[Row, int | None]:
    """The row whose shape the array has, and its axis of stacked layers. Raises ModelLoadError."""
    shape, sizes = tuple(array.shape), axis_sizes(spec)
    of_layer = sizes[min(layer, len(sizes) - 1)]  # a layer too many is refused later
    if isinstance(array, jax.Array) and array.is_deleted():
        raise ModelLoadError(f"{name} has been deleted, for example by donating it to a jitted function")
    for one in rows:
        expected = row_shape(one, of_layer)
        if not one.is_stacked:
            if shape == expected or (one.parts == (EMBED,) and shape[1:] == expected[1:] and shape[0] > expected[0]):
                return one, None
            continue
        axes = sorted(range(len(shape)), key=lambda axis: axis != kind.stack_axis)
        for axis in axes:
            if (*shape[:axis], *shape[axis + 1 :]) == expected:
                return one, axis
    first = rows[0]
    more = ", with an axis of layers" if first.is_stacked else ""
    wanted = list(row_shape(first, of_layer))
    raise ModelLoadError(f"{name} has shape {list(shape)}, the config calls for {wanted}{more}")


def _check_complete(kind: Kind, spec: DecoderSpec, parts: Mapping[_Place, _Source]) -> None:
    of_layers, top = parts_of(spec)
    every = sorted(frozenset().union(*of_layers))
    in_layers = ((part, i) for part in every for i, own in enumerate(of_layers) if part in own)
    for place in itertools.chain(((part, None) for part in sorted(top)), in_layers):
        if place not in parts:
            part, layer = place
            like = next((one.name for one in kind.rows(spec) if part in one.parts), part)
            where = "" if layer is None else f" of layer {layer}"
            raise ModelLoadError(
                f"params has {kind.name}'s names, but no {part}{where}: {like.replace('{i}', str(layer))} is missing"
            )


def _order(part: str, *, turned: bool) -> str:
    outputs, inputs = MATRICES[part]
    return inputs + outputs if turned else outputs + inputs


@dataclasses.dataclass(frozen=True)
class _Plan:
    kind: Kind
    spec: DecoderSpec
    parts: Mapping[_Place, _Source]
    layout: WeightLayout | None

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The model's dtype: that of the first layer's queries."""
        return np.dtype(self.parts["q", 0].array.dtype)

    @functools.cached_property
    def orders(self) -> dict[str, str]:
        """Order of the letters of each matrix in the result."""
        if self.layout is not None:
            return {part: _order(part, turned=part in self.layout.transposed) for part in MATRICES}
        return {part: _order(part, turned=False) for part in MATRICES} | self._fitting_orders

    @functools.cached_property
    def _fitting_orders(self) -> dict[str, str]:
        """Order of the letters of each matrix that can be used as it is in some layer."""
        found: dict[str, str] = {}
        for (part, _), source in self.parts.items():
            if part not in MATRICES or not source.is_plain or source.array.dtype != self.dtype:
                continue
            if source.letters in (_order(part, turned=False), _order(part, turned=True)):
                found.setdefault(part, source.letters)
        return found

    @functools.cached_property
    def result_layout(self) -> WeightLayout:
        """Layout of the result. q, k and v are one leaf if all of them are copied, and gate and up likewise."""
        if self.layout is not None:
            return self.layout
        used = self._fitting_orders
        turned = frozenset(part for part, order in used.items() if order != _order(part, turned=False))
        return WeightLayout(any(part in used for part in "qkv"), "gate" in used or "up" in used, turned)

    def tree(self) -> TrainerTree:
        """The plan of all leaves."""
        leaves = {LeafPlace(EMBED): self._vector(EMBED, None)}
        for layer in range(self.spec.num_layers):
            leaves |= {LeafPlace(name, layer): leaf for name, leaf in self._layer(layer)}
        for part in STACKED:
            if (part, 0) in self.parts:
                leaves[LeafPlace(part)] = self._stacked(part)
        for part in TOP:
            if (part, None) in self.parts and part != EMBED:
                make = self._matrix if part in MATRICES else self._vector
                leaves[LeafPlace(part)] = make(part, None)
        return TrainerTree(self.kind.name, self.spec, self.result_layout, self.dtype, leaves)

    def _layer(self, layer: int) -> Iterator[tuple[str, TreeLeaf]]:
        spec, layout, parts = self.spec, self.result_layout, parts_of(self.spec)[0][layer]
        own = spec.of_layer(layer)
        heads = (own.num_kv_heads, own.q_per_kv + 2, own.head_dim)
        if layout.split_qkv or "v" not in parts:
            yield from ((part, self._matrix(part, layer)) for part in "qkv" if part in parts)
        else:
            yield "qkv", self._joined("qkv", "qkv", layer, (*heads, spec.hidden_size))
        yield "o", self._matrix("o", layer)
        if layout.split_gate_up:
            yield from ((part, self._matrix(part, layer)) for part in ("gate", "up"))
        else:
            yield "gate_up", self._gate_up(layer)
        yield "down", self._matrix("down", layer)
        if spec.qkv_bias:
            yield "qkv_bias", self._joined(("q_bias", "k_bias", "v_bias"), "qkv", layer, heads)
        yield from ((part, self._vector(part, layer)) for part in ("q_norm", "k_norm", *UNLIKE) if part in parts)

    def _matrix(self, part: str, layer: int | None) -> TreeLeaf:
        """A matrix, in its order of `orders`."""
        source, order = self.parts[part, layer], self.orders[part]
        if source.is_plain and source.letters == order and source.array.dtype == self.dtype:
            return TreeLeaf((source.name,), (source.array,), (0,), None)
        outputs, inputs = MATRICES[part]
        sizes = [self._size(letters, layer) for letters in (outputs, inputs)]
        shape = tuple(sizes if order == outputs + inputs else sizes[::-1])
        return self._copy([source], [self._step(source, part, order, shape, layer)], "one", shape)

    def _vector(self, part: str, layer: int | None) -> TreeLeaf:
        """A vector of one layer or of none, or a matrix that has the engine's own axes."""
        source, order = self.parts[part, layer], order_of(part)
        shape = tuple(self._size(letter, layer) for letter in order)
        fits = source.letters == order and (tuple(source.array.shape) == shape or part == EXPERT_GATE_UP)
        if source.is_plain and fits and source.array.dtype == self.dtype:
            return TreeLeaf((source.name,), (source.array,), (0,), None)
        return self._copy([source], [self._step(source, part, order, shape, layer)], "one", shape)

    def _stacked(self, part: str) -> TreeLeaf:
        """A norm's vectors or a number, stacked over layers."""
        sources, width = [self.parts[part, i] for i in range(self.spec.num_layers)], self._size(order_of(part), 0)
        first, shape = sources[0], (self.spec.num_layers, width)
        alone = all(source.array is first.array for source in sources) and first.stack_axis == 0
        plain = first.row.offset == 0 and first.row.stride == 1 and isinstance(first.array, jax.Array)
        if alone and plain and first.array.dtype == self.dtype and tuple(first.array.shape) == shape:
            return TreeLeaf((first.name,), (first.array,), (0,), None)
        steps = [self._step(one, part, order_of(part), (width,), 0) for one in sources]
        return self._copy(sources, steps, "stack", shape)

    def _joined(self, parts: Any, join: str, layer: int, shape: tuple[int, ...]) -> TreeLeaf:
        sources = [self.parts[part, layer] for part in parts]
        steps = [
            self._step(source, part, order, tuple(self._size(letter, layer) for letter in order), layer)
            for part, source in zip(parts, sources, strict=True)
            for order in [order_of(part)]
        ]
        return self._copy(sources, steps, join, shape)

    def _gate_up(self, layer: int) -> TreeLeaf:
        shape = (2, self.spec.width(layer), self.spec.hidden_size)
        gate, up = (self.parts[part, layer] for part in ("gate", "up"))
        both = gate.array is up.array and gate.letters == "cfd" and gate.stack_axis is None
        if both and isinstance(gate.array, jax.Array) and gate.array.dtype == self.dtype:
            return TreeLeaf((gate.name,), (gate.array,), (0,), None)
        return self._joined(("gate", "up"), "stack", layer, shape)

    @functools.cached_property
    def sizes(self) -> tuple[Mapping[str, int], ...]:
        """Size of each letter's axis, for every layer."""
        return axis_sizes(self.spec)

    def _size(self, letters: str, layer: int | None) -> int:
        return math.prod(self.sizes[layer or 0][letter] for letter in letters)

    def _step(self, source: _Source, part: str, order: str, shape: tuple[int, ...], layer: int | None) -> Step:
        one = source.row
        shared = one.parts.index(part) if len(one.parts) > 1 else None
        letters = one.letters.replace("c", "")
        if "k" in order and "k" not in letters:  # queries, keys and values in one array, with equally many heads
            letters = letters.replace("n", "k")
        crop = None
        if part == EMBED and source.array.shape[0] > self.spec.vocab_size:
            crop = self.spec.vocab_size
        return Step(
            stack_axis=source.stack_axis,
            shared=shared,
            axes=tuple(self._size(letter, layer) for letter in letters),
            crop=crop,
            order=tuple(letters.index(letter) for letter in order),
            head_axis=order.index("h") if one.interleaved else None,
            shape=shape,
            factor=one.factor,
            offset=one.offset,
        )

    def _copy(self, sources: list[_Source], steps: list[Step], join: str, shape: tuple[int, ...]) -> TreeLeaf:
        return TreeLeaf(
            tuple(source.name for source in sources), tuple(source.array for source in sources),
            tuple(source.index for source in sources), Recipe(tuple(steps), join, shape, self.dtype),
        )  # fmt: skip
