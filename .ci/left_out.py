"""Find test files that need not run again, because nothing that they use has changed since all tests passed.

    python .ci/left_out.py options                       # print a step's versions and XLA_FLAGS
    python .ci/left_out.py list STEP                     # print the files that STEP need not run
    python .ci/left_out.py record OPTIONS COSTS REACH    # write tests/recording/complete_pass.json

A step is a run of tests in .ci/run. `record` reads three folders. OPTIONS has a file for each step, written when the
step began. COSTS and REACH have a folder for each step, written by pytest. A test file uses:

- itself, the test helpers that it imports, its conftest.py files, and all their imports
- the files of the project with a line that one of its tests reached, in child processes too, and their imports
- files that its tests opened, and files that were opened during the collection of tests
- all data of the tests, golden files among them, the demo model, the kernels' tuning.json, pyproject.toml and .ci/run
- the options of the step: the versions of Python, JAX and jaxlib, and XLA_FLAGS

An import inside a function counts if its line was reached. A native kernel is compiled from the modules that it names
in a string. If a child process of a test recorded nothing, its test file uses all of the project, new files too. A file
with a skipped test is not recorded: another machine may be able to run the test.

`list` prints a file if the step passed it and nothing that it uses has changed, imports included. Reached lines count
per test file, because a program that one of its tests traced serves its other tests.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests/recording/complete_pass.json"
PRODUCT = ("jpaged", "models", "serving", "pallas_kernels")
SCRIPTS = ("benchmarks", "tools")  # tests import their modules by bare names, through sys.path
CODE = (*PRODUCT, *SCRIPTS, "tests", "examples")
EVERYTHING = "*"  # stands for all files of the project, except the tests
COLLECTED = "*"   # name of the "test" that opened the files of the collection
SKIPPED = {"__pycache__", ".hypothesis", ".git", ".pytest_cache", ".ruff_cache"}  # not part of the project


def files_under(*folders: str) -> Iterator[str]:
    """Yield the files in folders, relative to the checkout. Links are not followed."""
    for folder in folders:
        for place, names, files in os.walk(ROOT / folder):
            names[:] = [name for name in names if name not in SKIPPED]
            yield from (Path(place, name).relative_to(ROOT).as_posix() for name in files)


@functools.cache
def resolved(name: str) -> str:
    """A file's path without links: jpaged/models is models."""
    path = (ROOT / name).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else name


@functools.cache
def data_files() -> frozenset[str]:
    """Files that every test uses."""
    data = {name for name in files_under("tests") if not name.endswith(".py") and Path(name).parent.name != "recording"}
    tuning = {name for name in files_under(*PRODUCT) if Path(name).name == "tuning.json"}
    # The last four do not exist. If one appears, it replaces pytest's options in pyproject.toml.
    others = {"pyproject.toml", ".ci/run", "pytest.ini", "pytest.toml", "tox.ini", "setup.cfg"}
    models = set(files_under("jpaged/demo_model", "jpaged/demo_draft", "jpaged/demo_eagle3"))
    return frozenset(data | tuning | others | models)


@functools.cache
def everything() -> frozenset[str]:
    """All files of the project, except the tests."""
    return frozenset([*files_under(*PRODUCT, *SCRIPTS, "examples", "ui", "deploy"), "hatch_build.py"])


@functools.cache
def digest(name: str) -> str:
    """Digest of a file's bytes; "" if the file is missing."""
    path = ROOT / name
    own = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    package = path.with_suffix("") / "__init__.py"  # Python would import it instead of the file
    return own + digest(package.relative_to(ROOT).as_posix()) if name.endswith(".py") and package.is_file() else own


def module_files(module: str) -> Iterator[tuple[str, bool]]:
    """Yield the project's files that an import runs. With each: True for the module itself, False for its packages."""
    parts = module.split(".")
    if parts[0] not in CODE:
        for folder in SCRIPTS:
            if (ROOT / folder / f"{parts[0]}.py").is_file():
                yield f"{folder}/{parts[0]}.py", True
        return
    for count in range(1, len(parts) + 1):
        base = ROOT.joinpath(*parts[:count])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                yield resolved(path.relative_to(ROOT).as_posix()), count == len(parts)


@dataclasses.dataclass(frozen=True)
class Import:
    """An import statement. line: 0 if it is outside functions, where it always runs."""

    line: int
    modules: frozenset[str]   # files; their own imports count too
    packages: frozenset[str]  # __init__.py files around the modules; their imports do not count


@functools.cache
def imports(name: str) -> tuple[Import, ...]:
    if not name.endswith(".py") or not (ROOT / name).is_file():
        return ()
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = Path(name).parent.parts
            package = parents[: len(parents) - node.level + 1] if node.level else ()
            base = ".".join([*package, *filter(None, [node.module])])
            modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and name.startswith("pallas_kernels/"):
            modules = [node.value] * node.value.startswith("pallas_kernels.")
        if modules:
            files = {pair for module in modules for pair in module_files(module)}
            own = frozenset(file for file, is_module in files if is_module)
            line = node.lineno if inside and not isinstance(node, ast.Constant) else 0  # ty: ignore[unresolved-attribute]
            found.append(Import(line, own, frozenset(file for file, _ in files) - own))
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(ast.parse((ROOT / name).read_bytes()), False)
    return tuple(found)


