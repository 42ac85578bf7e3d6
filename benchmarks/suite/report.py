"""Writes docs/performance.md and its plots from recorded results. Measures nothing."""

import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from suite import plots
from suite.compare import Comparison, Figure, compare, spread
from suite.plans import MOST_KEYS, SLOW_RATIO, SLOW_SECONDS, STEP_KEYS, STEP_MODEL, STEP_ROWS
from suite.records import Record, Runs, flattened_steps, grouped, machine_name, read, unfinished

RATE = Figure("output_tok_s", "output tokens/s", 1, True)
FIRST_TOKEN = Figure("first_token_ms", "first token, ms", 1, False)
GAP = Figure("token_gap_ms", "between tokens, ms", 2, False)
MEMORY = Figure("peak_rss_mib", "peak memory, MiB", 0, False)
TO_FIRST_TOKEN = Figure("to_first_token_s", "to the first token, s", 2, False)
CPU_TO_FIRST_TOKEN = Figure("cpu_to_first_token_s", "CPU to the first token, s", 2, False)
PROCESS_CPU = Figure("process_cpu_s", "CPU of the whole process, s", 2, False)
STEP = Figure("step_ms", "decode step, ms", 2, False)

INTRODUCTION = """\
# Performance on CPU

jpaged and the engines that a user could choose instead, measured on the same machine. `python benchmarks/run.py
--report` writes this page from the recorded runs in `benchmarks/results`.
[benchmarks/peers/README.md](../benchmarks/peers/README.md) has the installation of the peers, the models, the workloads
and notes on fairness.

A figure is the median of its runs, with the range. A round measures every engine once, and each run is a process of its
own. A run starts when other processes use at most 10% of the CPUs. If they use more during the run, it is repeated
once. Noisy runs count only if an engine has no others; such an engine is marked \\*. Every run checks that each request
gets all of its tokens. Every run of jpaged also checks that nothing was compiled after the engine was ready.

`ahead` and `behind`: the medians differ by at least 5%, and the ranges do not overlap. Otherwise `even`. The ratio is
jpaged's median divided by that of the best peer. Above 1 is good for rates, and bad for times and memory.
"""

CPU_NOTE = f"""\
W1 is one stream of 128 prompt and 128 output tokens. W2 is 32 requests of mixed length. W3 is 32 requests that share
512 prompt tokens. A peer whose run takes over {SLOW_SECONDS:.0f} s has one run if its
rate is less than {SLOW_RATIO:.0%} of the best peer's: it cannot be the best.
"""

STARTUP_NOTE = """\
Time from the start of the process until it has the first token of W1, imports and loading included. Cold: no compiled
programs are stored. Warm: those of a former start are. The files of the model and of packages are in the system's file
cache in both cases. The whole process also ends the engine. This benchmark lets jpaged compile and store the programs
that the first token did not need before it ends.
"""

SCALING_NOTE = f"""\
Median time of a decode step of {STEP_MODEL}, in an engine for {STEP_ROWS[-1]} rows of {STEP_KEYS[-1]:,} keys. Cases
with more than {MOST_KEYS:,} keys in all are left out. Peers are those that keep the KV of ended requests: otherwise
every case would compute its prompts again.
"""


RECURRENT_NOTE = """\
W2, on a model with gated DeltaNet in three of four layers, in bfloat16. Transformers runs its own implementation in
PyTorch, because the faster one needs a GPU.
"""


def write(results: pathlib.Path, document: pathlib.Path) -> None:
    """Write the document, and a plot next to it for each suite that has results and each machine."""
    parts = [INTRODUCTION]
    sections = {
        "cpu": cpu_section, "startup": startup_section, "scaling": scaling_section, "recurrent": recurrent_section,
    }  # fmt: skip
    for suite, section in sections.items():
        records = read(results / f"{suite}_suite.jsonl")
        for number, name in enumerate(dict.fromkeys(map(machine_name, records))):
            own = [record for record in records if machine_name(record) == name]
            plot = f"{document.stem}_{suite}{f'_{number + 1}' if number else ''}.png"
            parts.append(section(own, document.with_name(plot)))
    if len(parts) == 1:
        parts.append("Nothing is recorded yet.\n")
    document.write_text("\n".join(parts), encoding="utf-8")


