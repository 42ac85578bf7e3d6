"""`jpaged convert` on the command line: its output, and its folder as a model."""

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

import jpaged
from jpaged import cli

DEMO = Path(jpaged.__file__).parent / "demo_model"
SMALL = ["--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
SMALL += ["--row-buckets", "8", "--token-buckets", "64"]


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jpaged", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def run_here(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command in this process, which saves the start of Python; return what it prints."""
    status = cli.main(args)
    said = capsys.readouterr()
    assert status == 0, said.err
    return said.out


@pytest.mark.slow
def test_convert_use_and_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = str(tmp_path / "demo.jpaged"), str(tmp_path / "back")
    done = run("convert", "demo", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"wrote {out}: 11.2 MB, bfloat16" in done.stdout
    assert f"jpaged generate {out}" in done.stdout

    # The penalty is given: its default for `demo` differs from that for a folder.
    prompt = ["def read_json(path):", "--max-tokens", "12", "--temperature", "0", "--repetition-penalty", "1", *SMALL]
    here, there = (run_here(capsys, "generate", model, *prompt) for model in (out, "demo"))
    assert here.splitlines()[:2] == there.splitlines()[:2]

    assert "byte for byte" in run_here(capsys, "convert", out, back, "--to", "hf")
    names = [path.name for path in Path(back).iterdir()]
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= set(names)
    assert filecmp.cmpfiles(DEMO, back, names, shallow=False)[1:] == ([], [])

    done = run("convert", "demo", out)
    assert done.returncode == 2
    assert done.stderr.startswith("jpaged: out: there is a folder that is not empty: name a new folder")
    assert f"got {out!r}" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/nowhere/model", "OUT"], "/nowhere/model"),
        (["demo", "OUT", "--dtype", "int8"], "dtype must be auto, bfloat16, float16, float32, got 'int8'"),
        (["demo", "OUT", "--to", "hf"], "has no jpaged.json"),
        (["demo", "OUT", "--to", "hf", "--dtype", "float32"], "--to hf: leave it out, got 'float32'"),
        (["demo", "OUT", "--to", "hf", "--revision", "main"], "has no meaning with --to hf: leave it out, got 'main'"),
        (["demo", "/dev/null/OUT"], "out cannot be written: File exists, got '/dev/null/OUT'"),
    ],
)
def test_refused_in_one_line(words: list[str], says: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("jpaged: ")
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("MODEL", "OUT", "--to {orbax,hf}", "--dtype", "--revision"))
