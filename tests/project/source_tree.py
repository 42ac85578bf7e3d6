"""Python files of the repository, their module names and their imports."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ("jpaged", "models", "serving", "pallas_kernels")  # folders, links not followed


@functools.cache
def python_files(*folders: str) -> list[pathlib.Path]:
    """Return the Python files of folders, each once: symbolic links are not followed."""
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in (path, *path.parents) if parent.is_relative_to(ROOT))
    ]


def name_of(path: pathlib.Path) -> str:
    """Return the name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("models", "serving"):
        parts = ("jpaged", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: pathlib.Path) -> list[str]:
    """Return all imports of a file, also inside functions and for type checking. `from a import b` gives a.b."""
    return _imports(path, path.read_text(encoding="utf-8"))


@functools.cache
def _imports(path: pathlib.Path, source: str) -> list[str]:
    package = name_of(path).split(".") if path.name == "__init__.py" else name_of(path).split(".")[:-1]
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names
