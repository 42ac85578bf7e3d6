r"""Finds cut points: positions at which a text can be cut so that its pieces have the same token ids as the whole text.

A cut point is between a letter or a digit and the separator after it, such as a blank or a comma. It is safe for a
tokenizer if all of this holds:

1. No added token matches across the cut, or depends on the character on the other side.
2. The normalizer treats both sides separately. Unicode composes no separator with the letter before it.
3. The pre-tokenizer always splits at the cut. Its regular expressions match from left to right, and each alternative is
   one of `ALTERNATIVES`. After a letter or a digit, no alternative matches past a cut, or looks beyond it.
   Or there is no pre-tokenizer, and no token of the vocabulary has the separator after a letter or a digit. Then no
   merge of BPE crosses the cut.

`describe` checks these conditions. An unknown kind of tokenizer has no cut points.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import pre_tokenizers

# Letters and digits that every version of Unicode knows, and that compose with nothing before or after them.
BEFORE = "A-Za-z0-9À-ÖØ-öø-ÿα-ωа-яА-Яぁ-ゖァ-ヺ一-龥가-힣"
SEPARATORS = " \n,.，。、"
SPACE = "▁"  # SentencePiece's blank

_LETTERS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_FIRST = r"[^\r\n\p{L}\p{N}]?"

# Alternatives of the regular expressions of GPT-2, Llama 3, Qwen, Mistral, gpt-oss, DeepSeek and the demo model.
ALTERNATIVES = frozenset({
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _ENDINGS, r"'(?i:[sdmt]|ll|ve|re)",
    r" ?\p{L}+", r"\p{L}+", rf"{_FIRST}\p{{L}}+", rf"{_FIRST}+\p{{L}}+", rf"{_FIRST}[\p{{L}}\p{{M}}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(rf"{_FIRST}{_LETTERS}*{_SMALL}+{end}" for end in ("", _ENDINGS + "?")),
    *(rf"{_FIRST}{_LETTERS}+{_SMALL}*{end}" for end in ("", _ENDINGS + "?")),
    r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}{1,3}", r"\p{N}{1,3}+", "[一-龥぀-ゟ゠-ヿ]+",
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s*[\r\n]", r"\n+", r"[^\S\n]+(?!\S)", r"\s+(?!\S)", r"\s+$", r"\s+", r"\s",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CutPoints:
    """Cut points of texts for one tokenizer.

    separators:   characters before which a text may be cut.
    drops_blank:  the tokenizer adds a blank before every text, so a piece omits its first blank. A cut is then only at
                  a single blank between two letters or digits.
    """

    separators: str
    drops_blank: bool

    def pieces(self, text: str, size: int, most: int, *, from_end: bool = False) -> Iterator[str]:
        """Yield the pieces of a text in order, or from the last to the first.

        size: characters of a usual piece. Raises ValueError if a piece needs more than `most` characters.
        """
        find, start, end = self._pattern, 0, len(text)
        while end - start > size:
            if from_end:
                cut = self._last_cut(text, start, end - size, max(end - most, start))
            else:
                found = find.search(text, start + size, min(start + most, end))
                cut = None if found is None else found.start()
            if cut is None:
                if end - start > most:
                    raise ValueError("no cut point")
                break
            if from_end:
                yield text[self._begin(cut) : end]
                end = cut
            else:
                yield text[self._begin(start) : cut]
                start = cut
        yield text[self._begin(start) : end]

    def _begin(self, cut: int) -> int:
        return cut + 1 if self.drops_blank and cut else cut

    def _last_cut(self, text: str, start: int, high: int, low: int) -> int | None:
        """Return the last cut point from `low` to `high`, except `start`. Searches in windows, the last one first."""
        window = 4096
        while high > max(low, start):
            begin = max(high - window, low, start + 1)
            found = self._pattern.finditer(text, begin, min(high + 2, len(text)))
            cuts = [match.start() for match in found if match.start() <= high]
            if cuts:
                return cuts[-1]
            high, window = begin - 1, window * 2
        return None

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        after = f"(?=[{BEFORE}])" if self.drops_blank else ""
        return re.compile(f"(?<=[{BEFORE}])[{re.escape(self.separators)}]{after}")


@dataclasses.dataclass(frozen=True)
class Description:
    """Facts about a tokenizer (tokenizers.Tokenizer), from its JSON.

    cut_points:           None: no cut point is proved safe.
    characters_per_token: maximum number of characters of a text that one token stands for. None: no proved bound.
    """

    cut_points: CutPoints | None
    characters_per_token: int | None


def describe(backend: Any) -> Description:
    """Return the cut points of a tokenizers.Tokenizer, and the bound on its characters per token."""
    data = json.loads(backend.to_str())
    model, added = data["model"], data.get("added_tokens") or []
    normalizers = _steps(data.get("normalizer"), "normalizers")
    steps = _steps(data.get("pre_tokenizer"), "pretokenizers")
    if model.get("type") != "BPE" or model.get("dropout") or not all(map(_is_known_normalizer, normalizers)):
        return Description(None, None)
    vocab, byte_level = model["vocab"], any(step["type"] == "ByteLevel" for step in steps)
    replaces = any(step["type"] == "Replace" for step in normalizers)
    if not all(_is_known_step(step, no_blanks=replaces and not byte_level) for step in steps):
        return Description(None, None)
    splits = byte_level and any(step["type"] == "Split" or step.get("use_regex") for step in steps)
    covers = _covers_all_text(model, byte_level=byte_level)
    # NFC joins up to four characters.
    composed = 4 if any(step["type"] in ("NFC", "NFKC") for step in normalizers) else 1
    longest = max(max(map(len, vocab), default=1), *(len(token["content"]) for token in added), 1)
    if byte_level:  # lengths in the vocabulary are in bytes, so lengths of added tokens must be too
        longest = max(longest, *(len(token["content"].encode()) for token in added), 1)
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    bound = longest * composed if covers and not strips else None
    separators = "".join(mark for mark in SEPARATORS if _never_crossed(mark, added))
    prepends = any(step["type"] == "Prepend" for step in normalizers)
    metaspace = any(step["type"] == "Metaspace" for step in steps)
    if not splits:
        if not covers or byte_level or model.get("ignore_merges") or _has_affixes(model) or _merges_bytes(vocab):
            return Description(None, bound)
        blank = SPACE if metaspace or replaces else " "
        separators = _not_merged(separators, vocab, blank)
        if metaspace or prepends:
            separators = " " if " " in separators else ""
    if any(step.get("add_prefix_space") for step in steps):
        separators = " " if " " in separators else ""  # a piece that starts with another separator would get a blank
    if prepends and any(re.match(f"[{BEFORE}]", token["content"]) for token in added):
        separators = ""
    return Description(CutPoints(separators, prepends) if separators else None, bound)


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as a flat list."""
    if step is None:
        return []
    return [one for part in step[key] for one in _steps(part, key)] if step["type"] == "Sequence" else [step]


