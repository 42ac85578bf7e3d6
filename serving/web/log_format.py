"""Formats of the server's log: lines of text, or one JSON object per line for `--log-format json`.

Both have the time and the level of a line, and if it is about a request, its id, client, method, path and status.
"""

import datetime
import logging
import sys
from typing import Any

import msgspec

from jpaged.serving.web.request_context import current

FORMATS = ("text", "json")


def _request_of(record: logging.LogRecord) -> dict[str, Any]:
    """Facts about the request that a line is about; empty if it is about none. `facts` of the access log win."""
    found: dict[str, Any] = {}
    context = current.get()
    if context is not None:
        found = {"request_id": context.request_id, "client": context.client}
        found |= {"method": context.method, "path": context.path}
    for name in ("request_id", "status"):
        if (value := getattr(record, name, None)) is not None:
            found[name] = value
    return found | getattr(record, "facts", {})


class JSONFormatter(logging.Formatter):
    """Formats a record as one line: time (UTC), level, logger, message, request facts, a traceback (`exception`)."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _request_of(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """Formats a record as time (local), level and message. A line about a request ends with the facts about it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        line = super().formatMessage(record)
        request = {} if hasattr(record, "facts") else _request_of(record)  # the access log's message has them
        if not request:
            return line
        parts = [request.get("client"), f'"{request["method"]} {request["path"]}"' if "method" in request else None]
        parts += [request.get("status"), request.get("request_id")]
        return f"{line} [{' '.join(str(part) for part in parts if part is not None)}]"


def use_format(name: str) -> None:
    """Set the log's format, one of FORMATS. Without handlers, log to stderr. json: also log Python's warnings."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler(sys.stderr))
    if name == "json":
        logging.captureWarnings(True)
    for handler in root.handlers:
        handler.setFormatter(JSONFormatter() if name == "json" else TextFormatter())


def is_json() -> bool:
    """Return True if the process' log has one JSON object per line."""
    return any(isinstance(handler.formatter, JSONFormatter) for handler in logging.getLogger().handlers)


def line_of(message: str, level: int = logging.INFO) -> str:
    """Return a message for stdout: as it is, or as a line of JSON if the log has that format."""
    if not is_json():
        return message
    return JSONFormatter().format(logging.LogRecord("jpaged.serving", level, "", 0, message, None, None))


def say(message: str) -> None:
    """Print a message to stdout, in the log's format."""
    print(line_of(message), flush=True)
