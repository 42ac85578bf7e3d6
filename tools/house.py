"""Print the health of the code as one table: sizes, limits exceeded, uses of Any, and prose findings.

    python tools/house.py                     # the checkout
    python tools/house.py --list              # and what exceeds a limit, with path:line and figure
    python tools/house.py --rev v0.1          # a git revision
    python tools/house.py --compare main~20   # that revision, the checkout, and the difference

What is counted, for tracked Python files; links are left out:
1. Lines of a file, blank lines and comments included. Lines of a function from `def` to its end, docstring included.
2. Methods: functions in the body of a class, properties and dunder methods included.
3. Records: dataclasses (also flax's), NamedTuples and msgspec Structs. Their fields, inherited ones included.
4. Parameters, without self, cls, *args and **kwargs. Constructors are explicit `__init__` and `__new__` methods and
   class methods; generated `__init__` methods are not counted, their fields are. All other functions are one row.
5. Any: each use of the name in code, in annotations, aliases and casts; imports are not counted.
6. Prose: today's check_prose.py, with today's exceptions, also for an old revision.

Public types are exempt from the limits on fields and parameters: those that `PUBLIC` names.
"""

import argparse
import ast
import dataclasses
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import check_prose

PRODUCT = check_prose.PRODUCT
OTHER = ("tests", "tools", "benchmarks")
LIMITS = {
    "files over 500 lines": 500,
    "functions over 60 lines": 60,
    "classes over 20 methods": 20,
    "records over 20 fields": 20,
    "constructors over 7 parameters": 7,
    "other functions over 7 parameters": 7,
}
ROWS = ("Python files", "lines", *LIMITS, "uses of Any", "phrases", "long sentences")

# Types whose fields and parameters are an interface of others, mostly vLLM's or OpenAI's: a smaller number would be
# another interface. Their methods are counted.
PUBLIC: dict[str, str] = {
    "SamplingParams": "vLLM's sampling parameters",
    "EngineConfig": "vLLM's engine arguments",
    "LLM": "vLLM's offline interface",
    "AsyncLLM": "vLLM's interface for servers",
    "GenerationRequest": "the fields that both kinds of request share",
    "CompletionRequest": "OpenAI's request body, with vLLM's extensions",
    "ChatRequest": "OpenAI's request body, with vLLM's extensions",
    "SamplingFlags": "command line flags: one per sampling parameter",
    "Generate": "command line flags of `jpaged generate`",
    "Simulate": "command line flags of `jpaged simulate`",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Offender:
    """A file, class or function that exceeds a limit."""

    row: str
    path: str
    line: int
    name: str
    figure: int


@dataclasses.dataclass(slots=True)
class Section:
    """The figures of one group of folders: a number for each of `ROWS`."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    offenders: list[Offender] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The fields of a record that its class body declares, and the names of its bases."""

    line: int
    fields: frozenset[str]
    bases: tuple[str, ...]


# -- reading a checkout or a revision -----------------------------------------------------------------------------


def checkout_files(root: Path) -> dict[str, str]:
    """The text of every tracked file to read, by path."""
    return {path: (root / path).read_text(encoding="utf-8") for path in check_prose.tracked_files(root)}


def revision_files(root: Path, revision: str) -> dict[str, str]:
    """The same of a git revision. Raises SystemExit for an unknown one."""
    command = ["git", "-C", str(root), "archive", "--format=tar", revision]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"revision {revision}: {done.stderr.decode().strip()}")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() and check_prose.is_checked(member.name) else None
            if content is not None:
                files[member.name] = content.read().decode("utf-8")
    return files


# -- measuring ----------------------------------------------------------------------------------------------------


def measure(files: dict[str, str]) -> dict[str, Section]:
    """The sections product, other and documents of a set of files."""
    sections = {"product": Section(), "other": Section(), "documents": Section()}
    trees = {path: ast.parse(text) for path, text in files.items() if path.endswith(".py")}
    records = {path: dict(_records(tree)) for path, tree in trees.items()}
    for path, text in files.items():
        section = sections.get(_section_of(path))
        if section is None:
            continue
        if path in trees:
            _measure_python(section, path, text, trees[path], records)
        else:
            section.counts["files"] += 1
            section.counts["lines"] += text.count("\n")
        findings, _ = check_prose.apply_allowed(check_prose.check_source(path, text), check_prose.ALLOWED, ())
        long = sum(finding.rule == check_prose.LONG_SENTENCE for finding in findings)
        section.counts["long sentences"] += long
        section.counts["phrases"] += len(findings) - long
    for section in sections.values():
        section.offenders.sort(key=lambda each: (list(LIMITS).index(each.row), -each.figure, each.path))
        section.counts.update(each.row for each in section.offenders)
    return sections


def _section_of(path: str) -> str:
    top = path.split("/")[0]
    if path.endswith(".md"):
        return "documents"
    return "product" if top in PRODUCT else "other" if top in OTHER else ""


def _measure_python(
    section: Section, path: str, text: str, tree: ast.Module, records: dict[str, dict[str, Record]]
) -> None:
    section.counts["Python files"] += 1
    num_lines = text.count("\n")
    section.counts["lines"] += num_lines
    section.counts["uses of Any"] += sum(_num_any(node) for node in ast.walk(tree))
    figures = [("files over 500 lines", 1, "", num_lines), *_figures(tree)]
    for name, record in records[path].items():
        if name not in PUBLIC:
            fields = len(_all_fields(name, path, records))
            figures.append(("records over 20 fields", record.line, name, fields))
    for row, line, name, figure in figures:
        if figure > LIMITS[row]:
            section.offenders.append(Offender(row, path, line, name, figure))


