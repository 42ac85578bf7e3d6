"""Build hook of hatchling: checks that no package is missing, and adds models/ and serving/ to a wheel.

The folders models/ and serving/ are imported as jpaged.models and jpaged.serving. A wheel contains them under those
names, copied from the folders. In a checkout, symbolic links in jpaged/ do the same job. The wheel does not use the
links: archives and file systems without symbolic links lose them.

An editable install puts the folder .editable on the import path. That folder has a link to each package, so `models`,
`serving`, `tests` and `tools` are not importable by themselves. Editable installs therefore need all links.
"""

import os
import pathlib
import shlex
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("jpaged", "models", "serving", "pallas_kernels")
MOVED = {"models": "jpaged/models", "serving": "jpaged/serving"}  # folder -> its path in a wheel
LINKS = {
    "jpaged/models": "../models",
    "jpaged/serving": "../serving",
    ".editable/jpaged": "../jpaged",
    ".editable/pallas_kernels": "../pallas_kernels",
}


def missing_packages(root: pathlib.Path) -> str | None:
    """Return a sentence that names the packages missing from a source tree, or None."""
    missing = [f"{name}/__init__.py" for name in PACKAGES if not (root / name / "__init__.py").is_file()]
    if not missing:
        return None
    return f"Cannot build jpaged: {', '.join(missing)} missing in {root}. Get the complete sources."


def missing_links(root: pathlib.Path) -> str | None:
    """Return a sentence that names the links missing from a source tree and the command that makes them, or None."""
    wrong = [path for path, target in LINKS.items() if not _is_link(root / path, target)]
    if not wrong:
        return None
    found = ", ".join(f"{path} ({_kind(root / path)})" for path in wrong)
    folders = sorted({os.path.dirname(path) for path in wrong if not (root / path).parent.is_dir()})
    commands = [f"cd {shlex.quote(str(root))}"]
    commands += [f"mkdir -p {folder}" for folder in folders]
    commands += [f"ln -s {LINKS[path]} {path}" for path in wrong]
    return (
        f"Cannot install jpaged with -e, because these paths must be symbolic links: {found}. "
        f"Install without -e, or remove what is at these paths and run: {' && '.join(commands)}"
    )


def _is_link(path: pathlib.Path, target: str) -> bool:
    return path.is_symlink() and path.resolve() == (path.parent / target).resolve()


def _kind(path: pathlib.Path) -> str:
    if path.is_symlink():
        return "a link to another place"
    if path.is_dir():
        return "a folder"
    return "a file" if path.exists() else "missing"


class Hook(BuildHookInterface):
    """Runs before each build of a wheel, an editable install or a source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Stop the build with one sentence if the tree is incomplete. Else map the moved folders into the wheel."""
        root = pathlib.Path(self.root)
        problem = missing_packages(root)
        if problem is None and version == "editable":
            problem = missing_links(root)
        if problem is not None:
            raise SystemExit(problem)  # an exception would print hatchling's frames around the sentence
        if self.target_name == "wheel" and version == "standard":
            build_data["force_include"] |= MOVED
