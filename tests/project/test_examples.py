"""The examples that need no server run, and print the expected results."""

import importlib.util
import pathlib
import re
import runpy

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


@pytest.mark.slow
def test_the_first_python_of_the_readme_runs_as_printed(tmp_path, capsys):
    snippet = re.search(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text("utf-8"), re.DOTALL)[1]
    (tmp_path / "snippet.py").write_text(snippet)
    runpy.run_path(str(tmp_path / "snippet.py"))
    assert "def __enter__(self):\n        return self\n" in capsys.readouterr().out


@pytest.mark.slow  # tests/end_to_end/test_beams.py shows the search itself
def test_beam_search(capsys: pytest.CaptureFixture[str]):
    example("beam_search").main(**SIZES)
    printed = capsys.readouterr().out
    assert "    def push(self, item):\n        self.items.append(item)\n" in printed
    assert "    def __len__(self):\n        return len(self.items)\n" in printed
    shared, separate = (int(re.search(rf"{what}: +(\d+) blocks", printed)[1]) for what in ("of 4", "requests"))
    assert 0 < shared <= 0.65 * separate
    assert "the second found 16 tokens of the first" in printed  # one block, while both ran
    assert f"sharing saves {1 - shared / separate:.0%}" in printed


@pytest.mark.slow
def test_many_adapters(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["many_adapters.py", "--adapters", "6", "--max-loras", "2", "--max-tokens", "8"])
    example("many_adapters").main()
    printed = capfd.readouterr().out
    counts = re.findall(r"^ *(base model alone|6 adapters) +[\d.]+ +[\d,]+ +(\d+)$", printed, re.MULTILINE)
    assert [title for title, _ in counts] == ["base model alone", "6 adapters"]
    assert int(counts[0][1]) == 1 < int(counts[1][1])


@pytest.mark.slow
def test_grpo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["grpo.py", "--steps", "3", "--prompts", "2", "--group", "4"])
    example("grpo").main()
    printed = capsys.readouterr().out
    found = re.search(r"^(\d+) of (\d+) arrays of the engine are the trainer's own$", printed, re.MULTILINE)
    by_reference, count = found.groups()
    assert by_reference == count
    assert re.search(r"sampling against LLM\.score +0\.0e\+00 +0\.0e\+00", printed)
    assert float(re.search(r"the trainer's forward pass +(\S+)", printed)[1]) < 1e-4
