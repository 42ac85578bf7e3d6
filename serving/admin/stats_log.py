"""Logs one line about the engine every few seconds while there is work."""

import asyncio
import logging
import time
from collections.abc import Callable

from jpaged.errors import JPagedError
from jpaged.outputs import EngineStats, SpeculationStats

logger = logging.getLogger("jpaged.serving")

INTERVAL_SECONDS = 10.0  # as vLLM's


class StatsLog:
    """Compares the engine's counters with their values at the last line."""

    def __init__(self, stats: Callable[[], EngineStats]):
        self._stats = stats
        self._before = stats()
        self._then = time.monotonic()

    def line(self) -> str | None:
        """Return a line about the time since the last call; None if nothing ran."""
        now, stats = time.monotonic(), self._stats()
        before, seconds = self._before, max(now - self._then, 1e-9)
        self._before, self._then = stats, now
        prompt = max(stats.prompt_tokens - before.prompt_tokens, 0)  # below 0 after `reset_stats`
        generated = max(stats.generated_tokens - before.generated_tokens, 0)
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        line = (
            f"{stats.num_running} running, {stats.num_waiting} waiting; {prompt / seconds:,.1f} prompt tokens/s, "
            f"{generated / seconds:,.1f} generated tokens/s; KV cache {stats.used_blocks / stats.num_blocks:.1%} used"
        )
        return line + _drafts_since(before.speculation, stats.speculation)


def _drafts_since(before: SpeculationStats | None, now: SpeculationStats | None) -> str:
    """The end of a line: the chosen drafts per row, and the accepted ones. Empty without speculative decoding."""
    if before is None or now is None:
        return ""
    drafts, accepted = now.draft_tokens - before.draft_tokens, now.accepted_tokens - before.accepted_tokens
    share = f", {accepted / drafts:.1%} of {drafts:,} accepted" if drafts > 0 else ""
    return f"; {now.drafts_per_row:.1f} drafts per row{share}"


async def log_stats(stats: Callable[[], EngineStats], seconds: float = INTERVAL_SECONDS) -> None:
    """Log a line every few seconds while there is work, until the engine is closed or the task is cancelled."""
    try:
        log = StatsLog(stats)
        while True:
            await asyncio.sleep(seconds)
            if (line := log.line()) is not None:
                logger.info("%s", line)
    except JPagedError:  # the engine is closed, and its error reaches the requests
        return
