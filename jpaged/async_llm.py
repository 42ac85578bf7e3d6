"""The front door for servers: requests come and go on an event loop while one thread steps the engine.

1. `generate` tokenises and checks the prompt in a worker thread, so that a long prompt stops nobody's stream.
2. It hands the request to the engine thread through a list of commands, first in, first out.
3. After each step the engine thread posts the new outputs to the event loops of their readers, one call a loop. An
   output holds all before it, so a slow reader skips some and never piles them up; of deltas it gets the sum.
4. A generator that is closed or cancelled takes its request out of the engine.
5. Idle, the engine thread checks the engine's books, where nobody waits for it.
"""

import asyncio
import atexit
import dataclasses
import logging
import math
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from jpaged.build import build_engine
from jpaged.engine.engine import Output, StepError
from jpaged.engine.input_processor import Prompt
from jpaged.engine.inspect import EngineCapture
from jpaged.engine.request_group import RequestGroup
from jpaged.errors import CapacityError, EngineError, JPagedError, RequestError
from jpaged.frontend.interrupts import call_at_exit
from jpaged.outputs import EngineStats, PoolingRequestOutput, RequestOutput
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.snapshot import EngineSnapshot

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine

logger = logging.getLogger(__name__)

STALL_SECONDS = 120.0  # a step that takes longer counts as an engine that makes no progress
CHECK_AFTER_SECONDS = 1.0  # without a request: then nobody is likely to wait for the check to end
CHECK_EVERY_SECONDS = 60.0  # at most: it walks the whole pool


