"""Checks the arguments of `pause_generation`, `sleep`, `wake_up` and `update_weights`. The first three are vLLM's."""

import enum
from collections.abc import Sequence

from jpaged.errors import RequestError

SLEEP_LEVELS = (0, 1, 2)
WAKE_TAGS = ("weights", "kv_cache")


class PauseMode(enum.StrEnum):
    """Treatment of running requests when the engine pauses. New requests wait until it resumes."""

    ABORT = "abort"  # they end, with finish_reason 'abort'
    WAIT = "wait"    # the engine pauses when they have finished
    KEEP = "keep"    # they stop, and continue when the engine resumes


class UpdateMode(enum.StrEnum):
    """Treatment of running requests when the weights are replaced."""

    WAIT = "wait"            # they finish first; new requests wait
    KEEP = "keep"            # they continue with the new weights, and keep their KV
    RECOMPUTE = "recompute"  # they continue with the new weights, and recompute their KV
    ABORT = "abort"          # they end, with finish_reason 'abort'


def update_mode(mode: str) -> UpdateMode:
    """Return the mode of this name. Raises RequestError for an unknown name."""
    try:
        return UpdateMode(mode)
    except ValueError:
        raise RequestError("mode", mode, f"must be one of {', '.join(UpdateMode)}") from None


def check_version(version: object) -> None:
    """Raise RequestError unless `version` can be the version of weights. None: the number of updates so far."""
    if version is not None and (isinstance(version, bool) or not isinstance(version, (int, str))):
        raise RequestError("version", version, "must be an integer or a text")
    if version == "":
        raise RequestError("version", version, "must not be empty: leave it out for the number of updates")
    try:
        str(version).encode()  # as in metrics and in names of KV
    except UnicodeEncodeError:
        raise RequestError("version", ascii(version), "has half of a surrogate pair: UTF-8 cannot encode it") from None


def pause_mode(mode: str) -> PauseMode:
    """Return the mode of this name. Raises RequestError for an unknown name."""
    try:
        return PauseMode(mode)
    except ValueError:
        raise RequestError("mode", mode, f"must be one of {', '.join(PauseMode)}") from None


def check_level(level: int) -> None:
    """Raise RequestError unless `level` is a level of sleep."""
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        accepted = "must be 0 (only pause), 1 (free the KV pool, and keep the weights on the host) or 2 (free both)"
        raise RequestError("level", level, accepted)


def wake_tags(tags: Sequence[str] | None) -> frozenset[str]:
    """Return the tags of the parts to wake up; None: all parts. Raises RequestError for an unknown tag."""
    if tags is None:
        return frozenset(WAKE_TAGS)
    for tag in [tags] if isinstance(tags, str) else tags:
        if tag not in WAKE_TAGS:
            raise RequestError("tags", tag, f"must be a list of {' and '.join(WAKE_TAGS)}")
    return frozenset([tags] if isinstance(tags, str) else tags)
