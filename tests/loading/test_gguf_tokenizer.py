"""Tokenizers of GGUF files give the same ids and texts as the tokenizers they were made from."""

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jpaged.errors import ModelLoadError
from jpaged.loading import load_tokenizer
from tests.loading.gguf_files import add_tokenizer, finish

DEMO = Path(__file__).parents[2] / "jpaged" / "demo_model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"

TEXTS = [
    "",
    "a",
    " a",
    "  a",
    "def read(path):\n    return open(path).read()\n",
    "x = 3.14159 + 2**10 - 1234567",
    "\n\n\n",
    "\ttabs\t\tand\r\nreturns\r\n",
    "I'm sure they'll say it's HERS, WE'RE not; don't DON'T",
    "  runs    of      spaces ",
    "naïve café coöperation ÀÉÎÕÜ ñ",
    "e\u0301 combining a\u030a",
    "Привет, мир! Ελληνικά",
    "日本語のテキスト、中文字符。한국어",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 done",
    "١٢٣ ۴۵۶ ½ ² Ⅷ",
    "CamelCaseWords and snake_case_words/with/slashes",
    "العربية עברית हिन्दी ไทย",
    "a\u00a0b\u2003c\u200bd",
    "\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>\n",
    "mixed<tool>plain</tool> text",
    "ﬁ ligature Å Å",
]  # fmt: skip

# Regular expressions copied from the original tokenizer.json files.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(expression: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


ORIGINALS = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": (
        None,
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "llama-bpe": (None, split(LLAMA3)),
    "qwen2": (normalizers.NFC(), split(QWEN2)),
    "tekken": (None, split(TEKKEN)),
    "gpt-4o": (None, split(GPT4O)),
}


def write(path: Path, kind: str, tokens: list[str], types: list[int], special: dict[str, int], **keys: Any) -> Path:
    """Write a GGUF file with a tokenizer and one dummy tensor."""
    writer = gguf.GGUFWriter(path, keys.pop("architecture", "llama"))
    add_tokenizer(writer, tokens, types, kind, **special)
    for name, value in keys.items():
        if name == "chat_template":
            writer.add_chat_template(value)
        else:
            writer.add_key_value(f"tokenizer.ggml.{name}", value, *_type_of(value))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    finish(writer)
    return path


def _type_of(value: Any) -> tuple[gguf.GGUFValueType, ...]:
    kind = gguf.GGUFValueType
    if isinstance(value, list):
        return kind.ARRAY, kind.STRING if isinstance(value[0], str) else kind.FLOAT32
    return (kind.BOOL if isinstance(value, bool) else kind.STRING,)


def demo_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def assert_same(tokenizer: Any, original: Tokenizer) -> None:
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == original.decode(ids), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level(pre: str, tmp_path: Path) -> None:
    """Test the demo model's vocabulary with every way to split text, and with control and user-defined tokens."""
    vocab, merges = demo_vocabulary()
    extra = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<tool>": USER_DEFINED, "[PAD4099]": UNUSED}
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), *extra]
    types = [CONTROL, *[NORMAL] * (len(vocab) - 1), *extra.values()]

    whole = pre in ("llama-bpe", "tekken")
    every = {token: i for i, token in enumerate(tokens) if not token.startswith("[PAD")}
    original = Tokenizer(models.BPE(every, merges, ignore_merges=whole))
    original.normalizer, original.pre_tokenizer = ORIGINALS[pre][0] or original.normalizer, ORIGINALS[pre][1]
    original.decoder = decoders.ByteLevel()
    original.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|endoftext|>", *extra) if "|" in t])
    original.add_tokens([AddedToken("<tool>", normalized=False)])

    path = write(
        tmp_path / "t.gguf", "gpt2", tokens, types, {"bos": 0, "eos": len(vocab) + 1}, pre=pre,
        merges=[" ".join(merge) for merge in merges],
    )  # fmt: skip
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert_same(tokenizer, original)
    assert tokenizer.eos_token_id == len(vocab) + 1
    assert max(tokenizer.get_vocab().values()) == len(tokens) - 2  # [PAD4099] is not a token
    begins = [0] if whole else []
    assert tokenizer.encode("a") == begins + original.encode("a").ids


def train_pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """Train a small SentencePiece-like vocabulary. Returns its pieces, in the order learnt, and its merges."""
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=[])
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    corpus = [(Path(__file__).parent / name).read_text() for name in ("test_hub.py", "test_load_model.py")]
    made.train_from_iterator([line for text in corpus for line in text.splitlines()] + TEXTS[:14], trainer)
    model = json.loads(made.to_str())["model"]
    return sorted(model["vocab"], key=lambda t: model["vocab"][t]), [tuple(merge) for merge in model["merges"]]


