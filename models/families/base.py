"""`Family`: reads a config, and maps a checkpoint's tensors to parts of the parameter tree.

The map (`TensorRule`) works in both directions. Loading fills leaves from tensors, and `jpaged convert --to hf` writes
tensors from leaves.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, Params


class Part(enum.Enum):
    """Part of a leaf that a tensor fills. The fused qkv leaf is [kv_heads, q_per_kv + 2, head_dim, ...].

    DELTA_… are parts of `delta_qkvz` and `delta_ba`, CONV_Q to CONV_V of `delta_conv`. See `spec.param_shapes`.
    """

    WHOLE = "whole"
    HEADS = "heads"              # the whole leaf [heads, head_dim, ...]
    INTERLEAVED = "interleaved"  # gate and up, with alternating rows in the tensor
    QKV = "qkv"  # the whole fused leaf, in the same order: for each KV head its queries, its key, its value
    Q = "q"
    K = "k"
    V = "v"
    GATE = "gate"
    UP = "up"
    GATED_Q = "gated_q"  # gates and queries; the tensor has each query head before its gate
    DELTA_Q = "delta_q"
    DELTA_K = "delta_k"
    DELTA_V = "delta_v"
    DELTA_Z = "delta_z"
    CONV = "conv"        # the whole leaf [width, channels]; tensors of a convolution are [channels, 1, width]
    CONV_Q = "conv_q"
    CONV_K = "conv_k"
    CONV_V = "conv_v"
    ROW = "row"  # a vector, which the tensor has as a matrix of one row
    PER_HEAD = "per_head"  # a vector, which the tensor has as [1, 1, heads, 1]

    def view(self, leaf: np.ndarray) -> np.ndarray:
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
            case Part.GATED_Q:
                both = leaf[:, :-2]
                return both.reshape(len(leaf), 2, -1, *leaf.shape[2:])[:, ::-1].swapaxes(1, 2)
            case Part.DELTA_Q:
                return leaf[:, 0]
            case Part.DELTA_K:
                return leaf[:, 1]
            case Part.DELTA_V:
                return leaf[:, 2 : 1 + leaf.shape[1] // 2]
            case Part.DELTA_Z:
                return leaf[:, 1 + leaf.shape[1] // 2 :]
            case Part.CONV:
                return leaf.T[:, None]
            case Part.CONV_Q | Part.CONV_K | Part.CONV_V:
                parts = {Part.CONV_Q: 0, Part.CONV_K: 1, Part.CONV_V: slice(2, None)}
                return np.moveaxis(leaf, 0, -1)[:, parts[self], ..., None, :]
            case Part.ROW:
                return leaf[None]
            case Part.PER_HEAD:
                return leaf[None, None, :, None]

    @property
    def output_axes(self) -> int:
        """Number of leading axes of the view that the checkpoint's tensor has as one axis, its output features."""
        two = (Part.K, Part.V, Part.HEADS, Part.INTERLEAVED, Part.DELTA_Q, Part.DELTA_K, Part.CONV_Q, Part.CONV_K)
        three = (Part.Q, Part.QKV, Part.DELTA_V, Part.DELTA_Z, Part.CONV_V)
        return 4 if self is Part.GATED_Q else 3 if self in three else 2 if self in two else 1


