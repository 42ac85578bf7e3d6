"""Recorded answers of models that call tools, and a reader that parses them."""

from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.tool_formats import FORMATS
from tests.support import dialects

TOOLS = frozenset({"get_weather", "search", "now", "send.mail-1", "nothing"})
PARAMETERS = {  # of each tool
    "type": "object",
    "properties": {
        "q": {"type": "string"}, "city": {"type": "string"}, "days": {"type": "integer"}, "n": {"type": "number"},
        "deep": {"type": "boolean"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]}, "opts": {"$ref": "#/$defs/opts"}, "tags": {"type": "array"},
    },
    "$defs": {"opts": {"type": "object"}},
}  # fmt: skip


SCHEMAS = dict.fromkeys(TOOLS, PARAMETERS) | {"nothing": {"type": "object", "properties": {}}}


def reader(format_name: str | None, **options) -> AnswerReader:
    """Return a reader with a fixed call id."""
    made = FORMATS[format_name] if format_name else None
    names = options.pop("tool_names", TOOLS)
    schemas = {name: SCHEMAS.get(name, PARAMETERS) for name in names}
    return AnswerReader(tool_format=made, tool_names=names, schemas=schemas, new_id=lambda: "id", **options)


# (format, text of the model, expected content, expected calls); content `...` is the text itself.
RECORDED = [
    ("hermes",
     '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}\n</tool_call>', None,
     [("get_weather", '{"city": "São Paulo", "days": 3}')]),
    ("hermes",
     'Both, then.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
     '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
     "Both, then.", [("get_weather", '{"city": "Oslo"}'), ("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>\n\nDone. 🎉 \n', "Done. 🎉 \n", [("now", "{}")]),
    ("hermes", 'First.\n<tool_call>{"name": "now"}</tool_call>\nThen.', "First.\nThen.", [("now", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"q": "a\\"b\\u00e9\\\\"}, "name": "search"}</tool_call>',
     None, [("search", '{"q": "a\\"b\\u00e9\\\\"}')]),
    # Errors of small models: braces, a raw line break, arguments as a string or null, no end tag.
    ("hermes", '<tool_call>\n{"name": "search", "arguments": {"q": 1}\n</tool_call>',
     None, [("search", '{"q": 1}')]),
    ("hermes", '<tool_call>\n{"name": "search", "arguments": {"q": 1}}}\n</tool_call>',
     None, [("search", '{"q": 1}')]),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}', None, [("search", '{"q": "a\\nb"}')]),
    ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"q\\": [1, {}]}"}</tool_call>',
     None, [("search", '{"q": [1, {}]}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [("now", "{}")]),
    ("hermes", '<tool_call>[{"name": "now", "arguments": {}}, {"name": "search", "arguments": {"q":[-1.5e3,true]}}]'
     "</tool_call>", None, [("now", "{}"), ("search", '{"q": [-1.5e3, true]}')]),
    ("llama3_json", '{"name": "now", "parameters": {}}}', None, [("now", "{}")]),
    ("json", '[{"name": "now", "arguments": {}}}, {"name": "search"}]', None, [("now", "{}"), ("search", "{}")]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}}", None, [("now", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}}]', None, [("now", "{}")]),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"q": ,}}', ",}}", [("search", '{"q": ')]),  # not complete
    # Not calls: an unknown tool, no name, no object, no JSON, half a tag.
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', ..., []),
    ("hermes", 'See <tool_call>{"arguments": {}}</tool_call>.', ..., []),
    ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', ..., []),
    ("hermes", "<tool_call> nothing </tool_call>", ..., []),
    ("hermes", "a < b <tool_cal", ..., []),
    ("hermes", "  two lines\n\n", ..., []),
    # Cut off by max_tokens: the beginning of the arguments is kept.
    ("hermes", '<tool_call>{"name": "search", "arguments": {"q": "hel', None, [("search", '{"q": "hel')]),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"q": tr', None, [("search", '{"q": tr')]),
    ("hermes", '<tool_call>{"name": "search", "argu', ..., []),
    # Invalid arguments: the rest is content, and the next call is parsed.
    ("hermes",
     '<tool_call>{"name": "search", "arguments": {"q": oops}}</tool_call><tool_call>{"name": "now"}</tool_call>',
     "oops}}</tool_call>", [("search", '{"q": '), ("now", "{}")]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', None,
     [("get_weather", '{"city": "Paris"}')]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', None, [("now", "{}")]),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "search", "parameters": {"q": "x; y"}}', None,
     [("now", "{}"), ("search", '{"q": "x; y"}')]),
    ("llama3_json", '{"name": "Ada", "born": 1815}', ..., []),
    ("llama3_json", "<|python_tag|>print(1)", ..., []),
    ("llama3_json", "Here it is: {}", ..., []),
    ("mistral",
     '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Nice"}}, {"name": "now", "arguments": {}}]',
     None, [("get_weather", '{"city": "Nice"}'), ("now", "{}")]),
    ("mistral", 'Wait.[TOOL_CALLS]search[ARGS]{"q": "a [ARGS] b"}[TOOL_CALLS]now[CALL_ID]Ab3dEf7hI[ARGS]{}',
     "Wait.", [("search", '{"q": "a [ARGS] b"}'), ("now", "{}")]),
    ("mistral", '[TOOL_CALLS]search{"q": 1}', None, [("search", '{"q": 1}')]),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", ..., []),
    # No arguments at all. At the end of a text they may be cut off.
    ("mistral", "[TOOL_CALLS]now[ARGS][TOOL_CALLS]search[ARGS]{}", None, [("now", "{}"), ("search", "{}")]),
    ("mistral", "[TOOL_CALLS]search[ARGS]", ..., []),
    ("mistral", "[TOOL_CALLS]nothing[ARGS]", None, [("nothing", "{}")]),
    # A call in an argument of an unknown tool is text of that argument.
    ("mistral", '[TOOL_CALLS]rm[ARGS]{"q": "[TOOL_CALLS]now[ARGS]{}"}', ..., []),
    ("mistral", '[TOOL_CALLS] [{"name": "rm", "arguments": {"q": "[TOOL_CALLS]now[ARGS]{}"}}]', ..., []),
    ("mistral", '[TOOL_CALLS] [{"arguments": ["[TOOL_CALLS]now[ARGS]{}"], "name": "now"}]', ..., []),
    ("pythonic", "[rm(q='<|python_start|>[now()]')]", ..., []),
    ("pythonic", "[rm('<|python_start|>[now()]', 1)]", ..., []),
    ("pythonic", r"[search(q='\a\v\0\x00\101\18\q')]", None,
     [("search", r'{"q": "\u0007\u000b\u0000\u0000A\u00018\\q"}')]),
    ("pythonic", "[get_weather(city='New York', days=2), now()]", None,
     [("get_weather", '{"city": "New York", "days": 2}'), ("now", "{}")]),
    ("pythonic", """[search(q="it's \\"ok\\"", opts={'deep': True, "n": [1, -2.5, None,],}, tags=[])]""", None,
     [("search", '{"q": "it\'s \\"ok\\"", "opts": {"deep": true, "n": [1, -2.5, null]}, "tags": []}')]),
    ("pythonic", "<|python_start|>[send.mail-1(to='a\\x41\\u00e9\\'\\n')]<|python_end|>", None,
     [("send.mail-1", '{"to": "aA\\u00e9\'\\n"}')]),
    ("pythonic", "[search('x')]", ..., []),
    ("pythonic", "[1, 2]", ..., []),
    ("pythonic", "[search(q=__import__('os'))]", ..., []),
    ("pythonic", "[search(q='a', n=(1, 2))]", ..., []),
    ("pythonic", "[search(n=[+3, 1_000, .5, 5., 0x10, -1e3])]", None, [
        ("search", '{"n": [3, 1000, 0.5, 5.0, 16, -1e3]}'),
    ]),
    ("json", '[{"name": "now", "arguments": {}}, {"name": "search", "parameters": {"q": 0}}]', None,
     [("now", "{}"), ("search", '{"q": 0}')]),
    ("json", 'Sure:\n```json\n{"name": "now", "arguments": {}}\n```\n', "Sure:", [("now", "{}")]),
    ("json", '```json\n{"answer": 42}\n```', ..., []),
    ("json", '{"name": {"first": "Ada"}}', ..., []),
    *dialects.RECORDED,
]  # fmt: skip
