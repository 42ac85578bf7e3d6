"""Sends a workload to a server and records its answers."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jpaged.load_client.answer import Answer
from jpaged.load_client.backends import Backend, LoadRequest
from jpaged.load_client.connection import ConnectionPool, Endpoint, LoadError

Update = Callable[[int], None]  # receives the number of requests that have just ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A server's endpoint, and the common parts of all requests."""

    endpoint: Endpoint
    backend: Backend
    model: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # in every body, such as the temperature
    request_id_prefix: str = "bench-"  # prefix of X-Request-Id; the request's index follows


@dataclasses.dataclass(frozen=True)
class Run:
    """Answers of one run, in request order."""

    answers: list[Answer]
    seconds: float  # from the first request to the end of the last answer


async def send_all(
    target: Target,
    requests: Sequence[LoadRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    update: Update = lambda _: None,
) -> Run:
    """Send each request at its time, in seconds after the start. A failed request becomes an Answer with an error.

    max_concurrency: maximum number of requests in flight. Others wait, for `Answer.waited` seconds.
    """
    free = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    # Bodies are encoded before the clock starts: the client shares the machine's cores with the server.
    encode = msgspec.json.Encoder().encode
    bodies = [encode(target.backend.body(target.model, request, target.fields)) for request in requests]
    pool = ConnectionPool(target.endpoint)
    began = time.perf_counter()

    async def one(index: int, body: bytes) -> Answer:
        arrived = time.perf_counter()
        async with free:
            answer = Answer(time.perf_counter())
            answer.waited = answer.start - arrived
            reader = target.backend.reader(answer)
            try:
                await pool.post(body, reader.feed, {"x-request-id": f"{target.request_id_prefix}{index}"})
                reader.end()
            except LoadError as error:
                answer.error = str(error)
            answer.latency = time.perf_counter() - answer.start
        update(1)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, (body, when) in enumerate(zip(bodies, times, strict=True)):
            if (delay := began + when - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            tasks.append(group.create_task(one(index, body)))
    seconds = time.perf_counter() - began
    pool.close()
    return Run([task.result() for task in tasks], seconds)