def imported(files: Iterable[str], reached: dict[str, set[int]]) -> set[str]:
    """Files and all their imports. An import inside a function of the product counts if its line was reached."""
    found: set[str] = set()
    packages: set[str] = set()
    left = list(files)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            of_tests = name.startswith("tests/")  # lines of tests are not recorded
            for one in imports(name):
                packages |= one.packages
                if one.line and name == "tests/conftest.py":
                    packages |= one.modules  # tests of engines import them themselves; tests of kernels have no engine
                elif one.line == 0 or of_tests or one.line in reached.get(name, ()):
                    left += one.modules
    return found | packages


@functools.cache
def static_files(test_file: str) -> frozenset[str]:
    """Files that a test file always uses."""
    places = [parent / "conftest.py" for parent in Path(test_file).parents]
    conftests = [place.as_posix() for place in places if (ROOT / place).is_file()]
    return frozenset(imported([test_file, *conftests], {}))


def state(test_file: str, further: Iterable[str], options: str) -> str:
    """Digest of all that a test file uses: options and files."""
    names = {name for each in further for name in (everything() if each == EVERYTHING else [each])}
    names = sorted(static_files(test_file) | data_files() | names)
    text = "\n".join([options, *(f"{name} {digest(name)}" for name in names)])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_reach(folder: Path) -> tuple[dict[str, dict[str, set[int]]], Counter[str]]:
    """Reached lines by test file and file of the project, and the number of children that recorded, by test."""
    reached: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    children: Counter[str] = Counter()
    for path in folder.glob("*.jsonl"):
        with path.open() as rows:
            for row in map(json.loads, rows):
                lines = reached[row["test"].partition("::")[0]]
                for name, numbers in row["lines"].items():
                    if Path(name).parts[0] not in SKIPPED:
                        lines[resolved(name)].update(numbers)
    for path in folder.glob("*.lines"):
        test, *rest = path.read_text().splitlines()
        children[test] += 1
        for line in rest:
            name, _, number = line.rpartition(":")
            # A process that was killed may leave half a line.
            if number.isdigit() and Path(name).parts[0] not in SKIPPED:
                reached[test.partition("::")[0]][resolved(name)].add(int(number))
    return reached, children


def further_files(reach: Path, costs: Path) -> dict[str, set[str]]:
    """Files that the test files of a run used, without `static_files` and `data_files`."""
    reached, children = read_reach(reach)
    of_file: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in costs.glob("*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            of_file[row["test"].partition("::")[0]].append(row)
    collected = {name for name in reached[COLLECTED] if not (name.startswith("tests/") and name.endswith(".py"))}
    found = {}
    for test_file, rows in of_file.items():
        if any(row["skipped"] for row in rows):
            continue
        lines = reached[test_file]
        found[test_file] = imported([test_file, *lines], lines) | collected
        if any(row["children"] > children[row["test"]] for row in rows):
            found[test_file] = found[test_file] - everything() | {EVERYTHING}
        found[test_file] -= static_files(test_file) | data_files()
    return found


def options() -> str:
    """Versions and XLA_FLAGS of this process."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    python, flags = sys.version_info, os.environ.get("XLA_FLAGS")  # None: tests/conftest.py sets them
    return ", ".join([f"Python {python[0]}.{python[1]}", *versions, f"XLA_FLAGS {flags!r}"])


def record(options: Path, costs: Path, reach: Path) -> dict[str, Any]:
    """The record of a complete pass. Exits if a file that tests used has changed since their step began."""
    steps = {path.name: further_files(reach / path.name, costs / path.name) for path in sorted(options.iterdir())}
    table = sorted({name for one in steps.values() for names in one.values() for name in names})
    index = {name: number for number, name in enumerate(table)}
    rows: dict[str, Any] = {"files": table, "steps": {}}
    for step, of_files in steps.items():
        began, text = (options / step).stat().st_mtime, (options / step).read_text().strip()
        for name in set().union(*of_files.values(), *map(static_files, of_files), data_files(), everything()):
            if (ROOT / name).is_file() and (ROOT / name).stat().st_mtime > began:
                sys.exit(f"{name} has changed since step {step} began: nothing is recorded")
        rows["steps"][step] = {
            test_file: {"state": state(test_file, names, text), "further": sorted(index[name] for name in names)}
            for test_file, names in sorted(of_files.items())
        }
    return rows


def write(rows: dict[str, Any]) -> None:
    """Write the record, with a line for each test file."""
    lines = json.dumps(rows, separators=(",", ":")).replace('"tests/', '\n"tests/').replace('"steps"', '\n"steps"')
    RECORD.write_text(lines + "\n")


def unchanged(step: str, options: str) -> list[str]:
    """Test files that a step need not run."""
    if not RECORD.is_file():
        return []
    passed = json.loads(RECORD.read_text())
    table = passed["files"]
    return [
        test_file
        for test_file, row in passed["steps"].get(step, {}).items()
        if (ROOT / test_file).is_file()
        and state(test_file, (table[number] for number in row["further"]), options) == row["state"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("options", help="print a step's versions and XLA_FLAGS")
    listing = commands.add_parser("list", help="print the test files that a step need not run")
    listing.add_argument("step")
    recording = commands.add_parser("record", help="write the record of a complete pass")
    for name in ("options", "costs", "reach"):
        recording.add_argument(name, type=Path)
    args = parser.parse_args()
    if args.command == "options":
        print(options())
    elif args.command == "list":
        print("".join(f"{name}\n" for name in unchanged(args.step, options())), end="")
    else:
        write(record(args.options, args.costs, args.reach))


if __name__ == "__main__":
    main()
