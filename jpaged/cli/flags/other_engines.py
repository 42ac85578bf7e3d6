"""Flags of vLLM that jpaged lacks or has under another name. `frontend/engine_config.py` does the same for Python.

A flag that jpaged lacks is dropped at a neutral value, which asks for nothing. At any other value it is an error.
"""

import ast
import json
from collections.abc import Sequence
from typing import Any

from jpaged.frontend.engine_config import ALIASES, NOT_YET, SPECULATION_KEYS, is_neutral, with_speculation

COMMANDS = ("generate", "chat", "serve", "run-batch", "bench", "plan")  # commands with engine options
QUANTIZATION = "quantization"  # jpaged has it. vLLM also accepts the value None, and the short form -q
SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
         "-pcp": "prefill_context_parallel_size",
         "-q": QUANTIZATION}  # fmt: skip
# Flags of `vllm serve` only, with their neutral values as in NOT_YET.
SERVE: dict[str, tuple[Any, ...]] = {
    "enable_auto_tool_choice": (True,), "disable_log_requests": (True,), "enable_log_requests": (False,),
    "enable_prompt_tokens_details": (True,), "disable_frontend_multiprocessing": (False, True),
    "response_role": ("assistant",), "chat_template_content_format": ("auto", "string"),
}  # fmt: skip


def without_neutral(args: Sequence[str]) -> list[str]:
    """Use jpaged's names of flags, and drop flags of vLLM at neutral values. Raises RequestError for other values."""
    if not args or args[0] not in COMMANDS:
        return list(args)
    known = NOT_YET | SERVE if args[0] == "serve" else NOT_YET
    end = args.index("--") if "--" in args else len(args)
    flags, kept, speculation = list(args[:end]), list[str](), dict[str, Any]()
    while flags:
        flag, equals, given = flags.pop(0).partition("=")
        name = SHORT.get(flag, flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else "")
        negated = name.startswith("no_") and name not in known
        name = name.removeprefix("no_") if negated else name
        if name == QUANTIZATION and (equals or flags):
            word = given if equals else flags.pop(0)
            kept += [] if _value(word) is None else [f"--{QUANTIZATION}", word]
            continue
        if name in SPECULATION_KEYS and (equals or flags):
            word = given if equals else flags.pop(0)
            speculation[name] = _value(word) if name == "spec_tokens" else word
            continue
        if name in ALIASES and not negated:
            kept.append(f"--{ALIASES[name].replace('_', '-')}{equals}{given}")
            continue
        if name not in known:
            long = f"--{name.replace('_', '-')}" if flag in SHORT else flag
            kept.append(long + equals + given)
            continue
        value: Any = not negated
        if equals:
            value = _value(given)
        elif not any(isinstance(neutral, bool) for neutral in known[name]) and flags and not flags[0].startswith("-"):
            value = _value(flags.pop(0))
        is_neutral(name, value, known)
    return [*_with_speculation(kept, speculation), *args[end:]]


def _with_speculation(words: list[str], given: dict[str, Any]) -> list[str]:
    """Put --spec-method, --spec-model and --spec-tokens into --speculative-config. Raises RequestError for both."""
    if not given:
        return words
    flag, rest, before = "--speculative-config", list[str](), dict[str, Any]()
    words = list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name.replace("_", "-") != flag or not (equals or words):
            rest.append(name + equals + value)
            continue
        before["speculative_config"] = _json(value if equals else words.pop(0))
    return [*rest, flag, json.dumps(with_speculation(before | given)["speculative_config"])]


def _json(word: str) -> Any:
    """The value of --speculative-config; the word itself if it is not JSON, for an error that shows it."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _value(word: str) -> Any:
    """Return the Python value of a word: a literal such as a number or {}, a boolean, None, or the word itself."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if word.lower() in words:
        return words[word.lower()]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return word
