"""The kernel benchmarks run with small shapes, so that errors in them waste no time on a GPU."""

import json
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.paged_attention.tiling import Tiling

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(script, *arguments):
    command = [sys.executable, f"benchmarks/{script}.py", "--tiny", "--repeats", "1", *map(str, arguments)]
    # Level 0: nearly all of the time is compiling, and the times found mean nothing here.
    flags = "--xla_backend_optimization_level=0"
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "", "XLA_FLAGS": flags}
    return subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True, text=True).stdout


@pytest.mark.soak  # 90 s of compiling
def test_tuning_writes_what_the_kernels_read(tmp_path):
    printed = run("tune_kernels", "--file", tmp_path / "tuning.json", "--gated-file", tmp_path / "gated.json")
    assert "prefill_kernel='mosaic_gpu'): head_dim=16: must be 64, 128 or 256" in printed  # a candidate, which refuses
    (shapes,) = json.loads((tmp_path / "tuning.json").read_text()).values()
    ((key, entry),) = shapes.items()
    assert key == "q bfloat16, pages bfloat16, head_dim 16, q_per_kv 2, block 16"
    assert Tiling(**entry["tiling"]).decode_keys in (32, 64)
    (products,) = json.loads((tmp_path / "gated.json").read_text()).values()
    ((key, by_rows),) = products.items()
    assert key == "bfloat16, 32 -> 48"
    (entry,) = by_rows.values()
    assert entry["time_of_xla"] > 0
    assert (entry["tiling"] is None) == (entry["time_of_xla"] >= 0.98)


def test_steps_are_measured_once(tmp_path):
    """A second run finds every case in the file."""
    file = tmp_path / "steps.jsonl"
    printed = run("steps", "--out", file)
    lines = file.read_text().splitlines()
    results = [json.loads(line)["result"] for line in lines[1:]]
    assert [result["step"] for result in results] == [*["decode, greedy", "decode, random"] * 2, "chunk of 32"]
    assert all(result["seconds"] and not result["error"] for result in results)
    assert printed.count("tiny ") == 5
    assert "a rehearsal: the figures mean nothing" in printed
    assert run("steps", "--out", file) == printed
    assert file.read_text().splitlines() == lines
    file.write_text(file.read_text().replace('"device": "cpu"', '"device": "NVIDIA H200"'))
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run("steps", "--out", file)
    assert raised.value.stderr.rstrip().endswith("True): name another file")  # limits of one card, times of another
    file.write_text('{"card"')
    for wrong, message in ((file, "a line that is not JSON"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(subprocess.CalledProcessError) as raised:
            run("steps", "--report", wrong)
        assert message in raised.value.stderr
        assert "Traceback" not in raised.value.stderr


def test_products_of_quantised_weights_are_checked_and_measured(tmp_path):
    printed = run("quantized_kernels", "--out", tmp_path / "products.json")
    record = json.loads((tmp_path / "products.json").read_text())
    assert len(record["checks"]) == 12 + 4 + 1
    assert all(found["ok"] for found in record["checks"])
    assert len(record["times"]) == 1 + 6
    assert all(isinstance(times["seconds"]["1"], list) for times in record["times"].values())
    assert printed.count("Tflop/s") == 7


@pytest.mark.soak  # 160 s of compiling
def test_the_benchmark_checks_and_measures(tmp_path):
    printed = run("kernels", "--implementation", "triton", "--out", tmp_path)
    assert printed.count("name a copy of vLLM's triton_unified_attention.py with --vllm-attention") == 6
    assert printed.count("needs an NVIDIA GPU") == 4
    assert printed.count("us") >= 10
    (file,) = tmp_path.glob("rehearsal-cpu-*.json")
    record = json.loads(file.read_text())
    assert record["tiny"]
    assert all(isinstance(found, dict) for found in record["checks"].values())
    timed = {name: entry["seconds"] for name, entry in record["attention"].items()} | {"write": record["write"]}
    assert len(timed) == 9
    assert [*record["gated"]] == ["gated_dot, 3 rows, 32 to 2 x 48"]
    timed |= record["gated"]
    for name, results in timed.items():
        ours = {peer: times for peer, times in results.items() if not peer.startswith(("torch", "vLLM"))}
        assert all(isinstance(times, list) for times in ours.values()), (name, results)
