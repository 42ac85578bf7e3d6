"""The suite that compares jpaged with peers on CPU: statements, the document from recorded runs, options, processes."""

import hashlib
import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks/peers"))
import common
import make_workload
import run
from suite import plans, report, session
from suite.compare import Statement, compare
from suite.configurations import CONFIGURATIONS, Installation

pytestmark = pytest.mark.slow  # no default test: the engine does not depend on it

JPAGED = CONFIGURATIONS[0]
MACHINE = {"processor": "A", "features": "avx2", "cpus": 2, "memory_gib": 8.0, "system": "Linux 6"}


@pytest.mark.parametrize(
    ("ours", "statement", "higher_is_better"),
    [
        ([120, 121, 130], Statement.AHEAD, True),
        ([120, 121, 130], Statement.BEHIND, False),
        ([80, 81, 82], Statement.BEHIND, True),
        ([80, 81, 82], Statement.AHEAD, False),
        ([101, 103, 104], Statement.EVEN, True),   # ranges apart, medians 3% apart
        ([98, 120, 130], Statement.EVEN, True),    # medians 20% apart, ranges overlap
        ([70, 80, 101], Statement.EVEN, True),
    ],
)  # fmt: skip
def test_statement(ours, statement, higher_is_better):
    peers = {"good": [99.0, 100.0, 100.5], "bad": [1.0] if higher_is_better else [1000.0], "absent": []}
    found = compare(ours, peers, higher_is_better=higher_is_better)
    assert found is not None
    assert (found.best_name, found.statement) == ("good", statement)
    assert found.ratio == ours[1] / 100


def test_no_comparison_without_both_sides():
    assert compare([], {"peer": [1.0]}, higher_is_better=True) is None
    assert compare([1.0], {"peer": []}, higher_is_better=True) is None


def record(configuration, **fields):
    about = {"session": "2026-11-23T09:00:00", "commit": "abc", "machine": MACHINE, "version": f"{configuration} 1"}
    return {"configuration": configuration, "model": "tiny-llama-60m", "others_cpu": 0.0, **about, **fields}


