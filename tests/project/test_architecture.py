"""Imports between packages run one way, and the source contains nothing that it must not contain.

serving, cli -> llm -> engine and runtime (runtime -> engine.step_plan only) -> models -> pallas_kernels; loading ->
models; simulator -> engine. Modules that import nothing of jpaged (errors, config, outputs, ...) may be imported from
everywhere above the kernels.
"""

import ast
import builtins
import collections
import pathlib
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator

import pytest

from tests.project.source_tree import ROOT, SHIPPED, imports_of, name_of, python_files

ALL = (*SHIPPED, "benchmarks", "tools", "examples", "tests")

# Each part may import these, itself, and the shared modules below.
ALLOWED = {
    "pallas_kernels": set(),
    "jpaged.models": {"pallas_kernels"},
    "jpaged.load_client": set(),
    "jpaged.loading": {"jpaged.models", "pallas_kernels"},  # `loading.check` is an entry point: nothing imports it
    "jpaged.engine": set(),
    "jpaged.simulator": {"jpaged.engine"},
    "jpaged.entrypoints": {"jpaged.cli"},
    "jpaged.ray_serve": {"jpaged.cli"},
    "jpaged.runtime": {"jpaged.engine.step_plan", "jpaged.models", "pallas_kernels"},
    "jpaged.frontend.build": {
        "jpaged.frontend", "jpaged.engine", "jpaged.runtime", "jpaged.loading", "jpaged.models",
    },
    "jpaged.frontend.weight_updates": {"jpaged.frontend", "jpaged.runtime", "jpaged.loading", "jpaged.models"},
    "jpaged.frontend.group_updates": {"jpaged.frontend", "jpaged.runtime", "jpaged.loading", "jpaged.models"},
    "jpaged.frontend.adapters": {"jpaged.engine", "jpaged.runtime", "jpaged.loading", "jpaged.models"},
    "jpaged.frontend": {"jpaged.engine"},
    "jpaged.diagnosis": {"jpaged.runtime", "pallas_kernels"},
    "jpaged.planning": {"jpaged.frontend.engine_config", "jpaged.runtime", "jpaged.loading", "jpaged.models"},
    "jpaged.divergence": {"jpaged.loading", "jpaged.models", "jpaged.runtime", "pallas_kernels"},  # 8-bit pages
    "jpaged.quantizing": {"jpaged.loading", "jpaged.models", "pallas_kernels"},
    "jpaged.llm": {"jpaged.frontend", "jpaged.engine"},
    "jpaged.async_llm": {"jpaged.frontend", "jpaged.engine"},
    "jpaged.rl": {
        "jpaged.llm", "jpaged.frontend.prompts", "jpaged.frontend.progress", "jpaged.engine.input.input_processor",
    },
    "jpaged.serving": {"jpaged.llm", "jpaged.async_llm", "jpaged.cli", "jpaged.frontend"},
    "jpaged.cli": {
        "jpaged", "jpaged.llm", "jpaged.async_llm", "jpaged.serving", "jpaged.loading", "jpaged.planning",
        "jpaged.load_client", "jpaged.diagnosis", "jpaged.frontend", "jpaged.simulator", "jpaged.divergence",
        "jpaged.quantizing",
    },
}
# Leaves: plain data and helpers (jpaged.parsers is a package of them) that import no part.
SHARED = {
    "jpaged.answers",
    "jpaged.parsers",
    "jpaged.chat",
    "jpaged.child_process",
    "jpaged.collectives",
    "jpaged.config",
    "jpaged.engine_arguments",
    "jpaged.errors",
    "jpaged.kv_groups",
    "jpaged.lifetime",
    "jpaged.lora",
    "jpaged.metric_families",
    "jpaged.metrics",
    "jpaged.outputs",
    "jpaged.params",
    "jpaged.phases",
    "jpaged.pooling_params",
    "jpaged.requester",
    "jpaged.routing",
    "jpaged.sampling_params",
    "jpaged.snapshot",
    "jpaged.speculation_config",
    "jpaged.text",
    "jpaged.unpickling",
    "jpaged.version",
}
# Folders of a package, and the folders of it that each one may import, besides itself and the package's own modules.
ROOMS = {
    "jpaged.serving": {
        "schemas": set(),
        "web": {"schemas"},
        "adapters": {"schemas", "web"},
        "openai_api": {"schemas", "web", "adapters"},
        "responses": {"schemas", "web", "openai_api"},
        "messages": {"schemas", "web", "openai_api"},
        "files": {"schemas", "web", "openai_api"},
        "admin": {"schemas", "web", "openai_api"},
    },
    "jpaged.engine": {
        "adapters": set(),
        "kv_cache": set(),
        "grammar": set(),
        "speculation": set(),
        "scheduling": {"adapters", "kv_cache", "speculation"},
    },
    "jpaged.runtime": {
        "store": set(),
        "sampling": set(),
        "step": {"store", "sampling"},
        "drafting": {"store", "sampling", "step"},
        "memory": {"step", "drafting"},
        "compile": {"store", "sampling", "step", "memory", "drafting"},
        "parallel": {"store", "step", "memory", "compile"},
        "prediction": {"step", "memory", "compile"},
    },
    "jpaged.cli": {"common": set(), "flags": {"common"}, "bench": {"common", "flags"}},
}
OTHER_FILES = {"html/entities.py", "configuration_NAME.py", "modeling_NAME.py", "models/families/NAME.py"}
MOST_FILES = 30  # in a folder: more are not read as a list
PRIVATE_JAX_ALLOWED = {"jpaged/runtime/jax_compat.py"}
# Importable names that a file in serving/ would hide from `python serving/app.py`, which puts its folder first.
CLIENT_PACKAGES = {"openai", "httpx", "requests", "litellm", "langchain", "instructor", "aiohttp", "anthropic"}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def part_of(name: str) -> str | None:
    return next((part for part in ALLOWED if within(name, part)), None)


