"""The training text of the demo model: the standard library's source, a tokenizer, and windows of tokens."""

import ast
import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

END_OF_TEXT = "<|endoftext|>"  # precedes every file of the training text; also bos, eos and pad

LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "lib-dynload",
    "__pycache__", "pydoc_data", "encodings", "ensurepip",
}  # fmt: skip
"""Folders that some installations lack, that are not part of the library, or that have tables instead of code."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The standard library's source without its docstrings, split by file."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    sha256: str  # hash of all paths and texts, in order


def without_docstrings(text: str) -> str:
    """Return Python source without docstrings and the blank lines after them. A body left empty becomes `pass`.

    Docstrings are 20% of the library, in English. A model of this size that learns them continues most functions, with
    greedy decoding, by a docstring that does not end. Text that does not parse is returned unchanged.
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
    docstrings.sort(key=lambda found: found[0].lineno, reverse=True)  # last first: a removal moves all later lines
    for docstring, alone in docstrings:
        first, last = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
        before, after = lines[first][: docstring.col_offset], lines[last - 1][docstring.end_col_offset :]
        if alone:
            lines[first:last] = [before + b"pass" + after]
        elif not before.strip() and not after.strip():  # keep a docstring that shares its line with other statements
            while last < len(lines) - 1 and not lines[last].strip():
                last += 1
            del lines[first:last]
    return b"\n".join(lines).decode()


def read_corpus(root: pathlib.Path) -> Corpus:
    """Read every .py file under `root` outside LEFT_OUT. Holds out 5% of them, chosen by the SHA-256 of their paths."""
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


def held_out_sample(corpus: Corpus) -> str:
    """Return the start of every held-out file, joined: whole lines, at most 4,096 characters of each file."""
    begins = [text if len(text) <= 4096 else text[: text.rindex("\n", 0, 4096) + 1] for text in corpus.held_out]
    return "".join(begins)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """Train byte-level BPE (a tokenizers.Tokenizer) on `texts`.

    Newlines are never merged with other text, so a prompt may end in one. Numbers are split every three digits.
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
    """Concatenated files, each after an end-of-text token."""

    ids: np.ndarray        # int32[N]  tokens
    openings: np.ndarray   # int64[M]  starts of files, and of unindented lines that start with a letter or @

    @classmethod
    def encode(cls, tokenizer: Any, texts: Sequence[str]) -> "Stream":
        end = tokenizer.token_to_id(END_OF_TEXT)
        ids = [np.array([end, *e.ids], np.int32) for e in tokenizer.encode_batch(list(texts))]
        stream = np.concatenate(ids)
        words = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        breaks = np.array([w == END_OF_TEXT or not w.strip("\n") for w in words])
        begins = np.array([w[:1].isalpha() or w[:1] == "@" for w in words])
        return cls(stream, 1 + np.flatnonzero(breaks[stream[:-1]] & begins[stream[1:]]))

    def spread(self, numbers: np.ndarray, length: int, offset: float) -> np.ndarray:
        """Return the windows with these numbers, int32[len(numbers), length + 1].

        The starts of windows 0, 1, 2, ... follow the golden-ratio sequence, which covers the text evenly without state.
        Every other start then moves to the next opening, so that the model sees texts that begin with a definition.
        numbers: int64[N], numbers of windows.
        offset:  start of the sequence, in [0, 1).
        """
        golden = (math.sqrt(5.0) - 1.0) / 2.0
        share = np.mod(offset + numbers * golden, 1.0)
        starts = (share * (len(self.ids) - length - 1)).astype(np.int64)
        moved = self.openings[np.minimum(np.searchsorted(self.openings, starts), len(self.openings) - 1)]
        starts = np.where((np.arange(len(numbers)) % 2 == 0) & (moved + length < len(self.ids)), moved, starts)
        return self.ids[starts[:, None] + np.arange(length + 1)]

    def windows(self, length: int, count: int | None = None) -> np.ndarray:
        """Return windows, int32[windows, length + 1]: all consecutive ones, or `count` of them, evenly spread."""
        total = (len(self.ids) - 1) // length
        chosen = np.arange(total) if count is None else np.arange(count) * total // count
        return self.ids[chosen[:, None] * length + np.arange(length + 1)]
