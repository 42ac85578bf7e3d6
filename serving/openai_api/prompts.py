"""Makes the engine's prompts from a request: text or token ids, special tokens, a suffix, a cache salt."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from jpaged.errors import RequestError
from jpaged.frontend.tokenising import prompt_length
from jpaged.params.sampling import SamplingParams
from jpaged.serving.engine_client import Prompt
from jpaged.serving.openai_api.fill_in_the_middle import fill_in_prompt
from jpaged.serving.schemas.requests import CompletionRequest, Prediction
from jpaged.serving.server_state import Server
from jpaged.text.encoder import TokenLimit, text_encoder

MAX_PROMPTS = 1024  # per request

def prompt_list(prompt: str | list[str | int | list[int]], most: int = MAX_PROMPTS) -> list[Prompt]:
    """Return the prompts of a request. Raises RequestError for a mixed, empty or too long list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt", prompt, "must not be empty")
    kinds = set(map(type, prompt))  # there may be a million
    if kinds == {int}:
        return [{"prompt_token_ids": cast(list[int], prompt)}]
    if len(prompt) > most:
        raise RequestError("prompt", f"{len(prompt)} prompts", f"at most {most} in one request: send several")
    if kinds == {str}:
        return list(cast(list[str], prompt))
    if kinds == {list}:
        return [{"prompt_token_ids": ids} for ids in cast(list[list[int]], prompt)]
    raise RequestError("prompt", prompt, "mixes text and token ids: send one kind")


async def completion_prompts(
    server: Server, body: CompletionRequest, params: SamplingParams, prompts: list[Prompt]
) -> list[Prompt]:
    """Convert the prompts of a completion request to the engine's prompts. Raises RequestError that names the field."""
    if body.suffix:
        tokenizer = server.engine.get_tokenizer()
        if body.echo:
            raise RequestError("echo", True, "does not go with suffix: it would repeat suffix and marker tokens")
        prompts = [fill_in_prompt(tokenizer, prompt, body.suffix) for prompt in prompts]
    if body.add_special_tokens is False:
        limit = TokenLimit.of_prompt(server.engine.max_model_len, params)
        prompts = await without_special_tokens(server, prompts, limit)
    return salted(prompts, body.cache_salt)


async def without_special_tokens(server: Server, prompts: Sequence[Prompt], limit: TokenLimit) -> list[Prompt]:
    """Tokenise text prompts without the tokens that the tokenizer adds. limit: of one prompt. Raises RequestError."""
    tokenizer = server.engine.get_tokenizer()

    def work(cancelled: Callable[[], bool]) -> list[Prompt]:
        return [
            {"prompt_token_ids": plain_ids(tokenizer, "prompt", prompt, limit, cancelled)}
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    return await server.tokenising.run(sum(map(prompt_length, prompts)), work)


def plain_ids(
    tokenizer: Any, name: str, text: str, limit: TokenLimit | None, cancelled: Callable[[], bool] = lambda: False
) -> list[int]:
    """Tokenise a text without special tokens. name: of the parameter, for errors."""
    if tokenizer is None:
        accepted = "the model has no tokenizer: send token ids, or start with the option tokenizer"
        raise RequestError(name, text, accepted)
    return text_encoder(tokenizer).encode(name, text, limit, special_tokens=False, cancelled=cancelled).token_ids


def predicted(prompts: list[Prompt], prediction: Prediction | None) -> list[Prompt]:
    """Add a chat's expected answer to its prompts."""
    if prediction is None:
        return prompts
    return [{**({"prompt": one} if isinstance(one, str) else one), "prediction": prediction.text} for one in prompts]


def salted(prompts: list[Prompt], salt: str | None) -> list[Prompt]:
    """Add a request's cache_salt to its prompts. Raises RequestError for an empty salt, which isolates nothing."""
    if salt is None:
        return prompts
    if not salt:
        raise RequestError("cache_salt", salt, "must not be empty: leave it out to share the cache with all requests")
    return [{**({"prompt": one} if isinstance(one, str) else one), "cache_salt": salt} for one in prompts]
