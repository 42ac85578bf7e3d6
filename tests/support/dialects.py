"""Answers in the dialects of newer models: written as their chat templates write calls, and mistakes that they make."""

# Two calls: get_weather with {"city": "São Paulo", "days": 3}, and now, which has no arguments.
TWO = {
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n<parameter=days>\n"
    "3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>São Paulo</parameter>\n<parameter=days>3"
    "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo</arg_value>\n<arg_key>days"
    "</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>São Paulo</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">São Paulo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">São Paulo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "São Paulo", "days": 3}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "São Paulo", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "São Paulo", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>São Paulo<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "llama4_pythonic": '<|python_start|>[get_weather(city="São Paulo", days=3), now()]<|python_end|>',
    "openai": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "São Paulo", "days": 3}'
    "<|call|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "São Paulo", "days": 3}[TOOL_CALLS]now[ARGS]{}',
}  # fmt: skip
TWO["deepseek_v4"] = TWO["deepseek_v32"].replace("function_calls", "tool_calls")
EXPECTED_TWO = [("get_weather", '{"city": "São Paulo", "days": 3}'), ("now", "{}")]


def _qwen(value: str, key: str = "q") -> str:
    return f"<tool_call>\n<function=search>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def _glm(value: str, key: str = "q") -> str:
    return f"<tool_call>search\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def _dsml(value: str, string: str, key: str = "q") -> str:
    parameter = f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>'
    invoke = f'<｜DSML｜invoke name="search">\n{parameter}\n</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{invoke}\n</｜DSML｜function_calls>"


