"""Check that every test has passed in one of the gate's runs, so that no test runs nowhere.

    python .ci/every_test_passed.py [--left-out FILE] REPORT.xml ...

Reads JUnit reports. Collects all tests, with any markers. Prints the tests without a pass and exits with 1. FILE lists
the test files that a run has left out, one a line: their tests passed in the recorded complete pass. Exceptions are
tests that a developer starts (`soak`, and `slow` with `deviceless`), and tests that need torch, which the gate lacks.
Tests of the server's page may be skipped without node or Chromium, the test of the dashboard without Prometheus, and
the test against tunix without tunix.
"""

import argparse
import contextlib
import io
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

EXCUSES = ("torch", "the page was NOT", "NOT CHECKED")  # a skip with one of these in its reason counts as passed


class Collected:
    """Pytest plugin that keeps the names of collected tests."""

    def __init__(self, left_out: Collection[str]) -> None:
        self.names: list[str] = []
        self._left_out = left_out

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep the names of the tests that the gate must run."""
        for item in session.items:
            marks = {mark.name for mark in item.iter_markers()}
            is_left_out = item.nodeid.partition("::")[0] in self._left_out
            if "soak" not in marks and not {"slow", "deviceless"} <= marks and not is_left_out:
                self.names.append(junit_name(item.nodeid))


def junit_name(node_id: str) -> str:
    """Name of a test in a report: module and class joined with dots, a space, the test with its parameters."""
    place, bracket, parameters = node_id.partition("[")
    path, *names = place.split("::")
    module = path.removesuffix(".py").replace("/", ".")
    return f"{'.'.join([module, *names[:-1]])} {names[-1]}{bracket}{parameters}"


def passed(reports: Iterable[str]) -> set[str]:
    """Names of the tests that passed in one of the reports, or were skipped with one of EXCUSES."""
    found = set()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            results = [part for part in case if part.tag in ("failure", "error", "skipped")]
            if all(part.tag == "skipped" and _excused(part.get("message", "")) for part in results):
                found.add(f"{case.get('classname')} {case.get('name')}")
    return found


def _excused(reason: str) -> bool:
    return any(excuse in reason for excuse in EXCUSES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left-out", type=Path, metavar="FILE")
    parser.add_argument("reports", nargs="+")
    args = parser.parse_args()
    left_out = set(args.left_out.read_text().splitlines()) if args.left_out else set()
    collected = Collected(left_out)
    listing = io.StringIO()
    with contextlib.redirect_stdout(listing):
        status = pytest.main(["--collect-only", "-q", "-m", ""], plugins=[collected])
    if status != 0:
        print(listing.getvalue(), file=sys.stderr)
        return 1
    missing = sorted(set(collected.names) - passed(args.reports))
    print(f"{len(left_out)} files of tests were left out in a step")
    print(f"{len(collected.names)} tests had to pass, {len(missing)} did not", *missing, sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
