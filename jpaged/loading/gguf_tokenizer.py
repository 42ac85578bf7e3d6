"""Builds the tokenizer of a GGUF file from the keys tokenizer.*. It gives the same ids as the original tokenizer.

There are two kinds:
- "gpt2": byte-level BPE. tokenizer.ggml.pre names the split of text; llama.cpp's src/llama-vocab.cpp defines the names.
- "llama": SentencePiece's BPE. The pair with the best score is merged first. Text that no piece covers becomes bytes.

Imported late: Transformers, which takes seconds.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jpaged.errors import ModelLoadError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_PADDING = re.compile(r"\[PAD\d+\]")  # converters' name for rows of the embedding without a token
_SPACE = "▁"
_KEYS = {
    "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
    "token_type_count",
}  # fmt: skip

# Regular expressions that split text before BPE merges, from the original tokenizer.json files.
_LETTERS, _ENDINGS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = _ENDINGS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*%s"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _CASED % ("", "") + r"|\p{N}" + _AFTER_WORDS
GPT4O = _CASED % (_ENDINGS + "?", _ENDINGS + "?") + r"|\p{N}{1,3}" + _AFTER_WORDS


@dataclasses.dataclass(frozen=True)
class _Pre:
    """Meaning of one name in tokenizer.ggml.pre."""

    split: str | None = None      # regular expression; None: GPT-2's own
    digits: bool = False          # split every digit off first
    compose: bool = False         # apply Unicode's NFC first
    whole_words: bool = False     # a word that is a token needs no merges
    add_bos: bool = False         # default of add_bos_token


_PRE: dict[str, _Pre] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "gigachat", "a.x-4.0", "mellum"), _Pre()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _Pre(digits=True)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"),
        _Pre(LLAMA3, whole_words=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(LLAMA3)),
    "qwen2": _Pre(QWEN2, compose=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), _Pre(QWEN2)),
    "tekken": _Pre(TEKKEN, whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _Pre(GPT4O)),
}


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any | None:
    """Build the tokenizer (transformers.PreTrainedTokenizerBase) of a GGUF file; None if the file has none.

    Raises ModelLoadError that names the unsupported key.
    """
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    keys = _Keys(path, metadata)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(keys)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(keys), True
    else:
        raise keys.refused("model", "only gpt2 and llama")
    keys.refuse_the_rest()
    template = metadata.get("tokenizer.chat_template")
    if not (template is None or isinstance(template, str)):
        raise keys.damaged("tokenizer.chat_template must be a string")
    tokenizer.add_special_tokens(keys.added(_CONTROL, _UNKNOWN))
    tokenizer.add_tokens(keys.added(_USER_DEFINED))
    begin = keys.special("bos") if keys.flag("add_bos_token", add_bos) else None
    end = keys.special("eos") if keys.flag("add_eos_token", False) else None
    around = [token for token in (begin, end) if token is not None]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([begin] if begin else []), "$A", *([end] if end else [])],
            special_tokens=[(token, keys.tokens.index(token)) for token in dict.fromkeys(around)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=keys.special("bos"),
        eos_token=keys.special("eos"),
        unk_token=keys.special("unknown"),
        pad_token=keys.special("padding"),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


class _Keys:
    """Reads and checks the keys tokenizer.ggml.*."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        self._path = path
        self._values = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        self.architecture = metadata.get("general.architecture")
        self.tokens: list[str] = self._texts("tokens")
        self.types: list[int] = self._numbers("token_type", np.full(len(self.tokens), _NORMAL)).tolist()
        if self.kind == "llama":  # files spell user-defined tokens with ▁ or with a space
            self.tokens = [
                token.replace(_SPACE, " ") if kind == _USER_DEFINED else token
                for token, kind in zip(self.tokens, self.types, strict=True)
            ]
        self.vocab = {
            token: i
            for i, token in enumerate(self.tokens)
            if not (self.types[i] == _UNUSED and _PADDING.fullmatch(token))
        }
        padding = sum(1 for i, token in enumerate(self.tokens) if self.vocab.get(token) is None)
        if len(self.vocab) + padding != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.vocab.get(token, i) != i)
            raise self.damaged(f"tokenizer.ggml.tokens has {twice!r} twice")

    @property
    def kind(self) -> Any:
        """tokenizer.ggml.model."""
        return self._values.get("model")

    def get(self, name: str) -> Any:
        """The value of a key, or None."""
        return self._values.get(name)

    def flag(self, name: str, default: bool) -> bool:
        """The value of a key that must be true or false."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.damaged(f"tokenizer.ggml.{name}={value!r} must be true or false")
        return value

    def special(self, name: str) -> str | None:
        """The text of a special token; None if the file has no such key, or its id has no token."""
        number = self._values.get(f"{name}_token_id")
        return self.tokens[number] if isinstance(number, int) and 0 <= number < len(self.tokens) else None

    def merges(self) -> list[tuple[str, str]] | None:
        """Pairs to merge, by priority; None if the file has no merges."""
        if "merges" not in self._values:
            return None
        merges = self._texts("merges")
        cuts = [merge.find(" ", 1) for merge in merges]
        return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]

    def scores(self) -> list[float]:
        """One score per token. Raises ModelLoadError if the file has none."""
        if "scores" not in self._values:
            raise self.damaged("tokenizer.ggml.scores is missing")
        return self._numbers("scores", np.zeros(0)).tolist()

    def added(self, *types: int) -> list[AddedToken]:
        """Tokens of these types. The tokenizer finds them in the text before any other step."""
        # All but three of Phi-3's tokens include the space after them, according to its tokenizer.json. No key says so.
        strip = self.architecture == "phi3" and self.kind == "llama"
        return [
            AddedToken(
                token,
                normalized=False,
                special=_USER_DEFINED not in types,
                rstrip=strip and token not in ("<s>", "<unk>", "<|endoftext|>"),
            )
            for token, i in self.vocab.items()
            if self.types[i] in types and token
        ]

    def refuse_the_rest(self) -> None:
        """Refuse keys that are not read here, unless their value is empty or false."""
        for name, value in self._values.items():
            asks = value.size if isinstance(value, np.ndarray) else value
            if asks and name not in _KEYS and not name.endswith("token_id"):
                raise self.refused(name)

    def refused(self, name: str, usual: str = "") -> ModelLoadError:
        """Make the error for an unsupported key."""
        value = self._values.get(name)
        shown = f"[{len(value)} values]" if isinstance(value, (np.ndarray, list)) else repr(value)
        return ModelLoadError(
            f"{self._path}: tokenizer.ggml.{name}={shown} is not supported by jpaged{f' ({usual})' if usual else ''}: "
            "name the model's original tokenizer with tokenizer= (a folder or a hub id)"
        )

    def damaged(self, what: str) -> ModelLoadError:
        """Make the error for keys that contradict each other."""
        return ModelLoadError(f"{self._path}: {what}: use another conversion, or name a tokenizer with tokenizer=")

    def _texts(self, name: str) -> list[str]:
        value = self._values.get(name)
        if not isinstance(value, list):
            raise self.damaged(f"tokenizer.ggml.{name} must be a list of strings")
        return list(value)

    def _numbers(self, name: str, default: np.ndarray) -> np.ndarray:
        value = self._values.get(name, default)
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.damaged(f"tokenizer.ggml.{name} must have one number for each of {len(self.tokens):,} tokens")
        return value


def _byte_level(keys: _Keys) -> tuple[Tokenizer, bool]:
    """Build byte-level BPE. Also returns the default of add_bos_token: True if texts begin with BOS."""
    name = keys.get("pre")
    pre = _PRE.get(name) if isinstance(name, str) else None
    if pre is None:
        raise keys.refused("pre", f"only {', '.join(_PRE)}")
    if keys.flag("add_space_prefix", False):
        raise keys.refused("add_space_prefix", "only for the kind llama")
    tokenizer = _bpe(keys, keys.merges(), ignore_merges=pre.whole_words)
    if pre.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(keys: _Keys) -> Tokenizer:
    """Build SentencePiece's BPE. Like llama.cpp, add a space before the text and after each added token."""
    tokenizer = _bpe(
        keys, keys.merges() or _merges_by_score(keys), byte_fallback=_BYTE in keys.types, fuse_unk=True,
        unk_token=keys.special("unknown"),
    )  # fmt: skip
    prefix = keys.flag("add_space_prefix", True)
    before: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges_by_score(keys: _Keys) -> list[tuple[str, str]]:
    """Return all pairs of pieces that join to a piece, by that piece's score; ties in the order of the file."""
    scores = keys.scores()
    pieces = {token: i for token, i in keys.vocab.items() if keys.types[i] == _NORMAL}
    found = []
    for token, i in pieces.items():
        for cut in range(1, len(token)):
            left, right = pieces.get(token[:cut]), pieces.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    found.sort()
    return [(keys.tokens[left], keys.tokens[right]) for _, _, left, right in found]


def _bpe(keys: _Keys, merges: list[tuple[str, str]] | None, **options: Any) -> Tokenizer:
    if merges is None:
        raise keys.damaged("tokenizer.ggml.merges is missing")
    try:
        return Tokenizer(models.BPE(vocab=keys.vocab, merges=merges, **options))
    except Exception as error:  # tokenizers has no error type of its own; a merge may name an unknown token
        raise keys.damaged(f"tokenizer.ggml.tokens and merges do not make a tokenizer ({error})") from None
