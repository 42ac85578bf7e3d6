"""Tools that requests offer, and chat templates that support them, by the tool parser's name."""

from tests.support.tool_calls import TOOLS

TEMPLATES = {
    "hermes": "{{ tools }} {{ enable_thinking }} {{ documents }} <tool_call>", "mistral": "{{ tools }} [TOOL_CALLS]",
    "llama3_json": "{{ tools }} <|python_tag|>", "pythonic": "{{ tools }} <|python_start|>", "json": "{{ tools }}",
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
OFFERED = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in sorted(TOOLS)]