def write_lines(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def document(folder):
    report.write(folder, folder / "performance.md")
    return (folder / "performance.md").read_text()


def test_document_of_throughput(tmp_path):
    def w1(name, rate, **fields):
        figures = {"output_tok_s": rate, "first_token_ms": 2e3 / rate, "token_gap_ms": 1e3 / rate, "peak_rss_mib": 100}
        return record(name, workload="W1", **{**figures, **fields})

    records = [w1("jpaged bf16", rate) for rate in (200.0, 210.0, 220.0)]
    records += [w1("openvino fp16", rate) for rate in (150.0, 140.0, 160.0)]
    records += [w1("openvino fp16", 900.0, others_cpu=0.5)]  # noisy, and there are quiet runs
    records += [w1("vllm bf16", 100.0, others_cpu=0.5)]
    records += [record("jpaged int8", workload="W1", skipped="no option")]
    records += [record("llamacpp bf16", workload="W1", failed="exit status 1")]
    write_lines(tmp_path / "cpu_suite.jsonl", records)
    text = document(tmp_path)
    assert (
        "| tiny-llama-60m | W1 | bf16 | output tokens/s | 210.0 (200.0 to 220.0) "
        "| openvino fp16: 150.0 (140.0 to 160.0) | 1.40 | ahead |" in text
    )
    assert "| openvino fp16: 13.3 (12.5 to 14.3) | 0.71 | ahead |" in text  # the first token: less is better
    assert "| openvino fp16: 100 (100 to 100) | 1.00 | even |" in text
    assert r"| vllm bf16\* | 100.0 (1 run) |" in text
    assert "- jpaged int8, tiny-llama-60m, W1: skipped: no option" in text
    assert "- llamacpp bf16, tiny-llama-60m, W1: failed: exit status 1" in text
    assert "A (avx2), 2 CPUs" in text
    assert (tmp_path / "performance_cpu.png").stat().st_size > 1000
    assert not (tmp_path / "performance_scaling.png").exists()


def test_machines_are_not_mixed(tmp_path, monkeypatch):
    other = MACHINE | {"processor": "B"}
    records = [record("jpaged bf16", workload="W2", output_tok_s=rate) for rate in (50.0, 60.0)]
    records += [record("vllm bf16", workload="W2", output_tok_s=55.0)]
    records += [each | {"machine": other, "output_tok_s": 10 * each["output_tok_s"]} for each in records]
    results = tmp_path / "cpu_suite.jsonl"
    write_lines(results, records)
    text = document(tmp_path)
    assert "memory: A (avx2), 2 CPUs" in text
    assert "memory: B (avx2), 2 CPUs" in text
    assert "55.0 (50.0 to 60.0) | vllm bf16: 55.0" in text
    assert "550.0 (500.0 to 600.0) | vllm bf16: 550.0" in text
    assert (tmp_path / "performance_cpu_2.png").exists()
    monkeypatch.setattr(run, "describe", lambda: other)
    run.forget(results)  # a new run on a machine replaces the results of that machine only
    assert {each["machine"]["processor"] for each in map(json.loads, results.read_text().splitlines())} == {"A"}


def test_document_of_starts(tmp_path):
    def start(name, kind, seconds):
        figures = {"to_first_token_s": seconds, "cpu_to_first_token_s": seconds, "process_cpu_s": 2 * seconds}
        return record(name, start=kind, **figures)

    command = record("jpaged generate --model demo", start="cold", process_wall_s=30.04, process_cpu_s=50.0)
    records = [start("jpaged bf16", "cold", 20.0), start("vllm bf16", "cold", 60.0), command | {"model": "demo"}]
    write_lines(tmp_path / "startup_suite.jsonl", records)
    text = document(tmp_path)
    assert "| cold | to the first token, s | 20.00 (1 run) | vllm bf16: 60.00 (1 run) | 0.33 | ahead |" in text
    assert "| `jpaged generate --model demo` | cold | 30.0 | 50.0 |" in text
    assert (tmp_path / "performance_startup.png").exists()


def test_document_of_recurrent_layers(tmp_path):
    records = [
        record(name, threads=threads, output_tok_s=threads * rate)
        for threads in (1, 2) for name, rate in (("jpaged bf16", 300.0), ("transformers bf16", 60.0))
    ]  # fmt: skip
    write_lines(tmp_path / "recurrent_suite.jsonl", records)
    row = "| tiny-llama-60m | 2 | output tokens/s | 600.0 (1 run) | transformers bf16: 120.0 (1 run) | 5.00 | ahead |"
    assert row in document(tmp_path)


def test_document_of_steps(tmp_path):
    def steps(name, threads, factor):
        points = [
            {"rows": rows, "keys": keys, "keys_read": keys + 16, "others_cpu": 0.0,
             "step_ms": factor * (2.0 + 50e-6 * rows * (keys + 16))}
            for rows in (1, 4) for keys in (64, 1024, 8192)
        ]  # fmt: skip
        return record(name, threads=threads, steps=points)

    records = [steps("jpaged bf16", 1, 2.0), steps("jpaged bf16", 2, 1.0), steps("vllm bf16", 2, 1.0)]
    write_lines(tmp_path / "scaling_suite.jsonl", records)
    text = document(tmp_path)
    assert "| 2 | 4 | 8,192 | decode step, ms | 3.64 (1 run) | vllm bf16: 3.64 (1 run) | 1.00 | even |" in text
    assert "| 1 | 4.00 | 100 | 0% |" in text  # the fitted line
    assert "| 2 | 2.00 | 50 | 0% |" in text
    assert (tmp_path / "performance_scaling.png").exists()


def test_document_without_results(tmp_path):
    assert "Nothing is recorded yet." in document(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs either --suite or --report"),
        (["--report", "--suite", "cpu"], "needs either --suite or --report"),
        (["--suite", "cpu"], "--suite needs --peers"),
        (["--suite", "cpu", "--peers", "absent"], "has no workload.json"),
        (["--suite", "gpu"], "invalid choice: 'gpu'"),
        (["--suite", "cpu", "--peers-only", "tgi"], "invalid choice: 'tgi'"),
        (["--report", "--rounds", "0"], "'0' is not a positive whole number"),
        (["--report", "--results", "absent"], "--results absent: is not a folder"),
    ],
)
def test_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run.parse(run.make_parser(), arguments)
    assert message in capsys.readouterr().err


def test_report_alone_measures_nothing(tmp_path):
    arguments = ["--report", "--results", str(tmp_path), "--document", str(tmp_path / "performance.md")]
    assert run.main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["performance.md"]


def test_peers_of_a_choice():
    def names(**fields):
        return [each.name for each in plans.Choice(**fields).configurations(("bf16", "int8"))]

    assert names(peers=("vllm",)) == ["jpaged bf16", "vllm bf16", "jpaged int8"]
    assert names(peers=()) == ["jpaged bf16", "jpaged int8"]


