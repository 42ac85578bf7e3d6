"""Grammars over added tokens, end to end: the official client, HTTP, and one tiny model with four tokenizers.

The tokenizers have the added tokens of Qwen3, Llama 3, Mistral and gpt-oss.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from unittest import mock

import openai
import pytest

from jpaged import AsyncLLM, SamplingParams
from jpaged.chat.turn import ChatFormats
from jpaged.engine.engine import Engine, EngineOptions
from jpaged.engine.step_plan import SamplerVariant
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.support import added_tokens, tiny_engine

pytestmark = pytest.mark.slow  # tests/structured/test_added_tokens.py has the masks, without an engine

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
)
BEGIN = {"qwen3": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "gpt-oss": "<|channel|>"}
PARSERS = {"qwen3": "hermes", "llama3": "llama3_json", "mistral": "mistral", "gpt-oss": None}
ARGUMENTS = {
    "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "days": {"enum": [1, 2]}},
    "required": ["unit", "days"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("forecast", "now")]
NAMED = {"type": "function", "function": {"name": "now"}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def runner():
    """A random model that is larger than each of the vocabularies."""
    with tiny_engine.sampling_programs(SamplerVariant.FULL):
        spec = dataclasses.replace(tiny_engine.FULL, vocab_size=added_tokens.VOCAB_SIZE, num_layers=1)
        return tiny_engine.make_runner(spec, max_model_len=512)


@pytest.fixture(params=added_tokens.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(name, runner) -> Iterator[AsyncLLM]:
    tokenizer = added_tokens.tokenizer(name)
    ends = added_tokens.ids(name, *added_tokens.ENDS[name])

    def build(model, params, options, **how):
        view = tiny_engine.View(runner, close=lambda: None)
        engine = Engine(view, tokenizer, EngineOptions(eos_token_ids=ends, eos_token_id=ends[0]))
        return BuiltEngine(engine, engine_config(model, options), tiny_engine.FULL, tokenizer, SamplingParams())

    with mock.patch("jpaged.async_llm.build_engine", build):
        made = AsyncLLM("tiny")
    yield made
    made.close()


@pytest.fixture
def url(name, engine, host) -> str:
    formats = ChatFormats.named(TEMPLATE, tool_call_parser=PARSERS[name])
    host[0].app = create_app(Server(engine=engine, model_names=("tiny",), chat=formats))
    return host[1]


def written(client: openai.OpenAI, **asked: object) -> tuple[str, str]:
    """The text of a completion with its special tokens, and its finish reason."""
    extra = {"skip_special_tokens": False, "include_stop_str_in_output": True} | asked.pop("extra_body")
    answer = client.completions.create(
        model="tiny", prompt="Hi", temperature=0, max_tokens=200, extra_body=extra, **asked
    ).choices[0]
    return answer.text, answer.finish_reason


def test_forced_calls(name, client):
    """Required, named and streamed. `skip_special_tokens` does not hide the tags from the parser."""
    biased = {"logit_bias": {str(added_tokens.ids(name, BEGIN[name])[0]): 50}}  # Llama 3's tag is optional
    for choice, names in (("required", {"forecast", "now"}), (NAMED, {"now"})):
        for extra in ({}, biased | {"extra_body": {"skip_special_tokens": True}}):
            asked = CHAT | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False} | extra
            whole = client.chat.completions.create(**asked).choices[0]
            (call,) = whole.message.tool_calls
            assert (whole.message.content, whole.finish_reason) == (None, "tool_calls" if len(names) > 1 else "stop")
            assert call.function.name in names
            assert set(json.loads(call.function.arguments)) == {"unit", "days"}
        told = ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            assert not chunk.choices[0].delta.content
            for part in chunk.choices[0].delta.tool_calls or []:
                told += part.function.arguments or ""
        assert told == call.function.arguments


def test_regular_expressions(name, client):
    """The text of an added token alone, before other text, and as one of two."""
    tag = re.escape(BEGIN[name])
    for regex in (tag, f"{tag}(a|b)", f"[xyz]({tag}|0)"):
        text, reason = written(client, extra_body={"structured_outputs": {"regex": regex}})
        assert reason == "stop"
        assert re.fullmatch(regex, text)


def test_an_end_token_in_a_grammar(name, client):
    """The answer ends at the token, also with `ignore_eos`."""
    end = added_tokens.ENDS[name][-1]
    grammar = f'start: "a" <[{added_tokens.ids(name, end)[0]}]>\n'
    for ignored in (False, True):
        asked = {"structured_outputs": {"grammar": grammar}, "ignore_eos": ignored}
        assert written(client, extra_body=asked) == (f"a{end}", "stop")


TAGS = {
    "qwen3": ("<tool_call>", "<tool_call>\n", "\n</tool_call>", "<|im_end|>"),
    "llama3": ("<|python_tag|>", "<|python_tag|>", "<|eom_id|>", ""),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]now[ARGS]", "", "</s>"),
    "gpt-oss": (
        "<|channel|>", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>", "<|call|>", ""
    ),
}  # fmt: skip


def test_structural_tags(name, client):
    """The bias makes the model begin a tag at once, and end the answer after it."""
    trigger, begin, end, stop = TAGS[name]
    tag = {"type": "structural_tag", "triggers": [trigger], "structures": [
        {"begin": begin, "schema": ARGUMENTS, "end": end}
    ]}  # fmt: skip
    (first,) = added_tokens.ids(name, BEGIN[name])
    last = added_tokens.ids(name, stop or end)[0]
    text, reason = written(
        client,
        logit_bias={str(first): 50, str(last): 100},
        extra_body={"structured_outputs": {"structural_tag": json.dumps(tag)}, "min_tokens": 1},
    )
    assert reason == "stop"
    assert text.startswith(begin)
    assert text.endswith(end + stop)
    arguments, length = json.JSONDecoder().raw_decode(text.removeprefix(begin))
    assert set(arguments) == {"unit", "days"}
    assert text[len(begin) + length :].startswith(end)
