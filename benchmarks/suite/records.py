"""Reads the results that a suite has recorded."""

import dataclasses
import json
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from suite.configurations import CONFIGURATIONS, Configuration
from suite.session import others

Record = Mapping[str, Any]
BY_NAME = {each.name: each for each in CONFIGURATIONS}
MAX_OTHERS = 0.10


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one configuration in one row of a table."""

    configuration: Configuration
    records: tuple[Record, ...]

    @property
    def noisy(self) -> bool:
        """True if other processes used more than 10% of the CPUs in every run. Otherwise noisy runs do not count."""
        return min(map(others, self.records)) > MAX_OTHERS

    def values(self, field: str) -> list[float]:
        """Return a field of each run that has it. Noisy runs count only if all runs are noisy."""
        counted = [each for each in self.records if self.noisy or others(each) <= MAX_OTHERS]
        return [each[field] for each in counted if field in each]


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read a file of results. Empty if the file is missing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def machine_name(record: Record) -> str:
    """Return the processor, its features and the number of CPUs that a record was measured with."""
    machine = record["machine"]
    return f"{machine['processor']} ({machine['features']}), {machine['cpus']} CPUs"


def grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Runs]]:
    """Group successful runs by a key, and each group by configuration, in the order of `CONFIGURATIONS`."""
    groups: dict[Any, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["configuration"] in BY_NAME and "failed" not in record and "skipped" not in record:
            groups[key(record)][record["configuration"]].append(record)
    return {
        name: [Runs(each, tuple(group[each.name])) for each in CONFIGURATIONS if each.name in group]
        for name, group in groups.items()
    }


def flattened_steps(records: Iterable[Record]) -> list[Record]:
    """Return a record for each decode step in records of the suite `scaling`."""
    return [
        {**{name: value for name, value in record.items() if name != "steps"}, **step}
        for record in records
        for step in record.get("steps", [])
    ]


def unfinished(records: Iterable[Record]) -> dict[str, str]:
    """Return why configurations failed or were skipped, by configuration and model."""
    return {
        f"{record['configuration']}, {record['model']}{', ' + record['workload'] if 'workload' in record else ''}": (
            f"{reason}: {record[reason]}"
        )
        for record in records
        for reason in ("failed", "skipped")
        if reason in record
    }
