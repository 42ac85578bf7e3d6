"""The old name of `jpaged.parsers`, until the next release."""

import importlib
import pkgutil
import sys

from jpaged import parsers

_OLD_NAMES = {"answer_parser": "parser", "tool_formats": "formats"}

for _each in pkgutil.iter_modules(parsers.__path__):
    _name = _OLD_NAMES.get(_each.name, _each.name)
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{parsers.__name__}.{_each.name}")
