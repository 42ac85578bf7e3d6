"""Writes docs/performance.md and its plot from the results of `run.py`."""

import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from suite import FORMATS

EVEN = 0.03  # ratios within this of 1 are even
Line = dict[str, Any]


def write(results: pathlib.Path, docs: pathlib.Path) -> None:
    """Write performance.md into `docs`, with the suites that have results."""
    parts = [HEAD]
    for name, section in (("cpu", _cpu), ("startup", _startup), ("scaling", _scaling)):
        path = results / f"suite_{name}.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            parts.append(section(lines, docs))
    docs.joinpath("performance.md").write_text("\n".join(parts), "utf-8")


HEAD = """# Performance on CPU

Written by `python benchmarks/run.py`, from `benchmarks/results/suite_*.jsonl`.
[The runners](../benchmarks/peers/README.md) say how each engine is used. Figures are medians of interleaved rounds, and
the range follows in brackets. A row is *ahead* or *behind* if it differs from the best peer by more than 3%, else
*even*.
"""


def verdict(ratio: float) -> str:
    """State how jpaged compares with the best peer. ratio: of rates, jpaged / peer."""
    if ratio > 1 + EVEN:
        return "ahead"
    return "behind" if ratio < 1 - EVEN else "even"


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and the range."""
    low, middle, high = (f"{v:,.{digits}f}" for v in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def about(lines: Iterable[Line]) -> str:
    """The machine, the dates and the versions of some results."""
    lines = list(lines)
    machines = dict.fromkeys(
        f"{line['cpus']} CPUs of {line['cpu']}, {line['system']}, {line['date']}" for line in lines
    )
    versions = dict.fromkeys(line["version"] for line in lines)
    return f"{'; '.join(machines)}. {', '.join(versions)}.\n"


def _grouped(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _cpu(lines: list[Line], docs: pathlib.Path) -> str:
    text = ["## Throughput", "", about(lines)]
    text += ["W1 is one stream, W2 32 requests of mixed length, W3 32 requests that share 512 prompt tokens.", ""]
    summary, details = [], []
    for (model, workload), group in _grouped(lines, lambda line: (line["model"], line["workload"])).items():
        by_config = _grouped(group, lambda line: line["config"])
        for name, configs in FORMATS.items():
            rates = {c.name: [x["output_tok_s"] for x in by_config[c.name]] for c in configs if c.name in by_config}
            ours = [c.name for c in configs if c.is_ours and c.name in rates]
            peers = {c: statistics.median(rates[c]) for c in rates if c not in ours}
            if not ours or not peers:
                continue
            best = max(peers, key=lambda c: peers[c])
            ratio = statistics.median(rates[ours[0]]) / peers[best]
            rates_text = [spread(rates[ours[0]]), f"{best} {spread(rates[best])}", f"{ratio:.2f}", verdict(ratio)]
            summary.append([model, workload, name, *rates_text])
        for config, found in by_config.items():
            first = [line["first_token_ms"] for line in found if "first_token_ms" in line]
            details.append([
                model, workload, config, spread([line["output_tok_s"] for line in found]),
                spread(first, 1) if first else "", spread([line["peak_rss_mib"] for line in found]),
                f"{max(line['others_cpu'] for line in found):.2f}", str(len(found)),
            ])  # fmt: skip
    head = ["model", "workload", "weights", "jpaged, tokens/s", "best peer, tokens/s", "ratio", ""]
    text += _table(head, summary)
    text += ["", "All configurations. *others*: largest share of the CPUs that other processes used during a run.", ""]
    head = ["model", "workload", "engine", "tokens/s", "first token, ms", "peak memory, MiB", "others", "runs"]
    text += _table(head, details)
    return "\n".join(text) + "\n"


def _startup(lines: list[Line], docs: pathlib.Path) -> str:
    text = ["## Start", "", about(lines), "From the start of the process to the first token of W1.", ""]
    rows = []
    for (config, start), found in _grouped(lines, lambda line: (line["config"], line["start"])).items():
        seconds = [spread([line[key] for line in found], 1) for key in ("to_first_token_s", "cpu_to_first_token_s")]
        rows.append([config, start, *seconds])
    text += _table(["engine", "caches", "seconds", "CPU seconds"], rows)
    return "\n".join(text) + "\n"


def _scaling(lines: list[Line], docs: pathlib.Path) -> str:
    text = ["## Decode steps", "", about(lines), "Milliseconds a step of jpaged, bf16, by rows and keys a row.", ""]
    steps: dict[tuple[int, int, int], list[float]] = {}
    for line in lines:
        for step in line["steps"]:
            steps.setdefault((line["threads"], step["rows"], step["keys"]), []).append(step["step_ms"])
    medians = {case: statistics.median(times) for case, times in steps.items()}
    keys = sorted({case[2] for case in medians})
    rows = [
        [
            str(threads),
            str(count),
            *(f"{medians[threads, count, k]:.1f}" if (threads, count, k) in medians else "" for k in keys),
        ]
        for threads, count in dict.fromkeys(case[:2] for case in sorted(medians))
    ]
    text += _table(["threads", "rows", *(f"{k:,} keys" for k in keys)], rows)
    _plot(medians, docs / "performance_scaling.png")
    text += ["", "![Duration of a decode step by keys](performance_scaling.png)"]
    return "\n".join(text) + "\n"


def _plot(medians: dict[tuple[int, int, int], float], path: pathlib.Path) -> None:
    """Duration of a step by the keys that it reads, a line for each number of rows, with all threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(case[0] for case in medians)
    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=110)
    for rows in sorted({case[1] for case in medians}):
        points = sorted((k, ms) for (threads, count, k), ms in medians.items() if threads == most and count == rows)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{rows} rows")
    axes.set(xlabel="keys a row", ylabel="ms a step", xlim=0, ylim=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
