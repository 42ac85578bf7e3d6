"""An AsyncLLM and a `RemoteEngine` of it, in one process. The engine's side runs on an event loop of its own."""

import asyncio
import contextlib
import dataclasses
import functools
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from jpaged import AsyncLLM, RequestOutput, SamplingParams
from jpaged.errors import JPagedError
from jpaged.frontend.remote.host import FrontEndLink
from jpaged.frontend.remote.remote_engine import RemoteEngine
from jpaged.params.sampling import RequestOutputKind

T = TypeVar("T")


class EngineSide:
    """The engine's process: its event loop, in a thread."""

    def __init__(self, engine: AsyncLLM):
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        self.links: list[FrontEndLink] = []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine on the loop, and wait for its result."""

        async def run() -> T:
            return await make()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def sockets(self, ended: Callable[[], None] = lambda: None) -> tuple[socket.socket, socket.socket]:
        """Connect a front end. Returns its ends of the sockets."""
        (channel, channel_there), (questions, questions_there) = socket.socketpair(), socket.socketpair()

        async def connect() -> None:
            self.links.append(FrontEndLink(self.engine, channel, questions, ended))
            await self.links[-1].open()

        self.call(connect)
        return channel_there, questions_there

    def close(self) -> None:
        """End the connections and the loop. The engine goes on."""

        async def close() -> None:
            for link in self.links:
                link.close()
            await asyncio.sleep(0)

        self.call(close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextlib.contextmanager
def engine_side(engine: AsyncLLM) -> Iterator[EngineSide]:
    """The engine's side of front ends that the test connects."""
    side = EngineSide(engine)
    try:
        yield side
    finally:
        side.close()


@contextlib.contextmanager
def front_end(engine: AsyncLLM) -> Iterator[tuple[RemoteEngine, Callable[[Awaitable[T]], T]]]:
    """A `RemoteEngine` of an engine, and a function that runs a coroutine on its event loop."""
    with engine_side(engine) as side, asyncio.Runner() as runner:
        remote = RemoteEngine(*side.sockets())
        runner.run(remote.connect())
        try:
            yield remote, runner.run
        finally:
            remote.close()
            runner.run(asyncio.sleep(0.01))  # the loop closes the connection


async def joined(outputs: AsyncGenerator[Any, None], *, deltas: bool = False) -> Any:
    """The last output of a stream. deltas: with output_kind DELTA: all parts in one."""
    found = [output async for output in outputs]
    assert [each.finished for each in found] == [False] * (len(found) - 1) + [True]
    return functools.reduce(lambda first, later: first.followed_by(later), found) if deltas else found[-1]


def fields(output: RequestOutput) -> dict[str, Any]:
    """All that must be the same: everything but times."""
    found = dataclasses.asdict(output)
    metrics = found.pop("metrics")
    assert metrics["arrival_time"] <= metrics["first_scheduled_time"] <= metrics["finished_time"]
    for answer in found["outputs"]:
        if answer["sampling_mask"] is not None:
            answer["sampling_mask"] = [ids.tolist() for ids in answer["sampling_mask"]["token_ids"]]
    return found | {"drafts": (metrics["num_draft_tokens"], metrics["num_accepted_tokens"])}


async def outcome(engine: Any, prompt: Any, params: SamplingParams, request_id: str, **options: Any) -> Any:
    """The last output of a request, or its error."""
    deltas = params.output_kind is RequestOutputKind.DELTA
    try:
        return fields(await joined(engine.generate(prompt, params, request_id, **options), deltas=deltas))
    except JPagedError as error:
        return type(error), vars(error), str(error)
