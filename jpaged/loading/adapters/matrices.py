"""Writes the pairs A and B of an adapter into arrays with the layout of the adapter pools."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from jpaged.loading.adapters.modules import Module
from jpaged.models.adapters import AdapterMatrix, AdapterTarget
from jpaged.models.spec import DecoderSpec, WeightLayout

_EMBED = "embed"


@dataclasses.dataclass(frozen=True)
class LoraModule:
    """A module that the adapter changes, and its tensors."""

    module: Module
    a: str
    b: str
    rank: int
    scale: float


class LeafArrays:
    """The arrays of one `AdapterTarget`, filled one module at a time."""

    def __init__(self, target: AdapterTarget, rank: int, dtype: np.dtype):
        """rank: the largest of the leaf. Memory of layers without modules is not touched."""
        self._target = target
        layers, experts, parts = len(target.layers), target.experts, target.num_parts
        size = (target.inputs, rank) if target.leaf == _EMBED else (rank, target.inputs)
        self.a = np.zeros((layers, experts, parts, *size), dtype)
        self.b = np.zeros((layers, experts, rank, target.outputs), dtype)
        self.ranks = np.zeros((layers, experts, parts), np.int32)
        self.scales = np.zeros((layers, experts, parts), np.float32)

    def matrix(self) -> AdapterMatrix:
        return AdapterMatrix(self.a, self.b, self.ranks, self.scales)

    def is_filled(self, module: Module) -> bool:
        """True if another module has filled one of the parts."""
        layer, experts = self._places(module)
        return bool(self.ranks[layer, experts][..., list(module.parts)].any())

    def store(self, lora: LoraModule, a: Float[np.ndarray, "rows in"], b: Float[np.ndarray, "out columns"]) -> None:
        """Write a module's A and B. Values become the arrays' dtype."""
        module, rank = lora.module, lora.rank
        layer, experts = self._places(module)
        if module.all_experts:
            num = self._target.experts
            a_of = a.reshape(num, rank, -1)
            b_of = np.moveaxis(b.reshape(-1, rank, num), 2, 0)  # the experts' columns alternate
        else:
            a_of, b_of = a[None], b[None]
        places = range(*experts.indices(self._target.experts))
        for expert, one_a, one_b in zip(places, a_of, b_of, strict=True):
            for part in module.parts:
                if self._target.leaf == _EMBED:
                    np.copyto(self.a[layer, expert, part, :, :rank], one_a.T, casting="unsafe")
                else:
                    np.copyto(self.a[layer, expert, part, :rank], one_a, casting="unsafe")
                self.ranks[layer, expert, part], self.scales[layer, expert, part] = rank, lora.scale
            rows = self.b[layer, expert, :rank].T  # [out, rank], a view
            if self._target.leaf == _EMBED:
                np.copyto(rows, one_b, casting="unsafe")
            else:
                view = rows.reshape((*module.block[:-1], rank))
                assert np.shares_memory(view, self.b)
                module.rule.store(one_b, view)

    def _places(self, module: Module) -> tuple[int, slice]:
        """Index of the layer, and the experts."""
        layer = self._target.index(module.layer or 0)
        return layer, slice(None) if module.expert is None else slice(module.expert, module.expert + 1)


def in_layout(
    matrices: Mapping[str, AdapterMatrix], spec: DecoderSpec, layout: WeightLayout
) -> dict[str, AdapterMatrix]:
    """The matrices of a model whose q, k, v or gate, up are separate leaves. Without them: the same matrices."""
    found = dict(matrices)
    if layout.split_qkv and "qkv" in found:
        qkv = found.pop("qkv")
        b = qkv.b.reshape(*qkv.b.shape[:3], spec.num_kv_heads, spec.qkv_heads, spec.head_dim)
        found |= _split(qkv, {"q": b[..., :-2, :], "k": b[..., -2, :], "v": b[..., -1, :]})
    if layout.split_gate_up and "gate_up" in found:
        both = found.pop("gate_up")
        b = both.b.reshape(*both.b.shape[:3], 2, -1)
        found |= _split(both, {"gate": b[..., 0, :], "up": b[..., 1, :]})
    return found


def _split(fused: AdapterMatrix, outputs: Mapping[str, np.ndarray]) -> dict[str, AdapterMatrix]:
    """One matrix for each part that the adapter changes. outputs: the parts' B, [layers, experts, rank, ...]."""
    found = {}
    for part, (leaf, b) in enumerate(outputs.items()):
        ranks = fused.ranks[..., part : part + 1]
        rank = int(ranks.max())
        if rank:
            a = fused.a[:, :, part : part + 1, :rank]
            b = b[:, :, :rank].reshape(*b.shape[:2], rank, -1)
            found[leaf] = AdapterMatrix(
                np.ascontiguousarray(a), np.ascontiguousarray(b), np.ascontiguousarray(ranks),
                np.ascontiguousarray(fused.scales[..., part : part + 1]),
            )  # fmt: skip
    return found
