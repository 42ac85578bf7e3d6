"""`jpaged bench quality`: measures how well a model predicts a text, and its divergence from another model.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import math
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jpaged.cli.common.results import OutputJson, check_writable, machine, needs_matplotlib, write_json
from jpaged.cli.flags.engine import (
    ENGINE_DEFAULTS,
    EngineArguments,
    ModelArgument,
    engine_options,
    one_line_help,
    read_text,
)
from jpaged.config import EngineConfig
from jpaged.errors import RequestError

if TYPE_CHECKING:
    from jpaged.divergence import Divergence

HELD_OUT = pathlib.Path(__file__).parents[2] / "demo_model" / "held_out.txt"


@dataclasses.dataclass(frozen=True)
class Quality:
    """Result of one model on a text."""

    tokens: int  # number of predicted tokens
    loss: float  # mean negative log-likelihood of a token, in nats
    perplexity: float  # exp(loss)
    bits_per_byte: float


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityCommand:
    """Measure the perplexity of a text under a model: exp of the mean negative log-likelihood of its tokens.

    The text is cut into windows that are scored independently. The first token of a window is not predicted.

    --against also prints the mean and P99 of KL(second model || model) per token, over the whole vocabulary. Top-1
    agreement is the share of tokens for which both models have the same most probable token.

    Example: jpaged bench quality demo --quantization int8 --against demo --plot kl.png
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    against: str | None = None
    """Second model to compare with. It needs the same tokenizer, and is loaded without --quantization, --kv-cache-dtype
    and int8 or fp8 activations. The comparison holds both models in memory at once."""

    text: pathlib.Path | None = None
    """File with the text, UTF-8. Default: Python source that the demo model was not trained on."""

    window: int = 1024
    """Tokens per window; at most --max-model-len - 1."""

    output_json: OutputJson = None
    """Write the results to this file, as JSON."""

    plot: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """With --against: draw the distribution of the per-token KL divergence into this PNG file. Needs matplotlib."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Score the text with each model and print the results."""
        options = engine_options(self.engine, self.model_argument)
        if self.window < 2:
            raise RequestError("window", self.window, "must be at least 2 tokens")
        text = read_text("text", self.text or HELD_OUT) or ""
        check_writable(self.output_json)
        if self.plot is not None:
            if self.against is None:
                raise RequestError("plot", str(self.plot), "draws a comparison: name a second model with --against")
            needs_matplotlib("plot", self.plot)
            check_writable(self.plot, "plot")
        results = {self._name(options): measure(options, text, self.window)}
        other = options | {"model": self.against, "quantization": None, "kv_cache_dtype": "auto"}
        if other["quantized_activations"] != "float":  # an unquantised model refuses int8 and fp8
            other["quantized_activations"] = "auto"
        if self.against is not None:
            results[self._name(other)] = measure(other, text, self.window)
        width = max(map(len, results))
        print(f"{'model':{width}}  {'tokens':>8}  {'loss':>7}  {'perplexity':>10}  {'bits/byte':>9}")
        for name, found in results.items():
            figures = f"{found.loss:7.4f}  {found.perplexity:10.3f}  {found.bits_per_byte:9.4f}"
            print(f"{name:{width}}  {found.tokens:8,}  {figures}")
        if len(results) == 2:
            first, second = results.values()
            print(f"Perplexity ratio: {first.perplexity / second.perplexity:.4f}")
        written: dict[str, Any] = {"text": str(self.text or HELD_OUT.name)}
        written["results"] = {name: dataclasses.asdict(found) for name, found in results.items()}
        if self.against is not None:
            compared = _compare(options, other, text, self.window)
            figures = {"mean": compared.mean, "p99": compared.p99, "top1_agreement": compared.top1_agreement}
            written["divergence"] = {"tokens": len(compared.per_token)} | figures
            print(f"KL divergence of a token: mean {compared.mean:.4g}, P99 {compared.p99:.4g} nats")
            print(f"Top-1 agreement: {100 * compared.top1_agreement:.2f}%")
            if self.plot is not None:
                from jpaged.cli.bench.quality_plot import plot_divergence

                names = f"{self._name(options)} against {self._name(other)}"
                plot_divergence(compared, f"{names}, {len(compared.per_token):,} tokens", self.plot)
                print(f"drawn: {self.plot}")
        write_json(self.output_json, written | {"machine": machine()})
        return 0

    def _name(self, options: dict[str, Any]) -> str:
        kv_type = options["kv_cache_dtype"]
        notes = [options["quantization"], None if kv_type == "auto" else f"{kv_type} KV"]
        found = ", ".join(note for note in notes if note)
        return options["model"] + (f" ({found})" if found else "")


def measure(options: dict[str, Any], text: str, window: int) -> Quality:
    """Score a text in windows of `window` tokens, with an engine that has these options. Raises RequestError."""
    from jpaged import LLM

    with LLM(**options) as llm:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise RequestError("model", options["model"], "has no tokenizer: name one with --tokenizer")
        if window > llm.max_model_len - 1:
            raise RequestError("window", window, f"must be at most {llm.max_model_len - 1} with this model")
        windows = windows_of(tokenizer, text, window)
        scores = llm.score([{"prompt_token_ids": ids} for ids in windows])
        predicted = b"".join(tokenizer.decode(ids[1:]).encode() for ids in windows)
    tokens = sum(len(score.logprobs) for score in scores)
    loss = -math.fsum(score.cumulative_logprob for score in scores) / tokens
    return Quality(tokens, loss, math.exp(loss), loss * tokens / math.log(2) / len(predicted))


def windows_of(tokenizer: Any, text: str, window: int) -> list[list[int]]:
    """Token ids of a text, in windows of 2 to `window` tokens. Raises RequestError if there is none."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)  # verbose: it would warn about the length
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise RequestError("text", f"{len(text):,} characters", "has fewer than 2 tokens: name a longer text")
    return windows


def _compare(options: dict[str, Any], other: dict[str, Any], text: str, window: int) -> "Divergence":
    from jpaged.divergence import divergence
    from jpaged.loading import load_model

    models = [load_model(EngineConfig(**each)) for each in (options, other)]
    windows, other_windows = (windows_of(model.tokenizer, text, window) for model in models)
    if windows != other_windows:
        accepted = "has a different tokenizer: name a model with the same one"
        raise RequestError("against", other["model"], accepted)
    return divergence(*models, windows, options["kv_cache_dtype"])
