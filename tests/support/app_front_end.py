"""Front ends between an application and its engine, in one process: see tests/support/through_front_end.py.

Requests, outputs, errors and calls go through sockets, as between processes. The fake engine reads the prompts and
makes the text itself. Facts that tests change later are read from it directly.
"""

import asyncio
import contextlib
import types
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.config import EngineConfig
from jpaged.engine.engine import Output
from jpaged.engine.input.model_limits import ModelLimits
from jpaged.engine.input.prompt_reader import CheckedPrompt
from jpaged.errors import EngineError, JPagedError
from jpaged.frontend.remote.remote_engine import RemoteEngine
from jpaged.params.pooling import PoolingParams
from tests.serving.fake_engine import VOCAB, FakeEngine
from tests.support.front_end_pair import EngineSide

POLL_SECONDS = 0.0005


class AppFrontEnd(RemoteEngine):
    """A `RemoteEngine` of an AsyncLLM. Closes it with itself: in a server, the engine's process does that."""

    def __init__(self, engine: Any):
        self._side = EngineSide(engine)
        self._connected: asyncio.Task[None] | None = None
        super().__init__(*self._side.sockets())

    @classmethod
    def of(cls, engine: Any) -> Self | Any:
        """The front end of an AsyncLLM or a FakeEngine. Any other engine is returned."""
        if isinstance(engine, FakeEngine):
            return FakeFrontEnd(engine)
        return cls(engine) if hasattr(engine, "submit") else engine  # an AsyncLLM, also if it is wrapped

    async def connect(self) -> None:
        """Connect, once on each event loop: some tests run an application on several."""
        if self._connected is None or self._connected.get_loop() is not asyncio.get_running_loop():
            if self._connected is not None:
                super().__init__(*self._side.sockets())
            self._connected = asyncio.create_task(super().connect())
        await self._connected

    def close(self) -> None:
        super().close()
        self._side.engine.close()
        self._side.close()


class Connected:
    """Connects before the first request. Not at the start, as in a server: some tests start no lifespan."""

    def __init__(self, app: ASGIApp, engine: Any):
        self._app, self._engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._engine.connect()
        await self._app(scope, receive, send)


class _HostedFake:
    """The fake engine, with the members of `Hosted`. num_read: outputs that the server has read, by request."""

    def __init__(self, fake: FakeEngine, num_read: Counter[str]):
        self._fake, self._num_read = fake, num_read
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.config = EngineConfig(model="fake")
        limits = ModelLimits(vocab_size=VOCAB, max_model_len=fake.max_model_len, max_logprobs=20)
        inputs, admission = types.SimpleNamespace(limits=limits), types.SimpleNamespace(has_limits=False)
        self.engine = types.SimpleNamespace(inputs=inputs, admission=admission)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)

    def get_tokenizer(self) -> None:
        """Returns None. The front end reads the fake engine's: some tests set one that cannot be pickled."""

    async def submit(
        self, stream: Any, prompt: Any, params: Any, request_id: str, priority: int = 0, refuse_cut: bool = False,
        lora_request: Any = None, *, has_left: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Start a request, and return when it is admitted. Raises the error of one that is refused."""
        admitted = asyncio.get_running_loop().create_future()

        def admit() -> None:
            if not admitted.done():
                admitted.set_result(None)

        if "prediction" in prompt:
            [prompt["prediction"]] = prompt["prediction"]
        if isinstance(params, PoolingParams):
            outputs = self._fake.encode(prompt, params, request_id, priority=priority)
        else:
            outputs = self._fake.generate(
                prompt, params, request_id, priority=priority, refuse_cut=refuse_cut, on_admitted=admit,
                lora_request=lora_request,
            )  # fmt: skip
        self._tasks[request_id] = asyncio.create_task(self._post(outputs, stream, admitted, admit))
        await admitted

    async def _post(
        self, outputs: AsyncGenerator[Any, None], stream: Any, admitted: asyncio.Future[None], admit: Callable[[], None]
    ) -> None:
        try:
            async with contextlib.aclosing(outputs):
                count = 0
                async for output in outputs:
                    admit()
                    stream.reader.post([(stream, output)], ((), ()))
                    count += 1
                    # As a generator in this process would. Otherwise the server joins outputs.
                    while not output.finished and self._num_read[stream.request_id] < count:  # noqa: ASYNC110
                        await asyncio.sleep(POLL_SECONDS)
        except Exception as error:
            if not admitted.done():
                admitted.set_exception(error)
                return
            known = error if isinstance(error, JPagedError) else EngineError(f"{type(error).__name__}: {error}")
            stream.reader.post([(stream, known)], ((), ()))

    def abort_now(self, request_id: str) -> None:
        """End a request."""
        self._tasks[request_id].cancel()


def _live(name: str) -> Any:
    """A fact of the fake engine, as it is now. What the engine's first message said is ignored."""
    return property(lambda self: getattr(self.fake, name), lambda self, value: None)


class FakeFrontEnd(AppFrontEnd):
    """A `RemoteEngine` of a fake engine."""

    default_sampling_params = _live("default_sampling_params")
    max_num_seqs = _live("max_num_seqs")
    max_model_len = _live("max_model_len")
    num_engines = _live("num_engines")
    pooling = _live("pooling")
    is_ready = _live("is_ready")

    def __init__(self, fake: FakeEngine):
        self.fake = fake
        self._num_read = Counter[str]()
        super().__init__(_HostedFake(fake, self._num_read))

    def get_tokenizer(self) -> Any:
        return self.fake.get_tokenizer()

    async def _outputs(
        self, prompt: Any, params: Any, request_id: str | None, *options: Any
    ) -> AsyncGenerator[Output, None]:
        assert request_id is not None
        async with contextlib.aclosing(super()._outputs(prompt, params, request_id, *options)) as outputs:
            async for output in outputs:
                self._num_read[request_id] += 1
                yield output

    def _read(self, prompt: Any, *_: Any) -> CheckedPrompt:
        parts = {"prompt": prompt} if isinstance(prompt, str) else prompt
        ids = parts["prompt_token_ids"] if "prompt_token_ids" in parts else self.fake.tokenizer.encode(parts["prompt"])
        prediction = (parts["prediction"],) if parts.get("prediction") is not None else ()
        return CheckedPrompt(None, ids, parts.get("cache_salt"), prediction)

    def _texts(self, *_: Any) -> None:
        return None
