"""`jpaged simulate` and `jpaged bench steps`: their output, their files and their errors."""

import json
import subprocess
import sys

import pytest

from jpaged import cli
from jpaged.simulator.cost import SHIPPED

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


def test_policies_limits_and_a_host_tier(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    words = ["--scheduling-policy", "priority", "--priorities", "0:2,1:1", "--max-num-partial-prefills", "2",
             "--target-step-ms", "9", "--max-queued-requests", "8", "--max-queued-tokens", "300", "--num-blocks", "32",
             "--host-blocks", "64", "--seconds-per-move", "2e-5", "--rate", "200",
             "--output-json", str(figures)]  # fmt: skip
    assert run(*HAND, *LOAD, *words) == 0
    printed = capsys.readouterr().out
    assert "Policy:                  priority\n" in printed
    assert "Host tier:               64 blocks" in printed
    assert "2e-05 s a moved block given by hand" in printed
    data = json.loads(figures.read_text())
    assert data["scheduling"] == {
        "scheduling_policy": "priority", "max_num_partial_prefills": 2, "target_step_ms": 9.0,
        "max_queued_requests": 8, "max_queued_tokens": 300,
    }  # fmt: skip
    assert data["finished_requests"] + data["refused_requests"] == 50
    assert data["refused_requests"] > 0
    assert data["blocks_to_host"] > 0


def test_a_host_tier_in_gib(tmp_path, capsys):
    """The measured engine has blocks of 64 KiB. Here they are twice as large: 8192 blocks per GiB."""
    path = tmp_path / "model.json"
    engine = {"num_blocks": 256, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "windows": [None],
              "max_model_len": 512, "row_buckets": [], "token_buckets": [], "block_bytes": 65536}  # fmt: skip
    step = {"tokens": 1, "rows": 1, "kv_tokens": 1, "prompt_pairs": 1, "moved_blocks": 0}
    names = ("fixed", "per_token", "per_row", "per_kv_token", "per_prompt_pair", "per_moved_block")
    seconds = {**dict.fromkeys(names, 1e-5), "fixed": 5e-3}
    path.write_text(json.dumps(
        {"format": 1, "origin": "a test", "seconds": seconds, "engine": engine, "steps": [step]}
    ))  # fmt: skip
    assert run("--cost-model", str(path), *LOAD, "--swap-space", "1", "--block-size", "32") == 0
    assert "Host tier:               8,192 blocks" in capsys.readouterr().out
    assert run("--cost-model", str(path), *LOAD, "--swap-space", "1", "--seconds-per-move", "1") == 0
    assert "Host tier:               none: moving a block both ways takes longer" in capsys.readouterr().out


def test_priorities_of_a_trace_are_used_or_a_note_is_printed(tmp_path, capsys):
    trace = tmp_path / "day.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens,priority\n0,10,5,0\n1,20,6,1\n")
    assert run(*HAND, "--trace", str(trace)) == 0
    assert "have an effect with --scheduling-policy priority only" in capsys.readouterr().out
    assert run(*HAND, "--trace", str(trace), "--scheduling-policy", "priority") == 0
    assert "only" not in capsys.readouterr().out


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


TENSOR = ["--link-bandwidth", "100e9", "--link-latency", "1e-6", "--num-layers", "4", "--hidden-bytes", "8192"]


