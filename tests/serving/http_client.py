"""Requests to the server under test, and strict checks of its answers."""

import asyncio
import json
import time
from collections.abc import Collection
from typing import Any

import httpx
from openai.types import Completion

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}


def post(url: str, path: str, body: object) -> httpx.Response:
    """Send a body as JSON."""
    return httpx.post(f"{url}{path}", json=body, timeout=20)


def events(response: httpx.Response) -> list[str]:
    """Return the data of each event. The stream ends with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert data[-1] == "[DONE]"
    return data[:-1]


def strict(model, raw: str, extras: Collection[str] = ("stop_reason", "prompt_logprobs")):
    """Validate as the client's own type. Unknown fields fail, except `extras`: by default vLLM's."""
    made = model.model_validate_json(raw, strict=True)

    def no_extras(value):
        if hasattr(value, "model_extra"):
            assert set(value.model_extra or ()) <= set(extras), value.model_extra
            for name in type(value).model_fields:
                no_extras(getattr(value, name))
        elif isinstance(value, list):
            for item in value:
                no_extras(item)

    no_extras(made)
    return made


def strict_chunk(raw: str) -> Completion:
    """Validate an event of /v1/completions. OpenAI's server sends finish_reason null, which the type does not allow."""
    document = json.loads(raw)
    unfinished = [choice for choice in document["choices"] if choice["finish_reason"] is None]
    for choice in unfinished:
        choice["finish_reason"] = "stop"
    strict(Completion, json.dumps(document))
    return Completion.construct(**json.loads(raw))


def error_of(response: httpx.Response, status: int) -> dict:
    """Return the error of a response, which must have this status."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def wait_for(condition, seconds: float = 5.0) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def until_stopped(app: Any, path: str, body: object, parts: int) -> list[dict[str, Any]]:
    """Return the ASGI messages of an answer, whose request is cancelled after some parts of its body.

    uvicorn does so when its shutdown timeout has ended. parts: 0 cancels a request that has no answer.
    """
    sent: list[dict[str, Any]] = []
    received = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "client": ("x", 1), "server": ("x", 80),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        for message in received:
            return message
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if working is not None and parts and len(sent) == parts + 1:
            working.cancel()

    async def run() -> None:
        nonlocal working
        working = asyncio.create_task(app(scope, receive, send))
        if not parts:
            await asyncio.sleep(0.02)
            working.cancel()
        await working

    working: asyncio.Task[None] | None = None
    asyncio.run(run())
    return sent


def answer(url: str, path: str, **body) -> dict:
    """Return the answer to a request, which must succeed."""
    said = post(url, path, body)
    assert said.status_code == 200, said.text
    return said.json()


def param(url: str, path: str, **body) -> str:
    """Return the parameter that the error of a refused request names."""
    said = post(url, path, body)
    assert said.status_code == 400, said.text
    return said.json()["error"]["param"]