def best_first(text: str, scores: dict[str, float], ids: dict[str, int], unknown: int) -> list[int]:
    """Encode text with SentencePiece's BPE as in its paper.

    Merge the adjacent pair whose piece has the best score, the leftmost on a tie, until no pair makes a piece. Then
    replace the parts that are not pieces with their bytes.
    """
    parts = list(text)
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not found:
            break
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    out: list[int] = []
    for part in parts:
        if part in scores:
            out.append(ids[part])
        else:
            out += [ids.get(f"<0x{byte:02X}>", unknown) for byte in part.encode()]
    return out


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no-prefix"])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    pieces, merges = train_pieces()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    singles, merged = [p for p in pieces if len(p) == 1], [p for p in pieces if len(p) > 1]
    tokens += [*merged, *singles, "<|im_start|>", "<tool>"]
    types += [NORMAL] * len(pieces) + [CONTROL, USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0, 0.0]
    ids = {token: i for i, token in enumerate(tokens)}

    original = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    before = [normalizers.Prepend(SPACE)] if prefix else []
    original.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    original.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    original.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>", "<|im_start|>")])
    original.add_tokens([AddedToken("<tool>", normalized=False)])

    path = write(
        tmp_path / "t.gguf", "llama", tokens, types, {"bos": 1, "eos": 2, "unknown": 0}, scores=scores,
        add_space_prefix=prefix, chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )  # fmt: skip
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert_same(tokenizer, original)
    piece_scores = {tokens[i]: scores[i] for i in range(len(tokens)) if types[i] == NORMAL}
    for text in TEXTS:
        if text and "<" not in text:
            escaped = (SPACE if prefix else "") + text.replace(" ", SPACE)
            assert tokenizer.encode(text, add_special_tokens=False) == best_first(escaped, piece_scores, ids, 0), text
    assert tokenizer.encode("a")[0] == 1  # BOS, though the file has no add_bos_token
    message = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=True, return_dict=False)
    assert message == [1, *original.encode("a b").ids]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "<s>a b"


def test_added_tokens_of_spaces_and_phi3s_strip(tmp_path: Path) -> None:
    """User-defined runs of spaces work in both spellings. Phi-3's tokens include the space that follows them."""
    tokens = ["<unk>", "<s>", "</s>", SPACE, "a", "b", SPACE * 2, "   ", "<|end|>", SPACE + "a"]
    types = [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, USER_DEFINED, USER_DEFINED, CONTROL, NORMAL]
    special, scores = {"bos": 1, "eos": 2, "unknown": 0}, [0.0] * len(tokens)
    keys = {"scores": scores, "add_space_prefix": False, "add_bos_token": False}
    tokenizer = load_tokenizer(write(tmp_path / "g.gguf", "llama", tokens, types, special, **keys))
    assert tokenizer.encode("a  b   a a") == [4, 6, 5, 7, 4, 9]
    assert tokenizer.decode([4, 6, 5, 7, 4, 9]) == "a  b   a a"
    assert tokenizer.encode("<|end|> a") == [8, 9]
    phi = load_tokenizer(write(tmp_path / "p.gguf", "llama", tokens, types, special, architecture="phi3", **keys))
    assert phi.encode("<|end|> a") == [8, 4]
    assert phi.encode("<s> a") == [1, 9]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "bert"}, r"t\.gguf: tokenizer\.ggml\.model='bert' is not supported .*\(only gpt2 and llama\)"),
        ({"pre": "superbpe"}, r"tokenizer\.ggml\.pre='superbpe' is not supported by jpaged \(only gpt-2, .*tokenizer="),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre='default'"),
        ({}, r"tokenizer\.ggml\.pre=None"),
        ({"pre": "gpt-2", "add_space_prefix": True}, r"add_space_prefix=True is not supported"),
        ({"pre": "gpt-2", "remove_extra_whitespaces": True}, r"remove_extra_whitespaces=True is not supported"),
        ({"pre": "gpt-2", "merges": ["a x"]}, r"tokens and merges do not make a tokenizer"),
        ({"pre": "gpt-2", "tokens": ["a", "a"]}, r"tokenizer\.ggml\.tokens has 'a' twice"),
        ({"kind": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"pre": "gpt-2", "types": [1]}, r"token_type must have one number for each of 3 tokens"),
    ],
)  # fmt: skip
def test_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    keys = {"kind": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], **keys}
    tokens, kind = keys.pop("tokens"), keys.pop("kind")
    types = keys.pop("types", [NORMAL] * len(tokens))
    if kind == "llama":
        del keys["merges"]
    path = write(tmp_path / "t.gguf", kind, tokens, types, {}, **keys)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(path)


def test_no_tokenizer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    assert load_tokenizer(tmp_path / "t.gguf") is None
