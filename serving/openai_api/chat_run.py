"""A conversation that is ready to run. /v1/responses and /v1/messages convert their bodies to `ChatRequest` for it."""

import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jpaged.chat.turn import ChatTurn
from jpaged.errors import RequestError
from jpaged.frontend.prompt_streams import outputs_of
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.serving.openai_api import generation
from jpaged.serving.openai_api.chat_tools import tools_of
from jpaged.serving.openai_api.chat_turns import turn_of, turn_params
from jpaged.serving.openai_api.generation import Progress, Update
from jpaged.serving.openai_api.output_format import names_as_sent
from jpaged.serving.openai_api.prompts import salted
from jpaged.serving.schemas.requests import ChatMessage, ChatRequest
from jpaged.serving.server_state import Server


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRun:
    """A rendered conversation and its sampling parameters."""

    server: Server
    chat: ChatRequest
    turn: ChatTurn
    params: SamplingParams

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.turn.prompt["prompt_token_ids"])

    async def updates(
        self, request_id: str, progress: Progress, *, on_admitted: Callable[[], None] | None = None
    ) -> AsyncGenerator[Update, None]:
        """Run the request, updating `progress`. Closing the generator aborts it. on_admitted: called when queued."""
        prompts = salted([self.turn.prompt], self.chat.cache_salt)
        outputs = outputs_of(
            self.server.engine, prompts, self.params, request_id, priority=self.chat.priority or 0,
            refuse_cut=self.chat.max_tokens is not None, on_admitted=on_admitted,
            lora_request=self.server.lora_request(self.chat.model),
        )  # fmt: skip
        with generation.named_as_sent(names_as_sent(self.chat)):
            async with aclosing(generation.updates(outputs, 1, progress)) as updates:
                async for new in updates:
                    yield new


def prepare(server: Server, chat: ChatRequest, *, logprobs: int | None = None, drop_oldest: bool = False) -> ChatRun:
    """Render a conversation. Takes time that grows with the body: run it in a thread. Raises RequestError.

    logprobs:    log-probabilities per token. None: none.
    drop_oldest: drop the oldest turns of a conversation that is too long.
    """
    with generation.named_as_sent(names_as_sent(chat)):
        return _prepared(server, chat, logprobs, drop_oldest=drop_oldest)


def _prepared(server: Server, chat: ChatRequest, logprobs: int | None, *, drop_oldest: bool) -> ChatRun:
    defaults = server.engine.default_sampling_params
    most = chat.max_tokens
    if most is None and defaults.max_tokens != SamplingParams().max_tokens:
        most = defaults.max_tokens
    params = generation.sampling_params(chat, defaults, max_tokens=most, logprobs=logprobs)
    if logprobs is not None:  # each part of an answer is sent with its tokens' log-probabilities
        params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    tools = tools_of(chat)
    if not drop_oldest:
        turn = turn_of(server, chat, tools, params)
        return ChatRun(server, chat, turn, turn_params(chat, turn, params))

    def attempt(messages: list[ChatMessage]) -> ChatTurn:
        chat.messages = messages
        turn = turn_of(server, chat, tools, params)
        count, room = len(turn.prompt["prompt_token_ids"]), server.engine.max_model_len - (most or 1)
        if count > room:
            accepted = f"a prompt takes at most {room:,} tokens here: shorten the last turn"
            raise RequestError("messages", f"{count:,} tokens", accepted)
        return turn

    turn = _longest(chat.messages, attempt)
    return ChatRun(server, chat, turn, turn_params(chat, turn, params))


def _longest(messages: list[ChatMessage], attempt: Callable[[list[ChatMessage]], ChatTurn]) -> ChatTurn:
    """Return the turn with the most messages that `attempt` accepts. System messages at the beginning always stay."""
    head = 0
    while head < len(messages) and messages[head].role in ("system", "developer"):
        head += 1
    starts = [i for i in range(head, len(messages)) if messages[i].role == "user"]
    cuts = [head, *(start for start in starts if start > head)]
    try:
        return attempt(messages)
    except RequestError as error:
        if error.parameter != "messages" or len(cuts) < 2:
            raise
    best = attempt(messages[:head] + messages[cuts[-1] :])
    low, high = 1, len(cuts) - 1  # `cuts[high]` fits
    while low < high:
        middle = (low + high) // 2
        try:
            best, high = attempt(messages[:head] + messages[cuts[middle] :]), middle
        except RequestError as error:
            if error.parameter != "messages":
                raise
            low = middle + 1
    return best
