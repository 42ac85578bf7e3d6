"""Print what the tests of each folder cost, and compare their counts with the budget.

    python -m pytest -n auto tests --costs COSTS
    python tools/costs.py COSTS                       # a table of folders; of files or tests with --by
    python tools/costs.py COSTS --budget tests/recording/budget.json   # and exit with 1 if a count exceeds it
    python tools/costs.py COSTS --markdown            # for docs/testing.md

Programs are distinct compile keys, engines are runners that were created, children are processes that tests started
(tests/recording/costs.py). Only programs and engines have a budget: they depend neither on the machine's speed nor on
the worker. Seconds are sums over workers, so a run with two workers took half of them.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TOTAL = "all folders"


@dataclasses.dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float
    tests: int
    engines: int
    programs: int
    children: int
    max_rss_mib: int

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "Cost":
        """Sum of the rows. A program that several tests need counts once. `max_rss_mib` is the maximum."""
        seconds, cpu, engines, children = (
            sum(row[name] for row in rows) for name in ("seconds", "cpu_seconds", "engines", "children")
        )
        programs = len({key for row in rows for key in row["keys"]})
        return cls(seconds, cpu, len(rows), engines, programs, children, max(row["max_rss_mib"] for row in rows))


def read(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Rows of all tests, from folders that `pytest --costs` wrote."""
    return [json.loads(line) for each in folders for file in sorted(each.glob("*.jsonl")) for line in file.open()]


def group_of(test: str, by: str) -> str:
    file = test.partition("::")[0]
    return {"test": test, "file": file, "folder": str(Path(file).parent)}[by]


def costs(rows: list[dict[str, Any]], by: str = "folder") -> dict[str, Cost]:
    """Cost of each group, the most expensive first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(group_of(row["test"], by), []).append(row)
    found = {name: Cost.of(part) for name, part in groups.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def table(found: dict[str, Cost], markdown: bool) -> str:
    heads = ("seconds", "CPU seconds", "tests", "engines", "programs", "children", "MiB")
    rows = [
        (name, f"{c.seconds:.1f}", f"{c.cpu_seconds:.1f}", *map(str, dataclasses.astuple(c)[2:]))
        for name, c in found.items()
    ]
    if markdown:
        return "\n".join(f"| {' | '.join(row)} |" for row in [("", *heads), ("---",) * 8, *rows])
    widths = [max(map(len, column)) for column in zip(*[("", *heads), *rows], strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in [("", *heads), *rows]
    ]
    return "\n".join(lines)


def exceeded(found: dict[str, Cost], budget: dict[str, dict[str, int]]) -> list[str]:
    """Counts above the budget of their folder. The budget of a folder that `budget` lacks is 0."""
    return [
        f"{folder}: {count} {name}, and its budget is {allowed}"
        for folder, cost in found.items()
        for name in ("programs", "engines")
        if (count := getattr(cost, name)) > (allowed := budget.get(folder, {}).get(name, 0))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("costs", type=Path, nargs="+", help="folders that `--costs` wrote")
    parser.add_argument("--by", choices=("folder", "file", "test"), default="folder")
    parser.add_argument("--top", type=int, help="print only this many rows")
    parser.add_argument("--budget", type=Path, help="JSON of programs and engines by folder")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    rows = read(args.costs)
    if not rows:
        parser.error(f"no test in {', '.join(map(str, args.costs))}: run pytest with --costs")
    found = costs(rows, args.by)
    shown = dict(list(found.items())[: args.top])
    print(table(shown | {TOTAL: Cost.of(rows)}, args.markdown))
    if args.budget is None:
        return 0
    wrong = exceeded(costs(rows), json.loads(args.budget.read_text("utf-8")))
    print(*wrong, sep="\n", file=sys.stderr)
    if wrong:
        print("docs/testing.md says what to do: make a test cheaper, or `slow`, or another one.", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