def shared(name: str) -> bool:
    return any(within(name, one) for one in SHARED)


def ours(name: str) -> bool:
    return within(name, "jpaged") or within(name, "pallas_kernels")


def test_imports_run_one_way():
    wrong = []
    for path in python_files(*SHIPPED):
        part = part_of(name_of(path))
        if part is None:
            continue
        allowed = {part, *ALLOWED[part]} | (SHARED if part != "pallas_kernels" else set())
        for name in filter(ours, imports_of(path)):
            front = name.count(".") == 1 and name[7:8].isupper() and "jpaged" in allowed  # from jpaged import LLM
            if not front and not any(within(name, target) for target in allowed - {"jpaged"}):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", list(ROOMS))
def test_imports_between_the_folders_of_a_package_run_one_way(package: str):
    rooms, wrong = ROOMS[package], []
    for path in python_files(*SHIPPED):
        name = name_of(path)
        room = name.removeprefix(f"{package}.").split(".")[0]
        if not within(name, package) or room not in rooms:
            continue
        imported = {name for name in rooms if any(within(each, f"{package}.{name}") for each in imports_of(path))}
        wrong += [f"{path.relative_to(ROOT)} imports from {other}" for other in imported - {room, *rooms[room]}]
    assert not wrong, "\n".join(wrong)


def test_no_folder_is_a_long_corridor():
    counts = collections.Counter(path.parent for path in python_files(*SHIPPED))
    assert not {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_FILES}


