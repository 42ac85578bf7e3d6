"""The text that the demo model learns: the standard library's source, its tokenizer, and windows of its tokens."""

import ast
import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

END_OF_TEXT = "<|endoftext|>"  # stands before every file of the training text; bos, eos and pad

LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "lib-dynload",
    "__pycache__", "pydoc_data", "encodings", "ensurepip",
}  # fmt: skip
"""Folders that are not everywhere, not the library's own, or tables rather than code."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The standard library's source without its docstrings, split by file."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    sha256: str  # of all paths and texts, in order


def without_docstrings(text: str) -> str:
    """Python source without its docstrings and the blank lines behind them; `pass` where nothing else was.

    They are a fifth of the library, and English: with them, a model of this size greedily answers most functions with
    a docstring that does not end. Text that does not parse is returned as it is.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines = text.encode().split(b"\n")  # columns of the tree count bytes
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        (node.body[0], len(node.body) == 1 and not isinstance(node, ast.Module))
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]
    docstrings.sort(key=lambda found: found[0].lineno, reverse=True)  # the last first: lines move up
    for docstring, alone in docstrings:
        first, last = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
        before, after = lines[first][: docstring.col_offset], lines[last - 1][docstring.end_col_offset :]
        if alone:
            lines[first:last] = [before + b"pass" + after]
        elif not before.strip() and not after.strip():  # else it shares its line with other statements: it stays
            while last < len(lines) - 1 and not lines[last].strip():
                last += 1
            del lines[first:last]
    return b"\n".join(lines).decode()


def read_corpus(root: pathlib.Path) -> Corpus:
    """Every .py file under `root` but those left out, without docstrings.

    A twentieth is held out, chosen by the SHA-256 of its path.
    """
    train, held_out, digest = [], [], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        if "-" in relative.parts[0] or relative.as_posix() == "html/entities.py":  # config-3.11-…: build leftovers
            continue
        try:
            text = without_docstrings(path.read_text("utf-8").replace("\r\n", "\n"))
        except UnicodeDecodeError:
            continue  # a handful of files in old encodings
        name = relative.as_posix().encode()
        digest.update(name + b"\0" + text.encode() + b"\0")
        (held_out if hashlib.sha256(name).digest()[0] % 20 == 0 else train).append(text)
    return Corpus(tuple(train), tuple(held_out), digest.hexdigest())


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """Byte-level BPE (a tokenizers.Tokenizer) made from `texts`.

    Newlines stand alone, so that a prompt may end in one; numbers are split in threes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pieces = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pieces), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Stream:
    """Files behind each other, each after an end-of-text token."""

    ids: np.ndarray        # int32[N]
    openings: np.ndarray   # int64[M]  where a file or an unindented line that starts with a letter or @ begins

    @classmethod
    def encode(cls, tokenizer: Any, texts: Sequence[str]) -> "Stream":
        """Tokens of all texts."""
        end = tokenizer.token_to_id(END_OF_TEXT)
        ids = [np.array([end, *e.ids], np.int32) for e in tokenizer.encode_batch(list(texts))]
        stream = np.concatenate(ids)
        words = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        breaks = np.array([w == END_OF_TEXT or not w.strip("\n") for w in words])
        begins = np.array([w[:1].isalpha() or w[:1] == "@" for w in words])
        return cls(stream, 1 + np.flatnonzero(breaks[stream[:-1]] & begins[stream[1:]]))

    def spread(self, numbers: np.ndarray, length: int, offset: float) -> np.ndarray:
        """int32[len(numbers), length + 1]: the windows with these numbers (int64), of an endless row of windows.

        Starts follow the golden-ratio sequence, which covers the text evenly without keeping state; every other one
        is then moved to the next opening, so that the model knows text that begins with a function or a class.
        offset: in [0, 1), where the sequence begins.
        """
        golden = (math.sqrt(5.0) - 1.0) / 2.0
        share = np.mod(offset + numbers * golden, 1.0)
        starts = (share * (len(self.ids) - length - 1)).astype(np.int64)
        moved = self.openings[np.minimum(np.searchsorted(self.openings, starts), len(self.openings) - 1)]
        starts = np.where((np.arange(len(numbers)) % 2 == 0) & (moved + length < len(self.ids)), moved, starts)
        return self.ids[starts[:, None] + np.arange(length + 1)]

    def windows(self, length: int, count: int | None = None) -> np.ndarray:
        """int32[windows, length + 1] that lie behind each other; `count` of them, evenly spread."""
        total = (len(self.ids) - 1) // length
        chosen = np.arange(total) if count is None else np.arange(count) * total // count
        return self.ids[chosen[:, None] * length + np.arange(length + 1)]
