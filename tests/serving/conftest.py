"""A server on a real socket, over an engine without a model."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.applications import Starlette

from jpaged.chat.turn import ChatFormats
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving import fake_engine
from tests.support.http_server import running


@pytest.fixture
def engine():
    return fake_engine.FakeEngine()


class Host:
    """An ASGI application that passes requests on to another one, which may be exchanged."""

    app: Starlette

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def host() -> Iterator[tuple[Host, str]]:
    """A server for many applications, and its base URL. Starting and stopping one takes 0.2 s."""
    host = Host()
    with running(host) as base:
        yield host, base


@pytest.fixture
def url(engine, host) -> str:
    host[0].app = create_app(Server(engine=engine, model_names=("echo", "alias"), root="a/checkpoint"))
    return host[1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def chat_url(engine, host) -> str:
    """A server whose model has a template for tools, and reasoning between tags."""
    engine.tokenizer.chat_template = "{{ messages }}{{ tools }}<tool_call>"
    formats = ChatFormats.named(reasoning_parser="qwen3")
    host[0].app = create_app(Server(engine=engine, model_names=("echo",), chat=formats))
    return host[1]
