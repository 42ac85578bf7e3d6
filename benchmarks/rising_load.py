"""Drafts and throughput while the number of running requests rises from 1 to 64.

    python benchmarks/rising_load.py demo --speculative-config '{"method": "ngram"}' --output-json ngram.json
    python benchmarks/rising_load.py --plot rising.png ngram.json ...     # draws results, measures nothing

Two engines in one process, one of them without drafts, serve the same requests in turn. New requests arrive until the
next level runs, and all go on until every level was measured. A level begins when its prompts are computed. It ends
when the running requests have generated `--tokens` tokens on average, at the last level four times as many. The first
pair of rises only warms up. Each pair has other passages of held-out text. Different tokens are an error.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jpaged
from jpaged.cli.bench.quality import HELD_OUT
from jpaged.cli.bench.speculation import median_interval
from jpaged.cli.bench.speculation_plot import COLOURS
from jpaged.cli.common.results import machine, write_json

LAST_LONGER = 4  # the last level lasts this many times as long
MORE_STEPS = 4   # after the last prompt got a row, before a level is measured
PROMPT_TOKENS = 256  # prompt tokens of a step, at least
STRIDE = 8       # steps between two points of the curves


@dataclasses.dataclass(frozen=True)
class Level:
    """One number of running requests in one rise."""

    running: int
    seconds: float
    tokens: int
    steps: int
    draft_tokens: int
    accepted_tokens: int


@dataclasses.dataclass(frozen=True)
class Point:
    """Drafts at one moment of a rise."""

    seconds: float         # since the first request
    running: int
    drafts_per_row: float  # over the last STRIDE steps


@dataclasses.dataclass(frozen=True)
class Rise:
    """One engine through all levels."""

    levels: list[Level]
    points: list[Point]
    token_ids: list[list[int]]


class Counters:
    """Counters of an engine, as differences."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.began, self.stats = time.perf_counter(), engine.stats()

    def level(self, running: int) -> Level:
        """What happened since the counters were made."""
        now, seconds = self._engine.stats(), time.perf_counter() - self.began
        drafts = [(one.draft_tokens, one.accepted_tokens) if one else (0, 0)
                  for one in (self.stats.speculation, now.speculation)]  # fmt: skip
        drafted, accepted = (after - before for before, after in zip(*drafts, strict=True))
        tokens, steps = now.generated_tokens - self.stats.generated_tokens, now.steps - self.stats.steps
        return Level(running, seconds, tokens, steps, drafted, accepted)


def rise(engine: Any, prompts: Sequence[list[int]], levels: Sequence[int], tokens: int) -> Rise:
    """Run an engine through the levels. The requests are aborted at the end."""
    measured, points = [], []
    began, number = time.perf_counter(), 0
    params = jpaged.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    for running in levels:
        new = prompts[number:running]
        for prompt in new:
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            number += 1
        more = MORE_STEPS + sum(map(len, new)) // PROMPT_TOKENS
        while engine.stats().num_waiting:
            engine.step()
        for _ in range(more):
            engine.step()
        counters, part = Counters(engine), Counters(engine)
        wanted = running * tokens * (LAST_LONGER if running == levels[-1] else 1)
        for step in itertools.count(1):
            engine.step()
            if step % STRIDE == 0:
                last, part = part.level(running), Counters(engine)
                points.append(Point(part.began - began, running, last.draft_tokens / (running * max(last.steps, 1))))
                if part.stats.generated_tokens - counters.stats.generated_tokens >= wanted:
                    break
        measured.append(counters.level(running))
    ended = {output.request_id: output for output in engine.abort(map(str, range(number)))}
    engine.flush()
    return Rise(measured, points, [ended[str(index)].outputs[0].token_ids for index in range(number)])


def check_same(pair: Mapping[bool, Rise]) -> None:
    """Raise SystemExit if one answer is not a prefix of the other engine's: the rises end at different steps."""
    for one, other in zip(pair[False].token_ids, pair[True].token_ids, strict=True):
        both = min(len(one), len(other))
        if one[:both] != other[:both]:
            raise SystemExit("answers differ with drafts")


