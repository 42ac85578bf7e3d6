"""A server on a real socket, over an engine without a model."""

import asyncio
import contextlib
import importlib.util
import pathlib
import socket
import sys
import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from jpaged.serving.application import create_app
from jpaged.serving.generation import Server

_spec = importlib.util.spec_from_file_location("fake_engine", pathlib.Path(__file__).with_name("fake_engine.py"))
fake_engine = importlib.util.module_from_spec(_spec)
sys.modules["fake_engine"] = fake_engine
_spec.loader.exec_module(fake_engine)


@contextlib.contextmanager
def running(app) -> Iterator[str]:
    """The base URL of an application that runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as address:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[address])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{address.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


@pytest.fixture
def engine():
    return fake_engine.FakeEngine()


@pytest.fixture
def url(engine) -> Iterator[str]:
    with running(create_app(Server(engine=engine, model_names=("echo", "alias")))) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made
