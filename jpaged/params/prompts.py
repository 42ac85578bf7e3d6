"""`TextPrompt` and `TokensPrompt`: prompts as dictionaries, with vLLM's names. `LLM.generate` also takes plain text."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]  # share KV only with prompts of the same salt
    # Expected answer, as text or token ids. With speculative decoding, its tokens are drafts. It changes no answer.
    prediction: NotRequired[str | list[int]]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]
    prediction: NotRequired[str | list[int]]
