"""One answer's text: its tokens as text, up to a stop string, given out as a whole or as what is new."""

from jpaged.engine.detokenizer import Detokenizer
from jpaged.engine.stop_strings import StopText
from jpaged.params.sampling import SamplingParams


class AnswerText:
    """Takes one answer's tokens in order. What it gives out is never taken back.

    offsets: characters of the text before each token, where log-probabilities are asked for. A token that begins inside
    of a character has that character's; those of a stop string that is cut off count as if it were there.
    """

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams):
        stop, include = params.stop, params.include_stop_str_in_output
        self.offsets: list[int] | None = None if params.logprobs is None else []
        self._detokenizer = detokenizer
        self._stop = StopText(tuple(stop), include=include) if stop else None
        self._plain = self._stop is None and self.offsets is None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._length = 0  # characters so far, with those that are held back
        self._new: list[str] = []  # joined when it is asked for: adding to a long text would copy it for every token
        self._whole = ""
        self._ended = False

    def add(self, token_id: int) -> str | None:
        """Take a token; the stop string that is complete with it. Of the first min_tokens none is."""
        if self._plain:
            piece = self._detokenizer.add(token_id)
            if piece:
                self._new.append(piece)
            return None
        self.add_without_text(token_id)
        return self._take(self._detokenizer.add(token_id))

    def add_without_text(self, token_id: int) -> None:
        """Take a token that is left out of the text: one that ends the answer."""
        self._num_tokens += 1
        if self.offsets is not None:
            self.offsets.append(self._length + self._detokenizer.begins(token_id))

    def end(self) -> str | None:
        """No more tokens come: give out what was held back; a stop string that is complete with it. Once is enough."""
        if self._ended:
            return None
        self._ended = True
        stop = self._take(self._detokenizer.finish())
        if self._stop is not None:
            self._new.append(self._stop.rest())
        return stop

    def whole(self) -> str:
        """All that is given out. Whoever asks for this does not ask for what is new."""
        if self._new:
            self._whole += self.new()
        return self._whole

    def new(self) -> str:
        """What is given out and was not the last time."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _take(self, piece: str) -> str | None:
        if not piece:
            return None
        self._length += len(piece)
        if self._stop is None:
            self._new.append(piece)
            return None
        self._new.append(self._stop.add(piece, ends=self._num_tokens > self._min_tokens))
        return self._stop.stop
