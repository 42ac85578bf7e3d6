"""What a family is, and how a checkpoint's tensors map onto the parameter tree: data that works in both directions."""

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


class Part(enum.Enum):
    """Which part of a leaf a tensor fills. Heads of the fused qkv leaf lie [kv_heads, q_per_kv + 2, head_dim, …]."""

    WHOLE = "whole"
    HEADS = "heads"              # all of a leaf [heads, head_dim, …]
    INTERLEAVED = "interleaved"  # gate and up, row by row in turn
    QKV = "qkv"  # all of the fused leaf, in its own order: queries, key and value of one KV head after another
    Q = "q"
    K = "k"
    V = "v"
    GATE = "gate"
    UP = "up"

    def view(self, leaf: np.ndarray) -> np.ndarray:
        """The leaf's elements of this part, a view."""
        match self:
            case Part.WHOLE | Part.HEADS | Part.QKV:
                return leaf
            case Part.INTERLEAVED:
                return leaf.swapaxes(0, 1)
            case Part.Q:
                return leaf[:, :-2]
            case Part.K:
                return leaf[:, -2]
            case Part.V:
                return leaf[:, -1]
            case Part.GATE:
                return leaf[0]
            case Part.UP:
                return leaf[1]

    @property
    def output_axes(self) -> int:
        """So many leading axes of the view are one axis, the output features, in a checkpoint's tensor."""
        two = (Part.K, Part.V, Part.HEADS, Part.INTERLEAVED)
        return 3 if self in (Part.Q, Part.QKV) else 2 if self in two else 1


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One tensor of a checkpoint, and the leaf of the parameter tree that it fills."""

    name: str                            # the tensor's name; {layer} and {expert} stand for numbers
    leaf: str                            # name in `spec.param_shapes`
    parts: tuple[Part, ...] = (Part.WHOLE,)  # what its output features are, in this order
    transposed: bool = False             # stored [in, out]
    all_experts: bool = False            # one tensor for all experts of a layer, [experts, …]
    aliases: tuple[str, ...] = ()        # names that other files have for the same tensor

    def shape(self, leaf: np.ndarray) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have. leaf: of one layer, if it is stacked over layers."""
        if self.all_experts:
            return (leaf.shape[0], *self._of_one().shape(leaf[0]))
        shapes = [_flat_shape(part, part.view(leaf)) for part in self.parts]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        return shape[::-1] if self.transposed else shape

    def store(self, tensor: np.ndarray, leaf: np.ndarray) -> None:
        """Write the checkpoint's tensor into the leaf, converted to the leaf's dtype, without a temporary copy."""
        if self.all_experts:
            for one, place in zip(tensor, leaf, strict=True):
                self._of_one().store(one, place)
            return
        rows = tensor.T if self.transposed else tensor
        start = 0
        for part in self.parts:
            view = part.view(leaf)
            count = _flat_shape(part, view)[0]
            np.copyto(view, rows[start : start + count].reshape(view.shape), casting="unsafe")
            start += count

    def gather(self, leaf: np.ndarray) -> np.ndarray:
        """The checkpoint's tensor out of the leaf: what `store` undoes."""
        if self.all_experts:
            return np.stack([self._of_one().gather(one) for one in leaf])
        views = [(part, part.view(leaf)) for part in self.parts]
        rows = np.concatenate([view.reshape(_flat_shape(part, view)) for part, view in views])
        return np.ascontiguousarray(rows.T if self.transposed else rows)

    def _of_one(self) -> "TensorRule":
        """The rule for one expert's part of the tensor."""
        return dataclasses.replace(self, all_experts=False)


def with_bias(
    name: str, leaf: str, parts: tuple[Part, ...] = (Part.WHOLE,), *, transposed: bool = False, alias: str = ""
) -> tuple[TensorRule, TensorRule]:
    """The rules for NAME.weight, which fills LEAF, and for NAME.bias, which fills LEAF_bias. alias: of NAME."""
    aliases = {kind: (f"{alias}.{kind}",) if alias else () for kind in ("weight", "bias")}
    return (
        TensorRule(f"{name}.weight", leaf, parts, transposed, aliases=aliases["weight"]),
        TensorRule(f"{name}.bias", f"{leaf}_bias", parts, aliases=aliases["bias"]),
    )


