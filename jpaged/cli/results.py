"""What commands leave behind: a JSON file of results, and the machine they were measured on."""

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
    """What a figure is worth nothing without: versions, processor, device."""
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
    """Raises RequestError now for a file that could not be written after the work is done."""
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise RequestError(parameter, str(path), f"cannot be written: {error.strerror}") from None


def write_json(path: pathlib.Path | None, data: Any) -> None:
    """Write results, if a file was asked for."""
    if path is not None:
        text = json.dumps(data, indent=2, ensure_ascii=False, default=_bytes_as_numbers)
        path.write_text(text + "\n", encoding="utf-8")


def _bytes_as_numbers(value: Any) -> list[int]:
    """Of a token that is part of a character only, as OpenAI's API has them."""
    if isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
