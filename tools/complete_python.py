"""Cuts a model's continuation after its last complete Python statement. Used by train_demo.py."""

import ast
import warnings


def complete_python(prompt: str, continuation: str) -> str | None:
    """Return the longest prefix of `prompt + continuation` that is Python and longer than the prompt, or None.

    The prefix ends just before a newline, is accepted by `ast.parse`, and has at least one statement that starts after
    the prompt. The text after the last newline is ignored: at its token limit a continuation usually ends mid-line.
    """
    text = prompt + continuation
    for end in (i for i in range(len(text) - 1, len(prompt) - 1, -1) if text[i] == "\n"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # the model may write "\d" in a plain string
                tree = ast.parse(text[:end])
        except (SyntaxError, ValueError):  # ValueError: a NUL byte
            continue
        return text[:end] if _last_statement_start(tree, text) >= len(prompt) else None
    return None


def _last_statement_start(tree: ast.Module, text: str) -> int:
    """Return the index in `text` of the start of the last statement; -1 if there is none."""
    starts = [(node.lineno, node.col_offset) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    if not starts:
        return -1
    line, column = max(starts)
    lines = text.encode().split(b"\n")  # ast counts columns in UTF-8 bytes
    before = b"\n".join(lines[: line - 1]) + (b"\n" if line > 1 else b"")
    return len((before + lines[line - 1][:column]).decode())
