"""Finds earlier occurrences of the last tokens of a sequence, in constant time per token.

The structure is that of LZ77 compressors: hash chains over a ring of tokens. For each indexed n-gram length there is
an array of *heads* (hash -> last position that follows such an n-gram) and an array of *previous* positions (position
-> the position before it with the same hash). A lookup walks a chain from the newest position on and compares tokens.

A token costs 4 bytes, and 8 bytes for each indexed length. The pages of these arrays are allocated when first used.
"""

from collections.abc import Sequence

import numpy as np

from jpaged.engine.request import Request

# Appending one token to three chains takes 7 us, appending 16,384 tokens at once 2 to 5 ms, and a lookup in one chain 1
# to 4 us (a Xeon of 2 shared cores, Python 3.11).
BULK = 24             # from this number of tokens on, numpy is faster than a loop
PIECE = 16_384        # most tokens that one call indexes: a longer prompt is indexed over several steps
MOST_BUCKETS = 1 << 16
SHIFT = 32            # a hash is a sum of products modulo 2**64. Its middle bits choose the bucket
SALT = 0xD1B54A32D192ED03
SEPARATOR = -1        # is between two sequences, and equals no token


def _powers(count: int) -> list[int]:
    return [pow(0x9E3779B97F4A7C15, exponent, 1 << 64) for exponent in range(1, count + 1)]


