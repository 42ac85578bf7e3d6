"""The examples that need no server run, and print the expected results."""

import importlib.util
import pathlib
import re

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
SIZES = {
    "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,),
}  # fmt: skip


def example(name: str):
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # tests/end_to_end/test_beams.py shows the search itself
def test_beam_search(capsys: pytest.CaptureFixture[str]):
    example("beam_search").main(**SIZES)
    printed = capsys.readouterr().out
    answers = re.findall(r"请求 (\d): (.*)\.\.\.", printed)
    assert [number for number, _ in answers] == ["1", "2"]
    assert all(text for _, text in answers)
    shared, separate = (int(re.search(rf"{what}: +(\d+) blocks", printed)[1]) for what in ("of 4", "requests"))
    assert 0 < shared <= 0.65 * separate
    assert "the second found 16 tokens of the first" in printed  # one block, while both ran
    assert f"sharing saves {1 - shared / separate:.0%}" in printed
