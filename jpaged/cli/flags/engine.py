"""Flags that commands share: the engine options, which are made from EngineConfig, and the model."""

import ast
import dataclasses
import inspect
import itertools
import json
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import tyro

from jpaged.config import (
    DTYPE_ALIASES,
    DTYPES,
    LOAD_FORMATS,
    LOGPROBS_MODES,
    QUANTIZATIONS,
    QUANTIZED_ACTIVATIONS,
    QUANTIZED_FORMATS,
    ROUTINGS,
    RUNNERS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from jpaged.errors import RequestError
from jpaged.speculation_config import SpeculationConfig

T = TypeVar("T")
NO_MODEL = "name a folder, a Hugging Face hub id, a .gguf file, or demo (as first argument, or with --model)"

# Options with a fixed set of values. The help lists the values, and the engine checks the option.
CHOICES = {
    "runner": RUNNERS,
    "scheduling_policy": SCHEDULING_POLICIES,
    "dtype": (*DTYPES, *DTYPE_ALIASES),
    "load_format": LOAD_FORMATS,
    "quantization": tuple(dict.fromkeys((*QUANTIZATIONS, *QUANTIZED_FORMATS))),
    "quantized_activations": QUANTIZED_ACTIVATIONS,
    "logprobs_mode": LOGPROBS_MODES,
    "data_parallel_routing": ROUTINGS,
}


def _json_object(words: list[str]) -> dict[str, Any]:
    """Parse a flag's value as a JSON object. Raises ValueError, which tyro prints next to the flag."""
    value = json.loads(words[0])  # JSONDecodeError is a ValueError
    if not isinstance(value, dict):
        raise ValueError('write a JSON object, such as {"temperature": 0.7}')
    return value


JSON_OBJECT: Any = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=_json_object,
    is_instance=lambda value: value is None or isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)

BOOL_WORDS = {"true": True, "false": False, "1": True, "0": False}


def _bool(words: list[str]) -> bool:
    """Parse a flag's value as a boolean. Raises ValueError, which tyro prints next to the flag."""
    value = BOOL_WORDS.get(words[0].lower())
    if value is None:
        raise ValueError(f"{words[0]!r} is neither true (or 1) nor false (or 0)")
    return value


# A boolean whose default, None, means that the engine decides.
OPTIONAL_BOOL: Any = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="{true,false}",
    instance_from_str=_bool,
    is_instance=lambda value: value is None or isinstance(value, bool),
    str_from_instance=lambda value: [str(value).lower()],
)

ModelArgument = Annotated[
    tyro.conf.Positional[str | None],
    tyro.conf.arg(metavar="[MODEL]", help_behavior_hint=""),
]


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, by field name. Line breaks become spaces."""
    definition = next(node for node in ast.walk(ast.parse(inspect.getsource(cls))) if isinstance(node, ast.ClassDef))
    docs = {}
    for field, doc in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return docs


def one_line_help(cls: type[T]) -> type[T]:
    """Class decorator: use each field's docstring as its help, without line breaks, which tyro would keep."""
    for name, doc in field_docs(cls).items():
        hint: Any = cls.__annotations__[name]
        cls.__annotations__[name] = Annotated[hint, tyro.conf.arg(help=doc)]
    return cls


def annotated_flag(name: str, hint: Any, help_text: str, default: Any) -> Any:
    """Annotate a field's type with its help. The help shows no default of None, which the text explains."""
    if hint in (Mapping[str, Any] | None, SpeculationConfig | None):
        return Annotated[hint, JSON_OBJECT, tyro.conf.arg(help=help_text, help_behavior_hint="")]
    if hint == bool | None:
        return Annotated[hint, OPTIONAL_BOOL, tyro.conf.arg(help=help_text, help_behavior_hint="")]
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    if name in CHOICES:
        return Annotated[hint, tyro.conf.arg(help=help_text, metavar="{" + ",".join(CHOICES[name]) + "}")]
    if not optional:
        return Annotated[hint, tyro.conf.arg(help=help_text)]
    inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    metavar = "INT [INT ...]" if typing.get_origin(inner) is tuple else inner.__name__.upper()
    hidden = "" if default is None else f"(default: {default})"
    return Annotated[hint, tyro.conf.arg(help=help_text, metavar=metavar, help_behavior_hint=hidden)]


def _engine_flags() -> type:
    """Make a dataclass with EngineConfig's fields as flags. `model` is optional, as it may be a positional argument."""
    docs = field_docs(EngineConfig)
    hints = typing.get_type_hints(EngineConfig)
    fields = []
    for field in dataclasses.fields(EngineConfig):
        hint, default = hints[field.name], field.default
        if field.name == "model":
            hint, default = hint | None, None
        flag = annotated_flag(field.name, hint, docs[field.name], default)
        fields.append((field.name, flag, dataclasses.field(default=default)))
    namespace = {"__module__": __name__}  # so that it can be pickled: front ends get the flags
    return dataclasses.make_dataclass("EngineFlags", fields, frozen=True, kw_only=True, namespace=namespace)


EngineFlags: Any = _engine_flags()

# A command has the field `engine: EngineArguments = ENGINE_DEFAULTS`.
EngineArguments = Annotated[EngineFlags, tyro.conf.arg(name="")]
ENGINE_DEFAULTS: Any = EngineFlags()


def engine_options(flags: Any, model: str | None) -> dict[str, Any]:
    """Return keyword arguments for `LLM`. model: positional. Raises RequestError unless it or --model is given."""
    options = {field.name: getattr(flags, field.name) for field in dataclasses.fields(EngineConfig)}
    if model is not None and options["model"] is not None:
        raise RequestError("model", model, f"a second model next to --model {options['model']}: name one")
    options["model"] = options["model"] or model
    if not options["model"]:
        raise RequestError("model", options["model"], NO_MODEL)
    return options


def read_text(parameter: str, path: pathlib.Path | None) -> str | None:
    """Return the text of a flag's file, or None without one. Raises RequestError if the file cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(parameter, str(path), f"cannot be read: {error}") from None
