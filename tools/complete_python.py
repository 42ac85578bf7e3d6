"""Cut a model's continuation after its last complete Python statement."""

import ast
import warnings


def complete_python(prompt: str, continuation: str) -> str | None:
    """The longest beginning of `prompt + continuation` that is Python and goes beyond the prompt.

    It ends at the end of a line (just before a newline), is accepted by `ast.parse`, and holds at least one statement
    that starts after the prompt. None if there is no such beginning. What stands behind the last newline is never
    looked at: a continuation that stops at its token limit usually stops in mid-line.
    """
    text = prompt + continuation
    for end in (i for i in range(len(text) - 1, len(prompt) - 1, -1) if text[i] == "\n"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in a plain string is the model's business
                tree = ast.parse(text[:end])
        except (SyntaxError, ValueError):  # ValueError: a NUL byte
            continue
        return text[:end] if _last_statement_start(tree, text) >= len(prompt) else None
    return None


def _last_statement_start(tree: ast.Module, text: str) -> int:
    """Index in `text` of the first character of the statement that starts last; -1 if there is no statement."""
    starts = [(node.lineno, node.col_offset) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    if not starts:
        return -1
    line, column = max(starts)
    lines = text.encode().split(b"\n")  # ast counts columns in UTF-8 bytes
    before = b"\n".join(lines[: line - 1]) + (b"\n" if line > 1 else b"")
    return len((before + lines[line - 1][:column]).decode())