# Transformers' sequence classifiers of all families name it so.
SCORE = TensorRule("score.weight", "score")


def _flat_shape(part: Part, view: np.ndarray) -> tuple[int, ...]:
    axes = part.output_axes
    return (int(np.prod(view.shape[:axes])), *view.shape[axes:])


def _no_constants(_: CheckpointConfig) -> Mapping[str, float]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """Models of one architecture: how to read their config and their tensors' names."""

    model_type: str
    architectures: tuple[str, ...]   # the causal language model first, then the bare base model
    decoder: Callable[[CheckpointConfig], DecoderSpec]  # as the causal language model
    rules: tuple[TensorRule, ...]    # rules whose leaf the spec's tree does not have do not apply
    prefix: str                      # of all tensors but lm_head and score; a file of the bare base model lacks it
    ignored: re.Pattern[str]         # tensors that Transformers does not read either: buffers of old versions
    constants: Callable[[CheckpointConfig], Mapping[str, float]] = _no_constants  # leaves no tensor fills

    def spec(self, config: CheckpointConfig) -> DecoderSpec:
        """DecoderSpec of a config.json. Raises ModelLoadError that names the key it cannot honour."""
        spec, num_labels = self.decoder(config), config.num_labels()
        return spec if num_labels is None else dataclasses.replace(spec, pools=True, num_labels=num_labels)

    def tensors(self, tree: Mapping[str, Any]) -> Iterator["LeafTensors"]:
        """Every leaf of a parameter tree with the tensors that fill it; a tree of arrays or of their shapes."""
        for number, layer in enumerate(tree["layers"]):
            for leaf, value in layer.items():
                yield LeafTensors(leaf, number, self._rules_of(leaf, number, value.shape[0]))
        for leaf, value in tree.items():
            if leaf == "layers":
                continue
            rules = [rule for rule in self.rules if rule.leaf == leaf]
            if rules and "{layer}" in rules[0].name:
                named = tuple(pair for n in range(value.shape[0]) for pair in self._rules_of(leaf, n))
            else:
                named = self._rules_of(leaf, None)
            yield LeafTensors(leaf, None, named)

    def _rules_of(self, leaf: str, layer: int | None, experts: int = 1) -> tuple["NamedRule", ...]:
        """The rules for a leaf. experts: how many it holds, where tensors are one an expert."""
        rules = [rule for rule in (*self.rules, SCORE) if rule.leaf == leaf]
        numbers = {rule: range(experts) if "{expert}" in rule.name else (None,) for rule in rules}
        return tuple(NamedRule(rule, layer, expert) for rule in rules for expert in numbers[rule])


@dataclasses.dataclass(frozen=True)
class NamedRule:
    """A rule for one tensor."""

    rule: TensorRule
    layer: int | None
    expert: int | None = None

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.rule.name.format(layer=self.layer, expert=self.expert)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the tensor may have, its own first."""
        return tuple(
            name.format(layer=self.layer, expert=self.expert) for name in (self.rule.name, *self.rule.aliases)
        )


@dataclasses.dataclass(frozen=True)
class LeafTensors:
    """One leaf of the tree and its tensors."""

    leaf: str
    layer: int | None            # of a matrix: the layer that holds it. None: the leaf lies at the top of the tree
    tensors: tuple[NamedRule, ...]

    def block(self, leaf: np.ndarray, tensor: NamedRule) -> np.ndarray:
        """What the tensor's rule applies to: the leaf, its row where it is stacked over layers, its expert. A view."""
        if tensor.expert is not None:
            return leaf[tensor.expert]
        return leaf if self.layer is not None or tensor.layer is None else leaf[tensor.layer]
