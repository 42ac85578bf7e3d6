"""`jpaged bench speculation`: how much faster a model generates with drafts, by batch size.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jpaged.cli.bench.quality import HELD_OUT
from jpaged.cli.common.results import OutputJson, check_writable, machine, needs_matplotlib, write_json
from jpaged.cli.flags.engine import (
    ENGINE_DEFAULTS,
    EngineArguments,
    ModelArgument,
    engine_options,
    one_line_help,
    read_text,
)
from jpaged.errors import EngineError, RequestError

if TYPE_CHECKING:
    from jpaged import LLM, SamplingParams
    from jpaged.outputs import SpeculationStats

COPIES = 4  # how often a prompt of `repeated` has its passage


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a batch on one engine."""

    seconds: float
    steps: int
    token_ids: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one text and batch size. Ratios are above 1 if drafts make the engine faster."""

    text: str
    batch_size: int
    tokens_per_second_without: float  # median
    tokens_per_second: float          # median
    speedup: float                    # median over pairs
    speedup_low: float                # interval of the median, with a confidence of at least 95%
    speedup_high: float
    steps_ratio: float                # steps without drafts per step with drafts
    acceptance: float                 # share of the drafts that were accepted
    drafts_per_row: float             # drafts per row and step, plain steps included
    pairs: int


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Generate with and without drafts, in turn, and print acceptance, steps and speed by batch size.

    Two engines run in one process, one of them without --speculative-config. Both generate the same requests, one after
    the other, and must give the same tokens. The speed-up is the median over pairs of runs.

    Texts: `free` continues passages of a text. `repeated` continues passages that the prompt has several times. Each
    pair of runs has other passages, so that no drafter has seen their answers.

    Example: jpaged bench speculation demo --spec-method ngram --batch-sizes 1 4 32 --plot speculation.png
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    batch_sizes: tuple[int, ...] = (1, 4, 32)
    """Numbers of requests that run at once."""

    texts: tuple[Literal["free", "repeated"], ...] = ("free", "repeated")
    """Kinds of text."""

    input_len: int = 128
    """Tokens of a prompt."""

    output_len: int = 128
    """Tokens of an answer."""

    pairs: int = 10
    """Pairs of runs for each text and batch size."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""

    text: pathlib.Path | None = None
    """File with the text, UTF-8. Default: Python source that the demo model was not trained on."""

    output_json: OutputJson = None
    """Write the results to this file, as JSON."""

    plot: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Draw speed-up and accepted drafts by batch size into this PNG file. Needs matplotlib."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Measure all texts and batch sizes, and print the table."""
        options = engine_options(self.engine, self.model_argument)
        self._check(options)
        text = read_text("text", self.text or HELD_OUT) or ""
        from tqdm import tqdm

        from jpaged import LLM

        plain: dict[str, Any] = {**options, "speculative_config": None}
        with LLM(**plain) as without, LLM(**options) as drafting:
            for llm in (without, drafting):
                llm.wait_until_ready()
            config = drafting.config.speculative_config
            texts = _prompts(without, text, self.input_len, (1 + self.pairs) * sum(self.batch_sizes))
            unused = {name: iter(prompts) for name, prompts in texts.items()}
            cases = [(name, unused[name], size) for name in texts if name in self.texts for size in self.batch_sizes]
            rows = []
            with tqdm(
                total=len(cases) * (1 + self.pairs), unit="pair", disable=not sys.stderr.isatty(), leave=False
            ) as bar:
                for name, prompts, size in cases:
                    rows.append(self._measure(without, drafting, name, prompts, size, bar))
        print(table(rows))
        print("Machine: " + ", ".join(f"{name} {value}" for name, value in machine().items()))
        assert config is not None, "checked"
        title = f"{options['model']}, {config.method}, {config.num_drafts} drafts, temperature {self.temperature:g}"
        if self.plot is not None:
            from jpaged.cli.bench.speculation_plot import plot_speculation

            plot_speculation(rows, title, self.plot)
            print(f"drawn: {self.plot}")
        results = [dataclasses.asdict(row) for row in rows]
        write_json(self.output_json, {"title": title, "results": results, "machine": machine()})
        return 0

    def _check(self, options: dict[str, Any]) -> None:
        """Raise RequestError for bad options, before an engine starts."""
        if options["speculative_config"] is None:
            raise RequestError("speculative_config", None, "is compared with plain decoding: name a method")
        for name in ("input_len", "output_len", "pairs"):
            if getattr(self, name) < 1:
                raise RequestError(name, getattr(self, name), "must be at least 1")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise RequestError("batch_sizes", self.batch_sizes, "must be numbers of at least 1")
        check_writable(self.output_json)
        if self.plot is not None:
            needs_matplotlib("plot", self.plot)
            check_writable(self.plot, "plot")

    def _measure(
        self, without: "LLM", drafting: "LLM", name: str, prompts: Iterator[list[int]], size: int, bar: Any
    ) -> Row:
        """Run pairs in turn. The first pair only warms up. Raises EngineError if the tokens differ.

        prompts: the next ones are used.
        """
        found: list[tuple[Run, Run]] = []
        for number in range(1 + self.pairs):
            if number == 1:
                drafting.reset_stats()
            params, batch = self._params(number, size), list(itertools.islice(prompts, size))
            engines = (without, drafting) if number % 2 else (drafting, without)  # neither always runs first
            runs = {id(llm): _run(llm, batch, params) for llm in engines}
            pair = runs[id(without)], runs[id(drafting)]
            if pair[0].token_ids != pair[1].token_ids:
                raise EngineError(f"answers differ with drafts ({name}, {size} requests): please report this")
            found += [pair] if number else []
            bar.update()
        return _row(name, found, drafting.stats().speculation)

    def _params(self, number: int, count: int) -> list["SamplingParams"]:
        from jpaged import SamplingParams

        return [
            SamplingParams(
                temperature=self.temperature, max_tokens=self.output_len, ignore_eos=True, seed=number * count + index
            )
            for index in range(count)
        ]


