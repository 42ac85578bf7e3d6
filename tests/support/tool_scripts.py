"""Imports scripts of tools/ as modules."""

import importlib.util
import pathlib
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "jpaged" / "demo_model"


def load_tool(name: str) -> types.ModuleType:
    """Import a script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
