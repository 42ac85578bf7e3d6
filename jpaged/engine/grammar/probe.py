"""Run as a program: compiles grammars, one a line, where whoever sends them can kill it. Imports nothing of jpaged.

A compile cannot be interrupted from outside its process, and fuel does not bound all of it: 200 patterns under allOf,
multipleOf 1000003, or 300 patternProperties, each within every limit on size, ran for minutes.

A line in:  {"grammar": text, "context_free": bool, "limits": {...}, "seconds": number}
A line out: {"grammar": text, "error": text}; the grammar as Lark where it was GBNF, the error "" where there is none
"""

import json
import math
import os
import resource
import signal
import sys

MEMORY = 4 * 2**30  # bytes of address space


def main() -> None:
    """Answer lines until the input ends."""
    os.nice(5)
    if sys.platform == "linux":  # elsewhere the limit is not kept, or refuses what the interpreter has reserved
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer = LLTokenizer("byte")
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.alarm(math.ceil(asked["seconds"]) + 1)  # for the case that nobody is left to kill this process
        answer = {"grammar": asked["grammar"], "error": ""}
        try:
            if asked["context_free"]:
                answer["grammar"] = LLMatcher.grammar_from_lark(_lark(asked["grammar"]))
            limits = LLParserLimits(**asked["limits"])
            matcher = LLMatcher(tokenizer, answer["grammar"], limits=limits, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # a schema that is nothing but a reference to itself fails only here
            answer["error"] = matcher.get_error()
        except Exception as error:  # of the converter, which is plain Python: whatever it fails with is the answer
            answer["error"] = f"{error or type(error).__name__}"
        signal.alarm(0)
        print(json.dumps(answer), flush=True)


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(text)


if __name__ == "__main__":
    main()
