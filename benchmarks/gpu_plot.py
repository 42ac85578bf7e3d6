"""Draws docs/performance_gpu.png from the files of benchmarks/results that were measured on GPUs. Measures nothing.

    python benchmarks/gpu_plot.py      # needs matplotlib

Left: jpaged divided by vLLM on one H100, of `h100_beside_vllm.jsonl`. Middle: whole steps on an H200 as a share of the
limit, of `steps-h200.jsonl`. Right: prefill attention on the H100, with the prediction for the present kernel hatched.
"""

import json
import pathlib
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"qwen3-0.6b": "0.6B", "llama-3.1-8b": "8B"}
# Lower and upper end in us, by case: the matmuls alone, and the measured share of the matmul rate of the kernel's first
# version. See "Prefill attention" in docs/performance_gpu.md.
PREDICTED = {"prefill 2048 on 2048": (38, 101), "prefill 2048 on 8192": (256, 680)}
ATTENTION = {
    "jpaged triton": ("Triton", "C3"), "jpaged mosaic_prefill": ("Mosaic GPU, first version", "C1"),
    "vllm fa3": ("FlashAttention 3", "C2"),
}  # fmt: skip


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """All lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(number: int) -> str:
    """The number with its noun."""
    return f"{number} row{'s' * (number != 1)}"


def ratios(results: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(workload, jpaged divided by vLLM). Above 1 is in favour of jpaged."""
    figures: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in results:
        if one.get("engine") not in ("jpaged", "vllm"):
            continue
        what = {
            "throughput": "256 sequences", "latency": rows_of(one.get("rows", 0)),
            "ttft": f"first token of {one.get('prompt')}", "start": "start",
        }[one["figure"]]  # fmt: skip
        rate = one["output_tokens_per_s"] if "output_tokens_per_s" in one else 1 / one.get("ms", one.get("seconds"))
        figures.setdefault((MODELS[one["model"]], what), {}).setdefault(one["engine"], []).append(rate)
    for (model, what), of in figures.items():
        yield f"{model}: {what}", statistics.mean(of["jpaged"]) / statistics.mean(of["vllm"])


def shares(results: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(step, share of the limit in percent). The limit: bytes at the measured bandwidth, or matmuls at the rate."""
    card = results[0]["card"]
    for one in (line["result"] for line in results[1:]):
        if one["error"]:
            continue
        limit = max(one["least_bytes"] / card["copy_bytes_per_s"], one["flops"] / card["bf16_flops_per_s"])
        name = "chunk" if "chunk" in one["step"] else rows_of(one["rows"])
        model = MODELS.get(one["model"], one["model"])
        yield f"{model}: {name} of {one['context']:,}", 100 * limit / statistics.median(one["seconds"])


def bars(axes: Axes, values: Mapping[str, float], title: str, unit: str) -> None:
    """Horizontal bars, the first value at the top, each with its figure."""
    axes.set_title(title, fontsize="small")
    drawn = axes.barh(list(values), list(values.values()), color="C0")
    axes.bar_label(drawn, [f"{value:.2f}" if unit == "" else f"{value:.0f}{unit}" for value in values.values()],
                   fontsize="x-small", padding=2)  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(labelsize="x-small")
    axes.margins(x=0.12)


def attention(axes: Axes, results: list[dict[str, Any]]) -> None:
    """Times of prefill attention, by case and kernel. A prediction is a hatched range."""
    axes.set_title("prefill attention on an H100, µs\nmeasured; hatched: predicted", fontsize="small")
    labels: list[str] = []
    for case, (low, high) in PREDICTED.items():
        for engine, (name, colour) in ATTENTION.items():
            found = [one["us"] for one in results if (one.get("engine"), one.get("case")) == (engine, case)]
            if found:
                labels.append(f"{case.removeprefix('prefill ')}: {name}")
                axes.bar_label(axes.barh(labels[-1], round(found[0]), color=colour), fontsize="x-small", padding=2)
        labels.append(f"{case.removeprefix('prefill ')}: Mosaic GPU, now")
        axes.barh(labels[-1], high - low, left=low, color="white", edgecolor="C0", hatch="////")
    axes.invert_yaxis()
    axes.tick_params(labelsize="x-small")
    axes.margins(x=0.15)


def main() -> None:
    """Draw the three panels."""
    beside, steps = lines(RESULTS / "h100_beside_vllm.jsonl"), lines(RESULTS / "steps-h200.jsonl")
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    bars(left, dict(ratios(beside)), "jpaged / vLLM 0.22.1, one H100, measured\n(above 1: jpaged is faster)", "")
    left.axvline(1, color="black", linewidth=0.8)
    bars(middle, dict(shares(steps)), "share of the limit of a step, one H200, measured", "%")
    middle.set_xlim(0, 100)
    attention(right, beside)
    figure.savefig(ROOT / "docs" / "performance_gpu.png", dpi=100)


if __name__ == "__main__":
    main()
