"""The command line. Each command is a dataclass in a file of its own: its fields are the flags, `run()` does the work.

`--help` must be fast, so nothing here imports jax; commands import what they run inside `run()`.
"""

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from jpaged.errors import JPagedError

DESCRIPTION = """LLM inference in JAX: paged KV cache, continuous batching, an OpenAI-compatible server.

The model is the first argument or --model: a folder, a Hugging Face hub id, a .gguf file, or demo, which ships with
jpaged."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status is 2 where the user has to change something, and the message says what."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args in (["--version"], ["-V"]):
        from jpaged.version import __version__

        print(f"jpaged {__version__}")
        return 0
    if not args:
        args = ["--help"]
    try:
        command = parse(args)
        _log_to_stderr()
        return command.run()
    except JPagedError as error:
        print(f"jpaged: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jpaged: interrupted", file=sys.stderr)
        return 130


def console() -> None:
    """The console script."""
    sys.exit(main())


def _log_to_stderr() -> None:
    """What the engine says of itself, and of other libraries only what concerns the user."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jpaged").setLevel(logging.INFO)
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def parse(args: Sequence[str]) -> Any:
    """The command that an argument list asks for. Exits with a message, as argparse does, when it asks for none."""
    import tyro

    from jpaged.cli.bench import Bench
    from jpaged.cli.chat import Chat
    from jpaged.cli.convert import Convert
    from jpaged.cli.generate import Generate
    from jpaged.cli.inspect import Inspect
    from jpaged.cli.plan import Plan
    from jpaged.cli.serve import Serve
    from jpaged.cli.simulate import Simulate

    commands = (
        Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Chat, tyro.conf.subcommand("chat")]
        | Annotated[Serve, tyro.conf.subcommand("serve")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
        | Annotated[Inspect, tyro.conf.subcommand("inspect")]
        | Annotated[Simulate, tyro.conf.subcommand("simulate")]
        | Annotated[Convert, tyro.conf.subcommand("convert")]
        | Annotated[Plan, tyro.conf.subcommand("plan")]
    )
    read = functools.partial(
        tyro.cli,
        commands,
        prog="jpaged",
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    # Prompts may stand on both sides of the flags (`generate demo --max-tokens 8 "def f"`), and behind a bare -- they
    # may look like flags. Parsers of argparse's kind take one run of positional arguments only and report the others
    # as unknown: those are taken as prompts here.
    end = args.index("--") if "--" in args else len(args)
    flags, words = args[:end], args[end + 1 :]
    command, rest = read(args=flags, return_unknown_args=True)
    if isinstance(command, Generate):
        if not any(word.startswith("-") for word in rest):
            return command.with_more_words([*rest, *words])
        return read(args=flags)  # says what is wrong, and exits
    return read(args=args) if rest or words else command
