"""The progress bar of `LLM.generate`: finished prompts, tokens per second, and the share of KV blocks in use.

Imported late: tqdm, where there is a terminal or a notebook to show a bar.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from jpaged.outputs import EngineStats

REFRESH_SECONDS = 0.2  # between two updates of tokens per second and KV use

# True: show a bar of tqdm, on a terminal or in a notebook. A callable makes another bar from `total`, in prompts.
UseTqdm = bool | Callable[..., Any]


class Progress:
    """A progress bar over the prompts of one call, or no bar."""

    def __init__(self, use_tqdm: UseTqdm, total: int, stats: Callable[[], EngineStats], *, counts_prompts: bool):
        """stats: returns the engines' statistics. counts_prompts: show the rate of prompt, not generated, tokens."""
        self._bar = _bar(use_tqdm, total)
        self._stats = stats
        self._counts_prompts = counts_prompts
        self._left = total
        self._began = self._shown = time.monotonic()
        self._tokens_before = self._num_tokens(stats())

    def update(self, num_finished: int) -> None:
        """Count prompts that have finished since the last update."""
        self._left -= num_finished
        if self._bar is None:
            return
        now = time.monotonic()
        if now - self._shown > REFRESH_SECONDS or not self._left:
            stats = self._stats()
            rate = (self._num_tokens(stats) - self._tokens_before) / max(now - self._began, 1e-9)
            self._bar.set_postfix_str(f"{rate:.1f} tokens/s, KV {stats.used_blocks / stats.num_blocks:.0%}")
            self._shown = now
        self._bar.update(num_finished)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def _num_tokens(self, stats: EngineStats) -> int:
        return stats.prompt_tokens if self._counts_prompts else stats.generated_tokens


def _bar(use_tqdm: UseTqdm, total: int) -> Any | None:
    if not use_tqdm or not total:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total)
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return None  # a log or a pipe
    from tqdm import tqdm

    return tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True)
