"""Hostile request bodies: large, deep or malformed JSON, and fields with refused values."""

SIZE = 15_000_000
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TEXT = b'{"prompt":"x","max_tokens":2,'
TALK = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2,'


def listed(value: bytes, size: int = SIZE) -> bytes:
    """A list of one value, repeated to a size in bytes."""
    return b"[" + (value + b",") * (size // (len(value) + 1) - 1) + value + b"]"


def mapped(value: bytes, count: int) -> bytes:
    """An object of many entries."""
    return b"{" + b",".join(b'"%d":%s' % (i, value) for i in range(count)) + b"}"


def text(value: bytes = b"a", size: int = SIZE) -> bytes:
    """A string of one piece, repeated to a size in bytes."""
    return b'"' + value * (size // len(value)) + b'"'


TOOL = b'{"type":"function","function":{"name":"f","parameters":{}}}'
# name -> (path, beginning of the body, rest of the body as a function, accepted statuses)
FAST = {
    "whitespace pattern": (TEXT, lambda: b'"structured_outputs":{"json_object":true,"whitespace_pattern":'
                           + text(b"1", 60_000).replace(b'"1', b'" {1', 1)[:-1] + b'}"}}', 400),
    "digits as white space": (TEXT, lambda: b'"structured_outputs":{"json_object":true,"whitespace_pattern":'
                              + text(b"1", 60_000) + b"}}", 400),
    "name of 15 MB": (TEXT, lambda: text() + b":1}", 400),
    "7 million allowed_token_ids": (TEXT, lambda: b'"allowed_token_ids":' + listed(b"1") + b"}", 400),
    "500,000 allowed_token_ids": (TEXT, lambda: b'"allowed_token_ids":' + listed(b"1", 1_000_000) + b"}", 200),
    "7 million stop_token_ids": (TEXT, lambda: b'"stop_token_ids":' + listed(b"1") + b"}", 400),
    "a million metadata": (TALK, lambda: b'"metadata":' + mapped(b'"x"', 1_000_000) + b"}", 400),
    "5 million tools": (TALK, lambda: b'"tools":' + listed(b"{}") + b"}", 400),
    "a million logit_bias": (TEXT, lambda: b'"logit_bias":' + mapped(b"1", 1_000_000) + b"}", 400),
    "text of 15 MB": (b"{", lambda: b'"prompt":' + text(b"line of code\\n") + b',"max_tokens":2}', 200),
    "a million token ids": (b"{", lambda: b'"prompt":' + listed(b"100", 4 * 2**20 + 1) + b',"max_tokens":2}', 200),
}  # fmt: skip


def many_bodies() -> dict:
    """Return the other hostile bodies: each kind of value in each field that may hold it."""
    cases = {}
    lists = {
        "stop": b'"x"', "bad_words": b'"x"', "stop_token_ids": b"123456", "allowed_token_ids": b'""', "prompt": b"[]",
        "unknown": b"{}", "store": b"1", "user": b"1", "n": b"1",
    }  # fmt: skip
    for field, value in lists.items():
        for kind, item in {"own": value, "lists": b"[]", "objects": b"{}", "long": text(b"a", 1_000)}.items():
            body = b'"%s":%s}' % (field.encode(), listed(item))
            cases[f"{field} list of {kind}"] = (b"{" if field == "prompt" else TEXT, lambda body=body: body, 400)
    for field in ("metadata", "logit_bias", "logits_processors", "repetition_detection", "stream_options",
                  "response_format", "structured_outputs", "unknown", "suffix"):  # fmt: skip
        for kind, value in {"numbers": b"1", "strings": b'"x"'}.items():
            rest = b'"%s":%s}' % (field.encode(), mapped(value, 1_000_000))
            cases[f"{field} map of {kind}"] = (TEXT, lambda rest=rest: rest, 400)
    for field in ("regex", "grammar", "json", "whitespace_pattern"):
        rest = b'"structured_outputs":{"%s":%s}}' % (field.encode(), text())
        cases[f"structured_outputs.{field} text"] = (TEXT, lambda rest=rest: rest, 400)
    for field in ("user", "cache_salt", "stop", "model", "safety_identifier", "seed", "truncation_side"):
        rest = b'"%s":%s}' % (field.encode(), text())
        cases[f"{field} text"] = (TEXT, lambda rest=rest: rest, (400, 404))
    for field, value in {
        "messages": b'{"role":"user","content":"x"}', "tools": TOOL, "documents": b'{"text":"x"}',
        "chat_template_kwargs": b"1",
    }.items():  # fmt: skip
        for kind, item in {"own": value, "lists": b"[]", "numbers": b"1"}.items():
            rest = b'"%s":%s}' % (field.encode(), listed(item))
            cases[f"{field} list of {kind}"] = (b"{" if field == "messages" else TALK, lambda rest=rest: rest, 400)
    parts = b'{"messages":[{"role":"user","content":%s}]}' % listed(b'{"type":"text","text":"x"}')
    cases["parts"] = (b"", lambda: parts.replace(b'"messages"', b'"tools":[],"messages"'), 400)
    calls = b'[{"role":"assistant","tool_calls":%s}]' % listed(b'{"function":{"name":"f"}}')
    cases["tool calls"] = (b"{", lambda: b'"tools":[],"messages":' + calls + b"}", 400)
    arguments = mapped(b"1", 1_000_000)
    call = b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}]' % arguments
    cases["arguments"] = (b"{", lambda: b'"tools":[],"messages":' + call + b"}", 400)
    enum = b'"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":%s}}}]}' % listed(b"1")
    cases["enum"] = (TALK, lambda: enum, 400)
    cases["description"] = (TALK, lambda: enum.replace(listed(b"1"), b'["x"],"description":' + text()), 400)
    cases["tool's key"] = (TALK, lambda: b'"tools":[{"type":"function",' + text() + b":1}]}", 400)
    cases["fields"] = (b"{", lambda: mapped(b"1", 1_000_000)[1:], 400)
    cases["the same field"] = (TEXT, lambda: b'"stop":"x",' * 1_300_000 + b'"stop":"x"}', (200, 400))
    cases["deep lists"] = (TEXT, lambda: b'"stop":' + b"[" * SIZE, 400)
    cases["blanks"] = (TEXT, lambda: b" " * SIZE + b'"n":1}', 200)
    cases["digits"] = (TEXT, lambda: b'"n":' + b"1" * SIZE + b"}", 400)
    cases["fraction"] = (TEXT, lambda: b'"top_p":0.' + b"1" * SIZE + b"}", (200, 400))
    cases["quotes"] = (TEXT, lambda: b'"a":' + b'"' * SIZE, 400)
    cases["escaped"] = (b"{", lambda: b'"prompt":' + text(rb"\u00e9") + b',"max_tokens":2}', 200)
    cases["half a text"] = (b"{", lambda: b'"prompt":"' + b"a" * SIZE, 400)
    cases["not utf-8"] = (b"{", lambda: b'"prompt":' + text(b"\xff") + b"}", 400)
    cases["not an object"] = (b"", lambda: listed(b"1"), 400)
    cases["many prompts"] = (b"{", lambda: b'"prompt":' + listed(b"[1]") + b"}", 400)
    cases["many texts"] = (b"{", lambda: b'"prompt":' + listed(b'"x"') + b"}", 400)
    for value in (b"1", b'"x"', b"[1]", b"[]"):
        cases[f"inputs {value!r}"] = (b"{", lambda value=value: b'"input":' + listed(value) + b"}", 400)
    return cases


