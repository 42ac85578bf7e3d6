"""Change product code in small ways, and count the changes that the tests find.

    python tools/mutations.py draw mutations.json                       # 60 mutations, drawn with a fixed seed
    python tools/mutations.py run mutations.json results.json --reach REACH --costs COSTS
    python tools/mutations.py show results.json [earlier.json]

REACH and COSTS are folders of a test run with Python 3.12:

    python -m pytest -n auto tests -m 'not soak and not deviceless' --reach REACH --costs COSTS

A mutation changes one operator, condition, constant or call of a function. `draw` takes from each product folder a
number of mutations proportional to the square root of its lines, and at least two. `run` changes one copy of the
checkout per core. It runs the tests that reach the line, cheapest first, until one fails. Then come other tests of the
same files: they may use a program that another test traced. Slow tests run only if no default test failed.

A mutation is found if a test fails, crashes or does not end. Tests that fail without it do not count.
`--seconds` limits the sum of the tests' seconds in COSTS, for the default and for the slow tests of each mutation.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import math
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from costs import read
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("jpaged", "models", "serving", "pallas_kernels")
COMPARE: dict[type[ast.AST], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.AST], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A piece of a file and its replacement. Lines count from 1, columns (in bytes) from 0."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """Position and replacement, in one line."""
        return f"{self.file}:{self.line}: {_short(self.before)} -> {_short(self.after)}"

    def apply(self, source: str) -> str:
        """Source of the file with the mutation."""
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        text = source.encode()
        assert text[start:end].decode() == self.before, f"{self.file} has changed since the mutations were drawn"
        return (text[:start] + self.after.encode() + text[end:]).decode()


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def folder_of(file: str) -> str:
    """Folder of a product file for the draw: `jpaged/engine`, or `serving`."""
    parts = Path(file).parts
    return "/".join(parts[: 2 if parts[0] == "jpaged" and len(parts) > 2 else 1])


def product_files() -> list[str]:
    """Python files of the product that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", *PRODUCT], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name.endswith(".py") and not (ROOT / name).is_symlink()]


