"""The texts of each format around forced calls, by the format's name: as the models' chat templates write calls.

A format without an entry forces calls in JSON.
"""

from jpaged.parsers import gemma4, mistral
from jpaged.parsers.argument_grammar import TaggedArguments
from jpaged.parsers.call_frame import CallFrame, json_frame
from jpaged.parsers.listed_arguments import ListedArguments

_DSML_PARAMETER = '<｜DSML｜parameter name="$" string="{}">'


def _qwen(begin: str, end: str, line: str) -> CallFrame:
    arguments = TaggedArguments(f"<parameter=$>{line}", f"{line}</parameter>\n", "</parameter>")
    return CallFrame(
        "<function=$>\n", "</function>", before=f"{begin}\n", after=f"\n{end}", between="\n", arguments=arguments
    )


def _dsml(block: str) -> CallFrame:
    arguments = TaggedArguments(
        _DSML_PARAMETER.format("true"), "</｜DSML｜parameter>\n", "</｜DSML｜parameter>",
        other=_DSML_PARAMETER.format("false"),
    )  # fmt: skip
    return CallFrame(
        '<｜DSML｜invoke name="$">\n', "</｜DSML｜invoke>\n", f"<｜DSML｜{block}>\n", f"</｜DSML｜{block}>",
        arguments=arguments,
    )  # fmt: skip


def _glm(line: str) -> CallFrame:
    arguments = TaggedArguments(f"<arg_key>$</arg_key>{line}<arg_value>", f"</arg_value>{line}", "</arg_value>")
    return CallFrame(f"<tool_call>${line}", "</tool_call>", between=line, arguments=arguments)


def _deepseek(head: str, tail: str, between: str = "") -> CallFrame:
    return CallFrame(
        f"<｜tool▁call▁begin｜>{head}", f"{tail}<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        between=between,
    )  # fmt: skip


_PYTHONIC = CallFrame("$(", ")", "[", "]", between=", ", arguments=ListedArguments("=", ", "))
FRAMES: dict[str, tuple[CallFrame, ...]] = {
    "hermes": (json_frame(before="<tool_call>\n", after="\n</tool_call>", between="\n"),),
    "llama3_json": (json_frame("parameters", begin="<|python_tag|>", optional=True, between="; "),),
    "mistral": (
        CallFrame(f"${mistral.ARGUMENTS}", before=mistral.BEGIN, needs=mistral.ARGUMENTS),
        json_frame(begin=f"{mistral.BEGIN} [", between=", ", finish="]"),
    ),
    "json": (json_frame(begin="[", between=", ", finish="]"),),
    "granite": (json_frame(begin="<|tool_call|>[", between=", ", finish="]"),),
    "qwen3_coder": (_qwen("<tool_call>", "</tool_call>", "\n"),),
    "seed_oss": (_qwen("<seed:tool_call>", "</seed:tool_call>", ""),),
    "glm45": (_glm("\n"),),
    "glm47": (_glm(""),),
    "minimax_m2": (
        CallFrame(
            '<invoke name="$">\n', "</invoke>\n", "<minimax:tool_call>\n", "</minimax:tool_call>",
            arguments=TaggedArguments('<parameter name="$">', "</parameter>\n", "</parameter>"),
        ),
    ),
    "deepseek_v32": (_dsml("function_calls"),),
    "deepseek_v4": (_dsml("tool_calls"),),
    "deepseek_v3": (_deepseek("function<｜tool▁sep｜>$\n```json\n", "\n```", "\n"),),
    "deepseek_v31": (_deepseek("$<｜tool▁sep｜>", ""),),
    "kimi_k2": (
        CallFrame(
            "<|tool_call_begin|>functions.$:#<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        ),
    ),
    "gemma4": (
        CallFrame(
            f"{gemma4.BEGIN}call:${{", f"}}{gemma4.END}", arguments=ListedArguments(":", ",", gemma4.QUOTE)
        ),
    ),
    "pythonic": (_PYTHONIC,),
    "llama4_pythonic": (_PYTHONIC,),
    "openai": (CallFrame("<|channel|>commentary to=functions.$ <|constrain|>json<|message|>", between=None),),
}  # fmt: skip
