"""Reads quantization_config: the method, and values of the right type. Raises ModelLoadError that names the key."""

import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import regex

from jpaged.errors import ModelLoadError, shown
from jpaged.loading.checkpoint import read_json
from jpaged.models.families.config import QUANT_METHODS

CONFIG = "quantization_config"
MXFP4 = "mxfp4"
UNQUANTIZED = "use another quantization of the model, or the model without quantization"
_SECONDS = 10.0  # CPU time for all matches of a config. 350,000 (8 for each of 44,000 matrices) took 1.8 s
# Files of older releases, used if config.json has no quantization_config
_SIDE_FILES = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt"))


def with_quantization(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values, with quantization_config from a separate file if config.json has none."""
    if values.get(CONFIG) is not None:
        return dict(values)
    for name, method in _SIDE_FILES:
        if found := read_json(folder / name):
            return dict(values) | {CONFIG: {"quant_method": method} | found}
    return dict(values)


def method_of(values: Mapping[str, Any]) -> str | None:
    """Return the quantisation method of config.json; None if there is none. Raises ModelLoadError if unknown."""
    config = values.get(CONFIG)
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"config.json: {CONFIG} is {shown(config)}; must be an object")
    method = config.get("quant_method")
    if method not in (*QUANT_METHODS, MXFP4):
        raise refused("quant_method", method, f"must be {', '.join(QUANT_METHODS)} or {MXFP4}")
    return method


def refused(key: str, value: object, accepted: str, remedy: str = UNQUANTIZED) -> ModelLoadError:
    """Error for a value of quantization_config."""
    return ModelLoadError(f"config.json: {CONFIG}.{key} is {shown(value)}; {accepted}: {remedy}")


class Values:
    """A JSON object inside quantization_config. The methods raise ModelLoadError that names the key."""

    def __init__(self, values: object, path: str = ""):
        if not isinstance(values, Mapping):
            raise refused(path.rstrip(".") or "", values, "must be an object", "fetch the checkpoint again")
        self._values = values
        self._path = path

    @property
    def raw(self) -> Mapping[str, Any]:
        """The values as they are in the file."""
        return self._values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that has one."""
        return next((v for key in keys if (v := self._values.get(key)) is not None), default)

    def choice(self, *keys: str, accepted: tuple[Any, ...], default: Any = None, remedy: str = UNQUANTIZED) -> Any:
        """A value that must be one of `accepted`. Strings are compared without case."""
        value = self.get(*keys, default=default)
        plain = value.lower() if isinstance(value, str) else value
        found = [a for a in accepted if a == plain and isinstance(a, bool) == isinstance(plain, bool)]
        if not found:
            options = " or ".join(str(a) for a in accepted)
            raise refused(self._path + keys[0], value, f"must be {options}", remedy)
        return found[0]

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        return self.choice(key, accepted=(True, False), default=default)

    def group_size(self, *keys: str, default: int) -> int | None:
        """Inputs of a group. None (-1 in the file): all inputs."""
        value = self.get(*keys, default=default)
        if type(value) is not int or (value != -1 and not 0 < value < 2**31):
            raise refused(self._path + keys[0], value, "must be a number of inputs, or -1 for all of them")
        return None if value == -1 else value

    def names(self, *keys: str) -> tuple[str, ...]:
        """A list of strings, as a tuple; () if the key is missing."""
        value = self.get(*keys, default=())
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise refused(self._path + keys[0], value, "must be a list of strings", "fetch the checkpoint again")
        return tuple(value)

    def inner(self, key: str) -> "Values":
        """An object inside this one."""
        return Values(self.get(key, default={}), f"{self._path}{key}.")

    def items(self) -> Iterable[tuple[str, "Values"]]:
        """All values. Each must be an object."""
        return [(key, Values(value, f"{self._path}{key}.")) for key, value in self._values.items()]


def part_of(patterns: Collection[str], module: str) -> str | None:
    """Return the pattern that equals some consecutive names of the module (mlp.gate, lm_head); None: no pattern does.

    patterns: should be a set, because Qwen3-235B-A22B-FP8 has 283 patterns and 36,000 modules.
    """
    names = module.split(".")
    runs = (".".join(names[i:j]) for i in range(len(names)) for j in range(i + 1, len(names) + 1))
    return next((run for run in runs if run in patterns), None)


def in_text_model(name: str) -> str:
    """The name that a module of a multimodal model has in its text model.

    Both sides of a comparison need it: a checkpoint has the names of the multimodal model, and `DeclaredCheckpoint`
    those of the text model.
    """
    return name.replace("language_model.", "")


class Matcher:
    """Matches names of modules with the regular expressions of a config. All matches share one time limit.

    The config comes with the checkpoint, and `re` has no limit: (a|aa)+$ takes hours for a name of 60 letters.
    """

    def __init__(self, seconds: float = _SECONDS):
        self._left = seconds  # of CPU time, which is what `regex` limits
        self._compiled: dict[str, Any] = {}  # regex.Pattern, which is not a type for annotations

    def __call__(self, pattern: str, module: str, key: str) -> bool:
        """Return True if the regular expression matches from the module's first character.

        key: the config's key that has the pattern. Raises ModelLoadError if it is invalid, or takes too long.
        """
        try:
            if (compiled := self._compiled.get(pattern)) is None:
                compiled = self._compiled[pattern] = regex.compile(pattern)
            started = time.process_time()
            found = compiled.match(module, timeout=max(self._left, 1e-6))
            self._left -= time.process_time() - started
        except (regex.error, RecursionError, OverflowError) as error:
            raise refused(key, pattern, f"is not a regular expression ({error})", "correct it") from None
        except TimeoutError:
            raise refused(key, pattern, f"takes too long to match {shown(module)}", "use a simpler one") from None
        return found is not None