def cpu_section(records: Sequence[Record], plot: pathlib.Path) -> str:
    """Throughput, first token and memory."""
    groups = grouped(records, lambda record: (record["model"], record["workload"]))
    rows, details, rates = [], [], {}
    for (model, workload), runs in groups.items():
        figures = [RATE, FIRST_TOKEN, MEMORY] if workload == "W1" else [RATE, MEMORY]
        for weights in dict.fromkeys(each.configuration.weights for each in runs):
            same = [each for each in runs if each.configuration.weights == weights]
            rows += comparison_rows([model, workload, weights], same, figures)
            rates[f"{model}\n{workload} {weights}"] = by_engine(same, RATE)
        shown = [RATE, FIRST_TOKEN, GAP, MEMORY] if workload == "W1" else [RATE, MEMORY]
        details.append(f"### {model}, {workload}\n\n{detail_table(runs, shown)}")
    plots.bars(rates, RATE.title, plot)
    table = comparison_table(["model", "workload", "weights"], rows)
    return "\n".join(
        [heading("Throughput, first token, memory", records), origin(records), CPU_NOTE, table,
         picture(RATE.title, plot), *details, failures(records)]
    )  # fmt: skip


def startup_section(records: Sequence[Record], plot: pathlib.Path) -> str:
    """Cold and warm starts, and the command line as a whole."""
    figures = [TO_FIRST_TOKEN, CPU_TO_FIRST_TOKEN, PROCESS_CPU]
    rows, details, times = [], [], {}
    for (model, start), runs in grouped(records, lambda record: (record["model"], record["start"])).items():
        rows += comparison_rows([model, start], runs, [TO_FIRST_TOKEN, PROCESS_CPU])
        details.append(f"### {model}, {start}\n\n{detail_table(runs, figures)}")
        times[f"{model}\n{start}"] = by_engine(runs, TO_FIRST_TOKEN)
    plots.bars(times, TO_FIRST_TOKEN.title, plot)
    commands = [
        [f"`{each['configuration']}`", each["start"], f"{each['process_wall_s']:.1f}", f"{each['process_cpu_s']:.1f}"]
        for each in records
        if each["model"] == "demo" and "failed" not in each
    ]
    command = markdown(["command", "start", "wall time, s", "CPU, s"], commands) if commands else ""
    return "\n".join(
        [heading("Start", records), origin(records), STARTUP_NOTE, comparison_table(["model", "start"], rows),
         picture("seconds to the first token", plot), *details, command, failures(records)]
    )  # fmt: skip


def scaling_section(records: Sequence[Record], plot: pathlib.Path) -> str:
    """Decode steps by rows, keys and threads."""
    steps = flattened_steps(records)
    groups = grouped(steps, lambda record: (record["threads"], record["rows"], record["keys"]))
    rows = []
    for (threads, num_rows, keys), runs in sorted(groups.items()):
        rows += comparison_rows([str(threads), str(num_rows), f"{keys:,}"], runs, [STEP])
    lines = step_lines(steps)
    plots.steps(lines, plot)
    return "\n".join(
        [heading("Decode steps by rows, keys and threads", records), origin(records), SCALING_NOTE,
         comparison_table(["threads", "rows", "keys a row"], rows), picture("a decode step by keys", plot),
         straight(lines), failures(records)]
    )  # fmt: skip


def recurrent_section(records: Sequence[Record], _: pathlib.Path) -> str:
    """Throughput with recurrent layers. It has no plot."""
    rows, details = [], []
    groups = grouped(records, lambda record: (record["model"], record["threads"]))
    for (model, threads), runs in groups.items():
        rows += comparison_rows([model, str(threads)], runs, [RATE, MEMORY])
        details.append(f"### {model}, threads: {threads}\n\n{detail_table(runs, [RATE, PROCESS_CPU, MEMORY])}")
    return "\n".join(
        [heading("Recurrent layers", records), origin(records), RECURRENT_NOTE,
         comparison_table(["model", "threads"], rows), *details, failures(records)]
    )  # fmt: skip