def _figures(tree: ast.Module) -> Iterator[tuple[str, int, str, int]]:
    """(row of the table, line, name, figure) of every class and function of a file."""
    pending: list[tuple[ast.AST, str, bool]] = [(tree, "", False)]  # node, its qualified name, whether it is a class
    while pending:
        parent, prefix, in_class = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                yield "classes over 20 methods", node.lineno, prefix + node.name, methods
                pending.append((node, f"{prefix}{node.name}.", True))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                yield "functions over 60 lines", node.lineno, name, (node.end_lineno or node.lineno) - node.lineno + 1
                decorators = {_last_name(decorator) for decorator in node.decorator_list}
                constructs = in_class and (node.name in ("__init__", "__new__") or "classmethod" in decorators)
                row = "constructors over 7 parameters" if constructs else "other functions over 7 parameters"
                if PUBLIC.keys().isdisjoint(name.split(".")):
                    bound = in_class and "staticmethod" not in decorators
                    yield row, node.lineno, name, _num_parameters(node, bound=bound)
                pending.append((node, f"{name}.", False))
            else:
                pending.append((node, prefix, in_class))


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> int:
    arguments = node.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - bound


def _records(tree: ast.Module) -> Iterator[tuple[str, Record]]:
    """Every class with its declared fields. `_all_fields` finds out whether it is a record."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            decorated = any(_last_name(decorator) == "dataclass" for decorator in node.decorator_list)
            bases = (*(("dataclass",) if decorated else ()), *map(_last_name, node.bases))
            fields = frozenset(
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                and "ClassVar" not in ast.unparse(each.annotation) and "KW_ONLY" not in ast.unparse(each.annotation)
            )  # fmt: skip
            yield node.name, Record(node.lineno, fields, bases)


def _all_fields(name: str, path: str, records: dict[str, dict[str, Record]]) -> frozenset[str]:
    """Fields of a record and of its bases, which are looked up by name. Empty for a class that is not a record."""
    fields: set[str] = set()
    is_record = False
    pending, seen = [(name, path)], set[str]()
    while pending:
        current, where = pending.pop()
        if current in ("dataclass", "NamedTuple", "Struct"):
            is_record = True
            continue
        if current in seen:
            continue
        seen.add(current)
        if current not in records[where]:
            where = next((each for each, classes in records.items() if current in classes), "")
        if where:
            record = records[where][current]
            fields |= record.fields
            pending += [(base, where) for base in record.bases]
    return frozenset(fields) if is_record else frozenset()


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, of `a.b.c(...)` and of `a.b.c[...]`."""
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last_name(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _num_any(node: ast.AST) -> int:
    """Uses of Any that this node is; for a quoted annotation those in its text."""
    match node:
        case ast.Name(id="Any") | ast.Attribute(value=ast.Name(id="typing"), attr="Any"):
            return 1
        case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation):
            return _num_quoted_any(annotation)
        case ast.FunctionDef(returns=annotation) | ast.AsyncFunctionDef(returns=annotation):
            return _num_quoted_any(annotation)
    return 0


def _num_quoted_any(annotation: ast.expr | None) -> int:
    if annotation is None:
        return 0
    constants = (each.value for each in ast.walk(annotation) if isinstance(each, ast.Constant))
    return sum(len(re.findall(r"\bAny\b", text)) for text in constants if isinstance(text, str))


# -- output -------------------------------------------------------------------------------------------------------

_TITLES = {
    "product": f"product ({', '.join(PRODUCT)})",
    "other": f"other ({', '.join(OTHER)})",
    "documents": "documents (README.md, docs)",
}


def table(columns: Sequence[tuple[str, dict[str, Section]]]) -> str:
    """The figures, a column a revision; of two columns also the difference."""
    lines = []
    heads = [name for name, _ in columns] + (["change"] if len(columns) == 2 else [])
    widths = [max(9, len(head)) for head in heads]
    for key, title in _TITLES.items():
        lines += ["", _aligned(title, heads, widths)]
        for row in ("files", "lines", "phrases") if key == "documents" else ROWS:
            numbers = [sections[key].counts[row] for _, sections in columns]
            cells = [f"{number:,}" for number in numbers]
            if len(numbers) == 2:
                cells.append(f"{numbers[1] - numbers[0]:+,}" if numbers[1] != numbers[0] else "")
            lines.append(_aligned("  " + row, cells, widths))
    return "\n".join(lines[1:])


def _aligned(label: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join((f"{label:50}", *numbers)).rstrip()


def offender_lines(sections: Iterable[Section]) -> list[str]:
    """`path:line: name: figure (row)` of everything that exceeds a limit."""
    return [
        f"{each.path}:{each.line}: {each.name + ': ' if each.name else ''}{each.figure} ({each.row})"
        for section in sections
        for each in section.offenders
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line. The exit status is 0: this reports, and check_prose.py checks."""
    description, _, details = (__doc__ or "").partition("\n\n")
    details += "\nExempt:\n" + "".join(f"  {name}: {reason}\n" for name, reason in PUBLIC.items())
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", metavar="REV", help="measure this git revision instead of the checkout")
    parser.add_argument("--compare", metavar="REV", help="print this revision, the measured one, and the difference")
    parser.add_argument("--list", action="store_true", help="list what exceeds a limit, largest first")
    parser.add_argument("--root", type=Path, default=check_prose.ROOT, help="the repository (default: this one)")
    options = parser.parse_args(arguments)
    files = checkout_files(options.root) if options.rev is None else revision_files(options.root, options.rev)
    measured = measure(files)
    columns = [(options.rev or "checkout", measured)]
    if options.compare is not None:
        columns.insert(0, (options.compare, measure(revision_files(options.root, options.compare))))
    print(table(columns))
    if options.list:
        print()
        print("\n".join(offender_lines(measured.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
