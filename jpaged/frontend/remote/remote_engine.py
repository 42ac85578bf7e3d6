"""An engine in another process, as the server of a front end sees it. It has the interface of `serving.engine_client`.

Called by: the server's routes, on the event loop of the front end.
Owns: the streams of its requests, and the tokeniser's threads.
Never: imports JAX.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

from jpaged.engine.engine import Output
from jpaged.engine.input.prompt_reader import CheckedPrompt, Prompt, PromptReader
from jpaged.engine.output.answer_writer import AnswerWriter
from jpaged.engine.output.stop_strings import stop_automaton
from jpaged.engine.strategies.pooled_outputs import check_task
from jpaged.errors import EngineError, JPagedError
from jpaged.frontend.output_stream import OutputStream
from jpaged.frontend.remote.channel import Channel
from jpaged.frontend.remote.messages import (
    TOKENS,
    Abort,
    Answer,
    AskReport,
    Begin,
    Call,
    Draining,
    Fatal,
    FrameReader,
    Reported,
    Results,
    Stop,
    frame,
    message_of_engine,
    tokens_of,
)
from jpaged.frontend.remote.questions import Questions
from jpaged.frontend.remote.remote_adapters import RemoteAdapters
from jpaged.frontend.remote.texts import RequestTexts
from jpaged.frontend.remote.welcome import Welcome
from jpaged.frontend.tokenising import TokeniserThreads, prompt_length, reading_prompt
from jpaged.lora.request import LoRARequest
from jpaged.metrics import EngineMetricsSnapshot
from jpaged.outputs import (
    EngineStats,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    WeightUpdate,
    WeightVersion,
)
from jpaged.params.pooling import PooledModel, PoolingParams
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.requester import current_client
from jpaged.snapshot import EngineSnapshot

GONE = "the engine's process has ended"
POLL_SECONDS = 0.2  # between two questions of `wait_until_ready`


@dataclasses.dataclass(eq=False, slots=True)
class _Remote:
    """A request in the engine."""

    stream: OutputStream
    texts: RequestTexts | None       # None: the engine makes the text, or there is none
    on_admitted: Callable[[], None] | None


class RemoteEngine:
    """The engine's side of everything: see `EngineClient`."""

    def __init__(self, sock: socket.socket, questions: socket.socket):
        """Wait until the engine is built. Raises EngineError if it is not.

        sock, questions: connected to a `FrontEndLink`.
        """
        welcome, frames = _welcome(sock)
        self._questions = Questions(questions)
        self.config = welcome.config
        self.default_sampling_params = welcome.default_sampling_params
        self.max_num_seqs, self.num_engines = welcome.max_num_seqs, welcome.num_engines
        self.pooling: PooledModel | None = welcome.pooling
        self._limits = welcome.limits
        self._has_queue_limits = welcome.has_queue_limits
        self._tokenizer = welcome.tokenizer
        self._prompts = PromptReader(welcome.limits, welcome.tokenizer)
        self._writer = AnswerWriter(welcome.tokenizer)
        self._tokenising = TokeniserThreads()
        self._requests: dict[int, _Remote] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._ended: EngineError | None = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._when_fatal: list[Callable[[EngineError], None]] = []
        self._channel = Channel(sock, self._receive, self._lost, frames)
        self._is_ready = False
        self._report: Callable[[], bytes] = lambda: b""
        self._drain: Callable[[bool], None] = lambda _: None

    async def connect(self) -> None:
        """Begin to read, on this event loop."""
        await self._channel.open()

    # -- requests -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        refuse_cut: bool = False,
        on_admitted: Callable[[], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `AsyncLLM.generate`."""
        outputs = self._outputs(prompt, sampling_params, request_id, priority, refuse_cut, on_admitted, lora_request)
        return cast(AsyncGenerator[RequestOutput, None], outputs)

    def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str | None = None, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """See `AsyncLLM.encode`."""
        outputs = self._outputs(prompt, pooling_params, request_id, priority)
        return cast(AsyncGenerator[PoolingRequestOutput[Any], None], outputs)

    async def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        priority: int,
        refuse_cut: bool = False,
        on_admitted: Callable[[], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Output, None]:
        request_id = f"request-{uuid.uuid4().hex}" if request_id is None else request_id
        metrics = RequestMetrics(arrival_time=time.monotonic())
        self._check_open()
        if self._has_queue_limits:  # before the prompt is tokenised
            await self._call("check_room")
        checked = await self._tokenising.run(prompt_length(prompt), partial(self._read, prompt, params))
        texts = self._texts(request_id, checked, params, metrics)
        own: SamplingParams | PoolingParams = params
        if texts is not None:
            assert isinstance(params, SamplingParams)
            final = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop
            kind = RequestOutputKind.FINAL_ONLY if final else RequestOutputKind.DELTA
            own = dataclasses.replace(params, detokenize=False, stop=None, output_kind=kind)
        if isinstance(own, PoolingParams):
            own = dataclasses.replace(own, prompt_name=None)  # the token ids have the prompt
        deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        stream = OutputStream(asyncio.get_running_loop(), deltas=deltas)
        number = next(self._numbers)
        known: dict[str, Any] = {"prompt_token_ids": checked.token_ids}
        if checked.type_1_from is not None:
            known["token_type_ids"] = checked.token_type_ids
        if checked.cache_salt:
            known["cache_salt"] = checked.cache_salt
        if checked.prediction:
            known["prediction"] = list(checked.prediction)
        self._requests[number] = _Remote(stream, texts, on_admitted)
        try:
            self._send(
                Begin(
                    number, request_id, texts is not None, known, own, current_client.get(), priority, refuse_cut,
                    lora_request,
                )
            )  # fmt: skip
            while True:
                output = await stream.get()
                if output.prompt is None:
                    output.prompt = checked.text
                yield output
                if output.finished:
                    return
        finally:
            if self._requests.pop(number, None) is not None:
                with contextlib.suppress(EngineError):
                    self._send(Abort(number))

    def _read(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, cancelled: Callable[[], bool]
    ) -> CheckedPrompt:
        """Check and tokenise a prompt, in a thread. The engine checks all the rest."""
        check_task(self._limits.pooling, params)
        if isinstance(params, SamplingParams) and params.stop and self._tokenizer is not None:
            stop_automaton(tuple(params.stop))  # cached, and built here because no stream waits for it
        with reading_prompt():
            name = params.prompt_name if isinstance(params, PoolingParams) else None
            return self._prompts.read(prompt, cast(Any, params), cancelled, name)

    def _texts(
        self, request_id: str, checked: CheckedPrompt, params: SamplingParams | PoolingParams, metrics: RequestMetrics
    ) -> RequestTexts | None:
        """The text of a request. None: the engine makes it, because it chooses among answers, or waits for their ends.
        """
        if (
            isinstance(params, PoolingParams) or params.chooses or params.use_beam_search
            or self._tokenizer is None or self._limits.returns_routed_experts
        ):  # fmt: skip
            return None
        return RequestTexts(
            self._writer, params, request_id, checked.text, checked.token_ids, self._limits.end_token_ids, metrics
        )

    # -- messages -------------------------------------------------------------------------------------------------

    def _receive(self, kind: int, content: bytes) -> None:
        if kind == TOKENS:
            self._take_tokens(*tokens_of(content))
            return
        match message_of_engine(content):
            case Results(pairs):
                for number, result in pairs:
                    self._take(number, result)
            case Answer(identity, value, error):
                if future := self._calls.pop(identity, None):
                    with contextlib.suppress(Exception):  # the caller has left
                        future.set_result(value) if error is None else future.set_exception(error)
            case Draining(draining):
                self._drain(draining)
            case AskReport(identity):
                self._send(Reported(identity, self._report()))
            case Fatal(error):
                self._fail(cast(EngineError, error))

    def _take_tokens(self, numbers: Sequence[int], token_ids: Sequence[int]) -> None:
        """Hand the tokens of a step to their streams. Several tokens of a stream follow each other."""
        index, count = 0, len(numbers)
        while index < count:
            number, first = numbers[index], index
            index += 1
            while index < count and numbers[index] == number:
                index += 1
            request = self._requests.get(number)
            if request is None or request.texts is None:
                continue
            try:
                output = request.texts.tokens(list(token_ids[first:index]))
            except Exception as error:  # the text cannot be decoded: only this request fails
                self._fail_request(number, error)
                continue
            self._tell_stopped(number, request.texts)
            if output is not None:
                request.stream.put(output)

    def _take(self, number: int, result: Output | JPagedError | None) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        if isinstance(result, JPagedError):  # the engine may have refused the request
            del self._requests[number]
            request.stream.put(result)
            return
        if request.on_admitted is not None:
            request.on_admitted()
            request.on_admitted = None
        if result is None:
            return
        output: Output | None = result
        if request.texts is not None:
            assert isinstance(result, RequestOutput)
            try:
                output = request.texts.output(result)
            except Exception as error:
                self._fail_request(number, error)
                return
            self._tell_stopped(number, request.texts)
        if result.finished:
            del self._requests[number]
        if output is not None:
            request.stream.put(output)

    def _fail_request(self, number: int, error: Exception) -> None:
        """End a request whose text cannot be made."""
        request = self._requests.pop(number)
        request.stream.put(EngineError(f"the text of an answer could not be made: {type(error).__name__}: {error}"))
        with contextlib.suppress(EngineError):
            self._send(Abort(number))

    def _tell_stopped(self, number: int, texts: RequestTexts) -> None:
        for index, num_tokens in texts.stopped:
            self._send(Stop(number, index, num_tokens))
        texts.stopped.clear()

    def _send(self, message: object) -> None:
        self._check_open()
        try:
            self._channel.send(frame(message))
        except RuntimeError:
            raise EngineError(GONE) from None

    def _check_open(self) -> None:
        if self._ended is not None:
            raise EngineError(str(self._ended))

    def _lost(self) -> None:
        """The engine's process is gone."""
        if self._is_closing:
            self._ended = EngineError("the engine is closed: make a new one")
        self._fail(self._ended or EngineError(GONE))

    def _fail(self, error: EngineError) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = error
            callbacks, self._when_fatal = self._when_fatal, []
        for number in tuple(self._requests):
            self._requests.pop(number).stream.put(EngineError(str(error)))  # its own, because a traceback grows
        for future in self._calls.values():
            with contextlib.suppress(Exception):
                future.set_exception(error)
        self._calls.clear()
        if not self._is_closing:
            for callback in callbacks:
                callback(error)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _submit(self, name: str, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Call a method of the engine. Any thread may call it."""
        identity, future = next(self._call_numbers), Future[Any]()
        self._calls[identity] = future
        try:
            self._send(Call(identity, name, arguments, keywords))
        except EngineError:
            self._calls.pop(identity, None)
            raise
        return future

    async def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        return await asyncio.wrap_future(self._submit(name, *arguments, **keywords))

    async def check_health(self) -> None:
        """See `AsyncLLM.check_health`."""
        await self._call("check_health")

    async def inspect(self, engine: int = 0) -> EngineSnapshot:
        """See `AsyncLLM.inspect`."""
        return await self._call("inspect", engine)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """See `AsyncLLM.pause_generation`."""
        await self._call("pause_generation", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """See `AsyncLLM.resume_generation`."""
        await self._call("resume_generation")

    async def is_paused(self) -> bool:
        """See `AsyncLLM.is_paused`."""
        return await self._call("is_paused")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `AsyncLLM.sleep`."""
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `AsyncLLM.wake_up`."""
        await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """See `AsyncLLM.is_sleeping`."""
        return await self._call("is_sleeping")

    async def update_weights(
        self, weights: str, *, version: WeightVersion | None = None, mode: str = "keep"
    ) -> WeightUpdate:
        """See `AsyncLLM.update_weights`. weights: a path, for all front ends and the engine the same."""
        return await self._call("update_weights", str(weights), version=version, mode=mode)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `AsyncLLM.reset_prefix_cache`."""
        return await self._call("reset_prefix_cache", reset_running_requests)

    def start_profile(self, folder: str | os.PathLike[str]) -> None:
        """See `AsyncLLM.start_profile`. Not on the thread of the event loop."""
        self._submit("start_profile", os.fspath(folder)).result()

    def stop_profile(self) -> None:
        """See `AsyncLLM.stop_profile`. Not on the thread of the event loop."""
        self._submit("stop_profile").result()

    # -- other front ends: `serving.peers.Board` ------------------------------------------------------------------

    async def reports(self) -> list[bytes]:
        """The reports of all other front ends."""
        return await self._call("reports")

    def share(self, report: Callable[[], bytes], drain: Callable[[bool], None]) -> None:
        """report: makes this front end's report. drain: called when any front end begins or ends to drain."""
        self._report, self._drain = report, drain

    def tell_draining(self, draining: bool) -> None:
        """Let all front ends drain, this one too, or end it."""
        self._send(Draining(draining))

    # -- facts ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """See `AsyncLLM.stats`."""
        return self._questions.ask("stats")

    def metrics(self, engine: int = 0) -> EngineMetricsSnapshot | None:
        """See `AsyncLLM.metrics`."""
        return self._questions.ask("metrics", engine)

    @property
    def adapters(self) -> RemoteAdapters:
        """The engine's LoRA adapters."""
        return RemoteAdapters(self._questions.ask, self._submit)

    @property
    def weight_version(self) -> WeightVersion:
        """See `AsyncLLM.weight_version`."""
        return self._questions.ask("weight_version")

    @property
    def weights_problem(self) -> str | None:
        """See `AsyncLLM.weights_problem`."""
        return self._questions.ask("weights_problem")

    @property
    def is_ready(self) -> bool:
        """See `AsyncLLM.is_ready`."""
        self._is_ready = self._is_ready or self._questions.ask("is_ready")
        return self._is_ready

    def wait_until_ready(self) -> None:
        """Wait until all programs are compiled. Raises EngineError if the engine ends before."""
        while not self.is_ready:
            time.sleep(POLL_SECONDS)
            self._check_open()

    @property
    def max_model_len(self) -> int:
        """See `AsyncLLM.max_model_len`."""
        return self._limits.max_model_len

    def get_tokenizer(self) -> Any:
        """See `AsyncLLM.get_tokenizer`."""
        return self._tokenizer

    def when_fatal(self, callback: Callable[[EngineError], None]) -> None:
        """Call a function once when the engine or its process has ended by itself."""
        with self._lock:
            ended = self._ended
            if ended is None:
                self._when_fatal.append(callback)
        if ended is not None:
            callback(ended)

    def close(self) -> None:
        """End the connection. The engine goes on, and serves other front ends."""
        self._is_closing = True
        self._tokenising.close()
        self._questions.close()
        self._channel.close_from_any_thread()


def _welcome(sock: socket.socket) -> tuple[Welcome, FrameReader]:
    """Wait for the engine's first message. Returns it, and the reader that has the frames after it. Raises EngineError.
    """
    reader = FrameReader()
    sock.setblocking(True)
    while data := sock.recv(2**16):
        for _, content in reader.feed(data):
            welcome = message_of_engine(content)
            assert isinstance(welcome, Welcome)
            return welcome, reader
    raise EngineError(GONE)
