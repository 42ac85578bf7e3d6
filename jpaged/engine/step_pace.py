"""How many prompt tokens a step may have so that it stays under a time: learnt from the steps before."""

SMOOTHING = 0.2  # weight of the latest step in the averages


class StepPace:
    """Keeps a step's time under `target_seconds`, as far as its decodes leave room; None: does not limit anything.

    A step is taken to cost what a step of decodes alone does, and a share for every prompt token. Both are running
    averages. A step always may have `least` prompt tokens, or a prompt would never end; and has no more before it is
    known what they cost.
    """

    def __init__(self, target_seconds: float | None, *, least: int):
        self._target = target_seconds
        self._least = least
        self._decodes: float | None = None    # seconds of a step without prompt tokens
        self._per_token: float | None = None  # seconds that a prompt token adds

    def limit(self, budget: int) -> int:
        """Prompt tokens that the next step may have, at most `budget`."""
        if self._target is None:
            return budget
        if self._per_token is None:
            return min(budget, self._least)
        room = self._target - (self._decodes or 0.0)
        return min(budget, max(self._least, int(room / max(self._per_token, 1e-9))))

    def note(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that has ended."""
        if self._target is None:
            return
        if not prompt_tokens:
            self._decodes = _average(self._decodes, seconds)
        else:
            if self._decodes is not None and seconds < self._decodes:  # fewer decode than then, or that step was slow
                self._decodes = _average(self._decodes, seconds)
            added = max(seconds - (self._decodes or 0.0), 0.0)
            self._per_token = _average(self._per_token, added / prompt_tokens)


def _average(before: float | None, latest: float) -> float:
    return latest if before is None else before + SMOOTHING * (latest - before)