def _is_known_normalizer(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "NFC" | "NFKC"}:
            return True
        case {"type": "Prepend", "prepend": prefix}:
            return prefix == SPACE
        case {"type": "Replace", "pattern": {"String": " "}, "content": content}:
            return content == SPACE
    return False


def _is_known_step(step: dict[str, Any], *, no_blanks: bool) -> bool:
    """True if a step of the pre-tokenizer keeps cuts safe. no_blanks: the normalizer leaves no blanks."""
    match step:
        case {"type": "ByteLevel" | "Digits"}:
            return True
        case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": "always" | "first" | "never"}:
            return replacement == SPACE
        case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious" | "MergedWithNext"}:
            return no_blanks  # Gemma's, which never splits
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return all(alternative in ALTERNATIVES for alternative in alternatives(regex))
    return False


def alternatives(regex: str) -> list[str]:
    """Split a regular expression at its outermost bars."""
    found, depth, in_set, start, i = [], 0, False, 0, 0
    while i < len(regex):
        mark = regex[i]
        if mark == "\\":
            i += 1
        elif in_set:
            in_set = mark != "]"
        elif mark == "[":
            in_set = True
        elif mark in "()":
            depth += 1 if mark == "(" else -1
        elif mark == "|" and not depth:
            found.append(regex[start:i])
            start = i + 1
        i += 1
    return [*found, regex[start:]]


def _never_crossed(mark: str, added: list[dict[str, Any]]) -> bool:
    """True if no added token matches across a cut before `mark`, or depends on its other side."""
    for token in added:
        content = token["content"].replace(SPACE, " ")
        if re.search(f"[{BEFORE}]{re.escape(mark)}", content):
            return False
        if token["single_word"] and content.startswith(mark):
            return False
        if token["rstrip"] and mark.isspace() and re.search(f"[{BEFORE}]$", content):
            return False
    return True


def _not_merged(separators: str, vocab: dict[str, int], blank: str) -> str:
    """Return the separators that no token contains after a letter or a digit."""
    written = {mark: blank if mark == " " else mark for mark in separators}
    pair = re.compile(f"[{BEFORE}]([{re.escape(''.join(written.values()))}])")
    merged = {mark for token in vocab for mark in pair.findall(token)}
    return "".join(mark for mark, one in written.items() if one not in merged)


def _covers_all_text(model: dict[str, Any], *, byte_level: bool) -> bool:
    """True if every character gets at least one token: none is dropped, or joined to a run of unknown characters."""
    if byte_level:
        known = set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()
    else:
        known = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return bool(known or (model.get("unk_token") is not None and not model.get("fuse_unk")))


def _has_affixes(model: dict[str, Any]) -> bool:
    return bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))


def _merges_bytes(vocab: dict[str, int]) -> bool:
    """True if a token contains a byte token, such as <0x0A>, and further text."""
    return any("<0x" in token and len(token) > 6 for token in vocab)