@pytest.mark.parametrize("devices", [2, 8])
def test_tensor_parallelism_divides_the_steps_and_adds_all_reduces(devices, tmp_path, capsys):
    """One request at a time: steps of its prompt of 64 tokens, and of one token each. All times are known."""
    load = ["--rate", "inf", "--concurrency", "1", "--num-requests", "3", "--prompt-tokens", "64", "--output-tokens",
            "11", "--output-json", str(tmp_path / "figures.json")]  # fmt: skip
    assert run(*HAND, *load, *TENSOR, "--tensor-parallel-size", str(devices)) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "figures.json").read_text())

    def reduced(tokens: int) -> float:
        array = tokens * 8192 / 100e9
        one_shot = (devices - 1) * array + 1e-6
        ring = 2 * (devices - 1) * (array / devices + 1e-6)
        return 9 * min(one_shot, ring)

    computed = 11 * 5e-3 + (64 + 10) * 1e-5
    between = reduced(64) + 10 * reduced(1)
    assert data["steps"] >= 33
    assert data["duration"] == pytest.approx(3 * (computed / devices + between), rel=1e-9)
    assert data["between_devices"] == pytest.approx(between / (computed / devices + between), rel=1e-9)
    assert data["engine"]["num_devices"] == data["cost_model"]["all_reduces"]["num_devices"] == devices
    assert f"predicted for {devices} devices: divided by {devices}, and all-reduces added" in printed
    assert f"9 all-reduces a step over {devices} devices, at 100 GB/s and 1 us a step" in printed
    assert f"Engine:                  1 x {devices} devices, 256 rows" in printed


def test_a_measured_model_brings_its_sizes(tmp_path, capsys):
    """demo-cpu: 6 layers, 256 float32 numbers a token. A model of several devices is not divided again."""
    load = ["--rate", "9", "--num-requests", "9", "--prompt-tokens", "30", "--data-parallel-size", "2"]
    words = [*load, "--tensor-parallel-size", "2", "--link-bandwidth", "1e9", "--link-latency", "1e-5"]
    figures = tmp_path / "figures.json"
    assert run("--cost-model", "demo-cpu", *words, "--output-json", str(figures)) == 0
    printed = capsys.readouterr().out
    assert "demo measured on cpu" in printed
    assert "predicted for 2 devices" in printed
    assert "2 x 2 devices, 32 rows" in printed
    data = json.loads(figures.read_text())
    assert (data["num_replicas"], data["engine"]["block_bytes"]) == (2, 49152)
    assert data["cost_model"]["all_reduces"]["count"] == 13
    assert data["cost_model"]["all_reduces"]["hidden_bytes"] == 1024
    measured = json.loads((SHIPPED / "demo-cpu.json").read_text())
    assert data["cost_model"]["per_token"] == pytest.approx(measured["seconds"]["per_token"] / 2)
    measured["engine"]["num_devices"] = 4
    path = tmp_path / "four.json"
    path.write_text(json.dumps(measured))
    assert run("--cost-model", str(path), *load) == 0
    assert "predicted" not in capsys.readouterr().out
    assert run("--cost-model", str(path), *words) == 2
    assert "measured on 4 devices and holds for them: leave it out" in capsys.readouterr().err


