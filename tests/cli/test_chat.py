"""A conversation in the terminal: the prompts, the remembered messages, and stopped answers."""

import dataclasses
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jpaged.cli.chat import Conversation
from jpaged.cli.common.offline import outputs_as_they_come
from jpaged.errors import RequestError
from jpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jpaged.params.sampling import SamplingParams


class Template:
    """A tokenizer with a chat template that shows only the number of messages."""

    chat_template = "{...}"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "." * len(messages)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [len(text)]


@dataclasses.dataclass
class ScriptedEngine:
    """Answers every prompt with `text`, one character per token."""

    text: str
    tokenizer: Any = None
    interrupt_at: int | None = None
    prompts: list[Any] = dataclasses.field(default_factory=list)
    running: int = 0

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if prompt == "bad":
            raise RequestError("prompt", prompt, "is bad")
        self.prompts.append(prompt)
        self.running += 1
        try:
            for end in range(1, len(self.text) + 1):
                if end == self.interrupt_at:
                    signal.raise_signal(signal.SIGINT)
                finished = end == len(self.text)
                answer = CompletionOutput(0, self.text[:end], [0] * end, None, None, "length" if finished else None)
                yield RequestOutput(request_id, None, [0], [answer], finished, RequestMetrics(0.0))
        finally:
            self.running -= 1


def conversation(engine: ScriptedEngine, system_prompt: str | None = None) -> Conversation:
    return Conversation(engine, SamplingParams(), None, system_prompt)


def test_templated_conversation_grows_and_is_cleared():
    engine = ScriptedEngine("Hello.", Template())
    talk = conversation(engine, "Be kind.")
    assert list(talk.answer("hi")) == list("Hello.")
    assert "".join(talk.answer("again")) == "Hello."
    assert engine.prompts == [{"prompt_token_ids": [2]}, {"prompt_token_ids": [4]}]
    assert talk.messages[1:3] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "Be kind."}]


def test_plain_transcript_stops_before_the_users_part():
    engine = ScriptedEngine(" I am.\nUser: and you?\nAssistant: no")
    talk = conversation(engine)
    assert not talk.templated
    assert "".join(talk.answer("Are you?")) == " I am."
    assert engine.running == 0
    "".join(talk.answer("Sure?"))
    assert engine.prompts[1] == "User: Are you?\nAssistant: I am.\nUser: Sure?\nAssistant:"
    assert "".join(conversation(ScriptedEngine("so\nUse")).answer("x")) == "so\nUse"  # not "User:", so it is kept


def test_a_stopped_answer_is_remembered_up_to_its_last_piece():
    engine = ScriptedEngine("Hello.", Template())
    talk = conversation(engine)
    pieces = talk.answer("hi")
    assert [next(pieces), next(pieces)] == ["H", "e"]
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "He"}
    assert engine.running == 0


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_aborts_the_request_and_is_raised():
    engine = ScriptedEngine("Hello.", Template(), interrupt_at=4)
    pieces = conversation(engine).answer("hi")
    assert [next(pieces), next(pieces), next(pieces)] == ["H", "e", "l"]
    with pytest.raises(KeyboardInterrupt):
        next(pieces)
    assert engine.running == 0


def test_one_bad_prompt_ends_all():
    engine = ScriptedEngine("x" * 1000)
    with pytest.raises(RequestError, match="is bad"):
        list(outputs_as_they_come(engine, ["good", "bad", "good"], SamplingParams()))
    assert engine.running == 0
