"""The host tier with snapshots of recurrent state: bytes, and which entry is dropped."""

from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import given, settings

from jpaged.engine.kv_cache.host_tier import HostSizes, HostTier
from jpaged.engine.step_plan import BlockMove

SIZES = HostSizes(block_bytes=16, block_tokens=4, snapshot_bytes=64)  # a snapshot takes as much as 4 blocks, 16 tokens


def stored(tier, names):
    """The names that are stored, blocks and snapshots."""
    return [name for name in names if tier.has(name) or tier.has_snapshot(name)]


def test_a_snapshot_that_saves_few_tokens_is_dropped_before_blocks():
    tier = HostTier(10, SIZES)
    assert tier.put_snapshot("saves 32", 32) == 0
    assert tier.put_snapshot("saves 4", 4) == 1
    blocks = [f"block {i}" for i in range(6)]
    assert None not in map(tier.put, blocks)  # 2 are free, and the snapshot that saves 4 tokens has the bytes of 4
    assert stored(tier, ["saves 32", "saves 4", *blocks]) == ["saves 32", *blocks]
    assert (tier.num_used, tier.num_snapshots, tier.num_free) == (6, 1, 0)
    assert tier.take_drops() == [(BlockMove.DROP_STATE, 1, 1)]


def test_a_snapshot_takes_the_place_of_the_oldest_blocks_only_if_it_is_worth_more():
    tier = HostTier(8, SIZES)
    blocks = [f"block {i}" for i in range(8)]
    slots = [tier.put(name) for name in blocks]
    assert tier.put_snapshot("saves 15", 15) is None  # fewer tokens than the 4 blocks that it takes the place of
    assert stored(tier, blocks) == blocks
    assert tier.put_snapshot("saves 16", 16) == 0
    assert stored(tier, [*blocks, "saves 16"]) == [*blocks[4:], "saves 16"]
    assert tier.take_drops() == [(BlockMove.DROP, slot, slot) for slot in sorted(slots[:4])]
    assert tier.take_drops() == []


def test_a_snapshot_grows_old():
    """It saves 64 tokens, 4 times as many for each byte as a block. New blocks are worth more than it in the end."""
    tier = HostTier(8, SIZES)
    tier.put_snapshot("snapshot", 64)
    number = 0
    while tier.has_snapshot("snapshot"):
        assert tier.put(f"block {number}") is not None
        number += 1
    assert 4 * 4 < number <= 8 * 4
    for again in (0, 1):  # one that is stored again is young again
        tier.put_snapshot("snapshot", 64)
        for _ in range(4 * 4):
            tier.put(f"block {number}")
            number += 1
        assert tier.has_snapshot("snapshot"), again


def test_a_tier_full_of_snapshots_stores_blocks():
    tier = HostTier(8, SIZES)
    assert [tier.put_snapshot(name, 64) for name in ("first", "second")] == [0, 1]
    assert None not in [tier.put(f"block {i}") for i in range(4)]
    assert stored(tier, ["first", "second"]) == ["second"]


def test_a_snapshot_that_does_not_fit_is_not_stored():
    tier = HostTier(3, SIZES)
    assert tier.put("block") is not None
    assert tier.put_snapshot("snapshot", 1000) is None
    assert tier.has("block")


class Model:
    """The rule of the tier in the plainest form: all entries in a list, and exact fractions."""

    def __init__(self, num_slots, sizes):
        self.sizes, self.free, self.worth = sizes, num_slots * sizes.block_bytes, Fraction(0)
        self.entries: list[tuple[str, int, Fraction]] = []  # (kind, name, worth), in the order of storing

    def put(self, kind, name, tokens):
        size = self.sizes.block_bytes if kind == "block" else self.sizes.snapshot_bytes
        if (kind, name) in [entry[:2] for entry in self.entries]:
            self.remove(kind, name)
        worth = self.worth + Fraction(tokens, size)
        if size > sum(self.size(entry[0]) for entry in self.entries) + self.free:
            return
        while self.free < size:
            victim = min(self.entries, key=lambda entry: (entry[2], entry[0]), default=None)  # blocks before snapshots
            if victim is None or (kind == "snapshot" and victim[2] > worth):
                return
            self.worth = max(self.worth, victim[2])
            self.remove(*victim[:2])
        self.entries.append((kind, name, self.worth + Fraction(tokens, size)))
        self.free -= size

    def size(self, kind):
        return self.sizes.block_bytes if kind == "block" else self.sizes.snapshot_bytes

    def remove(self, kind, name):
        self.entries = [entry for entry in self.entries if entry[:2] != (kind, name)]
        self.free += self.size(kind)


ENTRIES = st.tuples(st.sampled_from(["block", "block", "snapshot", "take", "forget"]), st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(
    num_slots=st.integers(1, 12), sizes=st.sampled_from([(4, 4, 8), (8, 4, 4), (2, 4, 32)]),
    entries=st.lists(ENTRIES, max_size=80),
)  # fmt: skip
def test_the_entry_of_the_least_worth_is_dropped(num_slots, sizes, entries):
    """All sizes are powers of two, so the tier's floats are exact."""
    sizes = HostSizes(*sizes)
    tier, model = HostTier(num_slots, sizes), Model(num_slots, sizes)
    memory: set[tuple[BlockMove, int]] = set()  # host slots that have memory
    for kind, name in entries:
        if kind == "block":
            slot = tier.put(name)
            memory |= {(BlockMove.DROP, slot)} if slot is not None else set()
            model.put(kind, name, sizes.block_tokens)
        elif kind == "snapshot":
            slot = tier.put_snapshot(name, 4 << name)
            memory |= {(BlockMove.DROP_STATE, slot)} if slot is not None else set()
            model.put(kind, name, 4 << name)
        elif kind == "take":
            if tier.has(name):
                tier.free(tier.take(name))
                model.remove("block", name)
            if tier.has_snapshot(name):
                tier.free_snapshot(tier.take_snapshot(name).slot)
                model.remove("snapshot", name)
        elif name == 0:
            tier.forget_all()
            model = Model(num_slots, sizes)
        memory -= {(move, slot) for move, slot, _ in tier.take_drops()}
        tier.check()
        found = {("block", n) for n in range(10) if tier.has(n)}
        found |= {("snapshot", n) for n in range(10) if tier.has_snapshot(n)}
        assert found == {entry[:2] for entry in model.entries}
        blocks, snapshots = (sum(move is each for move, _ in memory) for each in (BlockMove.DROP, BlockMove.DROP_STATE))
        assert (blocks, snapshots) == (tier.num_used, tier.num_snapshots)