# Matrices of one expert, for a tensor of all experts and its parts
_NAMES_OF_ONE: dict[tuple[str, tuple[Part, ...]], tuple[tuple[str, Part], ...]] = {
    ("gate_up_proj", (Part.GATE, Part.UP)): (("gate_proj", Part.GATE), ("up_proj", Part.UP)),
    ("down_proj", (Part.WHOLE,)): (("down_proj", Part.WHOLE),),
}


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """A tensor of a checkpoint, and the leaf of the parameter tree that it fills."""

    name: str                            # the tensor's name, with {layer} and {expert} for indices
    leaf: str                            # name in `spec.param_shapes`
    parts: tuple[Part, ...] = (Part.WHOLE,)  # parts that the tensor's output features fill, in this order
    transposed: bool = False             # the tensor is [in, out]
    all_experts: bool = False            # one tensor for all experts of a layer, [experts, ...]
    aliases: tuple[str, ...] = ()        # other names of the tensor in other checkpoints
    # Share of each head, from its first dimension, that rope rotates in pairs (2i, 2i + 1) in the checkpoint. The leaf
    # has the order (i, i + half) of the kernels. Queries and keys have the same order, so q.k is the same.
    pairs: float = 0.0
    first_layer: int = 0                 # layers before it have no such tensor, and do not use their rows of the leaf

    def shape(self, leaf: np.ndarray) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor. leaf: of one layer, also if the tree stacks it over layers."""
        if self.all_experts:
            return (leaf.shape[0], *self._for_one_expert().shape(leaf[0]))
        shapes = [_flat_shape(part, part.view(leaf)) for part in self.parts]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        return shape[::-1] if self.transposed else shape

    def store(self, tensor: np.ndarray, leaf: np.ndarray) -> None:
        """Write the checkpoint's tensor into the leaf, in the leaf's dtype, without a temporary copy."""
        if self.all_experts:
            for expert_tensor, expert_leaf in zip(tensor, leaf, strict=True):
                self._for_one_expert().store(expert_tensor, expert_leaf)
            return
        rows = tensor.T if self.transposed else tensor
        start = 0
        for part in self.parts:
            view = part.view(leaf)
            count = _flat_shape(part, view)[0]
            values = rows[start : start + count].reshape(view.shape)
            for into, of in self._orders(part, view):
                np.copyto(view[into], values[of], casting="unsafe")
            start += count

    def gather(self, leaf: np.ndarray) -> np.ndarray:
        """Return the checkpoint's tensor from the leaf. Inverse of `store`."""
        if self.all_experts:
            return np.stack([self._for_one_expert().gather(expert_leaf) for expert_leaf in leaf])
        views = [(part, self._in_file_order(part, part.view(leaf))) for part in self.parts]
        rows = np.concatenate([view.reshape(_flat_shape(part, view)) for part, view in views])
        return np.ascontiguousarray(rows.T if self.transposed else rows)

    def _in_file_order(self, part: Part, view: np.ndarray) -> np.ndarray:
        if not self.pairs:
            return view
        values = np.empty_like(view)
        for into, of in self._orders(part, view):
            values[of] = view[into]
        return values

    def _orders(self, part: Part, view: np.ndarray) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Pairs of indices: of the view, and of the tensor's values in the view's shape. Together they cover both."""
        if not self.pairs:
            return [((), ())]
        before = (slice(None),) * (part.output_axes - 1)  # the last axis of output features is the head's dimensions
        rotated = int(view.shape[len(before)] * self.pairs)
        orders = [
            (slice(rotated // 2), slice(0, rotated, 2)),
            (slice(rotated // 2, rotated), slice(1, rotated, 2)),
            (slice(rotated, None), slice(rotated, None)),
        ]
        return [((*before, into), (*before, of)) for into, of in orders]

    def of_single_experts(self) -> tuple["TensorRule", ...]:
        """Rules for the same values in a tensor for each expert, for quantised releases; (): not known.

        `experts.gate_up_proj` is `experts.{expert}.gate_proj.weight` and `experts.{expert}.up_proj.weight` there, and
        these are [out, in].
        """
        head, _, name = self.name.rpartition(".")
        if not self.all_experts or (name, self.parts) not in _NAMES_OF_ONE:
            return ()
        return tuple(
            TensorRule(f"{head}.{{expert}}.{matrix}.weight", self.leaf, (part,))
            for matrix, part in _NAMES_OF_ONE[name, self.parts]
        )

    def _for_one_expert(self) -> "TensorRule":
        """The rule for one expert's slice of the tensor."""
        return dataclasses.replace(self, all_experts=False)


