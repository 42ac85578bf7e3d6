"""Checks the annotated shapes and dtypes of arrays while tests run. A call with other arrays fails.

It does the work of `jaxtyping.install_import_hook`, but only for functions and classes with array annotations. The hook
wraps every function and class, which made tests that compile a fifth slower.
"""

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ARRAY_TYPES = {"Bool", "Float", "Int", "UInt"}  # jaxtyping's types that the project uses
_CHECK = "@__import__('jaxtyping').jaxtyped(typechecker=__import__('beartype').beartype)\ndef _(): ..."


class _AddChecks(ast.NodeTransformer):
    def __init__(self) -> None:
        self._names = ARRAY_TYPES

    def visit_Module(self, node: ast.Module) -> ast.Module:
        assigned = [child for child in node.body if isinstance(child, ast.Assign) and self._has_arrays([child.value])]
        aliases = {part.id for child in assigned for part in child.targets if isinstance(part, ast.Name)}
        self._names = ARRAY_TYPES | aliases
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        if self._has_arrays([node.returns, *[argument.annotation for argument in every if argument is not None]]):
            node.decorator_list.append(_decorator(node))  # below other decorators, which may hide the annotations
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        if self._has_arrays([child.annotation for child in node.body if isinstance(child, ast.AnnAssign)]):
            node.decorator_list.insert(0, _decorator(node))  # above @dataclass, so that it checks __init__
        return node

    def _has_arrays(self, annotations: Sequence[ast.expr | None]) -> bool:
        names = (part for each in annotations if each is not None for part in ast.walk(each))
        return any(isinstance(part, ast.Name) and part.id in self._names for part in names)


def _decorator(node: ast.stmt) -> ast.expr:
    decorator = ast.parse(_CHECK).body[0].decorator_list[0]  # ty: ignore[unresolved-attribute]
    for part in ast.walk(decorator):
        ast.copy_location(part, node)
    return decorator


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        tree = _AddChecks().visit(ast.parse(data, path))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)  # never from a .pyc file, which has no checks
        return self.source_to_code(self.get_data(path), path)


class CheckArrays(importlib.abc.MetaPathFinder):
    """Import modules of these packages with checks. Modules imported earlier stay unchecked."""

    def __init__(self, packages: Sequence[str]):
        self._packages = tuple(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the packages as Python does, but with `_Loader`."""
        if not any(name == package or name.startswith(package + ".") for package in self._packages):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec

    def install(self) -> None:
        sys.meta_path.insert(0, self)
