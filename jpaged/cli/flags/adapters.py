"""Flags for LoRA adapters, of commands that answer OpenAI requests.

Imported late: the server, which `--help` does not need.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jpaged.errors import RequestError

if TYPE_CHECKING:
    from jpaged.async_llm import AsyncLLM
    from jpaged.frontend.remote.remote_engine import RemoteEngine
    from jpaged.serving.adapters.served_adapters import ServedAdapters

Module = tuple[str, str, str | None]  # name, path, base_model_name
KEYS = {"name", "path", "base_model_name"}


def _modules(words: list[str]) -> tuple[Module, ...]:
    """Parse the words after --lora-modules. Raises ValueError, which tyro prints next to the flag."""
    return tuple(module for word in words for module in _modules_of(word))


def _modules_of(word: str) -> list[Module]:
    if not word.startswith(("{", "[")):
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise ValueError(f'write NAME=FOLDER, or JSON as {{"name": ..., "path": ...}}; got {word!r}')
        return [(name, path, None)]
    found = json.loads(word)
    made: list[Module] = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not {"name", "path"} <= one.keys() <= KEYS:
            raise ValueError(f'write {{"name": ..., "path": ..., "base_model_name": ...}}; got {one!r}')
        name, path, base = one["name"], one["path"], one.get("base_model_name")
        if not (isinstance(name, str) and name and isinstance(path, str) and path and isinstance(base, str | None)):
            raise ValueError(f"name, path and base_model_name must be strings; got {one!r}")
        made.append((name, path, base))
    return made


_LIST: Any = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="NAME=FOLDER [NAME=FOLDER ...]",
    instance_from_str=_modules,
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [f"{name}={path}" for name, path, _ in value],
)
LoraModules = Annotated[tuple[Module, ...], _LIST, tyro.conf.arg(help_behavior_hint="")]


def check_adapters(modules: Sequence[Module], folders: Sequence[pathlib.Path] = (), *, enabled: bool) -> None:
    """Raise RequestError for adapters without --enable-lora, and for folders that do not exist.

    Called before the model is loaded, which may take minutes.
    """
    for flag, values in (("lora_modules", [name for name, *_ in modules]), ("lora_dirs", list(map(str, folders)))):
        if values and not enabled:
            raise RequestError(flag, values[0], "needs --enable-lora")
    check_folders("lora_dirs", folders)
    for name, path, _ in modules:
        if not pathlib.Path(path).expanduser().is_dir():
            raise RequestError("lora_modules", path, f"the adapter {name!r} is not a folder")


def check_folders(flag: str, folders: Sequence[pathlib.Path]) -> None:
    """Raise RequestError for a path that is not a folder."""
    for folder in folders:
        if not folder.expanduser().is_dir():
            raise RequestError(flag, str(folder), "is not a folder")


def served_adapters(
    engine: "AsyncLLM | RemoteEngine", names: Sequence[str], modules: Sequence[Module],
    folders: Sequence[pathlib.Path] = (),
) -> "ServedAdapters | None":  # fmt: skip
    """Load the adapters of the flags. None without --enable-lora. Closes the engine if one cannot be loaded.

    names: of the model. Raises RequestError and ModelLoadError.
    """
    if not engine.config.enable_lora:
        return None
    from jpaged.serving.adapters.served_adapters import AdapterModule, ServedAdapters

    try:
        adapters = ServedAdapters(engine.adapters, names, folders)
        adapters.load_modules([AdapterModule(*module) for module in modules])
    except BaseException:
        engine.close()
        raise
    return adapters