def replacements(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield replacements of a node, without its position."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        changed.ops = [COMPARE[type(node.ops[0])]()]
        yield changed
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield changed.operand
    elif isinstance(node, ast.IfExp):
        changed.body, changed.orelse = changed.orelse, changed.body
        yield changed
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def mutations_of(file: str) -> list[Mutation]:
    """All mutations of a file's function bodies, without annotations, f-strings, `raise` and `assert` statements."""
    source = (ROOT / file).read_text("utf-8")
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            return  # texts of errors are not mutated
        if inside:
            for new in replacements(node):
                before = ast.get_source_segment(source, node)
                text = ast.unparse(new)
                if before and before.isascii():
                    wrapped = text if isinstance(node, ast.stmt | ast.Constant) else f"({text})"
                    place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # ty: ignore
                    found.append(Mutation(file, *place, before, wrapped))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                visit(child, True)
            return
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
                visit(child, inside)

    visit(ast.parse(source), False)
    return found


def draw(count: int, seed: int) -> list[Mutation]:
    folders: dict[str, list[str]] = defaultdict(list)
    for file in product_files():
        folders[folder_of(file)].append(file)
    rng = random.Random(seed)
    lines = {one: sum((ROOT / f).read_text("utf-8").count("\n") for f in files) for one, files in folders.items()}
    weight = sum(map(math.sqrt, lines.values()))
    drawn = []
    for folder in sorted(folders, key=lambda one: lines[one]):
        candidates = [mutation for file in folders[folder] for mutation in mutations_of(file)]
        number = max(2, round(count * math.sqrt(lines[folder]) / weight))
        drawn += rng.sample(candidates, min(number, len(candidates)))
    return sorted(rng.sample(drawn, min(count, len(drawn))), key=lambda one: (one.file, one.line, one.column))


def reaching(mutations: Sequence[Mutation], folder: Path) -> dict[Mutation, tuple[set[str], set[str]]]:
    """For each mutation: the tests that reach it, and the other tests of their files."""
    lines = {one: (one.file, range(one.line, one.end_line + 1)) for one in mutations}
    found: dict[Mutation, set[str]] = {one: set() for one in mutations}
    of_file = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        with path.open() as file:
            for row in map(json.loads, file):
                of_file[row["test"].partition("::")[0]].add(row["test"])
                reached = {name: set(numbers) for name, numbers in row["lines"].items()}
                for one, (name, numbers) in lines.items():
                    if not reached.get(name, set()).isdisjoint(numbers):
                        found[one].add(row["test"])
    for path in folder.glob("*.lines"):
        test, *rest = path.read_text().splitlines()
        reached = set(rest)
        for one, (name, numbers) in lines.items():
            if any(f"{name}:{number}" in reached for number in numbers):
                found[one].add(test)
    return {
        one: (tests, {t for f in {test.partition("::")[0] for test in tests} for t in of_file[f]} - tests)
        for one, tests in found.items()
    }


def costs_of(folder: Path) -> dict[str, tuple[float, bool]]:
    """Seconds of each test, and whether it is slow."""
    return {row["test"]: (row["seconds"], "slow" in row["marks"]) for row in read([folder])}


def within_seconds(tests: Sequence[str], costs: dict[str, tuple[float, bool]], seconds: float) -> list[str]:
    """The first tests, at least one, whose `costs` sum to at most `seconds`."""
    chosen, total = [], 0.0
    for test in tests:
        total += costs[test][0]
        if chosen and total > seconds:
            break
        chosen.append(test)
    return chosen


def run_tests(tree: Path, tests: Sequence[str]) -> str:
    """Run tests until one fails. Returns the test that failed, or "" if none did."""
    report = tree.parent / f"{tree.name}.txt"
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "", "--timeout", "120", "-rfE", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / ".editable"), "PYTHONDONTWRITEBYTECODE": "1"}
    with report.open("w") as out:
        child = subprocess.Popen(
            words, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = child.wait(timeout=900)
        except subprocess.TimeoutExpired:
            status = -signal.SIGALRM
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also ends processes that tests left running
            child.wait()
    text = report.read_text(errors="replace")
    if status == 0:
        return ""
    if status == pytest.ExitCode.USAGE_ERROR:
        raise ValueError(f"a recorded test does not exist, so record again: {text[-300:]}")
    summary = text.rpartition("short test summary info")[2]  # logs have lines that begin with ERROR, too
    failed = [line.partition(" ")[2] for line in summary.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    named = [test for test in tests if failed and f"{failed[0]} ".startswith(f"{test} ")]  # names may have spaces
    return max(named, key=len, default=f"exit status {status}")


def judge(mutation: Mutation, tree: Path, default: Sequence[str], slow: Sequence[str]) -> dict[str, Any]:
    """Run the tests of a mutation in a tree that only this call uses. Returns its row of the results."""
    path = tree / mutation.file
    source = path.read_text("utf-8")
    row = {"mutation": dataclasses.asdict(mutation), "default_tests": len(default), "slow_tests": len(slow)}
    for kind, tests in (("default", default), ("slow", slow)):
        left = list(tests)
        while left:
            path.write_text(mutation.apply(source), "utf-8")
            try:
                failed = run_tests(tree, left)
            finally:
                path.write_text(source, "utf-8")
            if not failed:
                break
            if failed not in left or not run_tests(tree, [failed]):
                return row | {"found_by": failed, "kind": kind}
            left = left[left.index(failed) + 1 :]  # it fails without the mutation too
    return row | {"found_by": None, "kind": "survives"}


def run(args: argparse.Namespace) -> None:
    """Run the tests of every mutation, and write a line of results for each."""
    mutations = [Mutation(**row) for row in json.loads(args.mutations.read_text())]
    reached, costs = reaching(mutations, args.reach), costs_of(args.costs)
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(args.processes):
            tree = Path(folder, f"tree{number}")
            shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
            trees.put(tree)

        def one(mutation: Mutation) -> dict[str, Any]:
            own, others = reached[mutation]
            ordered = [
                *sorted((t for t in own if t in costs), key=lambda t: costs[t][0]),
                *sorted((t for t in others if t in costs), key=lambda t: costs[t][0]),
            ]
            parts = [[t for t in ordered if costs[t][1] is slow] for slow in (False, True)]
            default, slow = (within_seconds(part, costs, args.seconds) for part in parts)
            tree = trees.get()
            try:
                return judge(mutation, tree, default, slow)
            finally:
                trees.put(tree)

        with concurrent.futures.ThreadPoolExecutor(args.processes) as pool, args.results.open("w") as out:
            for row in tqdm(pool.map(one, mutations), total=len(mutations), unit="mutation"):
                out.write(json.dumps(row) + "\n")
                out.flush()


def show(args: argparse.Namespace) -> None:
    """Print the counts of each run, and the mutations that no test found."""
    for path in args.results:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = [row["kind"] for row in rows]
        print(f"{path}: {len(rows)} mutations, {kinds.count('default')} found by default tests, "
              f"{kinds.count('slow')} by slow tests, {kinds.count('deviceless')} by deviceless tests, "
              f"{kinds.count('survives')} survive")  # fmt: skip
        for row in rows:
            if row["kind"] == "survives":
                print(f"  {Mutation(**row['mutation']).name} ({row['default_tests']} + {row['slow_tests']} tests)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw mutations")
    drawing.add_argument("mutations", type=Path)
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--seed", type=int, default=34)
    running = commands.add_parser("run", help="run the tests of every mutation")
    running.add_argument("mutations", type=Path)
    running.add_argument("results", type=Path)
    running.add_argument("--reach", type=Path, required=True)
    running.add_argument("--costs", type=Path, required=True)
    running.add_argument("--seconds", type=float, default=60, help="limit for default and for slow tests each")
    running.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    showing = commands.add_parser("show", help="print the results of runs")
    showing.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    if args.command == "draw":
        rows = [dataclasses.asdict(one) for one in draw(args.count, args.seed)]
        args.mutations.write_text(json.dumps(rows, indent=1) + "\n")
    else:
        (run if args.command == "run" else show)(args)


if __name__ == "__main__":
    main()
