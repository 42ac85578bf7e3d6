"""The log as JSON: one object per line, for `--log-format json`."""

import datetime
import logging
import sys
from typing import Any

import msgspec

from jpaged.serving.request_context import current

FORMATS = ("text", "json")


class JSONFormatter(logging.Formatter):
    """Formats a record as one line: time (UTC), level, logger, message, and the request id if the line is about one.

    A line of the access log has its parts as fields too. A traceback is in `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is None and (context := current.get()) is not None:
            request_id = context.request_id
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def log_as_json() -> None:
    """Let the process' log have one JSON object per line. It goes where it went before, or to stderr."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler(sys.stderr))
    for handler in root.handlers:
        handler.setFormatter(JSONFormatter())
