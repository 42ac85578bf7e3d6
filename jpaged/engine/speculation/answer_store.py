"""Tokens of recent answers, to find continuations that other requests had. Its memory is bounded."""

import collections

import numpy as np

from jpaged.engine.speculation.token_index import TokenIndex

NO_OWNER = -1
MOST_POSITION = 2**31 - 2**24  # positions are int32


class AnswerStore:
    """A ring of the tokens of recent answers. The oldest answers are overwritten first.

    An answer that is read again is written again when the reading request ends, because its own answer repeats it. So
    the oldest answers are also the ones that are not used.

    Every answer has an owner, its prefix root. `continuations` returns only positions of one owner.
    """

    def __init__(self, sizes: list[int], max_answers: int, max_tokens: int):
        """Make an empty store.

        sizes:       the indexed n-gram lengths, ascending.
        max_answers: answers that it holds at most. 0: it stores nothing.
        max_tokens:  tokens of the ring, a power of two. One token costs 8 + 6 * len(sizes) bytes.
        """
        self._sizes, self._max_answers, self._max_tokens = sizes, max_answers, max_tokens
        self.clear()

    def clear(self) -> None:
        """Drop all answers."""
        self._index = TokenIndex(self._sizes, self._max_tokens, self._max_tokens // 2)
        if self._max_answers:
            self._index.touch_heads()
        self._owner_of = np.zeros(self._max_tokens if self._max_answers else 1, np.int32)  # of each slot of the ring
        self._owner_view = self._owner_of.data
        self._answers: collections.deque[tuple[int, bytes]] = collections.deque()  # first position, root
        self._owners: dict[bytes, int] = {}
        self._counts: collections.Counter[bytes] = collections.Counter()  # answers of each root
        self._next_owner = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, if every page of them is in use."""
        return self._index.num_bytes + self._owner_of.nbytes

    @property
    def num_answers(self) -> int:
        """Answers that are stored."""
        return len(self._answers)

    def owner(self, root: bytes) -> int:
        """Number of a prefix root, or NO_OWNER if it has no answers."""
        return self._owners.get(root, NO_OWNER)

    def add(self, root: bytes, tokens: list[int]) -> None:
        """Store an answer. Of an answer longer than half the ring only the end is stored.

        Takes 0.2 ms for 500 tokens, 1.3 ms for 4,000 (a Xeon of 2 shared cores), when the ring's pages exist.
        """
        if not self._max_answers:
            return
        if self._index.end > MOST_POSITION:
            self.clear()
        tokens = tokens[-(self._max_tokens // 2) :]
        if root not in self._owners:
            self._owners[root] = self._next_owner
            self._next_owner += 1
        owner, index = self._owners[root], self._index
        index.start_sequence()
        first = index.end
        self._owner_of[np.arange(first, first + len(tokens)) & (self._max_tokens - 1)] = owner
        index.append(tokens, owner)
        self._answers.append((first, root))
        self._counts[root] += 1
        while len(self._answers) > self._max_answers or self._answers[0][0] < index.oldest:
            self._drop_oldest()

    def keys(self, tail: list[int], owner: int) -> list[int]:
        """Hashes of the last tokens of a request (newest first), for `continuations`."""
        return self._index.keys_of(tail, owner)

    def continuations(
        self, size: int, key: int, tail: list[int], owner: int, limit: int, count: int
    ) -> list[tuple[int, list[int]]]:
        """Match length and up to `count` following tokens of earlier occurrences, newest first.

        size: index of the n-gram length. key: its hash. limit: occurrences to compare.
        """
        index, view, mask, least = self._index, self._owner_view, self._max_tokens - 1, self._sizes[size]
        return [
            (length, index.following(position, count))
            for position in index.positions(size, key, limit)
            if view[position & mask] == owner and (length := index.match(position, tail)) >= least
        ]

    def _drop_oldest(self) -> None:
        """Drop the oldest answer, and its owner with the owner's last answer."""
        _, root = self._answers.popleft()
        self._counts[root] -= 1
        if not self._counts[root]:
            del self._counts[root], self._owners[root]
        if self._answers:
            self._index.drop_before(self._answers[0][0])