def step_lines(steps: Iterable[Record]) -> dict[tuple[str, int, int], list[tuple[float, float]]]:
    """Return (keys read by a row, median ms of a step) by engine, threads and rows."""
    lines: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    by_case = grouped(steps, lambda record: (record["threads"], record["rows"], record["keys_read"]))
    for (threads, rows, keys), runs in sorted(by_case.items()):
        for each in runs:
            point = keys, statistics.median(each.values(STEP.field))
            lines.setdefault((each.configuration.engine, threads, rows), []).append(point)
    return lines


def straight(lines: Mapping[tuple[str, int, int], list[tuple[float, float]]]) -> str:
    """Fit a line to jpaged's steps of 4 rows: a fixed time, and a time for each key read."""
    rows = []
    for (engine, threads, num_rows), points in lines.items():
        if engine == "jpaged" and num_rows == 4 and len(points) > 2:
            keys, times = [4 * each for each, _ in points], [time for _, time in points]
            slope, fixed = statistics.linear_regression(keys, times)
            off = max(abs(fixed + slope * key - time) / time for key, time in zip(keys, times, strict=True))
            rows.append([str(threads), f"{fixed:.2f}", f"{slope * 1e6:.0f}", f"{off:.0%}"])
    if not rows:
        return ""
    text = "A straight line through jpaged's steps of 4 rows, in an engine that takes 8,256 tokens a request:\n\n"
    return text + markdown(["threads", "fixed, ms", "for each key read, ns", "largest distance of a step"], rows)


def comparison_rows(labels: list[str], runs: Sequence[Runs], figures: Iterable[Figure]) -> list[list[str]]:
    """Return a row for each quantity that jpaged and a peer have."""
    rows = []
    for figure in figures:
        found = compared(runs, figure)
        if found is not None:
            ours, best = spread(found.ours, figure.digits), spread(found.best, figure.digits)
            rows.append(
                [*labels, figure.title, ours, f"{found.best_name}: {best}", f"{found.ratio:.2f}", found.statement.value]
            )
    return rows


def compared(runs: Sequence[Runs], figure: Figure) -> Comparison | None:
    ours = [value for each in runs if each.configuration.is_jpaged for value in each.values(figure.field)]
    peers = {marked(each): each.values(figure.field) for each in runs if not each.configuration.is_jpaged}
    return compare(ours, peers, higher_is_better=figure.higher_is_better)


def comparison_table(labels: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "No row has runs of jpaged and of a peer.\n"
    return markdown([*labels, "figure", "jpaged", "best peer", "ratio", "jpaged is"], rows)


def detail_table(runs: Sequence[Runs], figures: Sequence[Figure]) -> str:
    """Return a table of all configurations, the best first."""
    best_first = sorted(
        runs,
        key=lambda each: statistics.median(each.values(figures[0].field)) * (-1 if figures[0].higher_is_better else 1),
    )
    rows = [
        [marked(each), *(spread(values, f.digits) if (values := each.values(f.field)) else "" for f in figures)]
        for each in best_first
    ]
    return markdown(["engine and weights", *(figure.title for figure in figures)], rows)


def by_engine(runs: Iterable[Runs], figure: Figure) -> dict[str, list[float]]:
    """Values of a quantity by engine."""
    return {each.configuration.engine: each.values(figure.field) for each in runs}


def marked(runs: Runs) -> str:
    """Name of a configuration, with a star if all of its runs were noisy."""
    return runs.configuration.name + (r"\*" if runs.noisy else "")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def heading(title: str, records: Sequence[Record]) -> str:
    """Return the heading of a section for one machine."""
    return f"## {title}: {machine_name(records[0])}\n"


def origin(records: Sequence[Record]) -> str:
    """Return the dates, versions and commits of records of one machine, and its memory and system."""

    def joined(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values))

    machines = joined(f"{m['memory_gib']} GiB, {m['system']}" for m in (record["machine"] for record in records))
    dates = joined(record["session"].partition("T")[0] for record in records)
    versions = joined(sorted({record["version"] for record in records if "version" in record}))
    return f"Measured on {dates}. {machines}. {versions}. Commit {joined(record['commit'] for record in records)}.\n"


def picture(caption: str, path: pathlib.Path) -> str:
    """Return a link to a plot next to the document."""
    return f"![{caption}]({path.name})\n"


def failures(records: Sequence[Record]) -> str:
    """List configurations without a result, with the reason."""
    found = unfinished(records)
    return "".join(f"- {name}: {reason}\n" for name, reason in found.items())
