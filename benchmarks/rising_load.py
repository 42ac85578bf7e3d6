"""Drafts and throughput while the number of running requests rises from 1 to 64.

    python benchmarks/rising_load.py demo --speculative-config '{"method": "ngram"}' --output-json ngram.json
    python benchmarks/rising_load.py --plot rising.png ngram.json ...     # draws results, measures nothing

Two engines in one process, one of them without drafts, serve the same requests, 16 steps of each in turn. New requests
arrive until the next level runs, and all go on until every level was measured. A level begins when its prompts are
computed. It ends when the running requests have generated `--tokens` tokens on average, at the last level four times as
many. The first pair of rises only warms up. Each pair has other passages of held-out text. Different tokens are an
error.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jpaged
from jpaged.cli.bench.quality import HELD_OUT
from jpaged.cli.bench.speculation import median_interval
from jpaged.cli.bench.speculation_plot import COLOURS
from jpaged.cli.common.results import machine, write_json

LAST_LONGER = 4  # the last level lasts this many times as long
MORE_STEPS = 4   # after the last prompt got a row, before a level is measured
PROMPT_TOKENS = 256  # prompt tokens of a step, at least
STRIDE = 16      # steps of an engine before it is the other's turn. They make one point of the curves


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

    seconds: float         # of the engine's steps so far
    running: int
    drafts_per_row: float  # over STRIDE steps


@dataclasses.dataclass(frozen=True)
class Rise:
    """One engine through all levels."""

    levels: list[Level]
    points: list[Point]
    token_ids: list[list[int]]


class Rising:
    """One engine that serves more and more requests. Its seconds are those of its own steps."""

    def __init__(self, engine: Any, prompts: Sequence[list[int]], levels: Sequence[int], tokens: int):
        self._engine, self._prompts, self._levels, self._tokens = engine, prompts, levels, tokens
        self._seconds = 0.0
        self.measured: list[Level] = []
        self.points: list[Point] = []

    def run(self) -> Iterator[None]:
        """Rise through the levels. Yields after every STRIDE steps, when nothing is in flight."""
        number = 0
        for running in self._levels:
            number = self._arrive(number, running)
            wanted = running * self._tokens * (LAST_LONGER if running == self._levels[-1] else 1)
            began, before = self._seconds, self._engine.stats()
            last = before
            while last.generated_tokens - before.generated_tokens < wanted:
                self._step(STRIDE)
                last, previous = self._engine.stats(), last
                part = self._level(running, 0.0, previous, last)
                drafts = part.draft_tokens / (running * max(part.steps, 1))
                self.points.append(Point(self._seconds, running, drafts))
                yield
            self.measured.append(self._level(running, self._seconds - began, before, last))

    def end(self) -> Rise:
        """Abort the requests. Returns the results."""
        ended = {output.request_id: output for output in self._engine.abort(map(str, range(self._levels[-1])))}
        self._engine.flush()
        token_ids = [ended[str(index)].outputs[0].token_ids for index in range(self._levels[-1])]
        return Rise(self.measured, self.points, token_ids)

    def _arrive(self, number: int, running: int) -> int:
        """Add requests until `running` run, and compute their prompts. number: requests before. Returns `running`."""
        params = jpaged.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
        new = self._prompts[number:running]
        for index, prompt in enumerate(new, number):
            self._engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while self._engine.stats().num_waiting:
            self._step(1)
        self._step(MORE_STEPS + sum(map(len, new)) // PROMPT_TOKENS)
        return running

    def _step(self, count: int) -> None:
        began = time.perf_counter()
        for _ in range(count):
            self._engine.step()
        self._engine.flush()
        self._seconds += time.perf_counter() - began

    def _level(self, running: int, seconds: float, before: Any, after: Any) -> Level:
        tokens, steps = after.generated_tokens - before.generated_tokens, after.steps - before.steps
        drafts = accepted = 0
        if after.speculation is not None:
            drafts = after.speculation.draft_tokens - before.speculation.draft_tokens
            accepted = after.speculation.accepted_tokens - before.speculation.accepted_tokens
        return Level(running, seconds, tokens, steps, drafts, accepted)


def rise_both(engines: Mapping[bool, Any], order: Sequence[bool], *args: Any) -> dict[bool, Rise]:
    """Run both engines through the levels, STRIDE steps of each in turn. args: of `Rising`."""
    rising = {drafts: Rising(engines[drafts], *args) for drafts in order}
    turns = [each.run() for each in rising.values()]
    while turns:
        turns = [turn for turn in turns if next(turn, turn) is None]
    return {drafts: each.end() for drafts, each in rising.items()}


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
            pair = rise_both(engines, order, prompts, levels, args.tokens)
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
