"""Flags of servers that tests start as processes: `jpaged serve`."""


def serve_flags() -> list[str]:
    """Further flags. tests/support/through_front_end.py replaces this function."""
    return []
