"""The command line. Each command is a dataclass in its own file: the fields are the flags, `run()` does the work.

`--help` must be fast, so this package imports no jax at its top level. Each `run()` imports what it needs.
"""

import functools
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from jpaged.errors import JPagedError

DESCRIPTION = """LLM inference in JAX: paged KV cache, continuous batching, an OpenAI-compatible server.

Most commands take a model, as first argument or as --model: a folder, a Hugging Face hub id, a .gguf file, or demo, the
small model that ships with jpaged. `jpaged COMMAND --help` lists the flags of a command. --config FILE reads flags from
a YAML file, and whole numbers may have a unit: 32k is 32,000, and 32K is 32,768."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit status: 2 after an error, whose message says what to change.

    Logging stays as the caller set it: `console` sets it for the process.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args in (["--version"], ["-V"]):
        from jpaged.version import __version__

        print(f"jpaged {__version__}")
        return 0
    if not args:
        args = ["--help"]
    try:
        return parse(args).run()
    except JPagedError as error:
        print(f"jpaged: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jpaged: interrupted", file=sys.stderr)
        return 130


def console() -> None:
    """Run the command line with its log on stderr, and exit. Entry point of the script `jpaged`."""
    _log_to_stderr()
    if {"-h", "--help"} & set(sys.argv) and hasattr(signal, "SIGPIPE"):
        # `jpaged serve --help | head` ends without a traceback. Not for other commands: they would die of any socket.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())


def _log_to_stderr() -> None:
    """Log the engine's messages, and the warnings of other libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("jpaged", "pallas_kernels"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def parse(args: Sequence[str]) -> Any:
    """Return the command of an argument list. Exits with a message, as argparse does, if the arguments are wrong.

    Raises RequestError for a flag of vLLM that is not supported yet.
    """
    import tyro

    from jpaged.cli.bench import Bench
    from jpaged.cli.chat import Chat
    from jpaged.cli.config_file import with_config_file
    from jpaged.cli.convert import Convert
    from jpaged.cli.generate import Generate
    from jpaged.cli.inspect import Inspect
    from jpaged.cli.numbers import with_whole_numbers
    from jpaged.cli.other_engines import without_neutral
    from jpaged.cli.plan import Plan
    from jpaged.cli.quantize import Quantize
    from jpaged.cli.report import Report
    from jpaged.cli.run_batch import RunBatch
    from jpaged.cli.serve import Serve
    from jpaged.cli.simulate import Simulate

    commands = (
        Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Chat, tyro.conf.subcommand("chat")]
        | Annotated[Serve, tyro.conf.subcommand("serve")]
        | Annotated[RunBatch, tyro.conf.subcommand("run-batch")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
        | Annotated[Inspect, tyro.conf.subcommand("inspect")]
        | Annotated[Simulate, tyro.conf.subcommand("simulate")]
        | Annotated[Convert, tyro.conf.subcommand("convert")]
        | Annotated[Quantize, tyro.conf.subcommand("quantize")]
        | Annotated[Plan, tyro.conf.subcommand("plan")]
        | Annotated[Report, tyro.conf.subcommand("report")]
    )
    read = functools.partial(
        tyro.cli,
        commands,
        prog="jpaged",
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    if any("key" in word for word in args):
        from jpaged.serving.keys import warn_of_visible_keys

        warn_of_visible_keys(args)
    args = with_whole_numbers(without_neutral(with_config_file(args)))
    # Prompts may come before and after flags (`generate demo --max-tokens 8 "def f"`). After a bare -- they may begin
    # with a dash. A parser like argparse accepts only one run of positional arguments and reports the others as
    # unknown: here the unknown ones become prompts.
    end = args.index("--") if "--" in args else len(args)
    flags, words = args[:end], args[end + 1 :]
    command, rest = read(args=flags, return_unknown_args=True)
    if isinstance(command, Generate):
        if not any(word.startswith("-") for word in rest):
            return command.with_more_words([*rest, *words])
        return read(args=flags)  # prints the error and exits
    return read(args=args) if rest or words else command
