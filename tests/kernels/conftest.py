"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def plain_errors() -> Iterator[None]:
    """Switch off the check of annotated shapes, so that the package's own errors are raised, as outside tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
