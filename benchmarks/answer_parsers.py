"""CPU time to parse answers: per token of a usual answer, and for 1 MB of the slowest text found.

    python benchmarks/answer_parsers.py [FORMAT ...]

Prints a table and the machine. Times are CPU seconds of this process: the minimum of three runs, or one run in the
search for the slowest text. Needs no model.
"""

import argparse
import os
import platform
import time

from jpaged.params.reasoning_tags import REASONING_PARSERS
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.tool_formats import FORMATS

SIZE = 2**20
PIECE = 4  # characters per token, approximately
CALL = '<tool_call>\n{"name": "now", "arguments": {"text": "' + "some words " * 60 + '"}}\n</tool_call>'
USUAL = "I shall look. " * 60 + CALL
OPENINGS = {
    "hermes": '<tool_call>{"name": "now", "arguments": {"a": [', "llama3_json": '{"name": "now", "parameters": {"a": [',
    "mistral": '[TOOL_CALLS]now[ARGS]{"a": [', "pythonic": "[now(a=[", "json": '[{"name": "now", "arguments": {"a": [',
    "llama4_pythonic": "[now(a=[", "granite": '<|tool_call|>[{"name": "now", "arguments": {"a": [',
    "qwen3_coder": "<tool_call><function=now><parameter=a>", "seed_oss": "<seed:tool_call><function=now><parameter=a>",
    "glm45": "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>", "gemma4": "<|tool_call>call:now{a:[",
    "glm47": "<tool_call>now<arg_key>a</arg_key><arg_value>",
    "minimax_m2": '<minimax:tool_call><invoke name="now"><parameter name="a">',
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="false">',
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="true">',
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{"a": [',
    "deepseek_v31": '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": [',
    "kimi_k2": '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"a": [',
    "openai": '<|channel|>commentary to=functions.now json<|message|>{"a": [',
}  # fmt: skip
REPEATED = (
    "<tool_call>", "<tool_cal", '<tool_call>{"name":"now"}</tool_call>', "[TOOL_CALLS]now[ARGS]{}", "now(),", "f(a=",
    '<tool_call>{"name": "now", "arguments": {"a": [', "```json", "[", "[]", "{", '{"a":', "1,", "1", '"', "'", "\\",
    "\\n", "\n", "\n\x01", " ", "<", "é",
    "<function=now></function>", "<parameter=a>1</parameter>", "</paramete",
    f"[{'1,' * 120}]</parameter><parameter=a>", f"[{'1,' * 120}]</arg_value><arg_key>a</arg_key><arg_value>",
    f'[{"1," * 120}]</parameter><parameter name="a">', "</parameter></invoke>", "</function></tool_call>",
    "<arg_key>a</arg_key><arg_value>1</arg_value>",
    "<tool_call>now</tool_call>", "<|channel|>", "<|start|>assistant<|channel|>final<|message|>a<|end|>", '<|"|>',
    "<|tool_call>call:now{}<tool_call|>", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
)  # fmt: skip


def seconds(reader: AnswerReader, text: str, piece: int = SIZE * 2, runs: int = 3) -> float:
    """Return the CPU seconds to parse a text that arrives in pieces of `piece` characters."""
    best = float("inf")
    for _ in range(runs):
        began = time.process_time()
        reader.parse_pieces(text[start : start + piece] for start in range(0, len(text), piece))
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("formats", nargs="*", choices=[[], *FORMATS], metavar="FORMAT", help="default: all formats")
    chosen = arguments.parse_args().formats or list(FORMATS)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}\n")
    print(f"{'format':12} {'usual, us a token':>18} {'1 MB, whole: ms':>16} {'1 MB by 4: ms':>14}   the text")
    for name in chosen:
        made = FORMATS[name]
        reader = AnswerReader(
            tool_format=made, tool_names=frozenset(("now",)), reasoning=REASONING_PARSERS["qwen3"], new_id=lambda: "id"
        )
        usual = seconds(reader, USUAL * 10, PIECE) / (len(USUAL) * 10 / PIECE)
        texts = [
            opening + repeated * (SIZE // len(repeated))
            for repeated in REPEATED
            for opening in ("", OPENINGS[name], OPENINGS[name] + '"', OPENINGS[name] + "'")
        ]
        text = max((seconds(reader, text, runs=1), text) for text in texts)[1]
        whole, pieces = seconds(reader, text), seconds(reader, text, PIECE, runs=1)
        print(f"{name:12} {usual * 1e6:18.2f} {whole * 1e3:16.1f} {pieces * 1e3:14.0f}   {text[:60]!r}", flush=True)


if __name__ == "__main__":
    main()
