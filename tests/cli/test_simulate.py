"""`jpaged simulate` and `jpaged bench steps`: what they print, what they leave, and how they say no."""

import json
import subprocess
import sys

import pytest

from jpaged import cli

HAND = ["--cost-model", "fixed=0.005,per_token=1e-5", "--num-blocks", "256", "--max-model-len", "512"]
LOAD = ["--rate", "20", "--num-requests", "50", "--prompt-tokens", "uniform:20:90", "--output-tokens", "10"]


def run(*args: str) -> int:
    return cli.main(["simulate", *args])


def test_a_generated_load(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    assert run(*HAND, *LOAD, "--output-json", str(figures), "--plot", str(picture), "--num-replicas", "2") == 0
    printed = capsys.readouterr().out
    for line in ("given by hand, not measured", "Throughput:", "Time to first token", "KV waste:", "Preemptions:"):
        assert line in printed
    data = json.loads(figures.read_text())
    assert data["finished_requests"] == 50
    assert data["output_tokens"] == 500
    assert data["seconds"]["first_token"]["p50"] > 0
    assert data["cost_model"]["fixed"] == 0.005
    assert data["engine"]["num_blocks"] == 256
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_read_whole_before_anything_runs(tmp_path, capsys):
    trace = tmp_path / "day.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,10,5\n1,20,6\n")
    assert run(*HAND, "--trace", str(trace)) == 0
    assert "Requests finished:       2" in capsys.readouterr().out
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,10,5\n1,20,-6\n")
    assert run(*HAND, "--trace", str(trace)) == 2
    said = capsys.readouterr()
    assert "line 3, column 3 (output_tokens): must be from 1" in said.err
    assert "Requests" not in said.out


def test_the_shipped_model_names_its_engine(capsys):
    assert run("--cost-model", "demo-cpu", "--rate", "5", "--num-requests", "20", "--prompt-tokens", "30") == 0
    printed = capsys.readouterr().out
    assert "Cost model:              demo measured on cpu" in printed
    assert "1 x 32 rows, 512 tokens a step" in printed


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "cost_model=None"),
        (["--cost-model", "nowhere.json"], "no such file"),
        (["--cost-model", "fixed=1"], "num_blocks=None"),
        ([*HAND], "rate=None"),
        ([*HAND, "--rate", "-1"], "rate=-1"),
        ([*HAND, *LOAD, "--num-blocks", "3"], "needs 32"),
        ([*HAND, *LOAD, "--max-num-seqs", "0"], "max_num_seqs=0"),
        ([*HAND, *LOAD, "--arrivals", "often"], "arrivals='often'"),
        ([*HAND, *LOAD, "--prefixes", "2"], "prefix_tokens=0"),
        ([*HAND, *LOAD, "--output-json", "/nowhere/x.json"], "output_json"),
        ([*HAND, *LOAD, "--plot", "/nowhere/x.png"], "plot="),
        ([*HAND, *LOAD, "--plot", "x.xyz"], "one of"),
        ([*HAND, *LOAD, "--trace", "x.csv"], "num_requests=50: is for generated loads"),
        ([*HAND, "--trace", "/nowhere/x.csv"], "cannot be read"),
    ],
)
def test_errors_are_one_line(args, says, capsys):
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_a_picture_without_matplotlib_is_refused_at_once(monkeypatch, tmp_path, capsys):
    for name in ("matplotlib", "matplotlib.backend_bases"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run(*HAND, *LOAD, "--plot", str(tmp_path / "x.png")) == 2
    said = capsys.readouterr()
    assert "pip install 'jpaged[bench]'" in said.err
    assert not said.out


def test_help_suffices_and_imports_no_jax():
    code = (
        "import sys; from jpaged.cli import main\n"
        "try: main(['simulate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for word in ("--cost-model", "--trace", "lognormal:MEAN:SPREAD", "prefix-affine", "onoff:ON:OFF"):
        assert word in done.stdout


def test_bench_steps_writes_what_simulate_reads(tmp_path, capsys):
    path = tmp_path / "model.json"
    words = ["demo", "--max-model-len", "96", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
    words += ["--row-buckets", "8", "--token-buckets", "32", "--repeats", "1", "--output-json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "jpaged", "bench", "steps", *words], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "Coefficients, seconds:" in done.stdout
    data = json.loads(path.read_text())
    assert min(data["seconds"].values()) >= 0
    assert max(data["seconds"].values()) > 0
    assert data["machine"]["jax"]
    assert {step["case"].split(": ")[1] for step in data["steps"]} == {"decode", "chunk"}
    assert data["engine"]["token_buckets"] == [32]
    assert run("--cost-model", str(path), "--rate", "inf", "--num-requests", "9", "--prompt-tokens", "30") == 0
    assert "demo measured on cpu" in capsys.readouterr().out