class TokenIndex:
    """Tokens in a ring, with hash chains over their n-grams. Positions grow for ever, and start at 1.

    A chain never returns a position whose tokens were overwritten.
    """

    def __init__(self, sizes: Sequence[int], capacity: int, max_buckets: int = MOST_BUCKETS):
        """Make an empty index.

        sizes:    the indexed n-gram lengths, ascending.
        capacity: tokens that the ring holds at least.
        """
        self.sizes = tuple(sizes)
        capacity = 1 << max(capacity - 1, 2 * sizes[-1], 63).bit_length()
        buckets = min(capacity, max_buckets)
        self._mask, self._bucket_mask = capacity - 1, buckets - 1
        self._bucket_dtype = np.uint16 if buckets <= 1 << 16 else np.uint32  # numpy sorts 16 bits by radix, 3 x faster
        self._powers = _powers(sizes[-1])
        self._tokens = np.zeros(capacity, np.int32)
        self._heads = [np.zeros(buckets, np.int32) for _ in sizes]  # 0: no position
        self._previous = [np.zeros(capacity, np.int32) for _ in sizes]
        # Reading an element of a memoryview takes a third of the time that reading one of an array takes.
        self._token_view = self._tokens.data
        self._chains = [(h.data, p.data) for h, p in zip(self._heads, self._previous, strict=True)]
        self.end = 1        # position of the next token
        self._start = 1     # position of the current sequence's first token
        self._oldest = 1    # earlier positions were dropped
        self._keys: list[int] = []
        self._keys_end = 0  # `_keys` belongs to this end

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self._tokens, *self._heads, *self._previous))

    def touch_heads(self) -> None:
        """Make the operating system allocate the heads' pages now. Otherwise the first tokens wait for them."""
        for heads in self._heads:
            heads.fill(0)

    @property
    def oldest(self) -> int:
        """First position whose token is kept."""
        return max(self._oldest, self.end - self._mask)

    def drop_before(self, position: int) -> None:
        """Forget the tokens before a position."""
        self._oldest = max(self._oldest, position)

    def start_sequence(self) -> None:
        """Begin a new sequence. No n-gram spans two sequences."""
        self._token_view[self.end & self._mask] = SEPARATOR
        self.end += 1
        self._start = self.end

    def append(self, tokens: Sequence[int], owner: int = 0) -> None:
        """Append tokens to the current sequence. owner: mixed into the hashes, the same for the whole sequence."""
        if len(tokens) >= BULK:
            most = min(PIECE, self._mask // 2)
            for first in range(0, len(tokens), most):
                self._append_many(np.asarray(tokens[first : first + most], np.int32), owner)
            return
        view, mask = self._token_view, self._mask
        for token in tokens:
            end = self.end
            slot = end & mask
            for (heads, previous), key in zip(self._chains, self.keys(owner), strict=False):  # short while it starts
                bucket = key & self._bucket_mask
                previous[slot] = heads[bucket]
                heads[bucket] = end
            view[slot] = token
            self.end = end + 1

    def keys(self, owner: int = 0) -> list[int]:
        """Hashes of the last tokens, one for each indexed length that the current sequence has."""
        if self._keys_end != self.end:
            self._keys, self._keys_end = self.keys_of(self.tail(self.sizes[-1]), owner), self.end
        return self._keys

    def keys_of(self, tail: Sequence[int], owner: int = 0) -> list[int]:
        """Hashes of tokens, newest first: one for each indexed length that they have."""
        keys, total, done = [], owner * SALT, 0
        powers, num_tokens = self._powers, len(tail)
        for size in self.sizes:
            if size > num_tokens:
                break
            for i in range(done, size):
                total += tail[i] * powers[i]
            done = size
            keys.append(total >> SHIFT)
        return keys

    def tail(self, count: int) -> list[int]:
        """Up to `count` last tokens of the current sequence, newest first."""
        tail = self._slice(max(self._start, self.oldest, self.end - count), self.end)
        tail.reverse()
        return tail

    def positions(self, index: int, key: int, limit: int) -> list[int]:
        """Up to `limit` positions that may follow the n-gram of length `sizes[index]` with this hash, newest first."""
        heads, previous = self._chains[index]
        position, oldest, found = heads[key & self._bucket_mask], self.oldest, []
        while position >= oldest and len(found) < limit:
            found.append(position)
            position = previous[position & self._mask]
        return found

    def match(self, position: int, tail: Sequence[int]) -> int:
        """Number of tokens before `position` that equal `tail` (newest first), from the newest on."""
        before = self._slice(max(self.oldest, position - len(tail)), position)
        before.reverse()
        count = 0
        for mine, other in zip(before, tail, strict=False):
            if mine != other:
                break
            count += 1
        return count

    def follows(self, position: int, gram: list[int]) -> bool:
        """Whether the tokens before `position` are `gram` (oldest first)."""
        first = position - len(gram)
        return first >= self.oldest and self._slice(first, position) == gram

    def following(self, position: int, count: int) -> list[int]:
        """Up to `count` tokens from `position` on, to the end of its sequence."""
        tokens = self._slice(position, min(position + count, self.end))
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _slice(self, first: int, last: int) -> list[int]:
        """Tokens of the positions first to last - 1."""
        start, stop = first & self._mask, last & self._mask
        if start <= stop or first >= last:
            return self._token_view[start:stop].tolist() if first < last else []
        return self._token_view[start:].tolist() + self._token_view[:stop].tolist()

    def _append_many(self, new: np.ndarray, owner: int) -> None:
        """Append as `append` does, with numpy. new: int32[N], less than the ring's capacity."""
        longest, count, end = self.sizes[-1], len(new), self.end
        known = self.tail(longest)[::-1]
        tokens = np.concatenate([np.zeros(longest - len(known), np.uint64), np.array(known, np.uint64),
                                 new.astype(np.uint64)])  # fmt: skip
        total = np.full(count, owner * SALT % 2**64, np.uint64)
        index = 0
        for i in range(longest):
            total += tokens[longest - 1 - i :][:count] * np.uint64(self._powers[i])
            if i + 1 == self.sizes[index]:
                first = max(0, i + 1 - len(known))  # earlier positions follow fewer tokens
                if first < count:
                    self._link(index, total[first:] >> np.uint64(SHIFT), end + first)
                index += 1
        self._tokens[np.arange(end, end + count) & self._mask] = new
        self.end = end + count

    def _link(self, index: int, keys: np.ndarray, first: int) -> None:
        """Put the positions from `first` on into their chains. keys: uint64[N]."""
        heads, previous = self._heads[index], self._previous[index]
        buckets = (keys & np.uint64(self._bucket_mask)).astype(self._bucket_dtype)
        order = np.argsort(buckets, kind="stable")
        buckets, positions = buckets[order], (order + first).astype(np.int32)
        same = buckets[1:] == buckets[:-1]
        before = heads[buckets]
        before[1:][same] = positions[:-1][same]
        previous[positions & self._mask] = before
        last = np.append(~same, True)
        heads[buckets[last]] = positions[last]


class RequestIndexes:
    """An index of the known tokens for each running request. It is brought up to date when it is read."""

    def __init__(self, sizes: Sequence[int]):
        """sizes: the indexed n-gram lengths, ascending."""
        self._sizes = sizes
        self._indexes: dict[Request, TokenIndex] = {}

    def __len__(self) -> int:
        return len(self._indexes)

    def read(self, request: Request) -> TokenIndex | None:
        """Index of all known tokens. None while a long prompt is not indexed: each call adds at most PIECE tokens."""
        index, tokens = self._indexes.get(request), request.token_ids
        num_new = -1 if index is None else len(tokens) - (index.end - 1)
        if index is None or num_new < 0:  # negative: the tokens were replaced
            index = self._indexes[request] = TokenIndex(self._sizes, request.max_total_tokens + 1)
            num_new = len(tokens)
        if num_new:
            first = index.end - 1
            index.append(tokens[first : first + PIECE])
        return index if num_new <= PIECE else None

    def drop(self, request: Request) -> None:
        """Forget a request."""
        self._indexes.pop(request, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._indexes.clear()
