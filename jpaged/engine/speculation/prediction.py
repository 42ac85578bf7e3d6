"""Drafts from a text that the caller expects the answer to resemble (OpenAI's `prediction`)."""

import bisect
import dataclasses
from collections.abc import Sequence

from jpaged.engine.request import Request

NEAR, NEAR_SIZE = 48, 2  # two equal tokens are enough this close to the lost place,
FAR_SIZE = 4             # four tokens anywhere
BACKWARD = 4             # a step backward counts as this many steps forward: answers rarely go back

Gram = tuple[int, ...]


@dataclasses.dataclass(slots=True)
class _Follower:
    """The place of one answer in its prediction."""

    tokens: list[int]                  # the prediction
    places: dict[Gram, list[int]]      # n-gram -> ascending indices of the tokens after it
    num_read: int = 0                  # tokens of the answer that were compared
    place: int = 0                     # index of the prediction's token that should come next
    lost: bool = False                 # the answer left the prediction at `place`


class PredictionDrafter:
    """Follows the prediction of a request from its first token on, and drafts the tokens that come next in it.

    When the answer leaves the prediction, it finds its place again by the answer's last tokens: by NEAR_SIZE tokens
    within NEAR tokens of the place, or by FAR_SIZE tokens anywhere. Of several places it takes the nearest one.
    """

    def __init__(self) -> None:
        self._followers: dict[Request, _Follower] = {}

    def note_prediction(self, request: Request, token_ids: Sequence[int]) -> None:
        """Set the predicted answer of a request. Takes 4 us per token. An empty prediction has no effect."""
        if not token_ids:
            return
        tokens = list(token_ids)
        places: dict[Gram, list[int]] = {}
        for size in (NEAR_SIZE, FAR_SIZE):
            for end in range(size, len(tokens)):  # a place at the end has nothing to draft
                places.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._followers[request] = _Follower(tokens, places)

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """Propose the next tokens of the prediction. Empty without a prediction, and while the place is lost.

        Takes 1.5 us with one new token, 5 us while the place is lost (a Xeon of 2 shared cores).
        """
        follower = self._followers.get(request)
        if follower is None:
            return ()
        self._follow(follower, request)
        return () if follower.lost else follower.tokens[follower.place : follower.place + count]

    def note_end(self, request: Request) -> None:
        """Drop the request's prediction."""
        self._followers.pop(request, None)

    def forget(self) -> None:
        """Find the places of all answers again from their start. Predictions come from callers, and are kept."""
        for follower in self._followers.values():
            follower.num_read, follower.place, follower.lost = 0, 0, False

    def _follow(self, follower: _Follower, request: Request) -> None:
        """Compare the answer's new tokens with the prediction."""
        tokens, first = follower.tokens, request.prompt_len
        for end in range(first + follower.num_read + 1, len(request.token_ids) + 1):
            if not follower.lost:
                place = follower.place
                if place < len(tokens) and tokens[place] == request.token_ids[end - 1]:
                    follower.place = place + 1
                    continue
                follower.lost = True
            _find_place(follower, request.token_ids[max(first, end - FAR_SIZE) : end])
        follower.num_read = request.num_output_tokens


def _find_place(follower: _Follower, last: list[int]) -> None:
    """Find the place in the prediction that follows the answer's last tokens. last: at most FAR_SIZE of them."""
    if len(last) == FAR_SIZE and (places := follower.places.get(tuple(last))):
        follower.place, follower.lost = _nearest(places, follower.place), False
        return
    places = follower.places.get(tuple(last[-NEAR_SIZE:])) if len(last) >= NEAR_SIZE else None
    if places:
        place = _nearest(places, follower.place)
        if abs(place - follower.place) <= NEAR:
            follower.place, follower.lost = place, False


def _nearest(places: list[int], place: int) -> int:
    """The element of an ascending list that is nearest to `place`. Distances backward count BACKWARD times."""
    index = bisect.bisect_left(places, place)
    if index == len(places) or (index and (place - places[index - 1]) * BACKWARD < places[index] - place):
        return places[index - 1]
    return places[index]
