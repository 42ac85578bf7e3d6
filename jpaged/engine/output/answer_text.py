"""Text of one answer: detokenizes its tokens, ends at a stop string, and returns the whole text or the new part."""

from collections.abc import Mapping

from jpaged.engine.output.detokenizer import Detokenizer
from jpaged.engine.output.stop_strings import StopText
from jpaged.params.sampling import SamplingParams


class AnswerText:
    """Text of one answer. Its tokens are appended in order; text that was returned never changes.

    offsets: number of characters before each token, or None if the request has no `logprobs`. A token that begins
        inside a character has the offset of that character. Characters of a stop string that is cut off are counted.
    """

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, special_names: Mapping[int, str] | None = None
    ):
        """special_names: of special tokens by their ids, if the text has them."""
        stop, include = params.stop, params.include_stop_str_in_output
        self.offsets: list[int] | None = None if params.logprobs is None else []
        self._detokenizer = detokenizer
        self._stop = StopText(tuple(stop), include=include) if stop else None
        self._special_names = special_names or {}
        self._special_offsets: list[int] | None = [] if special_names else None
        self._plain = self._stop is None and self.offsets is None and not special_names
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._length = 0  # characters so far, including held-back ones
        self._new: list[str] = []  # joined on demand, because appending to a string copies it for every token
        self._whole = ""
        self._ended = False

    def add(self, token_id: int) -> str | None:
        """Append a token. Returns the stop string that it completes; None if there is none, or within `min_tokens`."""
        if self._plain:
            piece = self._detokenizer.add(token_id)
            if piece:
                self._new.append(piece)
            return None
        self.add_without_text(token_id)
        piece = self._detokenizer.add(token_id)
        name = self._special_names.get(token_id)
        if name is not None and self._special_offsets is not None:
            before = len(piece) - len(name) if piece.endswith(name) else 0
            self._special_offsets.append(self._length + before)
        return self._append_text(piece)

    def add_without_text(self, token_id: int) -> None:
        """Append a token that has no text because it ends the answer."""
        self._num_tokens += 1
        if self.offsets is not None:
            self.offsets.append(self._length + self._detokenizer.offset_of_next(token_id))

    def end(self) -> str | None:
        """End the answer, unless it has ended, and flush held-back text. Returns the stop string completed, or None."""
        if self._ended:
            return None
        self._ended = True
        stop = self._append_text(self._detokenizer.finish())
        if self._stop is not None:
            self._new.append(self._stop.rest())
        return stop

    def whole(self) -> str:
        """Return the whole text so far. An answer uses either `whole` or `new`, not both."""
        if self._new:
            self._whole += self.new()
        return self._whole

    def new(self) -> str:
        """Return the text since the last call."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def special_offsets(self, *, new: bool) -> list[int] | None:
        """Return the index of each special token's name in the text. None if the text has no special tokens.

        new: only those since the last call. An answer uses either all or the new ones, not both.
        """
        offsets = self._special_offsets
        if not offsets:
            return None if offsets is None else []
        if not new:
            return list(offsets)
        self._special_offsets = []
        return offsets

    def _append_text(self, piece: str) -> str | None:
        if not piece:
            return None
        self._length += len(piece)
        if self._stop is None:
            self._new.append(piece)
            return None
        self._new.append(self._stop.add(piece, ends=self._num_tokens > self._min_tokens))
        return self._stop.stop
