"""Writes a command's results to a JSON file, and describes the machine that they were measured on.

Imported late: JAX, which the command has imported by then.
"""

import importlib.util
import json
import os
import pathlib
import platform
from typing import Annotated, Any

import tyro

from jpaged.errors import RequestError
from jpaged.version import __version__

OutputJson = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


def machine() -> dict[str, Any]:
    """Describe this machine: versions, processor, device."""
    import jax

    device = jax.devices()[0]
    return {
        "jpaged": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "devices": jax.device_count(),
        "cpus": os.cpu_count(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check_writable(path: pathlib.Path | None, parameter: str = "output_json") -> None:
    """Raise RequestError if a file cannot be written. Called before the work, so that no results are lost.

    An existing file keeps its content. A new file is removed again, because the work may fail.
    """
    if path is None:
        return
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise RequestError(parameter, str(path), f"cannot be written: {error.strerror}") from None


def needs_matplotlib(parameter: str, path: pathlib.Path) -> None:
    """Raise RequestError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        accepted = "needs matplotlib: python -m pip install matplotlib"
        raise RequestError(parameter, str(path), accepted)


def write_json(path: pathlib.Path | None, data: Any) -> None:
    """Write results to a file, if there is a path."""
    if path is not None:
        text = json.dumps(data, indent=2, ensure_ascii=False, default=_bytes_as_numbers)
        path.write_text(text + "\n", encoding="utf-8")


def _bytes_as_numbers(value: Any) -> list[int]:
    """Convert a token's bytes to integers, as OpenAI's API does. Part of a UTF-8 character has no text."""
    if isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
