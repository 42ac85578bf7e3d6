"""Speculative decoding during a run: the counters of drafts in the server's /metrics, before and after it.

They have vLLM's names, so servers of both are read. The table and the result file have the names of `vllm bench serve`.
"""

import dataclasses
import re
import ssl
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Self

from jpaged.load_client.connection import LoadError
from jpaged.load_client.http_get import get

PREFIX = "vllm:spec_decode_num_"
_LINE = re.compile(rf"^{PREFIX}(\w+?)(?:_total)?(?:{{(.*)}})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


@dataclasses.dataclass(frozen=True)
class DraftCounts:
    """Drafts of a server: totals over its engines."""

    drafts: int           # rows with drafts, summed over steps
    draft_tokens: int     # drafts that steps have checked
    accepted_tokens: int  # drafts that became tokens
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of_text(cls, text: str) -> Self | None:
        """Read the text of /metrics. Returns None if the server does not speculate."""
        counts, by_position = Counter[str](), Counter[int]()
        for name, labels, value in _LINE.findall(text):
            counts[name] += int(float(value))
            position = _POSITION.search(labels)
            if name == "accepted_tokens_per_pos" and position is not None:
                by_position[int(position[1])] += int(float(value))
        if "draft_tokens" not in counts:
            return None
        positions = tuple(by_position[position] for position in range(len(by_position)))
        return cls(counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"], positions)

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Return the counts since an earlier moment."""
        positions = zip(self.accepted_per_position, before.accepted_per_position, strict=True)
        return DraftCounts(
            self.drafts - before.drafts, self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens, tuple(now - then for now, then in positions),
        )  # fmt: skip

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts in percent."""
        return 100 * self.accepted_tokens / max(self.draft_tokens, 1)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a row with drafts gets from a step."""
        return 1 + self.accepted_tokens / max(self.drafts, 1)

    def rows(self) -> list[tuple[str, float]]:
        """Rows of the table."""
        return [
            ("Acceptance rate (%):", self.acceptance_rate),
            ("Acceptance length:", self.acceptance_length),
            ("Drafts:", self.drafts),
            ("Draft tokens:", self.draft_tokens),
            ("Accepted tokens:", self.accepted_tokens),
        ]

    def fields(self) -> dict[str, Any]:
        """Fields of the result file, with vLLM's names. Rates by position are fractions of the rows with drafts."""
        return {
            "spec_decode_acceptance_rate": self.acceptance_rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": [
                count / max(self.drafts, 1) for count in self.accepted_per_position
            ],
        }


def fetch(base: str, headers: Mapping[str, str], *, tls: ssl.SSLContext | None, timeout: float) -> DraftCounts | None:
    """Read the counters of a server. Returns None if it does not speculate, or has no readable /metrics.

    base: the server's address, without a slash at its end. timeout: in seconds.
    """
    try:
        status, body = get(f"{base}/metrics", headers, tls=tls, timeout=timeout)
    except LoadError:
        return None
    return DraftCounts.of_text(body.decode(errors="replace")) if status == HTTPStatus.OK else None
