"""Chat requests to the fake engine, validated by the types of the official client."""

import json

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.http_client import CHAT, events, post

PATH = "/v1/chat/completions"


def chat(url: str, **fields) -> dict:
    """Return the answer to a chat request."""
    answer = post(url, PATH, CHAT | fields)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.text, strict=True)
    return answer.json()


def chunks(url: str, **fields) -> list[dict]:
    """Return the chunks of a streamed answer."""
    found = events(post(url, PATH, CHAT | fields | {"stream": True}))
    for event in found:
        ChatCompletionChunk.model_validate_json(event, strict=True)
    return [json.loads(event) for event in found]


def refused(url: str, **fields) -> str:
    """Return the parameter that the error of a refused request names."""
    answer = post(url, PATH, CHAT | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]
