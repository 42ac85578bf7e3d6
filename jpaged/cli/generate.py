"""`jpaged generate`: completes prompts, and prints each finished answer.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import tyro

from jpaged.cli.common.demo_prompts import FIRST_PROMPTS, FIRST_STOP
from jpaged.cli.common.offline import outputs_as_they_come
from jpaged.cli.common.results import OutputJson, check_writable, machine, write_json
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, engine_options, one_line_help
from jpaged.cli.flags.sampling import SamplingFlags
from jpaged.errors import RequestError
from jpaged.lora.request import LoRARequest
from jpaged.outputs import EngineStats, Logprob, RequestOutput


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(SamplingFlags):
    """Complete prompts in one batch, and print each answer as soon as it is finished. Sampling is greedy by default.

    Example: jpaged generate demo "def split_path(path):"

    Example: jpaged generate --model Qwen/Qwen3-0.6B "The capital of France is" "2 + 2 ="

    Example: jpaged generate demo "class Stack:" --n 3 --temperature 0.8
    """

    words: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL] [PROMPT ...]", help_behavior_hint="")
    ] = ()
    """The model (unless --model names it), then prompts. Prompts after a bare -- may begin with a dash. Default: six
    prompts of Python code. Each answer then ends after one function or class."""

    lora: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Folder of a LoRA adapter for all prompts. Needs --enable-lora. Default: the model alone."""

    output_json: OutputJson = None
    """Write prompts, answers and statistics to this file, as JSON."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def with_more_words(self, words: list[str]) -> "Generate":
        """Return a copy with these words appended to `words`."""
        return dataclasses.replace(self, words=(*self.words, *words))

    def run(self) -> int:
        model, prompts = self.model_and_prompts()
        options = engine_options(self.engine, model)
        options |= {"max_queued_requests": None, "max_queued_tokens": None}  # one batch of any size, as with LLM
        first = tuple(prompts) == FIRST_PROMPTS and not self.stop and not self.use_beam_search
        flags = dataclasses.replace(self, stop=FIRST_STOP) if first else self
        params = flags.sampling_params(options["model"])
        if self.lora is not None and not options["enable_lora"]:
            raise RequestError("lora", str(self.lora), "needs --enable-lora")
        if self.lora is not None and not self.lora.is_dir():  # found before the model is loaded
            raise RequestError("lora", str(self.lora), "is not a folder")
        adapter = None if self.lora is None else LoRARequest(self.lora.name or "adapter", 1, str(self.lora))
        check_writable(self.output_json)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from jpaged import AsyncLLM

        out = Console(highlight=False, soft_wrap=True)
        # On a terminal, answers and progress bar share a console, which keeps the bar below the answers.
        screen = out if out.is_terminal else Console(stderr=True)
        answers: dict[int, RequestOutput] = {}
        with closing(AsyncLLM(**options)) as engine:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            start = time.perf_counter()
            with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
                task = bar.add_task("", total=len(prompts))
                for index, output in outputs_as_they_come(engine, prompts, params, adapter):
                    stats = engine.stats()
                    rate = stats.generated_tokens / (time.perf_counter() - start)
                    kv = stats.used_blocks / stats.num_blocks
                    bar.update(task, description=f"{rate:,.0f} tokens/s, KV {kv:.0%} used")
                    if output.finished:
                        answers[index] = output
                        _print_answer(out, prompts[index], output)
                        bar.advance(task)
            elapsed = time.perf_counter() - start
            stats = engine.stats()
        tokens = sum(len(made.token_ids) for answer in answers.values() for made in answer.outputs)
        out.print(
            f"{len(answers)} prompts, {tokens:,} tokens in {elapsed:.2f} s: {tokens / elapsed:,.1f} tokens/s\n"
            f"KV cache: peak {stats.peak_used_blocks:,} of {stats.num_blocks:,} blocks used "
            f"({stats.peak_used_blocks / stats.num_blocks:.1%}), {stats.kv_waste:.1%} of their slots empty"
        )
        if (drafts := stats.speculation) is not None:
            out.print(f"speculation: {drafts.acceptance_rate:.1%} of {drafts.draft_tokens:,} drafts accepted")
        write_json(self.output_json, self._report(options["model"], prompts, answers, tokens, elapsed, stats))
        return 0

    def model_and_prompts(self) -> tuple[str | None, list[str]]:
        """Split `words`. The first is the model, unless --model names it. The rest are prompts."""
        words = list(self.words)
        model = words.pop(0) if words and self.engine.model is None else None
        return model, words or list(FIRST_PROMPTS)

    def _report(
        self,
        model: str,
        prompts: Sequence[str],
        answers: dict[int, RequestOutput],
        tokens: int,
        elapsed: float,
        stats: EngineStats,
    ) -> dict[str, Any]:
        outputs: list[dict[str, Any]] = []
        for index, answer in sorted(answers.items()):
            outputs += [
                {
                    "prompt": prompts[index],
                    "prompt_index": index,
                    "index": made.index,  # number of the answer to this prompt, from 0
                    "text": made.text,
                    "token_ids": made.token_ids,
                    "finish_reason": made.finish_reason,
                    "cumulative_logprob": made.cumulative_logprob,
                    "logprobs": None if made.logprobs is None else [_plain(entries) for entries in made.logprobs],
                }
                for made in answer.outputs
            ]
        return {
            "model": model,
            "outputs": outputs,
            "output_tokens": tokens,
            "elapsed_time": elapsed,
            "output_tokens_per_second": tokens / elapsed,
            "stats": dataclasses.asdict(stats),
            "machine": machine(),
        }


def _print_answer(out: Any, prompt: str, output: RequestOutput) -> None:
    from rich.markup import escape

    count = len(output.outputs)
    for answer in output.outputs:
        out.print(f"[bold]{escape(prompt)}[/bold]{escape(answer.text)}", emoji=False)
        which = "" if count == 1 else f"answer {answer.index + 1} of {count}: "
        likely = "" if answer.cumulative_logprob is None else f", log-probability {answer.cumulative_logprob:.2f}"
        out.print(f"── {which}{len(answer.token_ids)} tokens, {answer.finish_reason}{likely}\n", style="dim")


def _plain(entries: dict[int, Logprob]) -> dict[str, Any]:
    return {str(token_id): dataclasses.asdict(entry) for token_id, entry in entries.items()}
