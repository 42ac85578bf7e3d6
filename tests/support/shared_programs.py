"""Lets the engines of one test process share compiled programs.

Otherwise an engine with all programs in the disk cache takes 2.7 s of CPU time to start, because it traces and lowers
each program to find it there.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from jpaged.runtime.compile import blueprint
from tests.recording.costs import recorder

CAPACITY = 48  # the programs of about eight engines

_programs: collections.OrderedDict[Any, jax.stages.Compiled] = collections.OrderedDict()
_lock = threading.Lock()  # an engine compiles in several threads
_enabled = True


def _shared(compile_program: Callable[..., jax.stages.Compiled]) -> Callable[..., jax.stages.Compiled]:
    """Make a compile function return an earlier program for the same shapes and options, if there is one."""

    def call(*shapes: Any, **options: Any) -> jax.stages.Compiled:
        if not _enabled:
            return compile_program(*shapes, **options)
        leaves, structure = jax.tree.flatten(shapes)
        described = [jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        key = (compile_program.__name__, structure, *described, *sorted(options.items()))
        with _lock:
            program = _programs.pop(key, None)
        with recorder.shared_program(key):
            if program is None:
                program = compile_program(*shapes, **options)
        with _lock:
            _programs[key] = program
            while len(_programs) > CAPACITY:
                _programs.popitem(last=False)  # the least recently used one
        return program

    return call


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Engines created inside the block share their step programs."""
    with (
        mock.patch.object(blueprint, "compile_forward", _shared(blueprint.compile_forward)),
        mock.patch.object(blueprint, "compile_output", _shared(blueprint.compile_output)),
        mock.patch.object(blueprint, "self_check", recorder.uncounted()(blueprint.self_check)),
    ):
        yield
    forget_programs()


def forget_programs() -> None:
    """Drop all shared programs. Later engines compile them again."""
    _programs.clear()


@contextlib.contextmanager
def own_programs() -> Iterator[None]:
    """Engines created inside the block compile all of their programs."""
    global _enabled
    _enabled = False
    try:
        yield
    finally:
        _enabled = True
