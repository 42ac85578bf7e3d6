"""A wheel has every package, even without the symbolic links. An editable install exposes two names only."""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore")
FOLDERS = ("jpaged", "models", "serving", "pallas_kernels", ".editable")
PATH_IN_WHEEL = {"models": "jpaged/models", "serving": "jpaged/serving"}
LINKS = ("jpaged/models", "jpaged/serving", ".editable/jpaged", ".editable/pallas_kernels")


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the sources that a wheel is built from, links included."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in FILES:
        shutil.copyfile(ROOT / name, copy / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def keep(link: pathlib.Path) -> None:
    """Leave the link as it is, as in a checkout."""


def write_as_text(link: pathlib.Path) -> None:
    """Write the link's target into a file, as git does where the file system has no links."""
    target = os.readlink(link)
    link.unlink()
    link.write_text(target)


def copy_the_folder(link: pathlib.Path) -> None:
    """Copy the folder, as archivers do that follow links."""
    folder = link.resolve()
    link.unlink()
    shutil.copytree(folder, link, symlinks=True)


def point_elsewhere(link: pathlib.Path) -> None:
    """Make the link point to its own parent."""
    link.unlink()
    link.symlink_to(".")


CHANGES = {
    "links": keep, "text files": write_as_text, "missing": pathlib.Path.unlink, "copied folders": copy_the_folder,
}  # fmt: skip


def build(tree: pathlib.Path, target: str) -> subprocess.CompletedProcess:
    """Run hatchling in a tree. target: wheel, wheel:editable or sdist. The result goes to tree/dist."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)


def only_file(tree: pathlib.Path, pattern: str) -> pathlib.Path:
    """The one file in tree/dist that matches."""
    (found,) = (tree / "dist").glob(pattern)
    return found


def wheel_files(tree: pathlib.Path) -> dict[str, bytes]:
    """Build a wheel; return its files by path, without the metadata."""
    done = build(tree, "wheel")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(only_file(tree, "*.whl")) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert len(set(names)) == len(names)
        return {name: wheel.read(name) for name in names}


def expected_files() -> dict[str, bytes]:
    """The files of the four folders by their paths in a wheel, read from the folders themselves."""
    found = {}
    for folder in ("jpaged", "models", "serving", "pallas_kernels"):
        for parent, _, names in os.walk(ROOT / folder):  # does not follow links
            inside = pathlib.Path(parent).relative_to(ROOT / folder)
            for name in names:
                if "__pycache__" not in inside.parts:
                    path = pathlib.PurePosixPath(PATH_IN_WHEEL.get(folder, folder), inside, name)
                    found[str(path)] = pathlib.Path(parent, name).read_bytes()
    return found


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name, marks=[pytest.mark.slow] * (name != "text files"))
        for name, change in CHANGES.items()
    ],
)
@pytest.mark.slow
def test_wheel_has_all_files_whatever_became_of_the_links(tree, change: Callable[[pathlib.Path], None]):
    for link in LINKS:
        change(tree / link)
    found, expected = wheel_files(tree), expected_files()
    assert found.keys() == expected.keys()
    assert found == expected
    assert "jpaged/serving/page/index.html" in found


@pytest.mark.slow
def test_wheel_from_the_source_distribution_has_all_files(tree, tmp_path):
    done = build(tree, "sdist")
    assert done.returncode == 0, done.stderr
    with tarfile.open(only_file(tree, "*.tar.gz")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    found, expected = wheel_files(unpacked), expected_files()
    assert found.keys() == expected.keys()
    assert found == expected


@pytest.mark.parametrize(
    "target", ["wheel", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wheel:editable", "sdist"))]
)
def test_build_without_a_package_stops_with_one_sentence(tree, target):
    shutil.rmtree(tree / "models")
    done = build(tree, target)
    assert done.returncode == 1
    expected = f"Cannot build jpaged: models/__init__.py missing in {tree}. Get the complete sources.\n"
    assert done.stdout + done.stderr == expected
    assert not list((tree / "dist").iterdir())


@pytest.mark.slow
def test_editable_install_exposes_two_packages(tree, tmp_path):
    assert build(tree, "wheel:editable").returncode == 0
    with zipfile.ZipFile(only_file(tree, "*.whl")) as wheel:
        (name,) = (name for name in wheel.namelist() if ".dist-info/" not in name)
        assert name.endswith(".pth")
        folder = wheel.read(name).decode().strip()
    assert sorted(path.name for path in pathlib.Path(folder).iterdir()) == ["jpaged", "pallas_kernels"]
    new = "models/families/new_family.py"  # a file added after the install is importable as well
    (tree / new).write_text("NAME = 'new'\n")
    code = (
        "import jpaged.serving, pallas_kernels, jpaged.models.families.new_family as new, pathlib, sys\n"
        f"assert pathlib.Path(new.__file__).resolve() == pathlib.Path({str(tree / new)!r}), new.__file__\n"
        f"assert sys.path[1] == {folder!r}, sys.path\n"
    )
    (tmp_path / "jpaged").mkdir()  # a folder of this name next to the script must not hide the package
    environment = os.environ | {"PYTHONPATH": folder}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=60)


@pytest.mark.parametrize(
    ("link", "change", "kind"),
    [
        ("jpaged/models", write_as_text, "a file"),
        ("jpaged/serving", copy_the_folder, "a folder"),
        (".editable/jpaged", pathlib.Path.unlink, "missing"),
        (".editable/pallas_kernels", point_elsewhere, "a link to another place"),
    ],
)
def test_editable_install_without_a_link_stops_and_says_what_to_do(tree, link, change, kind):
    target = os.readlink(tree / link)
    change(tree / link)
    done = build(tree, "wheel:editable")
    assert done.returncode == 1
    assert done.stdout + done.stderr == (
        f"Cannot install jpaged with -e, because these paths must be symbolic links: {link} ({kind}). "
        f"Install without -e, or remove what is at these paths and run: cd {tree} && ln -s {target} {link}\n"
    )


@pytest.mark.slow
def test_command_that_restores_the_links_works(tree):
    shutil.rmtree(tree / ".editable")
    (tree / "jpaged" / "models").unlink()
    command = build(tree, "wheel:editable").stderr.strip().split("run: ")[1]
    subprocess.run(["bash", "-c", command], check=True, timeout=60)
    assert build(tree, "wheel:editable").returncode == 0
