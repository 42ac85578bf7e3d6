"""KV groups: the layers of a KV group are of one kind, and a request uses the fewest pages."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jpaged.kv_groups import MAX_GROUPS, KVGroups, KVPlace, group_layers, max_blocks, window_blocks


def every(interval: int, count: int, window: int) -> list[int | None]:
    """Windows of `count` layers. Every interval-th layer has no window."""
    return [None if (layer + 1) % interval == 0 else window for layer in range(count)]


@pytest.mark.parametrize(
    ("windows", "max_model_len", "size", "groups"),
    [
        ([None] * 32, 4096, 32, [None]),                                   # Llama
        ([4096] * 32, 32768, 32, [4096]),                                  # Mistral 7B v0.1
        ([4096] * 32, 4096, 32, [None]),                                   # a window of max_model_len hides nothing
        (every(6, 26, 512), 32768, 4, [512] * 6 + [None]),                 # Gemma 3 1B: 22 + 4, two pages unused
        (every(6, 34, 1024), 131072, 5, [1024] * 6 + [None]),              # Gemma 3 4B: 29 + 5
        (every(6, 48, 1024), 131072, 8, [1024] * 5 + [None]),              # Gemma 3 12B
        (every(6, 62, 1024), 131072, 10, [1024] * 6 + [None]),             # Gemma 3 27B: 52 + 10
        (every(2, 42, 4096), 8192, 21, [4096, None]),                      # Gemma 2 9B
        (every(2, 24, 128), 131072, 12, [128, None]),                      # gpt-oss 20B
        (every(4, 32, 4096), 8192, 8, [4096] * 3 + [None]),                # Command R7B
        ([None] + [64] * 31, 4096, 5, [None] + [64] * 7),                  # MAX_GROUPS KV groups
    ],
)  # fmt: skip
def test_kv_groups_of_models(windows, max_model_len, size, groups):
    found = group_layers(windows, max_model_len)
    assert found.num_arrays == size
    assert list(found.windows) == groups


@given(
    windows=st.lists(st.sampled_from([None, 3, 100, 1000, 5000]), min_size=1, max_size=70),
    max_model_len=st.sampled_from([2, 64, 1000, 40_000]),
)
def test_every_layer_has_its_own_pages_in_a_kv_group_of_its_kind(windows, max_model_len):
    groups = group_layers(windows, max_model_len)
    places = [place for (place,) in groups.places]
    assert len(set(places)) == len(places) == len(windows) == groups.num_layers
    for window, place in zip(windows, places, strict=True):
        hides_something = window is not None and window < max_model_len
        assert groups.windows[place.kv_group] == (window if hides_something else None)
        assert 0 <= place.page_array < groups.num_arrays
    assert len(groups.windows) <= MAX_GROUPS
    if len(set(groups.windows)) == 1:
        assert len(groups.windows) == 1
        assert groups.num_arrays == len(windows)
    # no other size with at most MAX_GROUPS KV groups takes fewer pages: try all of them
    kinds = [groups.windows[place.kv_group] for place in places]

    def cost(size):
        counts = {kind: -(-kinds.count(kind) // size) for kind in set(kinds)}
        token_places = size * sum(count * (kind or max_model_len) for kind, count in counts.items())
        return token_places, sum(counts.values())

    best = min(cost(n) for n in range(1, len(windows) + 1) if cost(n)[1] <= MAX_GROUPS)
    assert cost(groups.num_arrays) == best


def test_layers_with_kv_and_with_state():
    """One layer has KV alone, one has state alone, one has both, and one has neither."""
    groups = group_layers((None,) * 4, 4096, attends=(True, False, True, False), recurrent=(False, True, True, False))
    pages, state = [KVPlace(0, i) for i in range(2)], [KVPlace(1, 2 + i) for i in range(2)]
    assert groups == KVGroups((None,), ((pages[0],), (state[0],), (pages[1], state[1]), ()), num_arrays=2)
    assert groups.num_layers == 2


@given(window=st.integers(1, 40), chunk=st.integers(1, 30), size=st.sampled_from([1, 2, 4, 8]))
def test_window_blocks_is_the_maximum_over_all_offsets(window, chunk, size):
    def held(start: int) -> int:
        """Blocks of a chunk that starts at a position far from 0, and of the window of its first token."""
        return len({position // size for position in range(start - window + 1, start + chunk)})

    assert window_blocks(window, chunk, size) == max(held(start) for start in range(64, 64 + size))


def test_max_blocks_of_several_groups():
    assert max_blocks((None,), 100, chunk=16, block_size=16) == 7
    assert max_blocks((None, 20, 20), 30, chunk=16, block_size=16) == 6  # shorter than the window and a chunk
    assert max_blocks((None, 20, 20), 1000, chunk=16, block_size=16) == 63 + 2 * 4
