"""Output of `benchmarks/kernels.py --check` for checks that pass, fail, or do not run."""

import pathlib
import sys
from typing import Any

import pytest

from pallas_kernels import KernelCheckError, self_check

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
import gated_matmul
import kernels

pytestmark = pytest.mark.slow  # no default test: the engine does not depend on it


def fails(**shape: Any) -> dict[str, float]:
    raise KernelCheckError(f"{'x' * 250}: differs from the reference by 0.5, more than 1e-05\nreport this")


def refuses(**shape: Any) -> dict[str, float]:
    raise NotImplementedError("cannot take this: blocks are too large")


def test_a_check_prints_its_limit_and_its_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(kernels, "CHECKS", [(2, 1, 16, 16, "float32", "float32", None)])
    monkeypatch.setattr(kernels, "self_check", lambda **shape: self_check(**shape | {"cases": "decode"}))
    found = kernels.check("xla", tiny=False)
    [differences] = found.values()
    assert not kernels.wrong(found)
    assert f"decode {differences['decode']:.1e}; limit 1e-05: ok" in capsys.readouterr().out
    monkeypatch.setattr(kernels, "self_check", fails)
    assert len(kernels.wrong(kernels.check("xla", tiny=False))) == 1
    assert "too large: x" in (said := capsys.readouterr().out)
    assert said.endswith("by 0.5, more than 1e-05\n")
    monkeypatch.setattr(kernels, "self_check", refuses)
    assert not kernels.wrong(kernels.check("xla", tiny=False))
    assert "cannot take this" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "cases"), [("triton", ("decode", "chunks", "mixed")), ("mosaic_gpu", ("decode",))])
def test_a_kernel_for_decodes_is_checked_with_decodes(monkeypatch: pytest.MonkeyPatch, name: str, cases: Any):
    monkeypatch.setattr(kernels, "self_check", lambda **shape: dict.fromkeys(shape["cases"], 0.0))
    assert {tuple(found) for found in kernels.check(name, tiny=False).values()} == {cases}


def test_a_check_of_gated_dot_prints_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gated_matmul, "check_gated_dot", lambda *shapes, **options: 0.0123)
    assert not kernels.wrong(gated_matmul.check(tiny=True))
    assert "silu 1.2e-02; limit 2e-02: ok" in capsys.readouterr().out
    monkeypatch.setattr(gated_matmul, "check_gated_dot", lambda *shapes, **options: fails())
    found = gated_matmul.check(tiny=True)
    assert len(kernels.wrong(found)) == len(found)
    assert "too large" in capsys.readouterr().out
