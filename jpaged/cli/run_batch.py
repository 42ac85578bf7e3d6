"""`jpaged run-batch`: answers a file of requests in OpenAI's batch format.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import asyncio
import dataclasses
import functools
import pathlib
import sys
from typing import Annotated

import tyro

from jpaged.cli.flags.adapters import check_adapters, served_adapters
from jpaged.cli.flags.chat import ChatFlags
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help
from jpaged.errors import RequestError

INFLIGHT_PER_ROW = 2  # so that a tokenised request waits for each row that becomes free


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBatch(ChatFlags):
    """Answer every request of a JSON lines file in OpenAI's batch format. Each answer is written when it is complete.

    Each line of the input file is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
    After a kill or Ctrl-C, the same command continues: it skips requests with an answer in the output file.

    Example: jpaged run-batch demo -i in.jsonl -o out.jsonl
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    input_file: Annotated[pathlib.Path, tyro.conf.arg(aliases=["-i"], metavar="FILE", help_behavior_hint="")]
    """File of requests."""

    output_file: Annotated[pathlib.Path, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")]
    """File of answers, in order of completion. The answer to a refused request is its error."""

    max_inflight: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Maximum number of requests in the engine, running or waiting. Default: twice --max-num-seqs."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Answer all requests that the output file does not have."""
        options = engine_options(self.engine, self.model_argument)
        if self.max_inflight is not None and self.max_inflight < 1:
            raise RequestError("max_inflight", self.max_inflight, "must be at least 1")
        for name in ("input_file", "output_file"):
            if "://" in str(getattr(self, name)):
                raise RequestError(name, str(getattr(self, name)), "must be a local file, not a URL")
        if self.output_file.exists() and self.input_file.exists() and self.output_file.samefile(self.input_file):
            raise RequestError("output_file", str(self.output_file), "is the input file: name another file")
        chat = self.chat_formats()
        check_adapters(self.lora_modules, enabled=options.get("enable_lora", False))
        from tqdm import tqdm

        from jpaged.async_llm import AsyncLLM
        from jpaged.serving.app_options import AppOptions
        from jpaged.serving.application import create_app
        from jpaged.serving.files.batch_files import check_requests, open_results, read_requests
        from jpaged.serving.files.batch_run import answer, run_requests
        from jpaged.serving.server_state import Server

        names = self.served_model_name or (options["model"],)
        expected = check_requests(self.input_file)  # before the slow load of the model
        with open_results(self.output_file, expected) as results:
            before = len(results.done)
            if before == len(expected):
                print(f"{self.output_file} has all {len(expected)} answers")
                return 0
            engine = AsyncLLM(**options)
            adapters = served_adapters(engine, names, self.lora_modules)
            server = Server(
                engine=engine, model_names=names, chat=chat, config=engine.config,
                template_kwargs=self.chat_template_kwargs, adapters=adapters,
            )  # fmt: skip
            # Kept responses would fill the memory, and no client can retrieve them.
            app = create_app(server, AppOptions(ui=False, keep_responses=False))
            limit = self.max_inflight or INFLIGHT_PER_ROW * engine.max_num_seqs
            requests = read_requests(self.input_file, frozenset(results.done))
            with tqdm(
                total=len(expected), initial=before, desc="Requests", unit="request", dynamic_ncols=True,
                disable=not sys.stderr.isatty(),
            ) as bar:  # fmt: skip

                async def work() -> int:
                    async with app.router.lifespan_context(app):  # closes the engine at the end
                        ask = functools.partial(answer, app)
                        return await run_requests(
                            ask, requests, results, max_inflight=limit, update=lambda _: bar.update(1)
                        )

                failed = asyncio.run(work())
        print(f"{len(expected) - before} requests answered, {failed} of them with an error: {self.output_file}")
        if before:
            print(f"{before} answers were already in the file")
        return 0