class _Stream:
    """The latest output of one request, on its way from the engine thread to one reader on an event loop.

    deltas: outputs hold what is new only: one that nobody has read yet goes in front of the next.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deltas: bool = False):
        self.loop = loop
        self.deltas = deltas
        self.aborted = False  # asked for while the prompt was still being tokenised
        self._latest: Output | JPagedError  # there once `_news` is set
        self._news = asyncio.Event()

    def put(self, latest: Output | JPagedError) -> None:
        """Called on the event loop."""
        unread = self._latest if self.deltas and self._news.is_set() else None
        if isinstance(unread, RequestOutput) and isinstance(latest, RequestOutput):
            latest = unread.followed_by(latest)
        self._latest = latest
        self._news.set()

    async def get(self) -> Output:
        """The next output; raises what ended the request instead."""
        await self._news.wait()
        self._news.clear()
        if isinstance(self._latest, JPagedError):
            raise self._latest
        return self._latest


@dataclasses.dataclass(frozen=True, slots=True)
class _Add:
    request: RequestGroup
    stream: _Stream


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Inspect:
    answer: Future[EngineCapture]


@dataclasses.dataclass(frozen=True, slots=True)
class _Reset:
    answer: Future[bool]


_Command = _Add | _Abort | _Inspect | _Reset


class AsyncLLM:
    """A model, ready to serve requests on asyncio. Arguments and errors as of `jpaged.LLM`; making it blocks.

    Use it as an asynchronous context manager, or call `close`, to give the device memory back.
    """

    def __init__(self, model: Any, *, params: Any = None, layout: Any = None, **engine_options: Any):
        built = build_engine(model, params, engine_options, layout=layout, progress=True)
        self.config = built.config
        self.spec = built.spec
        self.default_sampling_params = built.default_sampling_params
        self._tokenizer = built.tokenizer
        built.engine.prepare_grammars()
        self._start(built.engine)

    def _start(self, engine: "Engine") -> None:
        self._engine = engine
        # One thread: prompts are numbered in the order in which they came, and a tokenizer is not shared by threads.
        self._tokenising = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jpaged-tokenise")
        self._streams: dict[str, _Stream] = {}  # of all generators that run; kept by these
        self._live: dict[str, _Stream] = {}     # of all requests in the engine; kept by the engine thread
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._closing = False
        self._ended: EngineError | None = None  # why nothing more is taken
        self._trouble: EngineError | None = None  # the last step failed
        self._wrong_books: EngineError | None = None  # what the check found when the engine was idle
        self._last_step = time.monotonic()
        self._last_check = -math.inf
        self._next_check: float | None = None  # when to check the books if nothing comes; None: no step since
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()
        self._exit_hook = call_at_exit(self.close)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return self._engine.runner.max_model_len

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt as they come, each with all before it or as `output_kind` says; the last one is
        `finished`.

        prompt:          as of `LLM.generate`, one of them.
        sampling_params: None: the model's generation_config.json.
        request_id:      made up if not given; must not be in use.
        priority:        lower ones start first, with scheduling_policy="priority".

        A beam search, and `best_of`, give one output, at the end. Raises RequestError for a bad request and
        CapacityError for one that finds the queue full, before the first output, and EngineError when the device fails.
        Closing or cancelling the generator aborts the request.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        return cast(AsyncGenerator[RequestOutput, None], self._outputs(prompt, params, request_id, priority))

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """The one output of a prompt in an engine that pools: an embedding, or a classifier's probabilities.

        Its `outputs` are None if the request was aborted. Otherwise as `generate`; see `LLM.embed` and `LLM.classify`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        outputs = self._outputs(prompt, params, request_id, priority)
        return cast(AsyncGenerator[PoolingRequestOutput[Any], None], outputs)

    async def _outputs(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, request_id: str | None, priority: int = 0
    ) -> AsyncGenerator[Output, None]:
        request_id = f"request-{uuid.uuid4().hex}" if request_id is None else request_id
        if request_id in self._streams:
            raise RequestError("request_id", request_id, "is in use by a running request: choose another")
        loop = asyncio.get_running_loop()
        deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        stream = self._streams[request_id] = _Stream(loop, deltas=deltas)
        added = False
        try:
            self._check_open()
            request = await loop.run_in_executor(self._tokenising, self._process, request_id, prompt, params, priority)
            if request.grammar is not None:
                await asyncio.wrap_future(request.grammar, loop=loop)
            self._submit(_Add(request, stream))
            added = True
            if stream.aborted:
                self._submit(_Abort(request_id))
            while True:
                try:
                    output = await stream.get()
                except JPagedError:
                    added = False  # it has left the engine, or never entered
                    raise
                added = not output.finished
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request_id]
            if added:
                self._submit_abort(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now: their generators give a last output, finish_reason 'abort'. Unknown ids are passed over."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            stream = self._streams.get(one)
            if stream is not None:
                stream.aborted = True
                self._submit_abort(one)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), or None if it has none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where no sampling parameters are given."""
        return self.default_sampling_params

    async def check_health(self) -> None:
        """Raise EngineError when the engine has ended, its last step failed, or it makes no progress.

        Also from when its books were found wrong, which `check_integrity` says: only a new engine is healthy again.
        """
        self._check_open()
        if self._wrong_books is not None:
            raise self._wrong_books
        if self._trouble is not None:
            raise self._trouble
        stalled = time.monotonic() - self._last_step
        if self._live and stalled > STALL_SECONDS:
            raise EngineError(f"no step has ended for {stalled:.0f} s with {len(self._live)} requests running")

    async def inspect(self) -> EngineSnapshot:
        """Who owns which block of the KV pool, who runs, who waits: all at one moment, between two steps.

        Prompts are not in it. Raises EngineError when the engine is closed or has ended.
        """
        answer: Future[EngineCapture] = Future()
        self._submit(_Inspect(answer))
        captured = await asyncio.wrap_future(answer)
        return await asyncio.to_thread(captured.snapshot)

    async def reset_prefix_cache(self) -> bool:
        """Forget all KV that was kept for reuse. Only while no request lives; False, and nothing is done, otherwise."""
        answer: Future[bool] = Future()
        self._submit(_Reset(answer))
        return await asyncio.wrap_future(answer)

    def stats(self) -> EngineStats:
        """The engine's figures since the start or the last `reset_stats`."""
        return self._engine.stats()

    def reset_stats(self) -> None:
        """Begin counters and peaks anew."""
        self._engine.reset_stats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Abort what runs (last outputs with finish_reason 'abort') and give the device memory back."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        atexit.unregister(self._exit_hook)
        self._thread.join()
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    # -- on the event loops ---------------------------------------------------------------------------------------

    def _process(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, priority: int
    ) -> RequestGroup:
        return self._engine.inputs.process(request_id, prompt, params, stream=True, priority=priority)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._closing:
            raise EngineError("the engine is closed: make a new one")

    def _submit(self, command: _Command) -> None:
        with self._wake:
            self._check_open()
            self._commands.append(command)
            self._wake.notify()

    def _submit_abort(self, request_id: str) -> None:
        with self._wake:
            self._commands.append(_Abort(request_id))
            self._wake.notify()

    # -- on the engine thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._engine.close()

    def _serve(self) -> None:
        """Obey and step until it is time to close, or the engine fails; then tell all readers."""
        try:
            while self._obey():
                if self._engine.has_work:
                    self._step()
                elif self._next_check is not None and time.monotonic() >= self._next_check:
                    self._check_books()
            self._post((output.request_id, output) for output in self._engine.abort(tuple(self._live)))
        except Exception as error:
            logger.exception("the engine thread ends")
            self._ended = EngineError(f"the engine has ended: {error}")
        with self._wake:
            self._ended = self._ended or EngineError("the engine is closed: make a new one")
            left, self._commands = self._commands, deque()
        for command in left:
            match command:
                case _Add(request, stream):
                    self._live[request.request_id] = stream
                case _Inspect(answer) | _Reset(answer) if answer.set_running_or_notify_cancel():
                    answer.set_exception(self._ended)
        self._post((request_id, self._ended) for request_id in tuple(self._live))

    def _obey(self) -> bool:
        """Carry out all commands; False when it is time to close.

        If there is nothing else to do it waits, for a command or until the books are to be checked.
        """
        with self._wake:
            while not (self._commands or self._closing or self._engine.has_work):
                wait = None if self._next_check is None else max(self._next_check - time.monotonic(), 0.0)
                woken = self._wake.wait(wait)
                self._last_step = time.monotonic()
                if not woken:
                    break
            if self._closing:
                return False
        for _ in range(len(self._commands)):
            match self._commands.popleft():
                case _Add(request, stream):
                    self._add(request, stream)
                case _Abort(request_id):
                    self._post((output.request_id, output) for output in self._engine.abort([request_id]))
                case _Inspect(answer):
                    self._engine.inspect(answer)
                case _Reset(answer) if answer.set_running_or_notify_cancel():
                    answer.set_result(self._engine.reset_prefix_cache())
        return True

    def _add(self, request: RequestGroup, stream: _Stream) -> None:
        self._live[request.request_id] = stream
        try:
            self._engine.check_capacity(request)
            self._engine.add(request)
        except (RequestError, CapacityError) as error:  # this one's reader is told; nobody else is concerned
            self._post([(request.request_id, error)])

    def _check_books(self) -> None:
        """Compare what must agree in the engine while nothing runs; health fails from when it does not."""
        self._next_check = None
        try:
            self._engine.check_integrity()
        except Exception as error:  # where the books are wrong, reading them may fail in any way
            logger.error("the idle engine's books are wrong, a bug in jpaged; it begins with new ones: %s", error)
            self._wrong_books = EngineError(f"the engine's books were wrong: {error}; restart it, and report this")
            self._engine.start_over()  # whoever comes before the restart gets a free pool: the old one may mix up KV
        self._last_check = time.monotonic()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except StepError as error:
            logger.error("%s", error)
            self._trouble = error
            self._post((request_id, error) for request_id in error.request_ids)
        else:
            self._trouble = None
            self._post((output.request_id, output) for output in outputs)
        self._last_step = time.monotonic()
        self._next_check = max(self._last_step + CHECK_AFTER_SECONDS, self._last_check + CHECK_EVERY_SECONDS)

    def _post(self, news: Iterable[tuple[str, Output | JPagedError]]) -> None:
        """Give outputs and errors to their readers: one call of each event loop, however many requests it reads."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Output | JPagedError]]] = defaultdict(list)
        for request_id, latest in news:
            stream = self._live[request_id]
            if isinstance(latest, JPagedError) or latest.finished:
                del self._live[request_id]
            by_loop[stream.loop].append((stream, latest))
        for loop, latest_of in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, latest_of)
            except RuntimeError:  # the loop was closed over running generators: nobody reads any more
                gone = [request_id for request_id, stream in self._live.items() if stream.loop is loop]
                self._engine.abort(gone)
                for request_id in gone:
                    del self._live[request_id]


def _put_all(latest_of: list[tuple[_Stream, Output | JPagedError]]) -> None:
    for stream, latest in latest_of:
        stream.put(latest)