def row(pairs: Sequence[Mapping[bool, Rise]], index: int) -> dict[str, Any]:
    """Medians of one level."""
    speeds = {drafts: [pair[drafts].levels[index].tokens / pair[drafts].levels[index].seconds for pair in pairs]
              for drafts in (False, True)}  # fmt: skip
    ratios = sorted(fast / slow for slow, fast in zip(speeds[False], speeds[True], strict=True))
    low, high = median_interval(len(ratios))
    levels = [pair[True].levels[index] for pair in pairs]
    running, drafted = levels[0].running, sum(level.draft_tokens for level in levels)
    return {
        "running": running,
        "tokens_per_second_without": statistics.median(speeds[False]),
        "tokens_per_second": statistics.median(speeds[True]),
        "ratio": statistics.median(ratios), "ratio_low": ratios[low], "ratio_high": ratios[high],
        "drafts_per_row": drafted / (running * sum(level.steps for level in levels)),
        "acceptance": sum(level.accepted_tokens for level in levels) / max(drafted, 1),
        "pairs": len(pairs),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The levels as a table."""
    columns = "tokens/s plain", "with drafts", "ratio", "95% interval", "drafts/row", "accepted"
    lines = [f"{'running':>7}" + "".join(f"{column:>16}" for column in columns)]
    for each in rows:
        interval = f"{each['ratio_low']:.3f} to {each['ratio_high']:.3f}"
        lines.append(
            f"{each['running']:7}{each['tokens_per_second_without']:16,.0f}{each['tokens_per_second']:16,.0f}"
            f"{each['ratio']:16.3f}{interval:>16}{each['drafts_per_row']:16.3f}{each['acceptance']:16.1%}"
        )
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run pairs of rises in turn. Returns the results, and prints them."""
    config = json.loads(args.speculative_config)
    levels = [count for count in (1 << power for power in range(20)) if count < args.most] + [args.most]
    options: dict[str, Any] = {"max_num_seqs": args.most, "enable_prefix_caching": False}
    with (
        jpaged.LLM(args.model, **options) as plain,
        jpaged.LLM(args.model, speculative_config=config, **options) as drafting,
    ):
        engines = {False: plain.engines[0], True: drafting.engines[0]}
        for llm in (plain, drafting):
            llm.wait_until_ready()
        tokenizer = plain.get_tokenizer()
        assert tokenizer is not None, "the model has no tokenizer"
        ids = tokenizer.encode(HELD_OUT.read_text(encoding="utf-8"))
        stride = (len(ids) - args.input_len) // (args.most * (1 + args.pairs))
        pairs: list[Mapping[bool, Rise]] = []
        for number in range(1 + args.pairs):
            starts = [(number * args.most + index) * stride for index in range(args.most)]
            prompts = [ids[start : start + args.input_len] for start in starts]
            order = (False, True) if number % 2 else (True, False)
            pair = {drafts: rise(engines[drafts], prompts, levels, args.tokens) for drafts in order}
            check_same(pair)
            pairs += [pair] if number else []
    rows = [row(pairs, index) for index in range(len(levels))]
    title = f"{args.model}, {config['method']}"
    print(title)
    print(table(rows))
    points = [dataclasses.asdict(point) for point in pairs[-1][True].points]
    return {"title": title, "results": rows, "points": points, "machine": machine()}


def plot(path: pathlib.Path, results: Sequence[dict[str, Any]]) -> None:
    """Draw drafts over time, and the ratio of the throughputs by level. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    over_time, by_level = figure.subplots(1, 2)
    for colour, result in zip(COLOURS, results, strict=False):
        points, rows = result["points"], result["results"]
        last = points[-1]["seconds"]
        seconds = [point["seconds"] / last for point in points]
        over_time.plot(
            seconds, [point["drafts_per_row"] for point in points], color=colour, linewidth=1, label=result["title"]
        )
        sizes, middle = [each["running"] for each in rows], [each["ratio"] for each in rows]
        below = [each["ratio"] - each["ratio_low"] for each in rows]
        above = [each["ratio_high"] - each["ratio"] for each in rows]
        by_level.errorbar(sizes, middle, (below, above), color=colour, marker="o", capsize=3, label=result["title"])
    running = over_time.twinx()
    points = results[0]["points"]
    running.step(
        [point["seconds"] / points[-1]["seconds"] for point in points], [point["running"] for point in points],
        color="#888888", linewidth=0.8, linestyle="--", where="post",
    )  # fmt: skip
    running.set_yscale("log", base=2)
    running.yaxis.set_major_formatter(ScalarFormatter())
    running.set_ylabel("running requests (dashed)", fontsize="small")
    over_time.set_xlabel("time, as a share of the rise", fontsize="small")
    over_time.set_ylabel("drafts per row and step", fontsize="small")
    by_level.axhline(1, color="#888888", linewidth=0.8)
    by_level.set_xscale("log", base=2)
    by_level.xaxis.set_major_formatter(ScalarFormatter())
    by_level.set_xlabel("running requests", fontsize="small")
    by_level.set_ylabel("tokens/s with drafts / without", fontsize="small")
    for axes in (over_time, by_level):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines["top"].set_visible(False)
        axes.legend(fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a checkpoint, or demo")
    parser.add_argument("--speculative-config", help="as of jpaged serve")
    parser.add_argument("--most", type=int, default=64, help="running requests at the last level")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a request at each level")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--output-json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, nargs="+", help="PNG file, and the results to draw")
    args = parser.parse_args()
    if args.plot is not None:
        plot(args.plot[0], [json.loads(path.read_text(encoding="utf-8")) for path in args.plot[1:]])
        return
    if args.model is None or args.speculative_config is None:
        parser.error("name a model and --speculative-config")
    write_json(args.output_json, measure(args))


if __name__ == "__main__":
    main()
