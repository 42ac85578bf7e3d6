"""The kernel benchmarks run with small shapes, so that no time on a card is lost to errors in them."""

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
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""}
    return subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True, text=True).stdout


def test_tuning_writes_what_the_kernels_read(tmp_path):
    run("tune_kernels", "--file", tmp_path / "tuning.json")
    (shapes,) = json.loads((tmp_path / "tuning.json").read_text()).values()
    ((key, entry),) = shapes.items()
    assert key == "q bfloat16, pages bfloat16, head_dim 16, q_per_kv 2, block 16"
    assert Tiling(**entry["tiling"]).decode_keys in (32, 64)


def test_steps_are_measured_once(tmp_path):
    """A second run finds every case in the file."""
    file = tmp_path / "steps.jsonl"
    printed = run("steps", "--out", file)
    lines = file.read_text().splitlines()
    results = [json.loads(line)["result"] for line in lines[1:]]
    assert [result["step"] for result in results] == [*["decode, greedy", "decode, random"] * 2, "chunk of 32"]
    assert all(result["seconds"] and not result["error"] for result in results)
    assert printed.count("tiny ") == 5
    assert run("steps", "--out", file) == printed
    assert file.read_text().splitlines() == lines


def test_the_benchmark_checks_and_measures(tmp_path):
    printed = run("kernels", "--implementation", "triton", "--out", tmp_path)
    assert printed.count("us") >= 10
    (file,) = tmp_path.glob("rehearsal-cpu-*.json")
    record = json.loads(file.read_text())
    assert record["tiny"]
    assert all(isinstance(found, dict) for found in record["checks"].values())
    timed = {name: entry["seconds"] for name, entry in record["attention"].items()} | {"write": record["write"]}
    assert len(timed) == 9
    for name, results in timed.items():
        assert all(isinstance(times, list) for times in results.values()), (name, results)
