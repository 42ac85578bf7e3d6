"""Where one answer stands in its grammar: which tokens may come next, and which one came.

Jump-forward. Where the grammar allows one continuation only, its tokens are those that the tokenizer itself would
write for it (`GrammarMatcher.forced_tokens`), and a mask has the first of them alone. So an engine that takes them all
at once and one that samples them one by one come to the same tokens.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher

from jpaged.engine.step_plan import mask_words
from jpaged.errors import RequestError


def first_line(error: str) -> str:
    """llguidance's messages in one line: without its parser's state, and without drawings of where."""
    error = error.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    lines = [line.strip() for line in error.splitlines()]
    reason = [line for line in lines if line.startswith("error: ")]  # of a regular expression, after all of its text
    text = " ".join(reason or [line for line in lines if line and not set(line) <= set("^~ -|")])
    return text if len(text) <= 200 else text[:200] + "…"


REPLAY_SECONDS = 0.03  # of an answer's tokens, in which all other requests wait; a usual one's take 5 ms

# A new matcher for the grammar's beginning, and its generation; None where there can be none. Given the old one's.
Renew = Callable[[int], tuple[LLMatcher, int] | None]


class GrammarMatcher:
    """One answer's place in its grammar. Used by one thread at a time.

    Answers of one grammar share the states of its lexer, whose number is limited: others may have used them up (or, by
    an error in the compiler, broken them). Then an answer goes on with a fresh matcher, which takes its tokens again.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        parameter: str,
        value: object,
        renew: Renew = lambda generation: None,
        generation: int = 0,
    ):
        self._matcher = matcher
        self._renew = renew
        self._generation = generation
        self._renewed_at = -1         # tokens that there were when it last went on with another
        self._tokens: list[int] = []  # accepted so far
        self._vocab_size = vocab_size
        self._parameter = parameter
        self._value = value
        self._forced: list[int] = []  # the stretch that is being taken, and how far
        self._taken = 0
        self._asked = False           # whether what is forced here is known
        self._history: list[tuple[list[int], int]] = []  # `_forced` and `_taken` before each accepted token

    def __len__(self) -> int:
        """Tokens accepted so far."""
        return len(self._history)

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is satisfied and nothing more may come: the answer ends with finish_reason 'stop'."""
        return self._taken == len(self._forced) and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer might end here: end-of-sequence tokens are in the mask exactly then."""
        return self._taken == len(self._forced) and self._matcher.is_accepting()

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, one after the other; [] where there is a choice, or nothing left.

        They may be taken without sampling, all or as many as there is room for. Raises RequestError as `mask_into`.
        """
        if self._taken == len(self._forced) and not self._asked:
            forced = self._ask(lambda matcher: [] if matcher.is_stopped() else matcher.compute_ff_tokens())
            self._asked = True
            if forced:
                self._forced, self._taken = forced, 0
        return self._forced[self._taken :]

    def mask_into(self, words: np.ndarray) -> None:
        """Set the bits of the tokens that may come next, in int32 or uint32[mask_words(vocab_size)].

        Ids that the tokenizer does not have are never among them; once finished, only end-of-sequence is. Raises
        RequestError when the grammar turns out to cost too much here, or to allow nothing: the request cannot go on.
        """
        if words.shape != (mask_words(self._vocab_size),) or words.dtype.itemsize != 4 or not words.flags.c_contiguous:
            raise ValueError(f"expected 32-bit words[{mask_words(self._vocab_size)}], got {words.dtype}{words.shape}")
        forced = self.forced_tokens()
        words[:] = 0
        if forced:
            words.view(np.uint32)[forced[0] // 32] = np.uint32(1 << (forced[0] % 32))
            return
        self._ask(lambda matcher: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        if not words.any():
            raise self._impossible("it allows no token that the tokenizer has")

    def accept(self, token_id: int) -> bool:
        """Take the token that was sampled. False where the grammar does not allow it: nothing changes then.

        Raises RequestError as `mask_into`.
        """
        forced = self._forced[self._taken :]
        if self.is_finished or (forced and token_id != forced[0]):
            return False
        if self._ask(lambda matcher: matcher.try_consume_tokens([token_id])) != 1:
            return False
        self._tokens.append(token_id)
        self._history.append((self._forced, self._taken))
        if forced:
            self._taken += 1
        self._asked = False
        return True

    def rollback(self, num_tokens: int) -> None:
        """Go back by so many accepted tokens."""
        if not 0 <= num_tokens <= len(self._history):
            raise ValueError(f"cannot go back by {num_tokens} of {len(self._history)} tokens")
        if num_tokens:
            self._matcher.rollback(num_tokens)
            if self._matcher.is_error():
                raise self._impossible(first_line(self._matcher.get_error()))
            self._forced, self._taken = self._history[-num_tokens]
            del self._history[-num_tokens:], self._tokens[-num_tokens:]
            self._asked = False

    def copy(self) -> "GrammarMatcher":
        """Another answer at the same place, which goes its own way from here."""
        matcher = self._matcher.deep_copy()
        other = GrammarMatcher(
            matcher, self._vocab_size, self._parameter, self._value, self._renew, self._generation
        )
        other._tokens = list(self._tokens)
        other._forced, other._taken, other._asked = self._forced, self._taken, self._asked
        other._history = list(self._history)
        return other

    def _ask(self, ask: Callable[[LLMatcher], Any]) -> Any:
        """What the matcher answers; or, where it has failed, a fresh one at the same place."""
        answer = ask(self._matcher)
        if self._matcher.is_error():
            error = first_line(self._matcher.get_error())
            if not self._go_on_with_another():
                raise self._impossible(error)
            answer = ask(self._matcher)
            if self._matcher.is_error():
                self._go_on_with_another()  # not here again: the next answer to begin has a fresh one
                raise self._impossible(first_line(self._matcher.get_error()))
        return answer

    def _go_on_with_another(self) -> bool:
        """Take a fresh matcher to this place. False where it fails here, too, or on the way, or is too slow."""
        made = self._renew(self._generation)
        if made is None or self._renewed_at == len(self._tokens):
            return False
        self._renewed_at = len(self._tokens)
        matcher, self._generation = made
        until = time.monotonic() + REPLAY_SECONDS
        for first in range(0, len(self._tokens), 8):
            some = self._tokens[first : first + 8]
            if matcher.try_consume_tokens(some) != len(some) or time.monotonic() > until:
                return False
        self._matcher = matcher
        return True

    def _impossible(self, why: str) -> RequestError:
        return RequestError(self._parameter, self._value, f"cannot go on after {len(self)} tokens: {why}")
