"""A server on a real socket, over an engine without a model."""

import asyncio
import contextlib
import importlib.util
import pathlib
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from jpaged.serving.application import create_app
from jpaged.serving.connection import ConnectionLimits, bounded_connection
from jpaged.serving.generation import Server

_spec = importlib.util.spec_from_file_location("fake_engine", pathlib.Path(__file__).with_name("fake_engine.py"))
fake_engine = importlib.util.module_from_spec(_spec)
sys.modules["fake_engine"] = fake_engine
_spec.loader.exec_module(fake_engine)


@contextlib.contextmanager
def running(app, limits: ConnectionLimits | None = None, *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The base URL of an application that runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as address:
        http = bounded_connection(limits)
        made = None if tls is None else lambda *_: tls
        config = uvicorn.Config(
            app, http=http, log_level="warning", timeout_graceful_shutdown=1, ssl_context_factory=made
        )
        server = uvicorn.Server(config)

        def serve() -> None:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # the loop that `jpaged serve` uses
                runner.run(server.serve(sockets=[address]))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{address.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


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
    host[0].app = create_app(Server(engine=engine, model_names=("echo", "alias")))
    return host[1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
