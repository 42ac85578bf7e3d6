"""Check that the repository's prose is plain English: no riddles, and no docstring sentence over 30 words.

    python tools/check_prose.py                      # every tracked *.py, README.md and docs/*.md
    python tools/check_prose.py jpaged/engine README.md
    python tools/check_prose.py --count              # a table: rules by top-level folder
    python tools/check_prose.py --rules              # every rule with its reason

1. Phrases (prose_rules.py) are searched in docstrings, comments and Markdown. In the folders of the product they are
   also searched in string literals of at least four words: error messages and help texts.
2. Sentences are measured in docstrings only. Inline code counts as one word. Blank lines, list items, `name: text`
   entries and indented blocks end a sentence; indented blocks are code and are not measured.
3. `ALLOWED` lists the exceptions, at most 20, each with its reason. An entry that matches nothing is an error.

Inline code and code blocks are never searched, so a document can quote a bad phrase in backticks.
Prints `path:line: phrase "...": suggestion` and exits with 1 if there is a finding or a faulty exception.
"""

import argparse
import ast
import bisect
import dataclasses
import enum
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prose_rules import CODE, RULES, UNIT_START

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("jpaged", "models", "serving", "pallas_kernels")
MAX_WORDS = 30
MIN_STRING_WORDS = 4
MAX_ALLOWED = 20
LONG_SENTENCE = "long sentence"
_SEPARATOR = "\n\n" + UNIT_START  # between two pieces of prose of one file: no rule matches across a blank line


@dataclasses.dataclass(frozen=True, slots=True)
class Allowed:
    """An exception: findings in `path` whose text starts with `text`, without regard to case and white space."""

    path: str
    text: str
    reason: str


ALLOWED: tuple[Allowed, ...] = ()

_COMPILED = tuple((rule, rule.compile()) for rule in RULES)