def test_the_shipped_model_names_its_engine(capsys):
    assert run("--cost-model", "demo-cpu", "--rate", "5", "--num-requests", "20", "--prompt-tokens", "30") == 0
    printed = capsys.readouterr().out
    assert "Cost model:              demo measured on cpu" in printed
    assert "1 x 32 rows, 512 tokens a step" in printed


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "jpaged: cost_model"),
        (["--cost-model", "nowhere.json"], "no such file"),
        (["--cost-model", "fixed=1"], "jpaged: num_blocks"),
        ([*HAND], "jpaged: rate"),
        ([*HAND, "--rate", "-1"], "jpaged: rate"),
        ([*HAND, *LOAD, "--num-blocks", "3"], "needs 32"),
        ([*HAND, *LOAD, "--max-num-seqs", "0"], "jpaged: max_num_seqs"),
        ([*HAND, *LOAD, "--arrivals", "often"], "jpaged: arrivals"),
        ([*HAND, *LOAD, "--prefixes", "2"], "jpaged: prefix_tokens"),
        ([*HAND, *LOAD, "--output-json", "/nowhere/x.json"], "output_json"),
        ([*HAND, *LOAD, "--plot", "/nowhere/x.png"], "jpaged: plot"),
        ([*HAND, *LOAD, "--plot", "x.xyz"], "one of"),
        ([*HAND, *LOAD, "--trace", "x.csv"], "num_requests is for generated loads: leave it out with --trace, got 50"),
        ([*HAND, "--trace", "/nowhere/x.csv"], "cannot be read"),
        ([*HAND, *LOAD, "--target-step-ms", "0"], "jpaged: target_step_ms"),
        ([*HAND, *LOAD, "--max-num-partial-prefills", "0"], "jpaged: max_num_partial_prefills"),
        ([*HAND, *LOAD, "--max-queued-requests", "0"], "jpaged: max_queued_requests"),
        ([*HAND, *LOAD, "--max-queued-tokens", "-5"], "jpaged: max_queued_tokens"),
        ([*HAND, *LOAD, "--priorities", "0:1,2:1"], "have an effect with --scheduling-policy priority only"),
        ([*HAND, *LOAD, "--priorities", "high:1"], "'high' is not a number"),
        ([*HAND, *LOAD, "--priorities", "1:1,1:2"], "each once"),
        ([*HAND, *LOAD, "--host-blocks", "9"], "give --seconds-per-move"),
        ([*HAND, *LOAD, "--host-blocks", "-9", "--seconds-per-move", "1e-5"], "jpaged: host_blocks"),
        ([*HAND, *LOAD, "--host-blocks", "9", "--seconds-per-move", "0"], "jpaged: seconds_per_move"),
        ([*HAND, *LOAD, "--host-blocks", "9", "--swap-space", "1"], "give one of them"),
        ([*HAND, *LOAD, "--swap-space", "1", "--seconds-per-move", "1e-5"], "give --host-blocks"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "0"], "jpaged: tensor_parallel_size"),
        ([*HAND, *LOAD, *TENSOR], "above 1: leave it out, got "),
        ([*HAND, *LOAD, "--num-layers", "4"], "above 1: leave it out, got 4"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "2"], "jpaged: link_bandwidth"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "2", *TENSOR[:2]], "jpaged: link_latency"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "2", *TENSOR[:4]], "num_layers: the cost model does not contain it"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "2", *TENSOR[:6]], "hidden_bytes: the cost model"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "2", *TENSOR, "--num-layers", "0"], "at least 1, got 0"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "2", *TENSOR, "--link-bandwidth", "0"], "jpaged: link_bandwidth"),
        ([*HAND, *LOAD, "--tensor-parallel-size", "2", *TENSOR, "--link-latency", "-1"], "jpaged: link_latency"),
        ([*HAND, *LOAD, "--swap-space", "-1", "--seconds-per-move", "1e-5"], "jpaged: swap_space"),
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
    assert "pip install matplotlib" in said.err
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


@pytest.mark.slow
def test_bench_steps_writes_what_simulate_reads(tmp_path, capsys):
    path = tmp_path / "model.json"
    words = ["demo", "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    words += ["--row-buckets", "8", "--token-buckets", "64", "--repeats", "1", "--output-json", str(path)]
    assert cli.main(["bench", "steps", *words]) == 0
    assert "Coefficients, seconds:" in capsys.readouterr().out
    data = json.loads(path.read_text())
    assert min(data["seconds"].values()) >= 0
    assert max(data["seconds"].values()) > 0
    assert data["machine"]["jax"]
    assert {step["case"].split(": ")[1] for step in data["steps"]} == {"decode", "chunk"}
    assert data["engine"]["token_buckets"] == [64]
    engine = data["engine"]
    assert (engine["num_devices"], engine["num_layers"]) == (1, 6)
    # a hidden state is 256 numbers, and so are the keys and values of a token in a layer
    assert engine["block_bytes"] == engine["block_size"] * 6 * engine["hidden_bytes"]
    assert run("--cost-model", str(path), "--rate", "inf", "--num-requests", "9", "--prompt-tokens", "30") == 0
    assert "demo measured on cpu" in capsys.readouterr().out
