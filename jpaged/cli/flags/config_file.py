"""`--config FILE`: flags of a command from a YAML file, as in vLLM.

Imported late: YAML and the server, which only `--config` needs.
"""

import json
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import RequestError

FLAG = "--config"
COMMANDS = ("generate", "chat", "serve", "run-batch", "bench", "plan")
MAX_BYTES = 2**20
KEYS = ("api-key", "admin-key")


def with_config_file(args: Sequence[str]) -> list[str]:
    """Replace `--config FILE` in a command line by the flags in that YAML file. The file's keys are names of flags.

    Flags on the command line win, because they come later. The file's `model` is dropped if the command line has one.
    Warns if the file has API or admin keys and other users can read it. Raises RequestError for an unreadable file.
    """
    end = args.index("--") if "--" in args else len(args)
    flags, words = list(args[:end]), list(args[end:])
    if not args or args[0] not in COMMANDS:
        return list(args)
    paths, rest = [], []
    while flags:
        flag, equals, value = flags.pop(0).partition("=")
        if flag != FLAG:
            rest.append(flag + equals + value)
        elif equals or flags:
            paths.append(value if equals else flags.pop(0))
        else:
            raise RequestError("config", None, "needs the name of a YAML file")
    if not paths:
        return list(args)
    if len(paths) > 1:
        raise RequestError("config", paths[1], "a second file: put all flags into one")
    begin = 2 if rest[0] == "bench" and len(rest) > 1 else 1
    values = _read(pathlib.Path(paths[0]))
    named = rest[begin:] and not rest[begin].startswith("-")
    if named or any(word == "--model" or word.startswith("--model=") for word in rest):
        values.pop("model", None)
    from_file = [word for name, value in values.items() for word in words_of(name, value)]
    # Before the first flag, but after the model and the prompts: a flag with several values would consume them.
    place = next((place for place in range(begin, len(rest)) if rest[place].startswith("-")), len(rest))
    return [*rest[:place], *from_file, *rest[place:], *words]


def _read(path: pathlib.Path) -> dict[str, Any]:
    """Read a YAML mapping. Underscores in its keys become dashes. Raises RequestError."""
    import yaml

    try:
        about = path.stat()
        if about.st_size > MAX_BYTES:
            raise RequestError("config", str(path), f"is larger than {MAX_BYTES:,} bytes")
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError("config", str(path), f"is not a YAML file that can be read: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RequestError("config", str(path), "must have lines like `max-model-len: 4096`")
    found = {key.lstrip("-").replace("_", "-"): value for key, value in values.items()}
    if any(found.get(name) for name in KEYS):
        from jpaged.serving.web.keys import warn_if_others_read

        warn_if_others_read("config", path, about.st_mode)
    return found


def words_of(name: str, value: Any) -> list[str]:
    """Return a flag as words of a command line. A list becomes several values, a dict becomes JSON."""
    match value:
        case None:
            return []
        case bool() if typing.get_type_hints(EngineConfig).get(name.replace("-", "_")) == bool | None:
            return [f"--{name}", str(value).lower()]
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case dict():
            return [f"--{name}", json.dumps(value)]
        case list():
            return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
