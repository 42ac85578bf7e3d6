"""What the kernel tests share."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def plain_errors() -> Iterator[None]:
    """The package's own checks speak, as they do outside tests: annotated shapes are not checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
