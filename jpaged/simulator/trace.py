"""Trace: requests of a CSV or JSONL file, read line by line. Errors name the line and the column.

Columns of a CSV file's header, or keys of each JSON object, in any order:

    arrival         seconds, 0 or more, in ascending order
    prompt_tokens   1 or more
    output_tokens   1 or more
    prefix_id       optional; requests with the same prefix_id start with the same tokens
    prefix_tokens   optional; length of the prefix, 0 to prompt_tokens; default with a prefix_id: the whole prompt
    priority        optional; a whole number; default: 0

An empty field has its default. Other columns are refused, so that a misspelt column is not ignored.
"""

import csv
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jpaged.errors import RequestError
from jpaged.simulator.load import NO_PREFIX, Arrival

NEEDED = ("arrival", "prompt_tokens", "output_tokens")
OPTIONAL = ("prefix_id", "prefix_tokens", "priority")
MAX_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """Position in the file, for errors."""

    path: str
    number: int                   # line number, from 1
    columns: Mapping[str, int]    # name -> column number, from 1; empty for JSONL, which has keys

    def error(self, column: str, value: object, accepted: str) -> RequestError:
        place = f"column {self.columns[column]} ({column})" if column in self.columns else f"key {column!r}"
        return RequestError("trace", value, f"{self.path}, line {self.number}, {place}: {accepted}")


class Trace:
    """A recorded load. The constructor reads the whole file once, so that errors are raised before a run."""

    def __init__(self, path: pathlib.Path, max_model_len: int):
        self.path = path
        self.num_requests = 0
        self.has_priorities = False
        self._max_model_len = max_model_len
        self._ids: dict[str, int] = {}
        for arrival in self:
            self.num_requests += 1
            self.has_priorities |= arrival.priority != 0
        if not self.num_requests:
            raise RequestError("trace", str(path), "has no requests")

    def __iter__(self) -> Iterator[Arrival]:
        last = 0.0
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                lines = _csv_lines if self.path.suffix.lower() == ".csv" else _json_lines
                for line, fields in lines(str(self.path), file):
                    arrival = self._arrival(line, fields)
                    if arrival.time < last:
                        raise line.error(
                            "arrival", fields["arrival"], f"earlier than the line above ({last}): sort by arrival"
                        )
                    last = arrival.time
                    yield arrival
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RequestError("trace", str(self.path), f"cannot be read: {error}") from None

    def _arrival(self, line: _Line, fields: Mapping[str, Any]) -> Arrival:
        arrived = _seconds(line, fields)
        prompt = _whole(line, fields, "prompt_tokens", 1)
        output = _whole(line, fields, "output_tokens", 1)
        priority = _whole(line, fields, "priority", -MAX_INT, 0)
        name = fields.get("prefix_id")
        if name is None:
            shared = _whole(line, fields, "prefix_tokens", 0, 0)
            if shared:
                raise line.error("prefix_tokens", shared, "needs a prefix_id, which is missing")
            prefix = NO_PREFIX
        else:
            shared = _whole(line, fields, "prefix_tokens", 0, prompt)
            prefix = self._ids.setdefault(str(name), len(self._ids))
        if shared > prompt:
            raise line.error("prefix_tokens", shared, f"more than the prompt's {prompt} tokens")
        if prompt + output > self._max_model_len:
            raise line.error(
                "output_tokens", output, f"prompt ({prompt} tokens) and output are longer than max_model_len="
                f"{self._max_model_len}: shorten them, or simulate with a larger --max-model-len"
            )  # fmt: skip
        return Arrival(arrived, prompt, output, prefix, shared, priority)


def _csv_lines(path: str, file: Any) -> Iterator[tuple[_Line, dict[str, Any]]]:
    reader = csv.reader(file, strict=True)
    header = [name.strip() for name in next(reader, [])]
    columns = {name: place for place, name in enumerate(header, 1)}
    _check_names(_Line(path, 1, columns), header, "column")
    for values in reader:
        line = _Line(path, reader.line_num, columns)
        if not values:
            continue
        if len(values) != len(header):
            raise RequestError(
                "trace", ",".join(values),
                f"{path}, line {line.number}: {len(values)} columns, the header has {len(header)}"
            )  # fmt: skip
        texts = (value.strip() for value in values)
        yield line, {name: text for name, text in zip(header, texts, strict=True) if text}


def _json_lines(path: str, file: Any) -> Iterator[tuple[_Line, dict[str, Any]]]:
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        line = _Line(path, number, {})
        try:
            fields = json.loads(text.rstrip())
        except json.JSONDecodeError as error:
            raise RequestError(
                "trace", text.strip(), f"{path}, line {number}, column {error.colno}: {error.msg}; each line is a JSON "
                "object (a file of comma-separated values must end in .csv)"
            ) from None  # fmt: skip
        if not isinstance(fields, dict):
            raise RequestError("trace", text.strip(), f"{path}, line {number}: each line must be a JSON object")
        _check_names(line, list(fields), "key")
        yield line, {name: value for name, value in fields.items() if value is not None}


def _check_names(line: _Line, names: list[str], kind: str) -> None:
    for place, name in enumerate(names, 1):
        if name not in NEEDED + OPTIONAL or names.index(name) + 1 != place:
            why = "given twice" if name in NEEDED + OPTIONAL else f"must be one of {', '.join(NEEDED + OPTIONAL)}"
            raise RequestError("trace", name, f"{line.path}, line {line.number}, {kind} {place}: {why}")
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise RequestError(
            "trace", ", ".join(names), f"{line.path}, line {line.number}: {kind} {' and '.join(missing)} missing"
        )


def _seconds(line: _Line, fields: Mapping[str, Any]) -> float:
    value = fields.get("arrival")
    if value is None:
        raise line.error("arrival", value, "is empty: a number of seconds is needed")
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise line.error("arrival", value, "must be a number of seconds")
    if seconds < 0:
        raise line.error("arrival", value, "must be 0 or more seconds")
    return seconds


def _whole(line: _Line, fields: Mapping[str, Any], name: str, lowest: int, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        if default is not None:
            return default
        raise line.error(name, value, "is empty: a whole number is needed")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number != number or number in (math.inf, -math.inf) or number != int(number):
        raise line.error(name, value, "must be a whole number")
    if not lowest <= number <= MAX_INT:
        raise line.error(name, value, f"must be from {lowest} to {MAX_INT}")
    return int(number)
