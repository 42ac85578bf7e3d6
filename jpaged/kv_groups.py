"""KV groups: layers that share block tables over one pool of pages, and the blocks that a request needs.

1. Layers are of one *kind* if they keep KV of the same positions: all with the same sliding window, or all without one.
2. The layers of a kind are cut into KV groups of at most `num_arrays` layers. Layer j of every KV group stores its KV
   in page array j. A block is one page in each array, so any KV group can use any block, and one pool serves all kinds.
3. A request has one block table per KV group. A KV group with a window frees the blocks before the window.

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


@dataclasses.dataclass(frozen=True, slots=True)
class KVPlace:
    """KV group and page array of a layer. Of recurrent state: the number of KV groups, and an index after those."""

    kv_group: int    # index
    page_array: int  # index


@dataclasses.dataclass(frozen=True, slots=True)
class KVGroups:
    """KV groups of a model."""

    windows: tuple[int | None, ...]  # by KV group: number of keys that a query sees, itself included; None = all
    places: tuple[tuple[KVPlace, ...], ...]  # by layer: one for each of its mixers (`DecoderSpec.mixers`)
    num_arrays: int                  # page arrays; the last KV group of a kind may have fewer layers

    @property
    def num_layers(self) -> int:
        """Number of layers with KV."""
        return sum(place.page_array < self.num_arrays for places in self.places for place in places)

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
    windows: Sequence[int | None], max_model_len: int, attends: Sequence[bool] = (), recurrent: Sequence[bool] = ()
) -> KVGroups:
    """Cut layers into KV groups. windows: sliding window of each layer; None: no window.

    attends: True for each layer with attention; (): all layers. recurrent: True for each layer with a state; (): none.

    A KV group has at most `size` layers. The chosen size gives a request of max_model_len tokens the fewest pages,
    unused pages included; on a tie, the largest size wins. Sizes that give more than MAX_GROUPS KV groups are excluded.
    Usually the result is the number of layers of the rarest kind, as in vLLM. But if one layer of 32 has no window,
    vLLM's rule gives 32 KV groups.
    """
    # A window of max_model_len or more hides nothing. To support layers with different page shapes, add the shape to
    # the keys of `layers`.
    kinds = [None if window is None or window >= max_model_len else window for window in windows]
    with_kv = [i for i in range(len(kinds)) if not attends or attends[i]]
    layers = {kind: [i for i in with_kv if kinds[i] == kind] for kind in dict.fromkeys(kinds[i] for i in with_kv)}

    def num_groups(size: int, kind: int | None) -> int:
        return -(-len(layers[kind]) // size)

    def num_token_slots(size: int) -> int:
        return size * sum(num_groups(size, kind) * (max_model_len if kind is None else kind) for kind in layers)

    most = max(MAX_GROUPS, len(layers))
    sizes = range(max(map(len, layers.values())), 0, -1)
    allowed = [size for size in sizes if sum(num_groups(size, kind) for kind in layers) <= most]
    size = min(allowed, key=num_token_slots)  # on a tie the first, which is the largest
    group_windows: list[int | None] = []
    places: list[tuple[KVPlace, ...]] = [() for _ in kinds]
    for kind, members in layers.items():
        for index, layer in enumerate(members):
            if index % size == 0:
                group_windows.append(kind)
            places[layer] = (KVPlace(len(group_windows) - 1, index % size),)
    for index, layer in enumerate(layer for layer, has_state in enumerate(recurrent) if has_state):
        places[layer] += (KVPlace(len(group_windows), size + index),)
    return KVGroups(tuple(group_windows), tuple(places), size)


def window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Largest number of blocks that a chunk and the window before its first token span, for any offset in a block."""
    return -(-(window - 1 + chunk - 1) // block_size) + 1


def max_blocks(windows: Sequence[int | None], num_tokens: int, *, chunk: int, block_size: int) -> int:
    """Largest number of blocks that a request of `num_tokens` tokens needs at a time, in all KV groups together.

    windows: window of each KV group; None: no window. chunk: maximum tokens of the request in one step.
    """
    whole = -(-num_tokens // block_size)
    return sum(whole if w is None else min(whole, window_blocks(w, chunk, block_size)) for w in windows)
