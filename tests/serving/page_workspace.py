"""A copy of ui/ with its node modules, for tests that build the page or open it in a browser."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import platformdirs
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
UI = ROOT / "ui"
INSTALL = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")


def make_workspace(folder: pathlib.Path, why: str) -> pathlib.Path:
    """Copy the sources of the page to a folder, and link their node modules. Skips the test without node or npm.

    why: what remains untested then. The modules are kept in the user's cache, by the hash of package-lock.json.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{why}: {program} is not installed")
    workspace = folder / "ui"
    shutil.copytree(UI, workspace, ignore=shutil.ignore_patterns("node_modules"))
    (workspace / "node_modules").symlink_to(_node_modules(why), target_is_directory=True)
    return workspace


def _node_modules(why: str) -> pathlib.Path:
    key = hashlib.sha256((UI / "package-lock.json").read_bytes()).hexdigest()[:16]
    kept = platformdirs.user_cache_path("jpaged") / f"page-modules-{key}"
    if kept.is_dir():
        return kept / "node_modules"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(UI / name, folder)
        done = subprocess.run(INSTALL, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            pytest.skip(f"{why}: npm cannot install the modules: {done.stderr.strip().splitlines()[-1:]}")
        if not kept.is_dir():  # another process may have been first
            os.rename(folder, kept)
            os.mkdir(folder)  # for the context manager to delete
    return kept / "node_modules"