def _prompts(llm: "LLM", text: str, length: int, count: int) -> dict[str, list[list[int]]]:
    """Prompts of `length` tokens for each kind of text. Raises RequestError if the text is too short."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise RequestError("model", llm.config.model, "has no tokenizer, which the text needs")
    ids = tokenizer.encode(text)
    if len(ids) < 2 * length:
        raise RequestError("text", f"{len(ids)} tokens", f"must have at least {2 * length}: shorten --input-len")
    stride = max((len(ids) - length) // count, 1)
    starts = [index * stride % (len(ids) - length) for index in range(count)]
    passage = max(length // COPIES, 1)
    return {
        "free": [ids[start : start + length] for start in starts],
        "repeated": [(ids[start : start + passage] * (COPIES + 1))[:length] for start in starts],
    }


def _run(llm: "LLM", prompts: Sequence[list[int]], params: list["SamplingParams"]) -> Run:
    steps, began = llm.stats().steps, time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return Run(seconds, llm.stats().steps - steps, [output.outputs[0].token_ids for output in outputs])


def _row(name: str, pairs: Sequence[tuple[Run, Run]], stats: "SpeculationStats | None") -> Row:
    if stats is None:
        raise EngineError("the engine with speculative_config has no statistics of drafts")
    size = len(pairs[0][0].token_ids)
    tokens = sum(map(len, pairs[0][0].token_ids))
    ratios = sorted(plain.seconds / drafted.seconds for plain, drafted in pairs)
    low, high = median_interval(len(ratios))
    steps = [sum(run.steps for run in runs) for runs in zip(*pairs, strict=True)]
    return Row(
        text=name,
        batch_size=size,
        tokens_per_second_without=tokens / statistics.median(plain.seconds for plain, _ in pairs),
        tokens_per_second=tokens / statistics.median(drafted.seconds for _, drafted in pairs),
        speedup=statistics.median(ratios),
        speedup_low=ratios[low],
        speedup_high=ratios[high],
        steps_ratio=steps[0] / steps[1],
        acceptance=stats.acceptance_rate,
        drafts_per_row=stats.draft_tokens / (steps[1] * size),
        pairs=len(pairs),
    )


def median_interval(count: int) -> tuple[int, int]:
    """Indices of the order statistics that contain the median with a confidence of at least 95%.

    From the binomial distribution. With less than six values no interval has this confidence: the extremes are used.
    """
    total, ways, low = 0.0, 1, 0
    for index in range(count // 2):
        total += ways / 2**count
        if 2 * total > 0.05:
            break
        low = index
        ways = ways * (count - index) // (index + 1)
    return low, count - 1 - low


def table(rows: Sequence[Row]) -> str:
    """The results as a table."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        f"{'text':10}{'batch':>6}{'tokens/s plain':>16}{'with drafts':>13}{'speed-up':>10}{'95% interval':>16}"
        f"{'steps saved':>13}{'accepted':>10}{'drafts/row':>12}"
    )
    for text, group in itertools.groupby(rows, key=lambda row: row.text):
        for row in group:
            interval = f"{row.speedup_low:.2f} to {row.speedup_high:.2f}"
            yield (
                f"{text:10}{row.batch_size:6}{row.tokens_per_second_without:16,.0f}{row.tokens_per_second:13,.0f}"
                f"{row.speedup:10.2f}{interval:>16}{1 - 1 / row.steps_ratio:13.1%}{row.acceptance:10.1%}"
                f"{row.drafts_per_row:12.2f}"
            )
