"""`jpaged chat`: talk to a model in the terminal.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jpaged.chat.prompt import chat_prompt, has_chat_template
from jpaged.cli.common.offline import outputs_as_they_come
from jpaged.cli.flags.engine import (
    ENGINE_DEFAULTS,
    EngineArguments,
    ModelArgument,
    engine_options,
    one_line_help,
    read_text,
)
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams

if TYPE_CHECKING:
    from jpaged.async_llm import AsyncLLM

HELP = "/clear forgets the conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"
DEMO = "The demo model continues Python code and is not trained to chat: expect code, not answers."
NO_TEMPLATE = "This model has no chat template: it continues a plain transcript of User: and Assistant: lines."

OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk to a model in the terminal. Each prompt contains the whole conversation.

    Sampling parameters without a flag come from the model's generation_config.json.

    Example: jpaged chat Qwen/Qwen3-0.6B --system-prompt "Answer in one sentence."
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    system_prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """System message at the beginning of the conversation."""

    temperature: OptionalFloat = None
    """Sampling temperature: the logits are divided by it. 0: always the most likely token."""

    top_p: OptionalFloat = None
    """Sample only from the most likely tokens whose probabilities add up to this. 1: from all tokens."""

    top_k: OptionalInt = None
    """Sample only from this number of most likely tokens. 0: from all tokens."""

    min_p: OptionalFloat = None
    """Sample only from tokens with at least this fraction of the highest probability. 0: from all tokens."""

    max_tokens: OptionalInt = None
    """Maximum number of tokens of an answer. Default: up to max_model_len."""

    chat_template: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with a Jinja chat template that replaces the model's own."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Answer the user's messages until the user quits."""
        options = engine_options(self.engine, self.model_argument)
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in given.items() if value is not None}
        SamplingParams(**given, max_tokens=self.max_tokens)  # raises for bad flags before the model loads
        template = read_text("chat_template", self.chat_template)
        from jpaged import AsyncLLM

        if options["max_num_seqs"] is None:
            options["max_num_seqs"] = 1  # one conversation is one request at a time
        with closing(AsyncLLM(**options)) as engine:
            params = dataclasses.replace(engine.default_sampling_params, **given, max_tokens=self.max_tokens)
            conversation = Conversation(engine, params, template, self.system_prompt)
            print(HELP, file=sys.stderr)
            if options["model"] == "demo":
                print(DEMO, file=sys.stderr)
            if not conversation.templated:
                print(NO_TEMPLATE, file=sys.stderr)
            for line in _lines():
                match line.strip():
                    case "":
                        continue
                    case "/exit":
                        break
                    case "/clear":
                        conversation.clear()
                    case text:
                        _show(conversation, text)
        return 0


class Conversation:
    """The messages so far, and their rendering as a prompt."""

    def __init__(self, engine: "AsyncLLM", params: SamplingParams, template: str | None, system_prompt: str | None):
        self._engine = engine
        self._params = params
        self._template = template
        self._opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.templated = bool(template) or has_chat_template(engine.get_tokenizer())
        self.clear()

    def clear(self) -> None:
        """Forget all messages except the system prompt."""
        self.messages = list(self._opening)

    def answer(self, text: str) -> Generator[str]:
        """Yield the answer to `text` in pieces. Closing the generator stops the answer.

        `text` and the answer so far are then appended to the messages. Raises RequestError if the conversation is too
        long, and appends nothing.
        """
        prompt = self._prompt([*self.messages, {"role": "user", "content": text}])
        said = ""
        try:
            with closing(outputs_as_they_come(self._engine, [prompt], self._params)) as outputs:
                for _, output in outputs:
                    whole = output.outputs[0].text
                    end = len(whole) if self.templated else whole.find("\nUser:")
                    if end < 0:
                        # A plain answer ends at "\nUser:". Unfinished text is held back, as it may end in a part of it.
                        end = len(whole) if output.finished else max(len(said), len(whole) - len("\nUser:"))
                    piece, said = whole[len(said) : end], whole[:end]
                    yield piece
                    if not self.templated and "\nUser:" in whole:
                        break
        finally:
            if said:
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]

    def _prompt(self, messages: list[dict[str, str]]) -> Any:
        if self.templated:
            return chat_prompt(self._engine.get_tokenizer(), messages, self._template)
        names = {"system": "System", "user": "User", "assistant": "Assistant"}
        return "".join(f"{names[m['role']]}: {m['content'].strip()}\n" for m in messages) + "Assistant:"


def _lines() -> Iterator[str]:
    """Yield the user's lines from a terminal, with line editing, or from standard input."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()
    while True:
        try:
            yield session.prompt("you> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _show(conversation: Conversation, text: str) -> None:
    try:
        with closing(conversation.answer(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    except RequestError as error:
        print(f"jpaged: {error}; /clear starts a new conversation", file=sys.stderr)
    print()
