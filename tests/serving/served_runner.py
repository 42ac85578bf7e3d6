"""A server with the real engine and a runner in plain Python, for tests of what the server reports."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jpaged import AsyncLLM, SamplingParams
from jpaged.engine.engine import Engine, EngineOptions
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.engine.fake_runner import FakeRunner
from tests.support.http_server import running


def async_engine(runner: FakeRunner, options: EngineOptions | None = None, tokenizer: Any = None) -> AsyncLLM:
    """An AsyncLLM on a runner without a model. Without a tokenizer, prompts are token ids."""

    def build(model: Any, params: Any, given: Any, **how: Any) -> BuiltEngine:
        made = Engine(runner, tokenizer, options or EngineOptions())
        return BuiltEngine(made, engine_config(model, given), None, tokenizer, SamplingParams(temperature=0))

    with mock.patch("jpaged.async_llm.build_engine", build):
        return AsyncLLM("fake")


@contextlib.contextmanager
def served(engine: Any, **options: Any) -> Iterator[str]:
    """Base URL of a server of an engine. The server closes the engine. options: of `AppOptions`."""
    with running(create_app(Server(engine=engine, model_names=("fake",)), AppOptions(**options))) as base:
        yield base
