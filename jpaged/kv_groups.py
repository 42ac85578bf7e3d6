"""KV groups: layers that share block tables over one pool of pages, and the blocks that a request needs.

1. Layers are of one *kind* if they keep KV of the same positions: all with the same sliding window, or all without one.
2. The layers of a kind are cut into KV groups of at most `num_arrays` layers. Layer j of every KV group stores its KV
   in page array j. A block is one page in each array, so any KV group can use any block, and one pool serves all kinds.
3. A request has one block table per KV group. A KV group with a window frees the blocks before the window.

Layers may have KV of unlike sizes (`DecoderSpec.page_parts`). Then a page has the size of the largest layer's KV. As
many smaller layers of one KV group as fit share a page: they see the pool as a larger number of smaller pages.

A layer without keys and values of its own has the place of the layer that it reads (`DecoderSpec.kv_sources`).

A layer has one place for each of its mixers, KV first. A recurrent layer without attention keeps no KV, so it is in no
KV group. Its state has a place after the page arrays, one for each such layer. All of them share a place after the KV
groups. A layer with attention and a state has two places.

If all layers are of one kind, there is one KV group with one page array per layer. The design is that of vLLM's hybrid
KV cache manager.
"""

import dataclasses
from collections.abc import Sequence

# Largest number of block tables of a request. The host's work for each new block grows with their number.
MAX_GROUPS = 8
# The same if layers share pages. With few KV groups, pages of the rarer kind would be mostly unused: with at most 8, a
# request of 131,072 tokens of Gemma 4 31B takes 18.6 GiB, and with 16 it takes 12.4 GiB. Its keys and values take 10.8.
MAX_GROUPS_OF_PARTS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class KVPlace:
    """KV group and page array of a layer. Of recurrent state: the number of KV groups, and an index after those."""

    kv_group: int    # index
    page_array: int  # index
    part: int | None = None  # index in the page, if several layers share it; None: the page is the layer's alone


@dataclasses.dataclass(frozen=True, slots=True)
class KVGroups:
    """KV groups of a model."""

    windows: tuple[int | None, ...]  # by KV group: number of keys that a query sees, itself included; None = all
    places: tuple[tuple[KVPlace, ...], ...]  # by layer: one for each of its mixers (`DecoderSpec.mixers`)
    num_arrays: int                  # page arrays; the last KV group of a kind may have fewer layers
    parts: tuple[int, ...] = ()      # by KV group: number of layers that share a page; () = 1

    @property
    def pages_per_token(self) -> float:
        """Number of page arrays that layers without windows would need, if each had pages of its own."""
        alone = {place for places in self.places for place in places if place.page_array < self.num_arrays}
        return sum(1 if place.part is None else 1 / self.parts[place.kv_group] for place in alone)

    def of_layers(self, layers: range) -> "KVGroups":
        """KV groups of a pipeline stage. It has the same block tables, and page arrays for its own layers only.

        Models with recurrent layers have no stages.
        """
        counts = [0] * len(self.windows)
        places = []
        for layer in layers:
            (place,) = self.places[layer]
            places.append((KVPlace(place.kv_group, counts[place.kv_group]),))
            counts[place.kv_group] += 1
        return KVGroups(self.windows, tuple(places), max(counts))

    def __str__(self) -> str:
        names = ["full attention" if window is None else f"a window of {window:,}" for window in self.windows]
        parts = [f"{names.count(name)} with {name}" for name in dict.fromkeys(names)]
        return f"groups of {self.num_arrays} layer{'s'[: self.num_arrays - 1]}: {', '.join(parts)}"


def group_layers(
    windows: Sequence[int | None], max_model_len: int, attends: Sequence[bool] = (), recurrent: Sequence[bool] = (),
    parts: Sequence[int] = (), sources: Sequence[int | None] = (),
) -> KVGroups:  # fmt: skip
    """Cut layers into KV groups. windows: sliding window of each layer; None: no window.

    attends: True for each layer with attention; (): all layers. recurrent: True for each layer with a state; (): none.
    parts: number of layers of its size that a page holds, for each layer; (): 1.
    sources: earlier layer that each layer reads; None: it has KV of its own. (): all layers have.

    A KV group has at most `size` layers of one page each. The chosen size gives a request of max_model_len tokens the
    fewest pages, unused pages included; on a tie, the largest size wins. Sizes that give too many KV groups are
    excluded. Usually the result is the number of layers of the rarest kind, as in vLLM. But if one layer of 32 has no
    window, vLLM's rule gives 32 KV groups.
    """
    # A window of max_model_len or more hides nothing.
    kinds = [
        (None if window is None or window >= max_model_len else window, parts[i] if parts else 1)
        for i, window in enumerate(windows)
    ]
    owners = [i if source is None else source for i, source in enumerate(sources or [None] * len(kinds))]
    with_kv = [i for i, owner in enumerate(owners) if i == owner and (not attends or attends[i])]
    layers = {kind: [i for i in with_kv if kinds[i] == kind] for kind in dict.fromkeys(kinds[i] for i in with_kv)}

    def num_groups(size: int, kind: tuple[int | None, int]) -> int:
        return -(-len(layers[kind]) // (size * kind[1]))

    def num_token_slots(size: int) -> int:
        return size * sum(num_groups(size, kind) * (max_model_len if kind[0] is None else kind[0]) for kind in layers)

    most = max(MAX_GROUPS_OF_PARTS if any(count > 1 for _, count in layers) else MAX_GROUPS, len(layers))
    sizes = range(max(-(-len(members) // kind[1]) for kind, members in layers.items()), 0, -1)
    allowed = [size for size in sizes if sum(num_groups(size, kind) for kind in layers) <= most]
    size = min(allowed, key=num_token_slots)  # on a tie the first, which is the largest
    groups: list[tuple[int | None, int]] = []
    places: list[tuple[KVPlace, ...]] = [() for _ in kinds]
    for kind, members in layers.items():
        for index, layer in enumerate(members):
            index %= size * kind[1]
            if index == 0:
                groups.append(kind)
            places[layer] = (KVPlace(len(groups) - 1, index % size, None if kind[1] == 1 else index // size),)
    places = [places[owner] for owner in owners]
    for index, layer in enumerate(layer for layer, has_state in enumerate(recurrent) if has_state):
        places[layer] += (KVPlace(len(groups), size + index),)
    return KVGroups(
        tuple(window for window, _ in groups), tuple(places), size,
        tuple(count for _, count in groups) if any(count > 1 for _, count in groups) else (),
    )  # fmt: skip


def window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Largest number of blocks that a chunk and the window before its first token span, for any offset in a block."""
    return -(-(window - 1 + chunk - 1) // block_size) + 1


def max_blocks(windows: Sequence[int | None], num_tokens: int, *, chunk: int, block_size: int) -> int:
    """Largest number of blocks that a request of `num_tokens` tokens needs at a time, in all KV groups together.

    windows: window of each KV group; None: no window. chunk: maximum tokens of the request in one step.
    """
    whole = -(-num_tokens // block_size)
    return sum(whole if w is None else min(whole, window_blocks(w, chunk, block_size)) for w in windows)