def path_of(body: bytes) -> str:
    """Return the route that a body is for, from its first field."""
    head = body[:60]
    return EMBEDDINGS if b'"input"' in head else CHAT if b'"messages"' in head or b'"tools"' in head else COMPLETIONS


# Refused before the grammar's compiler runs.
REFUSED_FIELDS = [
    {"stop": ["x"] * 10_000},
    {"stop": ["x" * 5_000]},
    {"temperature": -1},
    {"top_p": "NaN"},
    {"logprobs": 1_000},
    {"logit_bias": {str(i): 1 for i in range(2_000)}},
    {"logit_bias": {"1000000": 1}},
    {"bad_words": ["x"] * 2_000},
    {"allowed_token_ids": []},
    {"repetition_penalty": 0},
    {"min_tokens": 500, "max_tokens": 20},
    {"truncate_prompt_tokens": 100_000},
    {"structured_outputs": {"json": {}, "regex": "a"}},
    {"structured_outputs": {"whitespace_pattern": "a*", "json_object": True}},
    {"prompt": [10**9]},
]
REFUSED_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}},
    {"type": "function", "function": {"name": "f", "parameters": []}},
    {"type": "function", "function": {"name": "f", "parameters": {"$ref": "https://example.com/a.json"}}},
    {"type": "function", "function": {"name": "f()", "parameters": {}}},
]