def test_an_import_inside_a_function_has_its_reason():
    """A comment on its line or above its group, or a line "Imported late: ..." in the docstring of the module."""
    wrong = []
    for path in python_files(*SHIPPED):
        source = path.read_text(encoding="utf-8")
        tree, lines = ast.parse(source), source.splitlines()
        if "\nImported late: " in (ast.get_docstring(tree) or ""):
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {node for each in functions for node in ast.walk(each)}
        late = {node.lineno: node for node in inside if isinstance(node, ast.Import | ast.ImportFrom)}
        for number, one in late.items():
            first = number
            while first - 1 in late or not lines[first - 2].strip():
                first -= 1
            said = [*lines[number - 1 : one.end_lineno], lines[first - 2], lines[first - 1]]
            if not any("#" in line for line in said):
                wrong.append(f"{path.relative_to(ROOT)}:{number}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_an_entry_point():
    for path in python_files(*SHIPPED):
        for name in imports_of(path):
            assert not within(name, "jpaged.loading.check"), f"{path.relative_to(ROOT)} imports {name}"


def test_shared_modules_import_no_part():
    for path in python_files("jpaged"):
        if shared(name_of(path)):
            parts = {part_of(name) for name in imports_of(path)} - {None}
            assert not parts, f"{path.relative_to(ROOT)} imports {parts}"


def test_every_module_has_its_place():
    """A new module is either in a part, or shared, or needs an entry above."""
    for path in python_files("jpaged"):
        name = name_of(path)
        assert name in {"jpaged", "jpaged.__main__"} or shared(name) or part_of(name), name


def test_host_side_imports_no_jax():
    for path in python_files("jpaged/engine", "jpaged/simulator"):
        for name in imports_of(path):
            assert name.split(".")[0] not in ("jax", "jaxlib", "flax"), f"{path.relative_to(ROOT)} imports {name}"


def test_nobody_imports_bare_models_or_serving():
    for path in python_files(*ALL):
        for name in imports_of(path):
            bare = within(name, "models") or within(name, "serving")
            assert not bare, f"{path.relative_to(ROOT)} imports {name}: write jpaged.{name}"


def test_helpers_of_tests_are_in_their_own_modules():
    """Nothing imports a module of tests or a conftest. pytest alone imports those."""
    for path in python_files(*ALL):
        for name in imports_of(path):
            parts = name.split(".")
            tests = parts[0] == "tests" and any(part == "conftest" or part.startswith("test_") for part in parts)
            assert not tests, f"{path.relative_to(ROOT)} imports {name}: move it to a helper module"


def test_no_torch_outside_the_recorders():
    """Shipped code never imports torch; tests do so only where they skip without it, benchmarks as a peer.

    jpaged/loading/check.py compares with torch where it is, and runs without it.
    """
    for path in python_files(*ALL):
        compared = path in (ROOT / "benchmarks/torch_peers.py", ROOT / "jpaged/loading/check.py")
        if compared or path.parent == ROOT / "benchmarks/peers":
            continue
        if path.parent == ROOT / "tools" and path.name.startswith("record_"):
            continue
        for name in imports_of(path):
            if within(name, "torch"):
                assert path.is_relative_to(ROOT / "tests"), f"{path.relative_to(ROOT)} imports torch"
                assert "skip" in path.read_text(encoding="utf-8"), f"{path.relative_to(ROOT)} must skip"


def test_private_jax_only_in_one_file():
    for path in python_files(*SHIPPED):
        if path.relative_to(ROOT).as_posix() in PRIVATE_JAX_ALLOWED:
            continue
        for name in imports_of(path):
            private = within(name, "jax._src") or within(name, "jaxlib")
            assert not private, f"{path.relative_to(ROOT)} imports {name}"


def test_serving_file_names_hide_nothing():
    for path in python_files("serving"):
        name = path.relative_to(ROOT / "serving").parts[0].removesuffix(".py")
        assert name not in sys.stdlib_module_names, path.name
        assert name not in CLIENT_PACKAGES, path.name


def test_links_are_in_place():
    for folder, names in {"jpaged": ("models", "serving"), ".editable": ("jpaged", "pallas_kernels")}.items():
        for name in names:
            link = ROOT / folder / name
            assert link.is_symlink(), f"{folder}/{name} must be a symbolic link to ../{name}"
            assert link.resolve() == ROOT / name


@pytest.mark.parametrize("part", ["jpaged", "jpaged.engine.step_plan", "jpaged.simulator.simulation", "jpaged.cli"])
def test_importing_starts_no_device(part):
    """`import jpaged` is quick and leaves the device alone; jax is imported when an engine is made."""
    code = f"import {part}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_path_on_a_page_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        paths = re.findall(r"`((?:jpaged|models|serving|pallas_kernels|tests|docs|examples)/[\w./]+)`", text)
        found |= {(page.name, path) for path in paths if "NAME" not in path}
    assert len(found) > 100
    assert not sorted((page, path) for page, path in found if not (ROOT / path).exists())


def test_every_module_that_docs_and_comments_name_exists():
    """`runtime/step/batch.py` and `batch.py` in backticks: a file of the project ends like this."""
    known = {path.relative_to(ROOT).as_posix() for path in python_files(*ALL)} | {"hatch_build.py"}
    endings = {"/".join(name.split("/")[start:]) for name in known for start in range(name.count("/") + 1)}
    wrong = []
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *python_files(*SHIPPED)]:
        named = set(re.findall(r"`([a-z_][\w/]*\.py)`", path.read_text(encoding="utf-8")))
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(named - endings - OTHER_FILES)]
    assert not wrong, "\n".join(wrong)


def test_the_path_to_read_is_short_and_each_file_says_its_place():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w./]+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert 10 <= len(rows) <= 16
    total = 0
    for name, excerpts in rows:
        source = (ROOT / name).read_text(encoding="utf-8")
        tree = ast.parse(source)
        labels = re.findall(r"^(Called by|Owns|Never): ", ast.get_docstring(tree) or "", re.MULTILINE)
        assert labels == ["Called by", "Owns", "Never"], name
        if excerpts.strip() == "all":
            total += source.count("\n")
        for excerpt in re.findall(r"`([\w.]+)`", excerpts):
            nodes: list[ast.stmt] = tree.body
            for part in excerpt.split("."):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
                (found,) = (node for node in nodes if isinstance(node, kinds) and node.name == part)
                nodes = found.body
            total += (found.end_lineno or 0) - found.lineno + 1
    assert 1_500 < total <= 3_000, total


def _undefined(path: pathlib.Path) -> Iterator[str]:
    """Names that a module reads and neither defines nor imports. Names inside strings are not read."""
    top = symtable.symtable(path.read_text(), str(path), "exec")
    known = {*dir(builtins), "__file__", "__name__", "__doc__", "__path__", "__package__", "__spec__"}
    known |= {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    scopes = [top]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for each in scope.get_symbols():
            is_global = scope is top or each.is_global()
            if is_global and each.is_referenced() and each.get_name() not in known:
                yield f"{path.relative_to(ROOT)}:{scope.get_lineno()}: {each.get_name()}"


def test_every_name_is_defined():
    """ruff's F821 and ty's unresolved-reference are off, because jaxtyping's shapes look like names to them."""
    found = [name for folder in ALL for path in (ROOT / folder).rglob("*.py") for name in _undefined(path)]
    assert not found


def test_an_undefined_name_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("import a\nb = a\n\ndef f(c: 'x y') -> d:\n    e = c\n    return [g for h in e if b and h]\n")
    assert sorted(name.partition(": ")[2] for name in _undefined(path)) == ["d", "g"]