QWEN = "<tool_call>\n<function=search>\n"
# A call in an argument of a tool that the request does not have.
UNKNOWN = {
    "qwen3_coder": _qwen("<tool_call>\n<function=now>\n</function>\n</tool_call>").replace("=search", "=rm"),
    "glm45": _glm("<tool_call>now\n</tool_call>").replace("call>search", "call>rm"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="rm">\n<parameter name="q"><minimax:tool_call>\n<invoke '
    'name="now">\n</invoke></minimax:tool_call></parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek_v31": '<｜tool▁call▁begin｜>rm<｜tool▁sep｜>'
    '{"q": "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"}',
    "gemma4": '<|tool_call>call:rm{q:<|"|><|tool_call>call:now{}<tool_call|><|"|>}<tool_call|>',
    "openai": '<|channel|>commentary to=functions.rm json<|message|>{"q": "<|start|>assistant<|channel|>commentary '
    'to=functions.now json<|message|>{}"}',
}

# (format, text of the model, expected content, expected calls); content `...` is the text itself.
RECORDED = [
    *((name, text, None, EXPECTED_TWO) for name, text in TWO.items()),
    *((name, f"Both, then.\n\n{text}", "Both, then.", EXPECTED_TWO) for name, text in TWO.items()
      if name not in ("llama4_pythonic", "openai")),
    # Values without quotes: the schema of the tool decides. A string keeps its line breaks, quotes and tags.
    ("qwen3_coder", _qwen('if a < b:\n\tprint("</p>")\n'), None,
     [("search", '{"q": "if a < b:\\n\\tprint(\\"</p>\\")\\n"}')]),
    ("qwen3_coder", _qwen("12"), None, [("search", '{"q": "12"}')]),
    ("qwen3_coder", _qwen("12", "days"), None, [("search", '{"days": 12}')]),
    ("qwen3_coder", _qwen("-1.5e3", "n"), None, [("search", '{"n": -1.5e3}')]),
    ("qwen3_coder", _qwen("many", "days"), None, [("search", '{"days": "many"}')]),
    ("qwen3_coder", _qwen("True", "deep"), None, [("search", '{"deep": true}')]),
    ("qwen3_coder", _qwen("None", "note"), None, [("search", '{"note": null}')]),
    ("qwen3_coder", _qwen("Nones", "note"), None, [("search", '{"note": "Nones"}')]),
    ("qwen3_coder", _qwen("7", "either"), None, [("search", '{"either": 7}')]),
    ("qwen3_coder", _qwen("7.5", "either"), None, [("search", '{"either": "7.5"}')]),
    ("qwen3_coder", _qwen('{"a": [1, {"b": "</parameter>"}]}', "opts"), None,
     [("search", '{"opts": {"a": [1, {"b": "</parameter>"}]}}')]),
    ("qwen3_coder", _qwen("['a', True, \"b\\/c\"]", "tags"), None, [("search", '{"tags": ["a", true, "b\\/c"]}')]),
    ("qwen3_coder", _qwen("null", "opts"), None, [("search", '{"opts": null}')]),
    ("qwen3_coder", _qwen("[1, 2]", "unknown"), None, [("search", '{"unknown": [1, 2]}')]),
    ("qwen3_coder", _qwen("as it is", "unknown"), None, [("search", '{"unknown": "as it is"}')]),
    ("qwen3_coder", _qwen(""), None, [("search", '{"q": ""}')]),
    ("qwen3_coder", "<function=now>\n</function>\n</tool_call> Done.", "Done.", [("now", "{}")]),  # no <tool_call>
    ("qwen3_coder", "<tool_call>\n<function=now></function>", None, [("now", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>\n</tool_call>", ..., []),
    ("qwen3_coder", '<tool_call>{"name": "now"}</tool_call>', ..., []),
    ("qwen3_coder", "a <function", ..., []),
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\nhel", None, [("search", '{"q": "hel')]),
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=opts>\n{oops}\n</parameter>\n</function>\n</tool_call>",
     "oops}\n</parameter>\n</function>\n</tool_call>", [("search", '{"opts": {')]),
    # A missing end tag, before another parameter of the tool or the end of the calls.
    ("qwen3_coder", f"{QWEN}<parameter=q>\na\nb\n<parameter=days>\n3\n</function>\n</tool_call>", None,
     [("search", '{"q": "a\\nb", "days": 3}')]),
    ("qwen3_coder", f"{QWEN}<parameter=q>\na\n</parameter>\n</tool_call> x", "x", [("search", '{"q": "a"}')]),
    ("qwen3_coder", f"{QWEN}<parameter=tags>\n[1]\n</tool_call>\n{QWEN}</tool_call>", None,
     [("search", '{"tags": [1]}'), ("search", "{}")]),
    ("qwen3_coder", f"{QWEN}<parameter=q>\na</parameter>\n<function=now></function>", None,
     [("search", '{"q": "a"}'), ("now", "{}")]),
    ("glm45", "<tool_call>search\n<arg_key>q\n<arg_value>a\n<arg_key>days</arg_key>\n<arg_value>3\n</tool_call>", None,
     [("search", '{"q": "a", "days": 3}')]),
    ("glm47", "<tool_call>search<arg_key>q</arg_key><arg_value>a</arg_value><tool_call>now</tool_call>", None,
     [("search", '{"q": "a"}'), ("now", "{}")]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="search">\n<parameter name="q">a\n<parameter name="days">'
     "3</invoke>\n</minimax:tool_call>", None, [("search", '{"q": "a", "days": 3}')]),
    ("deepseek_v32", _dsml("12", "false", "days").replace("</｜DSML｜parameter>", ""), None,
     [("search", '{"days": 12}')]),
    # The same tags in a value, where they are text: of no parameter, of one with a value, of no end.
    ("qwen3_coder", _qwen("<parameter=else>\n</function>\n<b>\n</tool_call> or <parameter=q>"), None,
     [("search", '{"q": "<parameter=else>\\n</function>\\n<b>\\n</tool_call> or <parameter=q>"}')]),
    # Numbers as Python reads them, where the schema has no strings.
    *(("qwen3_coder", _qwen(written, key), None, [("search", f'{{"{key}": {value}}}')]) for written, key, value in (
        ("1_000", "days", "1000"), ("+5", "days", "5"), ("007", "n", "7"), (".5", "n", "0.5"), ("5.", "n", "5.0"),
        ("1_0.5e1", "n", "105.0"), ("inf", "n", '"inf"'), ("1_000", "deep", '"1_000"'), ("+5", "either", '"+5"'),
        ("+5", "unknown", '"+5"'), ("٣", "days", '"٣"'))),
    # A call in an argument of an unknown tool is text of that argument.
    *((name, text, ..., []) for name, text in UNKNOWN.items()),
    ("glm45", _glm(" two\nlines "), None, [("search", '{"q": " two\\nlines "}')]),
    ("glm45", _glm("[1]", "tags"), None, [("search", '{"tags": [1]}')]),
    ("glm45", "<tool_call>rm\n</tool_call>", ..., []),
    ("glm45", '<tool_call>{"name": "now"}</tool_call>', ..., []),
    ("glm47", _glm("false", "deep"), None, [("search", '{"deep": false}')]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="search">\n<parameter name="q">a "b"</parameter>\n</invoke>\n'
     "</minimax:tool_call>\n", None, [("search", '{"q": "a \\"b\\""}')]),
    ("minimax_m2", '<invoke name="now">\n</invoke>', ..., []),
    ("deepseek_v32", _dsml("12", "true", "days"), None, [("search", '{"days": "12"}')]),
    ("deepseek_v32", _dsml("12", "false"), None, [("search", '{"q": 12}')]),
    ("deepseek_v32", _dsml('{"a": "</b>"}', "false"), None, [("search", '{"q": {"a": "</b>"}}')]),
    ("deepseek_v31", '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"q": 1}<｜tool▁call▁end｜>', None,
     [("search", '{"q": 1}')]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}", ..., []),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"q": tr', None,
     [("search", '{"q": tr')]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|><|tool_call_end|>"
     "<|tool_calls_section_end|>", None, [("now", "{}")]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.send.mail-1:2<|tool_call_argument_begin|>"
     '{"to": "a"}', None, [("send.mail-1", '{"to": "a"}')]),
    ("kimi_k2", "<|tool_calls_section_begin|> nothing", ..., []),
    ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_end|>", None, [("now", "{}")]),
    *(("deepseek_v3", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{arguments}<｜tool▁call▁end｜>", None,
       [("now", "{}")])
      for arguments in ("```json\n```", "```json\n\n```", "```json\n", "", "```json\n{}}\n```")),
    ("gemma4", '<|tool_call>call:search{q:<|"|>a {"b"}, c<|"|>,opts:{deep:true,"n":[1,-2.5,null,{}]},tags:[]}'
     '<tool_call|>'
     "<|tool_response>", None,
     [("search", '{"q": "a {\\"b\\"}, c", "opts": {"deep": true, "\\"n\\"": [1, -2.5, null, {}]}, "tags": []}')]),
    ("gemma4", "<|tool_call>call:search{q:two words}<tool_call|> x", "x", [("search", '{"q": "two words"}')]),
    ("gemma4", '<|tool_call>call:search{<|"|>q<|"|>:<|"|>a', None, [("search", '{"q": "a')]),
    ("gemma4", "<|tool_call>call:rm{}<tool_call|>", ..., []),
    ("gemma4", "<|tool_call>call:now<tool_call|><|tool_call>call:now()<tool_call|>", None,
     [("now", "{}"), ("now", "{}")]),
    ("gemma4", "<|tool_call>call:now", ..., []),
    ("gemma4", "<|tool_call>call:search{tags:[1,2,],n:3,}<tool_call|>", None, [("search", '{"tags": [1, 2], "n": 3}')]),
    ("gemma4", '<|tool_call>call:search{q:"a",}<tool_call|>', None, [("search", '{"q": "\\"a\\""}')]),  # as in vLLM
    ("granite", '[{"name": "now", "arguments": {}}]', None, [("now", "{}")]),
    ("granite", '<tool_call>[{"name": "search", "arguments": {"q": 1}}]', None, [("search", '{"q": 1}')]),
    ("granite", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', None, [("now", "{}")]),
    ("llama4_pythonic", "[search(q='x', tags=[1])]", None, [("search", '{"q": "x", "tags": [1]}')]),
    ("openai", "<|channel|>final<|message|>Hello.", "Hello.", []),
    ("openai", "<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
    ("openai", " to=functions.search<|channel|>commentary json<|message|>{\"q\": 1}", None, [("search", '{"q": 1}')]),
    ("openai", '<|channel|>commentary<|message|>I shall look.<|end|><|start|>assistant to=functions.search<|channel|>'
     'commentary <|constrain|>json<|message|>{"q": "a <|b|>"}', "I shall look.", [("search", '{"q": "a <|b|>"}')]),
    ("openai", "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
     "One.\nTwo.", []),
    ("openai", "<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{}",
     "<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{}", []),
    ("openai", "Plain text <b>.", ..., []),
    ("openai", '<|channel|>commentary to=functions.search json<|message|>{"q": "hel', None, [("search", '{"q": "hel')]),
]  # fmt: skip