@dataclasses.dataclass(frozen=True)
class Number(TensorRule):
    """A tensor with one number, which is an element of the leaf. axes: of the tensor, 0 or 1."""

    index: int = 0
    axes: int = 0

    def shape(self, leaf: np.ndarray) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return (1,) * self.axes

    def store(self, tensor: np.ndarray, leaf: np.ndarray) -> None:
        """Write the number into the leaf, in the leaf's dtype."""
        np.copyto(leaf[self.index : self.index + 1], tensor.reshape(1), casting="unsafe")

    def gather(self, leaf: np.ndarray) -> np.ndarray:
        """Return the checkpoint's tensor from the leaf."""
        return leaf[self.index : self.index + 1].reshape(self.shape(leaf))


def with_bias(
    name: str, leaf: str, parts: tuple[Part, ...] = (Part.WHOLE,), *, transposed: bool = False, alias: str = ""
) -> tuple[TensorRule, TensorRule]:
    """Rules for NAME.weight, which fills LEAF, and NAME.bias, which fills LEAF_bias. alias: another NAME."""
    aliases = {kind: (f"{alias}.{kind}",) if alias else () for kind in ("weight", "bias")}
    return (
        TensorRule(f"{name}.weight", leaf, parts, transposed, aliases=aliases["weight"]),
        TensorRule(f"{name}.bias", f"{leaf}_bias", parts, aliases=aliases["bias"]),
    )


def with_pairs(rules: tuple[TensorRule, ...], share: float = 1.0) -> tuple[TensorRule, ...]:
    """The rules, with queries and keys that are rotated in pairs. share: see `TensorRule.pairs`."""
    rotated = ((Part.Q,), (Part.K,))
    return tuple(dataclasses.replace(rule, pairs=share) if rule.parts in rotated else rule for rule in rules)


# All sequence classifiers of Transformers use this name for the score matrix.
SCORE = TensorRule("score.weight", "score")


@dataclasses.dataclass(frozen=True)
class TokenScore(TensorRule):
    """A score matrix with one label, from the output matrix: the row of the token "yes" minus that of "no".

    The sigmoid of this score is the probability of "yes" among the two tokens (Qwen3-Reranker).
    """

    no: int = 0
    yes: int = 0
    vocab_size: int = 0

    def shape(self, leaf: np.ndarray) -> tuple[int, ...]:
        """Shape of the output matrix."""
        return (self.vocab_size, leaf.shape[1])

    def store(self, tensor: np.ndarray, leaf: np.ndarray) -> None:
        """Write the difference of two rows of the output matrix. It is made in float32."""
        difference = tensor[self.yes].astype(np.float32) - tensor[self.no].astype(np.float32)
        np.copyto(leaf[0], difference, casting="unsafe")

    def gather(self, leaf: np.ndarray) -> np.ndarray:
        """Raise ModelLoadError: the output matrix cannot be made from the difference."""
        raise ModelLoadError("a model with classifier_from_token cannot be written as a checkpoint")


def _flat_shape(part: Part, view: np.ndarray) -> tuple[int, ...]:
    """Shape of a view after its axes of output features are merged into one."""
    axes = part.output_axes
    return (math.prod(view.shape[:axes]), *view.shape[axes:])


