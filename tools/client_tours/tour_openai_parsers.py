"""Tour of one tool parser with OpenAI's Python client: two calls at once, one of them without arguments.

The demo model cannot call tools. A structured output makes it write the calls in the parser's dialect, and the server
reads them like any answer with `tool_choice: auto`. With `required`, the server forces calls itself.
"""

import json
import os
from typing import Any

import openai
from checks import BASE, MODEL, PROMPT, Checks

CITY: Any = {"city": "São Paulo", "days": 3}
EXPECTED = [("get_weather", CITY), ("now", {})]
PARAMETERS = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {"city": {"enum": ["Oslo", "São Paulo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
ASKED: Any = {
    "model": MODEL, "messages": MESSAGES, "max_completion_tokens": 900, "temperature": 0, "tools": TOOLS,
}  # fmt: skip


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of a message's calls, which have different ids."""
    calls = message.tool_calls
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def main() -> None:
    checks = Checks()
    client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0, timeout=120)
    written: Any = {"extra_body": {"structured_outputs": {"choice": [os.environ["TOUR_ANSWER"]]}}}
    with checks.check("auto: two calls"):
        choice = client.chat.completions.create(**ASKED, **written, tool_choice="auto").choices[0]
        assert calls_of(choice.message) == EXPECTED
        assert not choice.message.content
        assert choice.finish_reason == "tool_calls"
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "4 C"} for call in choice.message.tool_calls or []
        ]
        history = [*MESSAGES, choice.message, *results]
        after = client.chat.completions.create(
            **ASKED | {"messages": history, "max_completion_tokens": 8}, tool_choice="none"
        )
        assert not after.choices[0].message.tool_calls
    with checks.check("auto, streamed: two calls"):
        with client.chat.completions.stream(**ASKED, **written) as stream:
            deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0]
        assert calls_of(final.message) == EXPECTED
        assert not final.message.content
        assert final.finish_reason == "tool_calls"
        assert {delta.index for delta in deltas} == {0, 1}
    with checks.check("auto, streamed: parallel_tool_calls false keeps the first call"):
        with client.chat.completions.stream(**ASKED, **written, parallel_tool_calls=False) as stream:
            final = stream.get_final_completion().choices[0]
        assert calls_of(final.message) == EXPECTED[:1]
    lively: Any = ASKED | {"temperature": 1, "seed": 3}
    for name, expected in (("get_weather", None), ("now", {})):
        with checks.check(f"forced, whole and streamed: {name}"):
            named: Any = {"type": "function", "function": {"name": name}}
            whole = client.chat.completions.create(**lively, tool_choice=named).choices[0].message
            with client.chat.completions.stream(**lively, tool_choice=named) as stream:
                streamed = stream.get_final_completion().choices[0].message
            ((called, arguments),) = calls_of(whole)
            assert calls_of(streamed) == [(called, arguments)]
            assert called == name
            assert arguments == expected if expected is not None else 1 <= arguments["days"] <= 9
            assert not whole.content
    with checks.check("required"):
        message = client.chat.completions.create(
            **lively, tool_choice="required", parallel_tool_calls=False
        ).choices[0].message
        assert {name for name, _ in calls_of(message)} <= {"get_weather", "now"}
    checks.write()


if __name__ == "__main__":
    main()
