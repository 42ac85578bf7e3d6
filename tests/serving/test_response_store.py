"""The store of responses: its limits, and the responses that it drops when it is full."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.errors import CapacityError
from jpaged.serving.responses.store import ResponseStore, StoredResponse
from jpaged.serving.web.error_responses import APIError


def response(size: int) -> StoredResponse:
    return StoredResponse(b"r" * size, b"", "completed")


def stored(store: ResponseStore) -> dict[bytes, dict[str, StoredResponse]]:
    """Return all responses by owner and name, without using them."""
    return {owner: dict(shelf.responses) for owner, shelf in store._shelves.items()}


def kept(store: ResponseStore, owner: bytes, *names: str) -> list[str]:
    """Return which responses are there."""
    return [name for name in names if name in stored(store).get(owner, {})]


def test_the_least_recently_used_goes_first():
    store = ResponseStore(max_bytes=100)
    for name in "abc":
        store.put(b"", name, response(30))
    store.get(b"", "a")
    store.put(b"", "d", response(30))
    assert kept(store, b"", *"abcd") == ["a", "c", "d"]
    store.put(b"", "e", response(101))
    assert kept(store, b"", *"abcde") == ["a", "c", "d"]


def test_a_key_does_not_evict_the_responses_of_another():
    store = ResponseStore(max_bytes=100)
    store.put(b"small", "mine", response(30))
    for i in range(50):
        store.put(b"large", str(i), response(30))
    assert store.get(b"small", "mine").size == 30
    with pytest.raises(APIError, match="no such response"):
        store.get(b"large", "mine")


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.sampled_from([b"x", b"y"]), st.integers(0, 8),
                          st.integers(0, 60))))  # fmt: skip
def test_the_bounds_hold(steps):
    store = ResponseStore(max_bytes=100, max_responses=4)

    async def run() -> None:
        for number, (what, owner, name, size) in enumerate(steps):
            if what == "put":
                store.put(owner, f"{name}-{number}", response(size))
            else:
                for known in [*stored(store).get(owner, {})][:1]:
                    await store.delete(owner, known) if what == "delete" else store.get(owner, known)
            held = [one for shelf in stored(store).values() for one in shelf.values()]
            assert store.num_responses == len(held) <= 4
            assert store.num_bytes == sum(one.size for one in held) <= 100

    asyncio.run(run())


def test_running_responses_are_bounded_and_end_with_the_server():
    async def run() -> None:
        store = ResponseStore(max_bytes=100, max_running=2)
        never = asyncio.Event()
        for name in "ab":
            store.start(b"", name, response(20), never.wait())
        with pytest.raises(CapacityError, match="2 responses run"):
            store.start(b"", "c", response(1), never.wait())
        for i in range(10):
            store.put(b"", str(i), response(40))
        assert store.get(b"", "a").task is not None
        await asyncio.sleep(0)
        await store.close()
        large = ResponseStore(max_bytes=100)
        with pytest.raises(CapacityError, match="background"):
            large.start(b"", "d", response(51), never.wait())

    asyncio.run(run())
