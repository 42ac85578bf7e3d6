"""The command line. Each command is a dataclass in its own file. Its fields are the flags, and `run()` does the work.

`--help` must be fast, so this package imports no jax at its top level. Each `run()` imports what it needs.

Imported late: the module of the command, and what only some commands need.
"""

import difflib
import functools
import importlib
import itertools
import logging
import operator
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

from jpaged.errors import JPagedError

DESCRIPTION = """LLM inference in JAX: paged KV cache, continuous batching, an OpenAI-compatible server.

Most commands take a model, as first argument or as --model: a folder, a Hugging Face hub id, a .gguf file, or demo, the
small model that ships with jpaged. `jpaged COMMAND --help` lists the flags of a command. --config FILE reads flags from
a YAML file, and whole numbers may have a unit: 32k is 32,000, and 32K is 32,768."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit status: 2 after an error, 130 after Ctrl-C. `console` sets up logging."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args in (["--version"], ["-V"]):
        from jpaged.version import __version__

        print(f"jpaged {__version__}")
        return 0
    if not args:
        args = ["--help"]
    if args[0] == "serve" and ("--log-format=json" in args or ("--log-format", "json") in itertools.pairwise(args)):
        from jpaged.serving.web.log_format import use_format

        use_format("json")  # before parsing, which may log warnings about flags
    try:
        return parse(args).run()
    except JPagedError as error:
        _print_error(str(error))
        return 2
    except KeyboardInterrupt:
        _print_error("interrupted")
        return 130


def _print_error(message: str) -> None:
    """Print an error to stderr, or log it if the log is JSON."""
    log_format = sys.modules.get("jpaged.serving.web.log_format")
    if log_format is not None and log_format.is_json():
        logging.getLogger("jpaged").critical("%s", message)
    else:
        print(f"jpaged: {message}", file=sys.stderr)


def console() -> None:
    """Run the command line with its log on stderr, and exit. Entry point of the script `jpaged`."""
    _log_to_stderr()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell script starts `command &` with SIGINT ignored. `kill -INT` must still interrupt the command.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if {"-h", "--help"} & set(sys.argv):
        # On a screen wider than 120 columns tyro puts groups side by side, and the first group is not at the top.
        os.environ["COLUMNS"] = str(min(shutil.get_terminal_size().columns, 120))
        if hasattr(signal, "SIGPIPE"):
            # `jpaged serve --help | head` must end without a traceback. Without --help, a closed socket would end us.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())


def _log_to_stderr() -> None:
    """Log jpaged's messages from INFO, and those of other libraries from WARNING."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("jpaged", "pallas_kernels"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


COMMANDS = (
    "generate", "chat", "serve", "run-batch", "bench", "inspect", "simulate", "convert", "quantize", "plan", "report",
)  # fmt: skip
BENCHMARKS = ("serve", "throughput", "latency", "steps", "quality", "startup", "speculation")
_CLASSES = {
    "generate": "generate.Generate",
    "chat": "chat.Chat",
    "serve": "serve.Serve",
    "run-batch": "run_batch.RunBatch",
    "bench serve": "bench.serve.BenchServe",
    "bench throughput": "bench.throughput.Throughput",
    "bench latency": "bench.latency.Latency",
    "bench steps": "bench.steps.Steps",
    "bench quality": "bench.quality.QualityCommand",
    "bench startup": "bench.startup.Startup",
    "inspect": "inspect.Inspect",
    "simulate": "simulate.Simulate",
    "convert": "convert.Convert",
    "quantize": "quantize.Quantize",
    "plan": "plan.Plan",
    "report": "report.Report",
}


def parse(args: Sequence[str]) -> Any:
    """Return the command of an argument list. Exits with a message, as argparse does, if the arguments are wrong.

    Imports only the command's module. Raises RequestError for a bad --config file, or for an unsupported flag of vLLM.
    """
    args = list(args)
    if args and not args[0].startswith("-") and args[0] not in COMMANDS:
        _no_command("command", args[0], COMMANDS)
    if args[:1] == ["bench"] and len(args) > 1 and not args[1].startswith("-") and args[1] not in BENCHMARKS:
        _no_command("benchmark", args[1], BENCHMARKS)
    import tyro

    from jpaged.cli.flags.config_file import with_config_file
    from jpaged.cli.flags.groups import grouped, ungrouped
    from jpaged.cli.flags.numbers import with_whole_numbers
    from jpaged.cli.flags.other_engines import without_neutral

    if any("key" in word for word in args):
        from jpaged.serving.web.keys import warn_of_visible_keys

        warn_of_visible_keys(args)
    args = with_whole_numbers(without_neutral(with_config_file(args)))
    name = " ".join(args[: 2 if args[0] == "bench" else 1])
    command = _command_of(name)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    if command is None:
        return tyro.cli(_all_commands(), prog="jpaged", description=DESCRIPTION, config=config, args=args)
    args = args[len(name.split()) :]
    with_engine = "engine" in command.__annotations__ and command.__name__ != "Inspect"
    flags_of = grouped(command) if with_engine else command
    read = functools.partial(tyro.cli, flags_of, prog=f"jpaged {name}", config=config)
    # Prompts may follow flags: `generate demo --max-tokens 8 "def f"`. tyro reports them as unknown arguments, because
    # it accepts one run of positional arguments only. Prompts after a bare -- may begin with a dash.
    end = args.index("--") if "--" in args else len(args)
    flags, words = args[:end], args[end + 1 :]
    found, rest = read(args=flags, return_unknown_args=True)
    if name == "generate" and not any(word.startswith("-") for word in rest):
        return ungrouped(command, found).with_more_words([*rest, *words])
    if rest or words:
        found = read(args=flags if name == "generate" else args)  # prints the error and exits
    return ungrouped(command, found) if with_engine else found


def _no_command(kind: str, word: str, known: Sequence[str]) -> NoReturn:
    """Print the error for an unknown command, and exit with status 2."""
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    print(f"jpaged: there is no {kind} {word!r}; {hint}There are {', '.join(known)}", file=sys.stderr)
    sys.exit(2)


def _command_of(name: str) -> Any:
    """Import the class of a command. None: `name` is not one command, such as `bench` without a benchmark."""
    if name not in _CLASSES:
        return None
    module, _, kind = _CLASSES[name].rpartition(".")
    return getattr(importlib.import_module(f"jpaged.cli.{module}"), kind)


def _all_commands() -> Any:
    """Union of all commands, for the help that lists them."""
    import tyro

    from jpaged.cli.bench.command import Bench

    kinds = [Bench if name == "bench" else _command_of(name) for name in COMMANDS]
    named = [Annotated[kind, tyro.conf.subcommand(name)] for kind, name in zip(kinds, COMMANDS, strict=True)]
    return functools.reduce(operator.or_, named)