class Kind(enum.Enum):
    """Where a piece of prose is from. It decides which checks apply."""

    DOCSTRING = enum.auto()
    COMMENT = enum.auto()
    STRING = enum.auto()
    MARKDOWN = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Prose:
    """A docstring, a comment, a string literal or a Markdown file, its inline code replaced with `CODE`.

    line: of its first character, from 1. last_line: of its last.
    """

    kind: Kind
    line: int
    last_line: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One rejected phrase or sentence."""

    path: str
    line: int
    rule: str
    text: str
    suggestion: str

    def __str__(self) -> str:
        if self.rule == LONG_SENTENCE:
            return f'{self.path}:{self.line}: sentence "{_shortened(self.text)}": {self.suggestion}'
        return f'{self.path}:{self.line}: phrase "{self.text}": {self.suggestion}'


# -- prose of a file ----------------------------------------------------------------------------------------------

_INLINE_CODE = re.compile(r"(`+)(?!`)(?:[^`\n]|\n(?!\s*\n)|(?!\1)`)+?\1(?!`)")
# Python up to 3.11: an f-string ends at its first own quote. tokenize finds the same comments in ten times the time.
_STRING_OR_COMMENT = re.compile(
    r'(?P<comment>#[^\n]*)|"""(?:[^\\]|\\.)*?"""|' r"'''(?:[^\\]|\\.)*?'''|"
    r'"(?:[^"\\\n]|\\.)*"|' r"'(?:[^'\\\n]|\\.)*'",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"#\s*(?:!|fmt:|noqa|type:|ty:|pragma|pylint:|-\*-)")


def _without_code(text: str) -> str:
    """The text with every character of inline code replaced with `CODE`; line breaks stay."""
    if "`" not in text:
        return text
    return _INLINE_CODE.sub(lambda match: re.sub(r"[^\n]", CODE, match.group()), text)


def python_prose(source: str, *, strings: bool) -> list[Prose]:
    """Docstrings and comments of a Python file, and with `strings` its string literals of four words and more.

    A string that is a statement counts as a docstring: it documents the field above it.
    """
    found = list(_comments(source))
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)) as constant):
                found.append(_literal(Kind.DOCSTRING, constant, text))
            case ast.JoinedStr(values=values):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values)
                if strings and _num_words(text) >= MIN_STRING_WORDS:
                    found.append(_literal(Kind.STRING, node, text))
                pending += [part for part in values if not isinstance(part, ast.Constant)]
            case ast.Constant(value=str(text)):
                if strings and _num_words(text) >= MIN_STRING_WORDS:
                    found.append(_literal(Kind.STRING, node, text))
            case _:
                pending += ast.iter_child_nodes(node)
    return sorted(found, key=lambda prose: prose.line)


def _literal(kind: Kind, node: ast.expr, text: str) -> Prose:
    last = node.end_lineno or node.lineno
    # A line continuation after the opening quotes starts the text a line later.
    line = max(node.lineno, last - text.count("\n")) if kind is Kind.DOCSTRING else node.lineno
    return Prose(kind, line, last, _without_code(text))


def _comments(source: str) -> Iterator[Prose]:
    """Comments, without the number sign. Whole-line comments of one column on consecutive lines are one comment."""
    lines: list[str] = []
    begin = (0, 0)
    line, position = 1, 0
    for match in _STRING_OR_COMMENT.finditer(source):
        if match.lastgroup != "comment" or _DIRECTIVE.match(match.group()):
            continue
        line, position = line + source.count("\n", position, match.start()), match.start()
        column = position - source.rfind("\n", 0, position) - 1
        alone = not source[position - column : position].strip()
        if not (lines and alone and line == begin[0] + len(lines) and column == begin[1]):
            if lines:
                yield _comment(begin[0], lines)
            lines, begin = [], (line, column)
        lines.append(match.group().lstrip("#").strip())
    if lines:
        yield _comment(begin[0], lines)


def _comment(line: int, lines: list[str]) -> Prose:
    return Prose(Kind.COMMENT, line, line + len(lines) - 1, _without_code("\n".join(lines)))


_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s")


def markdown_prose(source: str) -> Prose:
    """A Markdown file without its fenced and indented code blocks and the targets of its links."""
    lines: list[str] = []
    fence = ""
    in_list = in_code = False
    previous_blank = True
    for line in source.split("\n"):
        opened = _FENCE.match(line)
        if fence or opened:
            if fence and line.strip().startswith(fence):
                fence = ""
            elif opened and not fence:
                fence = opened.group(1)
            lines.append("")
            continue
        blank, indented = not line.strip(), line.startswith("    ")
        if _LIST_ITEM.match(line):
            in_list = True
        elif not blank and not line.startswith(" "):
            in_list = False
        in_code = not in_list and (indented and (previous_blank or in_code))
        lines.append("" if in_code else line)
        previous_blank = blank
    text = re.sub(r"\]\([^)\n]*\)", lambda match: "]" + " " * (len(match.group()) - 1), "\n".join(lines))
    return Prose(Kind.MARKDOWN, 1, len(lines), _without_code(text))


# -- sentences ----------------------------------------------------------------------------------------------------

_ENTRY = re.compile(rf"[\w*.\[\]{CODE}]+(?:, ?[\w*.\[\]{CODE}]+)*:(?:\s|$)|\S.*?\S {{3,}}\S")
_SENTENCE_END = re.compile(r"[.!?][\"')\]*]*\s+")
_ABBREVIATION = re.compile(r"(?:\be\.g|\bi\.e|\bvs|\bal|\bcf|\bresp|\bapprox|\bFig|\bSec|\bEq|\.\.)$")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a docstring, each with its offset in the text."""
    for offset, paragraph in _paragraphs(text):
        begin = 0
        for match in _SENTENCE_END.finditer(paragraph):
            if not _ABBREVIATION.search(paragraph[begin : match.start()]):
                yield offset + begin, paragraph[begin : match.start() + 1]
                begin = match.end()
        if begin < len(paragraph):
            yield offset + begin, paragraph[begin:]


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and entries. Indented blocks that follow neither an item nor an entry are left out."""
    lines = text.split("\n")
    base = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    begin, current = 0, list[str]()
    after_item = False  # indented lines continue the item or entry
    offset = 0
    for number, line in enumerate(lines):
        content = line.strip()
        indent = base if number == 0 else len(line) - len(line.lstrip())
        starts_item = bool(content) and bool(_LIST_ITEM.match(line) or _ENTRY.match(content))
        is_code = indent > base and not after_item and not starts_item
        if current and (not content or starts_item or is_code):
            yield begin, "\n".join(current)
            current = []
        if not content:
            after_item = False
        elif not is_code:
            if not current:
                begin = offset + len(line) - len(line.lstrip())
            # After the first line the text keeps its indentation, so that offsets stay right.
            current.append(line if current else line.lstrip())
            after_item = after_item or starts_item
        offset += len(line) + 1
    if current:
        yield begin, "\n".join(current)


def _num_words(text: str) -> int:
    """Words: runs of characters other than white space with a letter among them. Inline code is one word."""
    joined = re.sub(rf"{CODE}[{CODE}\s]*(?<={CODE})", "code", text) if CODE in text else text
    return sum(any(character.isalpha() for character in word) for word in joined.split())


def _shortened(text: str) -> str:
    words = _readable(text).split()
    return " ".join(words[:8]) + (" ..." if len(words) > 8 else "")


def _readable(text: str) -> str:
    return re.sub(rf"{CODE}[{CODE}\s]*(?<={CODE})", "`...`", " ".join(text.split()))


# -- checking -----------------------------------------------------------------------------------------------------


def check_source(path: str, source: str) -> list[Finding]:
    """All findings of one file, in order. path: from the root of the repository, with slashes; decides what is read."""
    if path.endswith(".md"):
        prose = [markdown_prose(source)]
    else:
        prose = python_prose(source, strings=path.split("/")[0] in PRODUCT)
    return sorted([*_phrases(path, prose, source), *_long_sentences(path, prose)])


def _phrases(path: str, prose: Sequence[Prose], source: str) -> Iterator[Finding]:
    text = _SEPARATOR.join(piece.text for piece in prose)
    begins, position = [], 0
    for piece in prose:
        begins.append(position)
        position += len(piece.text) + len(_SEPARATOR)
    lines = source.split("\n")
    for rule, pattern in _COMPILED:
        for match in pattern.finditer(text):
            begin = bisect.bisect_right(begins, match.start()) - 1
            piece = prose[begin]
            if rule.opening and piece.kind not in (Kind.DOCSTRING, Kind.COMMENT):
                continue
            if piece.kind is Kind.STRING:
                line = _line_in_literal(lines, piece, match.group())
            else:
                line = piece.line + text.count("\n", begins[begin], match.start())
            yield Finding(path, line, rule.name, _readable(match.group()), rule.suggestion)


def _line_in_literal(lines: Sequence[str], piece: Prose, phrase: str) -> int:
    """The line of a phrase in a literal that may be several joined ones; the first line where it cannot be found."""
    phrase = phrase.lower()
    for number in range(piece.line, piece.last_line + 1):
        if phrase in lines[number - 1].lower():
            return number
    return piece.line


def _long_sentences(path: str, prose: Sequence[Prose]) -> Iterator[Finding]:
    for piece in prose:
        if piece.kind is not Kind.DOCSTRING:
            continue
        for offset, sentence in sentences(piece.text):
            words = _num_words(sentence)
            if words > MAX_WORDS:
                line = piece.line + piece.text.count("\n", 0, offset)
                text = " ".join(sentence.split())
                yield Finding(path, line, LONG_SENTENCE, text, f"{words} words, at most {MAX_WORDS}: split it")


def apply_allowed(
    findings: Iterable[Finding], allowed: Sequence[Allowed], checked: Iterable[str]
) -> tuple[list[Finding], list[str]]:
    """Findings that no exception covers, and what is wrong with the exceptions.

    checked: paths of the files that were read. An exception for another file is not required to match.
    """
    problems = []
    if len(allowed) > MAX_ALLOWED:
        problems.append(f"ALLOWED has {len(allowed)} entries, at most {MAX_ALLOWED}: reword the prose instead")
    unreasoned = [entry for entry in allowed if not entry.reason.strip()]
    problems += [f"ALLOWED: {entry.path}: {entry.text!r} has no reason" for entry in unreasoned]
    used: set[Allowed] = set()
    remaining = []
    for finding in findings:
        covering = [
            entry for entry in allowed
            if entry.path == finding.path and _folded(_readable(finding.text)).startswith(_folded(entry.text))
        ]  # fmt: skip
        used.update(covering)
        if not covering:
            remaining.append(finding)
    paths = set(checked)
    problems += [
        f"ALLOWED: {entry.path}: {entry.text!r} matches nothing: remove the entry"
        for entry in allowed
        if entry.path in paths and entry not in used
    ]
    return remaining, problems


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


# -- files --------------------------------------------------------------------------------------------------------


def is_checked(path: str) -> bool:
    """Whether a file of this path has prose to check: *.py, README.md and docs/*.md."""
    return path.endswith(".py") or path == "README.md" or (path.startswith("docs/") and path.endswith(".md"))


def tracked_files(root: Path) -> list[str]:
    """Paths of the tracked files to check, from the root. Links are left out: their target is checked."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return [path for path in listed if is_checked(path) and (root / path).is_file() and not (root / path).is_symlink()]


def selected_files(arguments: Sequence[str], root: Path) -> list[str]:
    """The tracked files under the given files and folders; all of them if none is given. Raises SystemExit."""
    tracked = tracked_files(root)
    if not arguments:
        return tracked
    selected: dict[str, None] = {}
    for argument in arguments:
        full = Path(argument).resolve()
        if not full.exists() or not full.is_relative_to(root):
            raise SystemExit(f"{argument}: no file or folder of the repository {root}")
        path = full.relative_to(root).as_posix()
        below = [path] if full.is_file() else [each for each in tracked if path == "." or each.startswith(path + "/")]
        selected.update(dict.fromkeys(below))
    return list(selected)


# -- output -------------------------------------------------------------------------------------------------------


def count_table(findings: Sequence[Finding]) -> str:
    """Findings by rule and top-level folder. README.md and docs/ are one column; rules without findings have no row."""
    counts = Counter((finding.rule, _column(finding.path)) for finding in findings)
    present = {column for _, column in counts}
    columns = [name for name in (*PRODUCT, "tests", "tools", "benchmarks", "examples", "docs") if name in present]
    columns += sorted(present.difference(columns))
    by_rule = Counter(finding.rule for finding in findings)
    rows = [("rule", *columns, "all")]
    for rule, total in by_rule.most_common():
        rows.append((rule, *(str(counts[rule, column] or "") for column in columns), str(total)))
    by_column = Counter(_column(finding.path) for finding in findings)
    rows.append(("all", *(str(by_column[column]) for column in columns), str(len(findings))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((f"{name:{widths[0]}}", *numbers)))
    return "\n".join(lines)


def _column(path: str) -> str:
    top, slash, _ = path.partition("/")
    return top if slash else ("docs" if top.endswith(".md") else ".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line. The exit status is 1 if anything was found."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders to check; default: all")
    parser.add_argument("--count", action="store_true", help="print a table of rules and top-level folders instead")
    parser.add_argument("--rules", action="store_true", help="print the rules with their reasons, and exit")
    options = parser.parse_args(arguments)
    if options.rules:
        for rule in RULES:
            print(f"{rule.name}: {rule.reason}. Write {rule.suggestion}.")
        print(f"{LONG_SENTENCE}: a docstring sentence of more than {MAX_WORDS} words. Split it.")
        return 0
    paths = selected_files(options.paths, ROOT)
    findings: list[Finding] = []
    for path in paths:
        findings += check_source(path, (ROOT / path).read_text(encoding="utf-8"))
    remaining, problems = apply_allowed(findings, ALLOWED, paths)
    if options.count:
        print(count_table(remaining))
    else:
        for finding in remaining:
            print(finding)
    for problem in problems:
        print(problem)
    print(f"{len(remaining)} findings in {len({f.path for f in remaining})} of {len(paths)} files")
    return 1 if remaining or problems else 0


if __name__ == "__main__":
    sys.exit(main())
