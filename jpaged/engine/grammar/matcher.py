"""Follows one answer through its grammar: computes the mask of the next token, and accepts sampled tokens.

Jump-forward: if the grammar allows exactly one continuation, its tokens are forced (`GrammarMatcher.forced_tokens`).
They are the tokens that the tokenizer itself produces for that text. A mask then allows the first forced token only.
So appending all forced tokens at once produces the same tokens as sampling them one by one.
"""

import time
from collections.abc import Callable, Set
from typing import Any

import numpy as np
from llguidance import LLMatcher

from jpaged.engine.step_plan import mask_words
from jpaged.errors import RequestError


def first_line(error: str) -> str:
    """Return llguidance's error message as one line, without its parser state and its position markers."""
    error = error.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    lines = [line.strip() for line in error.splitlines()]
    reason = [line for line in lines if line.startswith("error: ")]  # follows the whole text of a bad expression
    text = " ".join(reason or [line for line in lines if line and not set(line) <= set("^~ -|")])
    return text if len(text) <= 200 else text[:200] + "…"


REPLAY_SECONDS = 0.03  # limit for replaying an answer's tokens: all requests wait. An ordinary replay takes 5 ms

# (generation of the failed matcher) -> (fresh matcher at the start of the grammar, its generation), or None.
Renew = Callable[[int], tuple[LLMatcher, int] | None]


class GrammarMatcher:
    """State of one answer in its grammar. Used by one thread at a time.

    All answers of one grammar share a limited number of lexer states. If other answers use them up, or a bug in
    llguidance breaks them, the answer continues with a fresh matcher, which replays its tokens.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        parameter: str,
        value: object,
        renew: Renew = lambda generation: None,
        generation: int = 0,
        end_ids: Set[int] = frozenset(),
    ):
        """end_ids: end-of-sequence tokens of the model."""
        self._matcher = matcher
        self._renew = renew
        self._generation = generation
        self._end_ids = end_ids
        self._ended = False           # the last accepted token is an end that llguidance has not consumed
        self._renewed_at = -1         # number of accepted tokens at the last replacement
        self._tokens: list[int] = []  # accepted tokens
        self._vocab_size = vocab_size
        self._parameter = parameter
        self._value = value
        self._forced: list[int] = []  # current run of forced tokens
        self._forced_index = 0        # next one of them
        self._forced_known = False    # `_forced` is computed for this position
        self._history: list[tuple[list[int], int]] = []  # `_forced` and `_forced_index` before each accepted token

    def __len__(self) -> int:
        """Number of accepted tokens."""
        return len(self._history)

    @property
    def is_finished(self) -> bool:
        """True if the grammar is satisfied and allows no more text. The answer ends with finish_reason "stop"."""
        if self._ended:
            return True
        return self._forced_index == len(self._forced) and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """True if the answer may end here. Exactly then the mask allows the end-of-sequence tokens."""
        return self._ended or (self._forced_index == len(self._forced) and self._matcher.is_accepting())

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, in order; [] if there is a choice, or the grammar is finished.

        Any number of them, from the first, may be accepted without sampling. Raises RequestError like `mask_into`.
        """
        if self._ended:
            return []
        if self._forced_index == len(self._forced) and not self._forced_known:
            forced = self._query(lambda matcher: [] if matcher.is_stopped() else matcher.compute_ff_tokens())
            self._forced_known = True
            if forced:
                self._forced, self._forced_index = forced, 0
        return self._forced[self._forced_index :]

    def mask_into(self, words: np.ndarray) -> None:
        """Write the mask of the next token into `words`: int32 or uint32[mask_words(vocab_size)].

        Ids that the tokenizer does not have are never allowed. When the grammar is finished, only end-of-sequence ids
        are. Raises RequestError if this step of the grammar costs too much, or allows no token: the request must end.
        """
        if words.shape != (mask_words(self._vocab_size),) or words.dtype.itemsize != 4 or not words.flags.c_contiguous:
            raise ValueError(f"expected 32-bit words[{mask_words(self._vocab_size)}], got {words.dtype}{words.shape}")
        forced = self.forced_tokens()
        words[:] = 0
        if self._ended:
            for token_id in self._end_ids:
                words.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
            return
        if forced:
            words.view(np.uint32)[forced[0] // 32] = np.uint32(1 << (forced[0] % 32))
            return
        self._query(lambda matcher: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        if not words.any():
            raise self._cannot_continue("it allows no token of the tokenizer")

    def accept(self, token_id: int) -> bool:
        """Advance by a token. If it is not allowed, returns False and changes nothing. Raises as `mask_into`."""
        forced = self._forced[self._forced_index :]
        if self.is_finished or (forced and token_id != forced[0]):
            return False
        if self._query(lambda matcher: matcher.try_consume_tokens([token_id])) != 1:
            if not self._is_named_end(token_id):
                return False
            self._ended = True
        self._tokens.append(token_id)
        self._history.append((self._forced, self._forced_index))
        if forced:
            self._forced_index += 1
        self._forced_known = False
        return True

    def rollback(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` accepted tokens."""
        if not 0 <= num_tokens <= len(self._history):
            raise ValueError(f"num_tokens is {num_tokens}, must be from 0 to {len(self._history)}")
        if num_tokens:
            self._matcher.rollback(num_tokens - self._ended)
            self._ended = False
            if self._matcher.is_error():
                raise self._cannot_continue(first_line(self._matcher.get_error()))
            self._forced, self._forced_index = self._history[-num_tokens]
            del self._history[-num_tokens:], self._tokens[-num_tokens:]
            self._forced_known = False

    def copy(self) -> "GrammarMatcher":
        """Return an independent copy, for an answer that forks here."""
        matcher = self._matcher.deep_copy()
        other = GrammarMatcher(
            matcher, self._vocab_size, self._parameter, self._value, self._renew, self._generation, self._end_ids
        )
        other._ended = self._ended
        other._tokens = list(self._tokens)
        other._forced, other._forced_index = self._forced, self._forced_index
        other._forced_known = self._forced_known
        other._history = list(self._history)
        return other

    def _is_named_end(self, token_id: int) -> bool:
        """True if the grammar names this end-of-sequence token here, such as gpt-oss's <|call|> after a call.

        llguidance allows the token in the mask, but consumes it only where the answer may end.
        """
        if token_id not in self._end_ids:
            return False
        words = np.zeros(mask_words(self._vocab_size), np.uint32)
        self._query(lambda matcher: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        return bool(words[token_id // 32] >> (token_id % 32) & 1)

    def _query(self, query: Callable[[LLMatcher], Any]) -> Any:
        """Return `query(matcher)`. If the matcher fails, replace it and query the new one."""
        result = query(self._matcher)
        if self._matcher.is_error():
            error = first_line(self._matcher.get_error())
            if not self._replace_matcher():
                raise self._cannot_continue(error)
            result = query(self._matcher)
            if self._matcher.is_error():
                self._replace_matcher()  # this answer fails anyway; its grammar is renewed for the next answer
                raise self._cannot_continue(first_line(self._matcher.get_error()))
        return result

    def _replace_matcher(self) -> bool:
        """Replay the accepted tokens on a fresh matcher and use it.

        Returns False if a replacement has failed at this position before, or the replay fails or is too slow.
        """
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

    def _cannot_continue(self, why: str) -> RequestError:
        return RequestError(self._parameter, self._value, f"cannot continue after {len(self)} tokens: {why}")
