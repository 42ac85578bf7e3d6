"""The dialects of `XmlTags`: the tags that models write around calls and arguments."""

from jpaged.parsers.known_tools import STRING, TYPES
from jpaged.parsers.sections import Section
from jpaged.parsers.xml_calls import XmlTags


def _dsml(block: str) -> XmlTags:
    return XmlTags(
        Section(f"<｜DSML｜{block}>", f"</｜DSML｜{block}>", '<｜DSML｜invoke name="'), name_end='">',
        call_end="</｜DSML｜invoke>", key='<｜DSML｜parameter name="', value_end="</｜DSML｜parameter>",
        key_ends=(('" string="true">', STRING), ('" string="false">', TYPES - STRING), ('">', None)),
    )  # fmt: skip


def _qwen(begin: str, end: str, *, lines: bool) -> XmlTags:
    return XmlTags(
        Section(begin, end, "<function=", loose=True), name_end=">", call_end="</function>", key="<parameter=",
        key_ends=((">", None),), value_end="</parameter>", lines=lines,
    )  # fmt: skip


GLM = XmlTags(
    Section("<tool_call>", "", ""), name_end="", call_end="</tool_call>", key="<arg_key>",
    key_ends=(("</arg_key>", None),), value="<arg_value>", value_end="</arg_value>",
)  # fmt: skip
DIALECTS = {
    "qwen3_coder": _qwen("<tool_call>", "</tool_call>", lines=True),
    "glm45": GLM,
    "glm47": GLM,
    "minimax_m2": XmlTags(
        Section("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="'), name_end='">',
        call_end="</invoke>", key='<parameter name="', key_ends=(('">', None),), value_end="</parameter>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "seed_oss": _qwen("<seed:tool_call>", "</seed:tool_call>", lines=False),
}  # fmt: skip
# Parts of tags that may be special tokens of their own.
TOKENS = {"deepseek_v32": ("｜DSML｜",), "deepseek_v4": ("｜DSML｜",)}
