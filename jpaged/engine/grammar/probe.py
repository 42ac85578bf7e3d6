"""A program that compiles grammars in a process that its parent can kill. Imports nothing of jpaged.

llguidance cannot be interrupted while it compiles, and its fuel does not bound all of the work. These compiled for
minutes, each within every limit on size: 200 patterns under allOf, multipleOf 1000003, 300 patternProperties.

The first line of input is the vocabulary of the model: its size, and the names of its special tokens. The other tokens
do not matter for a compile. Each further line is a request, each line of output its answer:

    {"vocab_size": number, "special_tokens": [text, ...]}
    {"grammar": text, "context_free": bool, "limits": {...}, "seconds": number}
    {"grammar": text, "error": text}

The answer's "grammar" is Lark if the request's was GBNF. Its "error" is "" on success.

Imported late: llguidance, under the limits of the child process.
"""

import json
import math
import os
import resource
import signal
import sys
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space
MAX_FIRST = 16  # first bytes of answers that are tried


def main() -> None:
    """Answer requests until the input ends."""
    os.nice(5)
    # Other systems ignore this limit, or count memory that the interpreter has only reserved.
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(**json.loads(sys.stdin.readline()))))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.alarm(math.ceil(asked["seconds"]) + 1)  # in case the parent is gone and cannot kill this process
        answer = {"grammar": asked["grammar"], "error": ""}
        try:
            if asked["context_free"]:
                answer["grammar"] = LLMatcher.grammar_from_lark(_lark(asked["grammar"]))
            limits = LLParserLimits(**asked["limits"])
            matcher = LLMatcher(tokenizer, answer["grammar"], limits=limits, log_level=0)
            if not matcher.is_error():
                mask = matcher.compute_bitmask()  # a schema that only refers to itself fails here, not before
            answer["error"] = matcher.get_error() or _error_after_first_byte(matcher, mask)
        except Exception as error:  # the converter to Lark is plain Python and may raise anything
            answer["error"] = f"{error or type(error).__name__}"
        signal.alarm(0)
        print(json.dumps(answer), flush=True)


def _error_after_first_byte(matcher: Any, mask: bytes) -> str:
    """The error after the first byte of an answer, and the bytes that it forces; "" if there is none.

    An enum of thousands of objects fails there, and not before: its alternatives differ only after the first brace.
    """
    allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
    for byte in allowed[:MAX_FIRST]:
        copied = matcher.deep_copy()
        copied.consume_token(byte)
        copied.consume_tokens(copied.compute_ff_tokens())
        if not copied.is_error():
            copied.compute_bitmask()
        if copied.is_error():
            return copied.get_error()
    return ""


class _Tokens:
    """A vocabulary of single bytes, special tokens, and empty tokens up to the model's size."""

    def __init__(self, vocab_size: int, special_tokens: list[str]):
        names = [name.encode() for name in special_tokens] or [b"<|end|>"]
        padding = [b""] * (vocab_size - 256 - len(names))
        self.tokens = [bytes([byte]) for byte in range(256)] + names + padding
        self.special_token_ids = list(range(256, 256 + len(names)))
        self.eos_token_id = 256
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(text)


if __name__ == "__main__":
    main()
