"""The experts to which a request's tokens were routed, collected step by step."""

import numpy as np


class RoutedTokens:
    """Experts of each computed token of one request."""

    def __init__(self, prompt_of: "RoutedTokens | None" = None):
        """prompt_of: tokens of the request that computed the prompt; None: this request."""
        self._prompt_of = prompt_of
        self._parts: list[tuple[int, np.ndarray]] = []  # (position, int16[tokens, layers, top_k]), in order of steps
        self._position = 0

    def append(self, experts: np.ndarray, position: int | None = None) -> None:
        """Append the next tokens: int16[tokens, layers, top_k]. position: of the first one, if the row starts."""
        if position is not None:
            self._position = position
        if len(experts):
            self._parts.append((self._position, experts.copy()))  # not a view, which would keep the step's whole array
            self._position += len(experts)

    def array(self, num_tokens: int) -> np.ndarray | None:
        """Experts of the first `num_tokens` tokens, or of those that were computed: int32[tokens, layers, top_k]."""
        parts = self._parts if self._prompt_of is None else [*self._prompt_of._parts, *self._parts]
        if not parts:
            return None
        ends = [position + len(part) for position, part in self._parts or parts]
        routed = np.zeros((min(num_tokens, max(ends)), *parts[0][1].shape[1:]), np.int32)
        for position, part in parts:
            room = routed[position : position + len(part)]
            room[:] = part[: len(room)]
        return routed
