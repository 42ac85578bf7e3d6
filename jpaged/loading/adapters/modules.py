"""Finds the leaf of the parameter tree that a module's weight fills, and the part of the leaf.

A module's path plus ".weight" is the name of its weight in a checkpoint, so the family's `TensorRule`s know it. PEFT
names all experts of a layer as one module, because Transformers keeps their weights in one array.
"""

import dataclasses
import functools
import re

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.adapters.names import ends_of
from jpaged.models.adapters import AdapterTarget, adapter_targets
from jpaged.models.families.base import Family, LeafTensors, NamedRule, Part, TensorRule
from jpaged.models.spec import DecoderSpec, param_shapes

_WEIGHT = ".weight"
_FUSED_PATH = re.compile(r".*\.(\d{1,9})\.(?:(?:mlp|block_sparse_moe)\.)?experts")
_EXPERTS = re.compile(r"(.+\.experts)\.(?:\{expert\}\..+|gate_up_proj|down_proj)")
_FUSED = {"expert_gate_up": "gate_up_proj", "expert_down": "down_proj"}  # the parameter's name in Transformers
# Index of A for each part of a leaf. A whole fused leaf has the same A for all its parts.
_PARTS = {
    Part.Q: (0,), Part.GATED_Q: (0,), Part.K: (1,), Part.V: (2,), Part.QKV: (0, 1, 2), Part.GATE: (0,), Part.UP: (1,),
    Part.INTERLEAVED: (0, 1), Part.WHOLE: (0,),
}  # fmt: skip
# The same of leaves whose parts have other meanings.
_PARTS_OF_LEAF = {
    "delta_qkvz": {
        Part.QKV: (0, 1), Part.DELTA_Q: (0,), Part.DELTA_K: (0,), Part.DELTA_V: (0,), Part.DELTA_Z: (1,),
    },
    "delta_ba": {Part.QKV: (0, 1), Part.DELTA_Q: (0,), Part.DELTA_K: (1,)},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of the model that an adapter may change."""

    target: AdapterTarget
    rule: TensorRule         # places B [out, rank] as it places a weight [out, in]
    layer: int | None        # None: the module belongs to no layer
    expert: int | None       # None: the module has no expert's number
    block: tuple[int, ...]   # shape of the leaf, of one expert
    all_experts: bool = False  # A is [experts * rank, in], B [out, rank * experts], rank-major

    @property
    def inputs(self) -> int:
        return self.block[-1]

    @property
    def outputs(self) -> int:
        """Outputs of the module. It may fill a part of the leaf."""
        return self.rule.shape(np.broadcast_to(np.float32(0), self.block))[0]

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts of the leaf that share the module's A."""
        indices = _PARTS_OF_LEAF.get(self.target.leaf, _PARTS)
        return tuple(dict.fromkeys(index for part in self.rule.parts for index in indices[part]))


class Modules:
    """All modules of a model, by path."""

    def __init__(self, family: Family, spec: DecoderSpec):
        self._family, self.spec = family, spec
        targets = adapter_targets(spec)
        self._leaves = tuple(dict.fromkeys(target.leaf for target in targets))
        self._targets = {(target.leaf, layer): target for target in targets for layer in target.layers}
        tree = param_shapes(spec, np.float32)
        if "lm_head" in self._leaves:  # absent from the tree of tied embeddings
            tree["lm_head"] = tree["embed"]
        self._named: dict[str, tuple[LeafTensors, NamedRule]] = {}
        self._fused: dict[str, int] = {}  # module with all experts of a layer
        for leaf in family.tensors(tree):
            for tensor in leaf.tensors:
                for name in tensor.names:
                    self._named[name] = leaf, tensor
                if leaf.leaf not in _FUSED or leaf.layer is None:
                    continue
                for match in filter(None, map(_EXPERTS.fullmatch, (tensor.rule.name, *tensor.rule.aliases))):
                    path = match[1].format(layer=leaf.layer)
                    for fused in (path, path.replace(".block_sparse_moe.", ".mlp.")):  # Mixtral's name since 5.0
                        self._fused[fused] = leaf.layer
        self._shapes = tree
        rules = (rule for rule in family.rules if rule.leaf in self._leaves and not rule.leaf.startswith("expert_"))
        self._ends = {end for rule in rules for end in ends_of(rule.name.removesuffix(_WEIGHT))}

    def find(self, path: str, label: str) -> Module:
        """The module of a path. Raises ModelLoadError for unknown modules, and for those that no adapter may change."""
        for full in (path, self._family.prefix + path):
            found = self._named.get(full + _WEIGHT)
            if found is not None:
                return self._module(*found, label)
        raise ModelLoadError(f"{label}: {self._unknown(path)}")

    def fused_layer(self, path: str) -> int | None:
        """Layer of a module with all experts of a layer; None if it is no such module."""
        return self._fused.get(path, self._fused.get(self._family.prefix + path))

    def fused(self, layer: int, inputs: int, outputs: int, label: str) -> tuple[Module, str]:
        """The parameter of a layer's experts with these sizes, and its name. PEFT's paths do not name it."""
        found = [self._experts(leaf, layer) for leaf in _FUSED]
        for module in found:
            if (module.inputs, module.outputs) == (inputs, outputs):
                return module, _FUSED[module.target.leaf]
        sizes = " or ".join(f"{module.inputs} inputs and {module.outputs} outputs" for module in found)
        raise ModelLoadError(
            f"{label}: it is for experts with {inputs} inputs and {outputs} outputs, the model's have {sizes}: the "
            "adapter is for another model"
        )

    def copy_shape(self, path: str) -> tuple[int, ...] | None:
        """Shape of the embedding or the lm_head, if the path names one of these; else None."""
        for full in (path, self._family.prefix + path):
            leaf, _ = self._named.get(full + _WEIGHT, (None, None))
            if leaf is not None and leaf.leaf in ("embed", "lm_head"):
                return self._shapes[leaf.leaf].shape
        return None

    def is_weight(self, name: str) -> bool:
        """True if the model has a tensor of this name."""
        return name in self._named or self._family.prefix + name in self._named

    def has_end(self, end: str) -> bool:
        """True if `target_modules` may mean a module with this end. Not for experts: Transformers 5 fuses theirs."""
        return end in self._ends

    def _module(self, leaf: LeafTensors, tensor: NamedRule, label: str) -> Module:
        if leaf.leaf not in self._leaves:
            kinds = ", ".join(self._leaves)
            raise ModelLoadError(
                f"{label}: jpaged cannot adapt {leaf.leaf}; it can adapt {kinds}: train without this module in "
                "target_modules"
            )
        tree = self._shapes if leaf.layer is None else self._shapes["layers"][leaf.layer]
        shape = tree[leaf.leaf].shape
        rule = dataclasses.replace(tensor.rule, transposed=False)  # B is [out, rank] for a weight [in, out], too
        target = self._targets[leaf.leaf, leaf.layer or 0]
        return Module(target, rule, leaf.layer, tensor.expert, shape if tensor.expert is None else shape[1:])

    def _experts(self, leaf: str, layer: int) -> Module:
        rules = [rule for rule in self._family.rules if rule.leaf == leaf]
        parts = tuple(part for rule in rules for part in rule.parts)
        rule = TensorRule(rules[0].name, leaf, parts)
        shape = self._shapes["layers"][layer][leaf].shape
        return Module(self._targets[leaf, layer], rule, layer, None, shape[1:], all_experts=True)

    def _unknown(self, path: str) -> str:
        """Why a path is unknown: a number beyond the model's, or a name that the model does not have."""
        known = [rule for rule in self._family.rules if rule.leaf in self._leaves and rule.name.endswith(_WEIGHT)]
        for rule in known:
            match = _expression(rule).fullmatch(path) or _expression(rule).fullmatch(self._family.prefix + path)
            if match is not None:
                return self._without(**{kind: int(n) for kind, n in match.groupdict().items()})
        match = _FUSED_PATH.fullmatch(path)
        if match is not None and self.spec.experts is not None:
            return self._without(layer=int(match[1]))
        names = ", ".join(rule.name.removesuffix(_WEIGHT) for rule in known)
        return f"the model has no module {path}: the adapter is for another model; this one's modules are {names}"

    def _without(self, layer: int, expert: int = 0) -> str:
        """Why the model has no module with these numbers."""
        num_experts = 0 if self.spec.experts is None else self.spec.experts.num
        for kind, number, count in (("layer", layer, self.spec.num_layers), ("expert", expert, num_experts)):
            if number >= count and (kind == "layer" or count):
                return f"{kind} {number}, but the model has {count} {kind}s: the adapter is for another model"
        return f"layer {layer} of the model has no such module: the adapter is for another model"


def _expression(rule: TensorRule) -> re.Pattern[str]:
    """Matches module paths of a rule, with any numbers."""
    name = re.escape(rule.name.removesuffix(_WEIGHT))
    return re.compile(re.sub(r"\\{(layer|expert)\\}", r"(?P<\1>\\d{1,9})", name))


@functools.lru_cache(2)
def modules_of(family: Family, spec: DecoderSpec) -> Modules:
    """The modules of a model. DeepSeek-V3 has 45,000, and adapters may be loaded between requests."""
    return Modules(family, spec)
