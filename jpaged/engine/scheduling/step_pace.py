"""Limits the prompt tokens of a step so that it stays under a target time. Learns from the time of earlier steps."""

SMOOTHING = 0.2  # weight of the latest step in the running averages


class StepPace:
    """Keeps the time of a step under `target_seconds`, if its decodes alone leave room for that.

    Assumes that a step takes the time of its decodes, plus a constant time per prompt token. Both are running averages.
    Every step may have `min_tokens` prompt tokens, so that prompts end; no more until the time per token is known.
    """

    def __init__(self, target_seconds: float | None, *, min_tokens: int):
        """target_seconds: None means no limit."""
        self._target = target_seconds
        self._min_tokens = min_tokens
        self._decodes: float | None = None    # seconds of a step without prompt tokens
        self._per_token: float | None = None  # seconds that a prompt token adds

    def limit(self, budget: int) -> int:
        """Prompt tokens that the next step may have, at most `budget`."""
        if self._target is None:
            return budget
        if self._per_token is None:
            return min(budget, self._min_tokens)
        room = self._target - (self._decodes or 0.0)
        return min(budget, max(self._min_tokens, int(room / max(self._per_token, 1e-9))))

    def note(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from the time that a step took."""
        if self._target is None:
            return
        if not prompt_tokens:
            self._decodes = _average(self._decodes, seconds)
        else:
            if self._decodes is not None and seconds < self._decodes:  # fewer rows decode now, or a step was slow
                self._decodes = _average(self._decodes, seconds)
            added = max(seconds - (self._decodes or 0.0), 0.0)
            self._per_token = _average(self._per_token, added / prompt_tokens)


def _average(before: float | None, latest: float) -> float:
    return latest if before is None else before + SMOOTHING * (latest - before)
