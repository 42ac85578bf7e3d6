r"""Translates regular expressions of Python and JavaScript to the syntax of Rust, which llguidance reads.

If the dialects disagree, the translation matches only text that all of them match: `\d` is 0-9 everywhere, and more in
some dialects. llguidance reports look-around and back references, which Rust's syntax lacks.
"""

import re

# Characters that a class has in every dialect. JavaScript's \d and \w are ASCII. Python counts ½ as a word character
# and the separators U+001C to U+001F as white space. JavaScript counts the byte order mark as white space.
_NARROW = {
    "d": "[0-9]",
    "w": "[A-Za-z0-9_]",
    "s": r"[ \t\n\r\f\v]",
    "D": r"\D",
    "W": r"[^\w\p{N}]",
    "S": r"[^\s\x1c-\x1f\x{feff}]",
}
# Characters that an escape matches in any dialect. For use inside [^...], which then matches what all dialects match.
_WIDE = {
    "d": r"\d",
    "w": r"[\w\p{N}]",
    "s": r"[\s\x1c-\x1f\x{feff}]",
    "D": "[^0-9]",
    "W": "[^A-Za-z0-9_]",
    "S": r"[^ \t\n\r\f\v]",
}
_PIECE = re.compile(r"[^\\\[\]&~]+|\\(?P<escaped>.)|(?P<open>\[\^?\]?)|(?P<close>\])|.", re.DOTALL)


def to_rust(pattern: str) -> str:
    """Translate an expression to Rust's syntax, in linear time. An invalid expression stays invalid."""
    out: list[str] = []
    in_class = negated = False
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if piece["escaped"]:
            classes = _WIDE if in_class and negated else _NARROW
            out.append(classes.get(piece["escaped"], r"\z" if text == r"\Z" else text))
        elif in_class:
            # Inside a class, Rust reads "[" as a nested class and && ~~ -- as operators. Others read plain characters.
            if piece["open"]:
                closed = text.endswith("]")
                out.append("\\[" + ("^" if "^" in text else "") + ("]" if closed else ""))
                in_class = not closed
            elif piece["close"]:
                out.append("]")
                in_class = False
            else:
                out.append("\\" + text if text in "&~" else text)
        elif piece["open"]:
            out.append(text)
            in_class, negated = True, "^" in text
        else:
            out.append(text)
    return "".join(out)


def literal(text: str) -> str:
    """Return an expression that matches exactly this text."""
    return "".join(char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text)
