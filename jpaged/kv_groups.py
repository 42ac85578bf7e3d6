"""Layers in groups that share one pool of pages: who is in which group, and how many blocks a request needs of it.

1. Layers are of one *kind* when they keep the KV of the same positions: those with the same sliding window, or with
   none.
2. The layers of a kind are cut into groups of at most `num_arrays`. The j-th layer of every group has its KV in page
   array j. So a block is one page in each of these arrays, any group can use any block, and one pool serves all kinds.
3. Each group has its own block table a request. A group with a window gives back what lies behind it.

Layers of one kind only are one group with an array a layer. The design is that of vLLM's hybrid KV cache manager.
"""

import dataclasses
from collections.abc import Sequence

# Block tables a request. Each costs the host what one table costs, at every block that a request begins.
MAX_GROUPS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class KVPlace:
    """Where a layer's KV lies."""

    group: int  # whose block tables lead to it
    array: int  # the page array that it lies in


@dataclasses.dataclass(frozen=True, slots=True)
class KVGroups:
    """All layers of a model in their groups."""

    windows: tuple[int | None, ...]  # one a group: how many keys a query sees, itself included; None = all before it
    places: tuple[KVPlace, ...]      # one a layer
    num_arrays: int                  # page arrays: layers of a group, the last group of a kind may have fewer

    def __str__(self) -> str:
        names = ["full attention" if window is None else f"a window of {window:,}" for window in self.windows]
        parts = [f"{names.count(name)} with {name}" for name in dict.fromkeys(names)]
        return f"groups of {self.num_arrays} layer{'s'[: self.num_arrays - 1]}: {', '.join(parts)}"


def group_layers(windows: Sequence[int | None], max_model_len: int) -> KVGroups:
    """The groups of a model's layers, given the sliding window of each.

    The size of a group is the one with which a request of max_model_len tokens takes the fewest page places, unused
    ones included, among sizes that give at most MAX_GROUPS groups; of equals the largest. Mostly that is the count of
    the rarest kind, which vLLM takes; but where one layer of 32 has no window, that would be 32 groups.
    """
    # A window that hides nothing is none. Layers whose pages have another shape would be another kind: its place is
    # here, in what `layers` is keyed by.
    kinds = [None if window is None or window >= max_model_len else window for window in windows]
    layers = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)}

    def num_groups(size: int, kind: int | None) -> int:
        return -(-len(layers[kind]) // size)

    def token_places(size: int) -> int:
        return size * sum(num_groups(size, kind) * (max_model_len if kind is None else kind) for kind in layers)

    most = max(MAX_GROUPS, len(layers))
    sizes = range(max(map(len, layers.values())), 0, -1)
    allowed = [size for size in sizes if sum(num_groups(size, kind) for kind in layers) <= most]
    size = min(allowed, key=token_places)  # the first of equals, which is the largest
    groups: list[int | None] = []
    places: dict[int, KVPlace] = {}
    for kind, members in layers.items():
        for index, layer in enumerate(members):
            if index % size == 0:
                groups.append(kind)
            places[layer] = KVPlace(len(groups) - 1, index % size)
    return KVGroups(tuple(groups), tuple(places[layer] for layer in range(len(kinds))), size)


def window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Most blocks that hold a chunk of so many tokens and what its first one sees, wherever in a block they begin."""
    return -(-(window - 1 + chunk - 1) // block_size) + 1


def most_blocks(windows: Sequence[int | None], num_tokens: int, *, chunk: int, block_size: int) -> int:
    """Most blocks of all groups that a request of so many tokens holds at a time.

    chunk: most tokens of it that one step computes.
    """
    whole = -(-num_tokens // block_size)
    return sum(whole if w is None else min(whole, window_blocks(w, chunk, block_size)) for w in windows)