def test_slow_peers_are_not_repeated():
    def slow(*runs):
        fields = ("configuration", "output_tok_s", "seconds")
        return plans.not_repeated([dict(zip(fields, each, strict=True)) for each in runs])

    fast, half, short = ("vllm bf16", 100, 40), ("llamacpp bf16", 49, 80), ("transformers bf16", 49, 29)
    assert slow(fast, half, short, ("jpaged bf16", 1, 900)) == {"llamacpp bf16"}
    assert slow(half, ("jpaged bf16", 1000, 900)) == set()
    assert slow() == set()


class Runs(Installation):
    """Runs a line of Python in place of each runner."""

    def missing(self, configuration, model):
        return None

    def command(self, configuration, model, *arguments):
        return [sys.executable, "-c", *arguments]


@pytest.mark.parametrize(
    ("code", "broken", "recorded"),
    [
        ("print('{\"output_tok_s\": 5.0}')", 0, {"output_tok_s": 5.0}),
        ("print('{\"skipped\": \"old\"}')", 0, {"skipped": "old"}),
        ("import sys; sys.exit('bad lengths')", 1, {"failed": "exit status 1: bad lengths"}),
        ("import time; time.sleep(60)", 1, {"failed": "not done after 1 s"}),
        (
            "print('{\"compiles_after_ready\": 2}')", 1,
            {"failed": "2 programs were compiled after the engine was ready"},
        ),
    ],
)  # fmt: skip
def test_runs_are_recorded(tmp_path, code, broken, recorded):
    limits = session.Conditions(max_others=1.0, quiet_wait=0.0, timeout=1.0)
    made = session.Session("cpu", tmp_path / "cpu_suite.jsonl", Runs(tmp_path, tmp_path), limits)
    found = made.measure(JPAGED, "tiny-llama-60m", [code], workload="W1", round=1)
    (line,) = made.results.read_text().splitlines()
    written = json.loads(line)
    assert recorded.items() <= written.items()
    assert (written["configuration"], written["workload"], written["round"]) == ("jpaged bf16", "W1", 1)
    assert (found is None) == ("output_tok_s" not in recorded)
    assert session.exit_status(made) == broken


def test_a_cold_run_starts_without_stored_programs(tmp_path):
    limits = session.Conditions(max_others=1.0, quiet_wait=0.0)
    made = session.Session("startup", tmp_path / "startup_suite.jsonl", Runs(tmp_path, tmp_path), limits)
    code = (
        "import json, os, pathlib; folder = pathlib.Path(os.environ['XDG_CACHE_HOME']);"
        "print(json.dumps({'found': (folder / 'program').exists()}));"
        "folder.mkdir(exist_ok=True); (folder / 'program').touch()"
    )
    found = [
        made.measure(JPAGED, "tiny-llama-60m", [code], session.Caches(tmp_path / "caches", cold))
        for cold in (True, False, True)
    ]
    assert [each and each["found"] for each in found] == [False, True, False]


class Counting(common.Engine):
    """Returns the numbers 0, 1, 2 ... for each request, all rows together."""

    def __init__(self, missing=0):
        self.missing = missing

    def generate(self, requests, arrivals):
        lengths = [request.output_len - self.missing for request in requests]
        for step in range(max(lengths)):
            for row, length in enumerate(lengths):
                if step < length:
                    arrivals.add(row)
        return [list(range(length)) for length in lengths]


def test_a_runner_counts_tokens_and_times_steps():
    requests = [common.Request([5], 128)]
    figures = common.time_workload(Counting(), [], requests)
    assert figures["output_tokens"] == 128
    assert 0 < figures["token_gap_ms"] < figures["first_token_ms"] + figures["seconds"] * 1e3
    with pytest.raises(SystemExit, match=r"output lengths are \[127\], the requests ask for \[128\]"):
        common.time_workload(Counting(missing=1), [], requests)
    step = common.time_steps(Counting(), 4, 64)
    assert (step["rows"], step["keys"], step["keys_read"]) == (4, 64, 80)
    assert step["step_ms"] > 0


def test_prompts_of_a_row_extend_each_other():
    assert common.row_prompt(3, 64) == common.row_prompt(3, 512)[:64]
    assert common.row_prompt(3, 64) != common.row_prompt(4, 64)


def test_workloads_are_the_same_everywhere():
    text = json.dumps(make_workload.workloads())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "19fc419914775abb"
