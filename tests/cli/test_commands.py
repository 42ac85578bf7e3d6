"""The commands on the demo model: their output, and their --output-json.

One command runs in its own process, as a user starts it. The others run in this process, to save the start of Python.
"""

import ast
import io
import json
import subprocess
import sys

import pytest

from jpaged import cli
from jpaged.cli.bench.speculation import median_interval

SMALL = ["--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
SMALL += ["--row-buckets", "8", "--token-buckets", "64"]


@pytest.fixture
def jpaged(capsys):
    """Run a command with small programs in this process; return what it prints."""

    def run(*args: str) -> str:
        status = cli.main([*args, *SMALL])
        said = capsys.readouterr()
        assert status == 0, said.err
        return said.out

    return run


def refused(capsys, *args: str) -> str:
    """Run a command that must be refused; return the last line that it prints to stderr."""
    assert cli.main([*args, *SMALL]) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_generate(tmp_path):
    path = tmp_path / "answers.json"
    prompts = ["def read_json(path):", "import os\n", "[bold]x[/bold] = [1, 2]"]
    command = [sys.executable, "-m", "jpaged", "generate", "demo", *prompts, "--max-tokens", "9", "--logprobs", "2"]
    command += ["--output-json", str(path), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert [output["prompt"] for output in report["outputs"]] == prompts  # in the order of the prompts
    for output in report["outputs"]:
        assert output["prompt"] + output["text"] in done.stdout  # unchanged: no text is read as markup
        assert len(output["token_ids"]) == len(output["logprobs"]) <= 9
    assert "tokens/s" in done.stdout
    assert "KV cache: peak" in done.stdout
    assert report["stats"]["compiles_after_ready"] == 0
    assert report["machine"]["jax"]


@pytest.mark.slow
def test_the_first_answers_are_python_without_repetitions(tmp_path, jpaged):
    path = tmp_path / "answers.json"
    jpaged("generate", "--model", "demo", "--output-json", str(path))
    for output in json.loads(path.read_text())["outputs"]:
        ast.parse(output["prompt"] + output["text"])
        assert output["finish_reason"] == "stop"
        lines = [line for line in output["text"].splitlines() if line.strip()]
        assert len(set(lines)) == len(lines) >= 2


@pytest.mark.slow
def test_generate_several_answers(tmp_path, jpaged):
    path = tmp_path / "answers.json"
    words = ["generate", "demo", "def f(x):", "import os\n", "--max-tokens", "6", "--output-json", str(path)]
    said = jpaged(*words, "--n", "2", "--best-of", "3", "--temperature", "1", "--sampling-seed", "3")
    report = json.loads(path.read_text())
    assert [(o["prompt_index"], o["index"]) for o in report["outputs"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert report["output_tokens"] == sum(len(output["token_ids"]) for output in report["outputs"])
    for best, next_best in zip(report["outputs"][::2], report["outputs"][1::2], strict=True):
        assert best["cumulative_logprob"] >= next_best["cumulative_logprob"]
    for output in report["outputs"]:
        shown = f"{output['prompt']}{output['text']}\n── answer {output['index'] + 1} of 2: "
        assert shown + f"{len(output['token_ids'])} tokens, {output['finish_reason']}" in said
    beams = ["--use-beam-search", "--beam-width", "4", "--n", "2", "--early-stopping", "never", "--length-penalty", "0"]
    jpaged(*words, *beams)
    found = json.loads(path.read_text())["outputs"]
    assert [(o["prompt_index"], o["index"]) for o in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[0]["cumulative_logprob"] >= found[1]["cumulative_logprob"]


@pytest.mark.slow
def test_generate_json(tmp_path, jpaged):
    path, schema = tmp_path / "answers.json", tmp_path / "schema.json"
    numbers = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    schema.write_text(json.dumps(numbers | {"additionalProperties": False}))
    flags = ["--json-schema", str(schema), "--stop", "zebra", "--max-tokens", "60", "--output-json", str(path)]
    jpaged("generate", "demo", "A number: ", *flags)
    (answer,) = json.loads(path.read_text())["outputs"]
    assert json.loads(answer["text"])["n"] in (1, 22)


def test_generate_refuses_a_bad_prompt(capsys):
    assert refused(capsys, "generate", "--model", "demo", "x", "", "y") == "jpaged: prompt must not be empty, got ''"


def test_chat_reads_lines_until_they_end(monkeypatch, jpaged):
    monkeypatch.setattr(sys, "stdin", io.StringIO("import\n\n/clear\nimport\n/exit\nx\n"))
    said = jpaged("chat", "demo", "--max-tokens", "5", "--temperature", "0")
    half = len(said) // 2
    assert said[:half] == said[half:] != ""  # two equal answers: /clear forgot the first


TOTALS = ["--dataset-name", "random-total", "--total-len-min", "40", "--total-len-max", "90"]


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [[], pytest.param(TOTALS, marks=pytest.mark.slow)])
def test_bench_throughput(tmp_path, dataset, jpaged):
    path = tmp_path / "figures.json"
    sizes = dataset or ["--input-len", "20", "--output-len", "10"]
    said = jpaged("bench", "throughput", "demo", *sizes, "--num-prompts", "10", "--output-json", str(path))
    figures = json.loads(path.read_text())
    assert "Throughput: " in said
    assert "KV waste: " in said
    assert figures["num_requests"] == 10
    assert figures["total_num_tokens"] == figures["prompt_tokens"] + figures["output_tokens"]
    assert figures["requests_per_second"] == pytest.approx(10 / figures["elapsed_time"])
    assert 0 <= figures["kv_waste"] < 1
    assert figures["compiles_after_ready"] == 0
    if not dataset:
        assert (figures["prompt_tokens"], figures["output_tokens"]) == (200, 100)


@pytest.mark.slow
def test_bench_startup(tmp_path, jpaged):
    path = tmp_path / "figures.json"
    said = jpaged("bench", "startup", "demo", "--output-json", str(path))
    figures = json.loads(path.read_text())
    cold, [warm] = figures["cold"], figures["warm"]
    for start in (cold, warm):
        first, ready = (start["events"][name]["wall"] for name in ("first token", "all programs"))
        assert 0 < first <= ready
        phases = {name: wall for name, wall, cpu in start["phases"]}
        assert {"imports", "weights and tokenizer", "step programs", "KV pool"} < set(phases)
        assert sum(phases[name] for name in ("imports", "weights and tokenizer", "step programs")) < first
    assert cold["work"]["trace"] > 3 * warm["work"]["trace"]  # programs were stored
    assert cold["work"]["compile"] > 3 * warm["work"]["compile"]
    for name in ("step programs", "from start to first token", "sum of lowering", "Machine: "):
        assert name in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--warm-starts", "0"], "warm_starts"),
        (["--compilation-cache-dir", "/tmp/x"], "leave it out"),
        (["--block-size", "24"], "the engine did not start: "),
    ],
)
def test_bench_startup_refuses(words, message, capsys):
    assert message in refused(capsys, "bench", "startup", "demo", *words)


@pytest.mark.slow
def test_bench_speculation(tmp_path, jpaged):
    path, plot = tmp_path / "figures.json", tmp_path / "speculation.png"
    words = ["--spec-method", "ngram", "--batch-sizes", "1", "3", "--output-len", "24", "--pairs", "2"]
    said = jpaged("bench", "speculation", "demo", *words, "--output-json", str(path), "--plot", str(plot))
    rows = json.loads(path.read_text())["results"]
    assert [(row["text"], row["batch_size"]) for row in rows] == [(t, n) for t in ("free", "repeated") for n in (1, 3)]
    assert all(row["speedup_low"] <= row["speedup"] <= row["speedup_high"] for row in rows)
    assert all(0 <= row["acceptance"] <= 1 and row["steps_ratio"] >= 1 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Machine: " in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "speculative_config"),
        (["--spec-method", "ngram", "--batch-sizes", "0"], "batch_sizes"),
        (["--spec-method", "ngram", "--pairs", "0"], "pairs"),
    ],
)
def test_bench_speculation_refuses(words, message, capsys):
    assert message in refused(capsys, "bench", "speculation", "demo", *words)


def test_the_interval_of_a_median_is_that_of_the_binomial_distribution():
    assert [median_interval(count) for count in (1, 5, 6, 10, 20)] == [(0, 0), (0, 4), (0, 5), (1, 8), (5, 14)]


def test_bench_latency(tmp_path, jpaged):
    path = tmp_path / "figures.json"
    words = ["bench", "latency", "demo", "--input-len", "8", "--output-len", "4", "--batch-size", "3"]
    said = jpaged(*words, "--num-iters-warmup", "1", "--num-iters", "3", "--output-json", str(path))
    figures = json.loads(path.read_text())
    assert "Avg latency: " in said
    assert "99% percentile latency: " in said
    assert len(figures["latencies"]) == 3
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 3)
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_bench_refuses_requests_that_are_too_long(capsys):
    assert "more than the model's 256 tokens" in refused(capsys, "bench", "throughput", "demo", "--input-len", "250")
