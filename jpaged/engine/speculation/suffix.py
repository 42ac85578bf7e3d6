"""Drafts the most frequent continuation of the last tokens, in the request and in earlier answers.

The method is SuffixDecoding (arXiv 2411.04975), with its parameters. The paper counts continuations in suffix trees:
one per request, over its prompt and output, and one over the outputs of earlier requests. A tree of depth 24 has up to
24 nodes per token, which in Python take kilobytes. This drafter keeps the tokens and hash chains (`TokenIndex`), 28
bytes per token, and counts when it proposes: it reads the newest occurrences of the last 8, 4 and 2 tokens, compares
how far each one matches, and follows them. So the counts cover the newest MAX_OCCURRENCES occurrences of a length, and
a match has at least 2 tokens.
"""

from collections.abc import Sequence

from jpaged.engine.request import Request
from jpaged.engine.speculation.answer_store import NO_OWNER, AnswerStore
from jpaged.engine.speculation.ngram import repeated
from jpaged.engine.speculation.token_index import RequestIndexes
from jpaged.errors import RequestError

SIZES = (2, 4, 8)         # n-gram lengths that find occurrences. The match is then compared to its full length
MAX_OCCURRENCES = 8       # of each length, the newest
STORED_TOKENS = 1 << 22   # tokens of earlier answers: 24 MiB with three lengths, and 80 MiB when the ring is full

Continuation = tuple[int, list[int]]  # length of the match in tokens, and the tokens that followed it


class SuffixDrafter:
    """Proposes the path that most occurrences of the last tokens took.

    Earlier answers are read only by requests with the same `kv.prefix_root`: the same cache salt, adapter and weight
    version. An answer is stored with the end of its prompt, so that drafts start with the first token of an answer.
    """

    def __init__(
        self, *, max_tree_depth: int = 24, max_cached_requests: int = 10_000, max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1, stored_tokens: int = STORED_TOKENS,
    ):  # fmt: skip
        """Check the parameters, which are vLLM's. Raises RequestError.

        max_tree_depth:      most tokens of a match and its draft together, at least 3.
        max_cached_requests: most answers that are stored. 0: drafts come from the request's own tokens alone.
        max_spec_factor:     most tokens of a draft per token of its match.
        min_token_prob:      a draft ends before its estimated probability falls below this.
        stored_tokens:       most tokens of stored answers, a power of two.
        """
        for name, value, accepted, is_valid in (
            ("max_tree_depth", max_tree_depth, "must be at least 3", max_tree_depth >= 3),
            ("max_cached_requests", max_cached_requests, "must be at least 0", max_cached_requests >= 0),
            ("max_spec_factor", max_spec_factor, "must be above 0", max_spec_factor > 0),
            ("min_token_prob", min_token_prob, "must be from 0 to 1", 0 <= min_token_prob <= 1),
        ):
            if not is_valid:
                raise RequestError(f"suffix_decoding_{name}", value, accepted)
        self._depth, self._min_prob = max_tree_depth, min_token_prob
        self._limits = _draft_limits(max_tree_depth, max_spec_factor)
        self._sizes = [size for size in SIZES if size < max_tree_depth]
        self._indexes = RequestIndexes(self._sizes)
        self._answers = AnswerStore(self._sizes, max_cached_requests, stored_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored answers."""
        return self._answers.num_bytes

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """Propose the most frequent continuation of the longest matches.

        Takes 16 us without earlier answers and 43 us with them (medians; 45 and 100 us at the 95th percentile; over
        texts of jpaged, new tokens included, on a Xeon of 2 shared cores).
        """
        index = self._indexes.read(request)
        if index is None:
            return ()
        tail = index.tail(self._depth - 1)
        keys = index.keys()
        owner = self._answers.owner(request.kv.prefix_root)
        stored_keys = keys if owner == NO_OWNER else self._answers.keys(tail, owner)
        best: list[int] = []
        score = 0.0
        for i in range(len(keys) - 1, -1, -1):
            own = [
                (length, repeated(index.following(position, count), count))
                for position in index.positions(i, keys[i], MAX_OCCURRENCES)
                if (length := index.match(position, tail)) >= self._sizes[i]
            ]
            stored = []
            if owner != NO_OWNER:
                stored = self._answers.continuations(i, stored_keys[i], tail, owner, MAX_OCCURRENCES, count)
            for found in (own, stored):
                draft, its_score = self._best(found, count)
                if its_score > score:
                    best, score = draft, its_score
            if i and score >= min(count, self._limits[self._sizes[i] - 1]):
                break  # shorter matches cannot have a higher score
        return best

    def note_end(self, request: Request) -> None:
        """Drop the request's index, and store its answer."""
        self._indexes.drop(request)
        if request.num_output_tokens:
            first = max(0, request.prompt_len - self._depth)
            self._answers.add(request.kv.prefix_root, request.token_ids[first:])

    def forget(self) -> None:
        """Drop everything that was learnt from any request."""
        self._indexes.clear()
        self._answers.clear()

    def _best(self, found: list[Continuation], count: int) -> tuple[list[int], float]:
        """Draft with the highest score: of the occurrences with the longest match, or of all of them."""
        if not found:
            return [], 0.0
        lengths = [length for length, _ in found]
        longest, shortest = max(lengths), min(lengths)
        limit = min(count, self._limits[longest])
        draft, score = most_frequent([path for length, path in found if length == longest], limit, self._min_prob)
        if shortest < longest and score < (limit := min(count, self._limits[shortest])):
            other, its_score = most_frequent([path for _, path in found], limit, self._min_prob)
            if its_score > score:
                return other, its_score
        return draft, score


def most_frequent(paths: list[list[int]], limit: int, min_prob: float) -> tuple[list[int], float]:
    """Follow the paths: at each token take the one that most of the paths take, and leave the other paths.

    limit: most tokens. min_prob: the product of the tokens' shares stays at least this.
    Returns the tokens and the sum of their probabilities, the expected number of accepted tokens. The first path wins
    a tie.
    """
    draft: list[int] = []
    score, prob = 0.0, 1.0
    while len(draft) < limit:
        step = len(draft)
        if len(paths) == 1:
            rest = paths[0][step:limit]
            return draft + rest, score + prob * len(rest)
        counts: dict[int, int] = {}
        for path in paths:
            if step < len(path):
                counts[path[step]] = counts.get(path[step], 0) + 1
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        prob *= counts[token] / len(paths)
        if prob < min_prob:
            break
        draft.append(token)
        score += prob
        paths = [path for path in paths if step < len(path) and path[step] == token]
    return draft, score


def _draft_limits(depth: int, factor: float) -> list[int]:
    """Maximum number of tokens in a draft, for each match length below depth: factor * match, within depth - match.

    A longer match may be cut, so no limit is below that of a shorter match.
    """
    limits = [0]
    for match in range(1, depth):
        limits.append(max(limits[-1], min(int(factor * match), depth - match)))
    return limits
