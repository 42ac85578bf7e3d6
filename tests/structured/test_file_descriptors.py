"""A process without free file descriptors is busy: a grammar that needs one gets CapacityError (HTTP 503)."""

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

from jpaged.engine.grammar.limits import STEP_LIMITS
from jpaged.engine.grammar.probe_process import ProbeProcess
from jpaged.errors import CapacityError


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let every attempt to open a file fail with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_that_cannot_start_is_a_lack_of_capacity_and_a_running_child_needs_no_descriptor():
    probe = ProbeProcess(257, ["<|end|>"])

    def compile_grammar() -> str:
        return probe.compile('start: "a"', context_free=True, limits=STEP_LIMITS, seconds=20)[1]

    try:
        with no_descriptors(), pytest.raises(CapacityError, match="file descriptors"):
            compile_grammar()
        assert compile_grammar() == ""
        with no_descriptors():
            assert compile_grammar() == ""
    finally:
        probe.close()
