"""The health table: what counts as a record, a constructor, a use of Any; revisions, differences and the list."""

import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import house

pytestmark = pytest.mark.slow  # no default test: the engine does not depend on it


def product(**files: str) -> house.Section:
    """The product's figures of files in jpaged/, by name without suffix."""
    return house.measure({f"jpaged/{name}.py": text for name, text in files.items()})["product"]


def offenders(section: house.Section) -> list[tuple[str, int, str, int]]:
    return [(each.row, each.line, each.name, each.figure) for each in section.offenders]


def fields(count: int, first: int = 0) -> str:
    return "".join(f"    x{i}: int\n" for i in range(first, first + count))


def test_files_and_functions_at_the_limit_pass():
    body = "def f():\n" + "    x = 1\n" * 59
    assert not offenders(product(a=body, b="x = 1\n" * 500))
    section = product(a=body + "    x = 1\n", b="x = 1\n" * 501)
    assert offenders(section) == [("files over 500 lines", 1, "", 501), ("functions over 60 lines", 1, "f", 61)]
    assert section.counts["Python files"] == 2
    assert section.counts["lines"] == 562
    assert section.counts["files over 500 lines"] == 1


def test_methods():
    body = "class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(21))
    assert offenders(product(a=body)) == [("classes over 20 methods", 1, "A", 21)]


@pytest.mark.parametrize(
    "head",
    [
        "@dataclasses.dataclass\nclass A:\n",
        "@dataclass(frozen=True)\nclass A:\n",
        "@flax.struct.dataclass\nclass A:\n",
        "class A(NamedTuple):\n",
        "class A(msgspec.Struct, kw_only=True):\n",
    ],
)
def test_records(head):
    assert not offenders(product(a=head + fields(20) + "    y: ClassVar[int] = 1\n    _: KW_ONLY\n"))
    (found,) = offenders(product(a=head + fields(21)))
    assert found[0] == "records over 20 fields"
    assert found[2:] == ("A", 21)


def test_inherited_fields_count_and_other_classes_do_not():
    base = "class Base(msgspec.Struct):\n" + fields(15)
    section = product(a=base, b="from jpaged.a import Base\n\n\nclass A(Base):\n" + fields(10, first=12))
    assert offenders(section) == [("records over 20 fields", 4, "A", 22)]
    assert not offenders(product(a="class A:\n" + fields(30)))


def test_parameters():
    eight = ", ".join("abcdefgh")
    source = (
        f"def f({eight}): ...\n"
        f"def g(a, /, b, c, d, *args, e, f, g, **kwargs): ...\n"
        f"class A:\n    def __init__(self, {eight}):\n        def inner({eight}): ...\n"
        f"    @classmethod\n    def create(cls, {eight}): ...\n"
        f"    @staticmethod\n    def static({eight}): ...\n"
        f"    def method(self, a, b, c, d, e, f, g): ...\n"
    )
    assert sorted(offenders(product(a=source))) == [
        ("constructors over 7 parameters", 4, "A.__init__", 8),
        ("constructors over 7 parameters", 7, "A.create", 8),
        ("other functions over 7 parameters", 1, "f", 8),
        ("other functions over 7 parameters", 5, "A.__init__.inner", 8),
        ("other functions over 7 parameters", 9, "A.static", 8),
    ]


def test_public_types_are_exempt():
    eight = ", ".join("abcdefgh")
    assert not offenders(product(a="@dataclass\nclass EngineConfig:\n" + fields(21)))
    assert not offenders(product(a=f"class LLM:\n    def __init__(self, {eight}): ...\n"))


def test_uses_of_any():
    source = (
        "from typing import Any\nimport typing\n\nPairs = dict[Any, Any]\nx: 'list[Any]' = []\n"
        "def f(a: Any, b: 'Any | None', c: typing.Any) -> 'Any': ...\n# Any\ny = 'Any'\n"
    )
    assert product(a=source).counts["uses of Any"] == 7


def test_prose_is_counted():
    section = product(a=f'"""Begins anew. {"word " * 31}."""\n')
    assert section.counts["phrases"] == 1
    assert section.counts["long sentences"] == 1
    documents = house.measure({"README.md": "Begins anew.\n"})["documents"]
    assert documents.counts["phrases"] == 1
    assert documents.counts["files"] == 1


def git(root: pathlib.Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, "-C", root, *arguments], check=True, capture_output=True)


def test_revisions_and_output(tmp_path, capsys):
    (tmp_path / "jpaged").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "jpaged" / "models").symlink_to("../models")
    (tmp_path / "models" / "a.py").write_text("x = 1\n" * 501)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "models" / "a.py").write_text("x = 1\n" * 1_502)
    assert house.revision_files(tmp_path, "HEAD").keys() == house.checkout_files(tmp_path).keys()
    assert house.main(["--root", str(tmp_path), "--compare", "HEAD", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-3:] == ["HEAD", "checkout", "change"]
    assert lines[1].split() == ["Python", "files", "1", "1"]
    assert lines[2].split() == ["lines", "501", "1,502", "+1,001"]
    assert lines[-1] == "models/a.py:1: 1502 (files over 500 lines)"
    assert house.main(["--root", str(tmp_path), "--rev", "HEAD"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["lines", "501"]
    with pytest.raises(SystemExit, match="revision absent"):
        house.main(["--root", str(tmp_path), "--rev", "absent"])
