"""The old name of `jpaged.parsers`, until the next release."""

import importlib
import pkgutil
import sys

from jpaged import parsers

for _each in pkgutil.iter_modules(parsers.__path__):
    sys.modules[f"{__name__}.{_each.name}"] = importlib.import_module(f"{parsers.__name__}.{_each.name}")
