"""A call with arrays of a wrong shape or dtype fails in tests."""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jaxtyping
import pytest

from jpaged.runtime.sampling import vocab_search
from tests.support.array_types import CheckArrays

MODULE = """
import dataclasses
import functools
from jaxtyping import Array, Float, Int

Table = Int[Array, "rows 2"]

@functools.partial
def function(x: Float[Array, " n"], y: Float[Array, " n"]): ...

def with_an_alias(table: Table): ...

def result(x: Float[Array, "n m"]) -> Float[Array, "m n"]:
    return x

@dataclasses.dataclass
class Record:
    x: Float[Array, " n"]

    def method(self, *, ids: Int[Array, " n"] | None): ...
"""
ONE, TWO, TABLE = jnp.zeros(1), jnp.zeros(2), jnp.zeros((3, 2))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "module_with_arrays.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [CheckArrays(["module_with_arrays"]), *sys.meta_path])
    import module_with_arrays  # ty: ignore[unresolved-import]

    yield module_with_arrays
    del sys.modules["module_with_arrays"]


def test_wrong_calls_fail(module: Any):
    record = module.Record(ONE)
    module.function(TWO, TWO), module.with_an_alias(TABLE.astype(int)), module.result(jnp.zeros((2, 2)))
    record.method(ids=None)
    for call in (
        lambda: module.function(ONE, TWO),
        lambda: module.with_an_alias(TABLE),
        lambda: module.result(TABLE),
        lambda: module.Record(TABLE),
        lambda: record.method(ids=ONE),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            call()


def test_the_projects_functions_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        vocab_search.argmax(jnp.zeros(3))
