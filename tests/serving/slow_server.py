"""`jpaged serve` on a runner without a model, whose steps take 20 ms. Signal USR1 prints the engine's load.

It is run as a program, with the arguments of `jpaged serve`. The front end's process imports the tokenizer from here.
"""

import json
import signal
import sys
from typing import Any
from unittest import mock

from jpaged import SamplingParams, cli
from jpaged.engine.engine import Engine
from jpaged.errors import ModelLoadError
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from tests.engine.small_tokenizer import SmallTokenizer
from tests.support.slow_runner import SlowRunner


class AnyTokenizer(SmallTokenizer):
    """Takes any character."""

    def encode(self, text: str, *, verbose: bool = True, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.get(letter, 20) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        """The contents of the messages."""
        return "".join(message["content"] for message in messages)


class Steps(SlowRunner):
    """20 ms for each step."""

    seconds = 0.02


def build(model: Any, params: Any, given: Any, **how: Any) -> BuiltEngine:
    """In place of `build_engine`. The model "broken" cannot be loaded."""
    if model == "broken":
        raise ModelLoadError("broken: it is")
    tokenizer = AnyTokenizer()
    engine = Engine(Steps(max_num_seqs=32, max_num_batched_tokens=64, max_model_len=2000, num_blocks=8000), tokenizer)

    def show(*_: Any) -> None:
        stats = engine.stats()
        print(json.dumps([stats.num_running, stats.used_blocks, stats.generated_tokens, stats.finished_requests]))

    signal.signal(signal.SIGUSR1, show)
    return BuiltEngine(engine, engine_config(model, given), None, tokenizer, SamplingParams(temperature=0))


def main() -> int:
    """Serve. Returns the exit status."""
    sys.stdout.reconfigure(line_buffering=True)
    with mock.patch("jpaged.async_llm.build_engine", build):
        return cli.main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    from tests.serving import slow_server  # the front end finds the tokenizer's class by this name

    sys.exit(slow_server.main())