def _no_constants(_: CheckpointConfig) -> Mapping[str, float]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model architecture: the reader of its config, and the names of its tensors."""

    model_type: str
    architectures: tuple[str, ...]   # the causal language model first, then the base model
    decoder: Callable[[CheckpointConfig], DecoderSpec]  # spec of the causal language model
    rules: tuple[TensorRule, ...]    # a rule whose leaf is not in the spec's tree is skipped
    prefix: str                      # of all tensors except lm_head and score; absent in files of the base model
    ignored: re.Pattern[str]         # tensors that Transformers also ignores, mostly buffers of old versions
    constants: Callable[[CheckpointConfig], Mapping[str, float]] = _no_constants  # values of leaves without a tensor
    has_classifier: bool = True      # Transformers has a sequence classifier of this architecture

    def spec(self, config: CheckpointConfig) -> DecoderSpec:
        """DecoderSpec of a config.json. Raises ModelLoadError, which names the wrong or unsupported key."""
        spec, num_labels = self.decoder(config), config.num_labels()
        return spec if num_labels is None else dataclasses.replace(spec, pools=True, num_labels=num_labels)

    def scored_by_tokens(self, spec: DecoderSpec, no: int, yes: int) -> "Family":
        """The family of a causal language model that classifies by two tokens of its answer."""
        aliases = tuple(rule.name for rule in self.rules if rule.leaf == "embed") if spec.tie_embeddings else ()
        rule = TokenScore("lm_head.weight", "score", aliases=aliases, no=no, yes=yes, vocab_size=spec.vocab_size)
        return dataclasses.replace(self, rules=(*self.rules, rule))

    def tensors(self, tree: Params) -> Iterator["LeafTensors"]:
        """Yield every leaf of a parameter tree of arrays or ShapeDtypeStructs, with the tensors that fill it."""
        for number, layer in enumerate(tree["layers"]):
            for leaf, value in layer.items():
                yield LeafTensors(leaf, number, self._rules_of(leaf, number, value.shape[0]))
        for leaf, value in tree.items():
            if leaf == "layers":
                continue
            rules = [rule for rule in self.rules if rule.leaf == leaf]
            if rules and "{layer}" in rules[0].name:
                layers = range(rules[0].first_layer, value.shape[0])
                named = tuple(pair for n in layers for pair in self._rules_of(leaf, n))
            else:
                named = self._rules_of(leaf, None)
            yield LeafTensors(leaf, None, named)

    def _rules_of(self, leaf: str, layer: int | None, experts: int = 1) -> tuple["NamedRule", ...]:
        """The rules for a leaf. experts: number of its experts; used if each expert has its own tensor."""
        rules = [rule for rule in self.rules if rule.leaf == leaf] or [rule for rule in (SCORE,) if rule.leaf == leaf]
        numbers = {rule: range(experts) if "{expert}" in rule.name else (None,) for rule in rules}
        return tuple(NamedRule(rule, layer, expert) for rule in rules for expert in numbers[rule])


@dataclasses.dataclass(frozen=True)
class NamedRule:
    """A rule with the indices that complete the tensor's name."""

    rule: TensorRule
    layer: int | None
    expert: int | None = None

    @property
    def name(self) -> str:
        return self.rule.name.format(layer=self.layer, expert=self.expert)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensor's name, then its aliases."""
        return tuple(
            name.format(layer=self.layer, expert=self.expert) for name in (self.rule.name, *self.rule.aliases)
        )


@dataclasses.dataclass(frozen=True)
class LeafTensors:
    """A leaf of the tree, and the tensors that fill it."""

    leaf: str
    layer: int | None            # None: the leaf is at the top of the tree
    tensors: tuple[NamedRule, ...]

    def of_single_experts(self, experts: int) -> "LeafTensors":
        """The same leaf, with a tensor for each of its experts, if the names of these are known."""
        rules = [rule for tensor in self.tensors for rule in tensor.rule.of_single_experts()]
        named = tuple(NamedRule(rule, self.layer, expert) for rule in rules for expert in range(experts))
        return dataclasses.replace(self, tensors=named) if rules else self

    def block(self, leaf: np.ndarray, tensor: NamedRule) -> np.ndarray:
        """View that the tensor's rule applies to: the leaf, its row if it is stacked over layers, or one expert's."""
        if tensor.expert is not None:
            return leaf[tensor.expert]
        return leaf if self.layer is not None or tensor.layer is None else leaf[tensor.layer]
