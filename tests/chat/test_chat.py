"""`LLM.chat`: prompts equal the server's, and answers are messages if there are tools or reasoning."""

import pathlib
from typing import Any

import pytest
from transformers import AutoTokenizer

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.engine.engine import Engine, EngineOptions
from jpaged.errors import RequestError
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from tests.engine.fake_runner import FakeRunner

USER = {"role": "user", "content": "def read_json(path):"}
TOOL = {"type": "function", "function": {"name": "now"}}
BODY = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
TOOLS = "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
PARAMS = SamplingParams(temperature=0, max_tokens=None)
END = 0  # <|endoftext|>


class Scripted(FakeRunner):
    """A runner that answers every prompt with the tokens of `script`, then the end token."""

    script: list[int]

    def attend(self, row: int, sampler: int, length: int) -> int:
        super().attend(row, sampler, length)  # checks the content of the pages
        seen = self.seen(row, 0, length)[1].tolist()
        said = max(k for k in range(len(self.script) + 1) if seen[len(seen) - k :] == self.script[:k])
        return [*self.script, END][said]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pathlib.Path(jpaged.__file__).parent / "demo_model")


@pytest.fixture
def runner() -> Scripted:
    return Scripted(vocab_size=4096, max_model_len=256)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, runner: Scripted, tokenizer: Any) -> LLM:
    def build(model: Any, params: Any, options: Any, **how: Any) -> BuiltEngine:
        engine = Engine(runner, tokenizer=tokenizer, options=EngineOptions(eos_token_ids=(END,), eos_token_id=END))
        return BuiltEngine(engine, engine_config(model, options), None, tokenizer, SamplingParams(temperature=0))

    monkeypatch.setattr("jpaged.llm.build_engine", build)
    return LLM("model")


def test_an_answer_with_calls_is_a_message(llm, runner, tokenizer):
    """The template receives the tools. Each answer has a message, but without tools it has only text."""
    said = 'Wait.\n<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
    runner.script = tokenizer.encode(said)
    asked = {"use_tqdm": False, "chat_template": TOOLS + BODY + "{# <tool_call> #}"}
    conversations = [[USER], [USER, USER]]
    for output, times in zip(llm.chat(conversations, PARAMS, tools=[TOOL], **asked), (1, 2), strict=True):
        assert tokenizer.decode(output.prompt_token_ids) == "# now\n" + f"{USER['content']}\n" * times
        answer = output.outputs[0]
        assert (answer.text, answer.finish_reason) == (said, "stop")
        (call,) = answer.message.tool_calls
        assert (answer.message.content, call.name, call.arguments) == ("Wait.", "now", '{"zone": "é"}')
    (plain,) = llm.chat([USER], PARAMS, **asked)
    assert tokenizer.decode(plain.prompt_token_ids) == f"{USER['content']}\n"
    assert (plain.outputs[0].text, plain.outputs[0].message) == (said, None)


def test_parsers_are_selected_by_name(llm, runner, tokenizer):
    runner.script = tokenizer.encode("Hm.\n</think>\n\n[now(n=1)]")
    (output,) = llm.chat(
        [USER], PARAMS, use_tqdm=False, chat_template=TOOLS + BODY + "{{ opening + '<think>\\n' }}", tools=[TOOL],
        chat_template_kwargs={"opening": "# "}, tool_call_parser="pythonic", reasoning_parser="qwen3",
    )  # fmt: skip
    assert tokenizer.decode(output.prompt_token_ids).endswith("# <think>\n")
    message = output.outputs[0].message
    assert (message.reasoning, message.content) == ("Hm.", None)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("now", '{"n": 1}')]


def test_tool_choice_forces_or_forbids_a_call(llm, runner, tokenizer):
    said = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    runner.script = tokenizer.encode(said)
    asked = {"use_tqdm": False, "chat_template": TOOLS + BODY + "{# <tool_call> #}", "tools": [TOOL]}
    named = {"type": "function", "function": {"name": "now"}}
    for choice, called in (("none", False), ("auto", True), ("required", True), (named, True)):
        (output,) = llm.chat([USER], PARAMS, tool_choice=choice, **asked)
        assert ("# now" in tokenizer.decode(output.prompt_token_ids)) == called
        assert bool(output.outputs[0].message.tool_calls) == called
        assert runner.masks[0] is None or choice not in ("none", "auto")


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "template.jinja"}, "chat_template"),
        ({"reasoning_tags": ("<a>", "<a>")}, "reasoning_tags"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"name": "now"}]}, "tools[0]"),
        ({"chat_template_kwargs": {"messages": True}}, "chat_template_kwargs.messages"),
        ({"tool_call_parser": "qwen9"}, "tool_call_parser"),
        ({"reasoning_parser": "qwen9"}, "reasoning_parser"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_options_that_the_demo_model_does_not_support_raise(llm, options, parameter):
    with pytest.raises(RequestError) as caught:
        llm.chat([USER], PARAMS, use_tqdm=False, **options)
    assert caught.value.parameter == parameter
