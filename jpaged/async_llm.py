"""`AsyncLLM`: runs requests that arrive at any time, on asyncio. The server uses it.

1. `generate` tokenises and checks the prompt in a thread (`frontend/tokenising.py`). A long prompt delays no stream and
   no short prompt.
2. It hands the request to the engine's thread (`frontend/engine_thread.py`), which runs all requests together. With
   data_parallel_size there are several engines, and a router chooses one (`frontend/engine_threads.py`).
3. Each output reaches the generator through an `OutputStream`. An output contains all earlier output, so a slow reader
   skips outputs and none pile up. With output_kind DELTA, unread outputs are joined.
4. Closing or cancelling a generator aborts its request.
"""

import asyncio
import contextlib
import dataclasses
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack, cast

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.engine import Engine, Output
from jpaged.engine.input.input_processor import Prompt
from jpaged.engine.request_group import RequestGroup
from jpaged.engine_arguments import EngineArguments
from jpaged.errors import CapacityError, EngineError, JPagedError, RequestError
from jpaged.frontend.build import build_engine
from jpaged.frontend.engine_access import EngineAccess
from jpaged.frontend.engine_thread import EngineThread
from jpaged.frontend.engine_threads import EngineThreads
from jpaged.frontend.output_stream import OutputStream
from jpaged.frontend.pausing import check_level, pause_mode, update_mode, wake_tags
from jpaged.frontend.prefill import prefill
from jpaged.frontend.tokenising import TokeniserThreads, prompt_length, reading_prompt
from jpaged.frontend.watchdog import STALL_SECONDS
from jpaged.lifetime import close_when_collected, using_device
from jpaged.lora.request import LoRARequest
from jpaged.outputs import PoolingRequestOutput, RequestOutput, ScoreOutput, WeightUpdate, WeightVersion
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.params.scoring import ScoringParams
from jpaged.requester import Requester, current_client
from jpaged.snapshot import EngineSnapshot

PROGRAMS_SECONDS = 0.05  # poll interval of a request that waits for its programs


class AsyncLLM(EngineAccess):
    """A model that serves requests on asyncio. Arguments and errors as for `jpaged.LLM`; the constructor blocks.

    `close`, or the end of an `async with` block, frees the device memory; garbage collection does too.

    watchdog_seconds: a longer step is logged with its program and its stack, and makes `check_health` fail.
    """

    @using_device()
    def __init__(
        self,
        model: Any,
        *,
        params: Any = None,
        layout: Any = None,
        mesh: Any = None,
        watchdog_seconds: float = STALL_SECONDS,
        **engine_options: Unpack[EngineArguments],
    ):
        if not 0 < watchdog_seconds < float("inf"):
            raise RequestError("watchdog_seconds", watchdog_seconds, "must be a number of seconds above 0")
        built = build_engine(
            model, params, engine_options, layout=layout, mesh=mesh, progress=True, background=True
        )
        super().__init__(built)
        built.engine.inputs.prepare_grammars()
        self._tokenising = TokeniserThreads()
        self._streams: dict[str, OutputStream] = {}  # by request id, of all running generators
        self._engine_thread: EngineThread | EngineThreads
        if built.others:
            engines, routing = (built.engine, *built.others), self.config.data_parallel_routing
            self._engine_thread = EngineThreads(
                engines, routing, num_prefill=self.config.prefill_engines, watchdog_seconds=watchdog_seconds
            )
        else:
            self._engine_thread = EngineThread(built.engine, watchdog_seconds=watchdog_seconds)
        self._collected = close_when_collected(self, partial(_close, self._engine_thread, self._tokenising))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        refuse_cut: bool = False,
        on_admitted: Callable[[], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt as they arrive. The last one is `finished`. `output_kind` sets their content.

        prompt:          one of the forms that `LLM.generate` accepts.
        sampling_params: None: the model's generation_config.json.
        request_id:      generated if None; must not be in use.
        priority:        lower ones start first, with scheduling_policy="priority".
        refuse_cut:      raise RequestError if prompt and max_tokens exceed max_model_len. Otherwise the answer ends
            at max_model_len, with finish_reason 'length'.
        on_admitted:     called when the queue has accepted the request.
        lora_request:    LoRA adapter; None: the base model alone. Needs enable_lora=True.

        A beam search and `best_of` yield one output, at the end. Raises, before the first output, RequestError for a
        bad request and CapacityError if the queue is full. Raises EngineError when the device fails. Closing or
        cancelling the generator aborts the request.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        outputs = self._outputs(prompt, params, request_id, priority, refuse_cut, on_admitted, lora_request)
        return cast(AsyncGenerator[RequestOutput, None], outputs)

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Yield the one output of a prompt, from a pooling engine: an embedding, or a classifier's probabilities.

        Its `outputs` are None if the request was aborted. Otherwise as `generate`; see `LLM.embed` and `LLM.classify`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        outputs = self._outputs(prompt, params, request_id, priority)
        return cast(AsyncGenerator[PoolingRequestOutput[Any], None], outputs)

    async def score(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        num_prompt_tokens: int = 1,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> ScoreOutput:
        """Return how likely the tokens of a text are, given the tokens before them. As `LLM.score`, for one text.

        request_id, priority, lora_request: as for `generate`. Raises the errors of `generate`, and EngineError if the
        request was aborted. Cancelling the call aborts the request. An update of the weights meanwhile, with mode
        'keep' or 'recompute', does not change the tokens that were scored before it.
        """
        params = ScoringParams(sampling_params, num_prompt_tokens)
        outputs = self._outputs(prompt, params, request_id, priority, lora_request=lora_request)
        async with contextlib.aclosing(outputs):
            output = cast(RequestOutput, await anext(outputs))  # there is one
        if output.score is None:
            reason = output.outputs[0].finish_reason
            raise EngineError(f"the text was not scored: the request ended with finish_reason {reason!r}")
        return output.score

    async def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | ScoringParams,
        request_id: str | None,
        priority: int,
        refuse_cut: bool = False,
        on_admitted: Callable[[], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Output, None]:
        request_id = f"request-{uuid.uuid4().hex}" if request_id is None else request_id
        if request_id in self._streams:
            raise RequestError("request_id", request_id, "is in use by a running request: choose another")
        loop = asyncio.get_running_loop()
        deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        stream = self._streams[request_id] = OutputStream(loop, deltas=deltas)
        in_engine = False
        left = threading.Event()
        try:
            await self.submit(
                stream, prompt, params, request_id, priority, refuse_cut, lora_request, has_left=left.is_set
            )
            in_engine = True
            if on_admitted is not None:
                on_admitted()
            if stream.aborted:
                self._engine_thread.abort(request_id)
            while True:
                try:
                    output = await stream.get()
                except JPagedError:
                    in_engine = False
                    raise
                in_engine = not output.finished
                yield output
                if output.finished:
                    return
        finally:
            left.set()
            del self._streams[request_id]
            if in_engine:
                self._engine_thread.abort(request_id)

    async def submit(
        self,
        stream: Any,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | ScoringParams,
        request_id: str,
        priority: int = 0,
        refuse_cut: bool = False,
        lora_request: LoRARequest | None = None,
        *,
        has_left: Callable[[], bool],
    ) -> None:
        """Add a request whose outputs go to `stream`. Returns when the queue has accepted it. Raises as `generate`.

        stream:   an `OutputStream`, or that of a front end in another process.
        has_left: returns True once the client has left; any thread may call it.
        """
        loop = asyncio.get_running_loop()
        requester = Requester(current_client.get(), has_left)
        self._engine_thread.check_room()  # checks the process too: a forked child has no threads
        adapter = self._adapter_of(lora_request)
        if adapter is not None:  # other requests go on while it is read
            await asyncio.shield(asyncio.wrap_future(adapter, loop=loop))  # other requests may wait for it, too
        work = partial(self._process, request_id, prompt, params, priority, refuse_cut, requester, adapter)
        request_group, prefixes = await self._tokenising.run(prompt_length(prompt), work)
        if request_group.grammar is not None:
            await asyncio.wrap_future(request_group.grammar, loop=loop)
        with self._engine_thread.routed(request_group, prefixes) as engine_thread:
            if isinstance(self._engine_thread, EngineThreads) and self._engine_thread.num_prefill:
                inputs = self.engine.inputs
                await prefill(self._engine_thread, inputs, request_group, prefixes, engine_thread, priority)
            await self._wait_for_programs(request_group, engine_thread)
            engine_thread.add(request_group, stream)

    def _process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | ScoringParams,
        priority: int,
        refuse_cut: bool,
        requester: Requester,
        adapter: Future[LoadedAdapter] | None,
        cancelled: Callable[[], bool],
    ) -> tuple[RequestGroup, Sequence[int]]:
        """Return the request group, and the names of its prefixes for the router."""
        process = partial(self.engine.inputs.process, request_id, prompt, params, stream=True, priority=priority)
        with reading_prompt():
            request_group = process(
                refuse_cut=refuse_cut, cancelled=cancelled, requester=requester, adapter=adapter
            )
            return request_group, self._engine_thread.prefixes(request_group)

    async def _wait_for_programs(self, request_group: RequestGroup, engine_thread: EngineThread) -> None:
        """Wait until the programs of a request are compiled. Other requests continue."""
        sampler = max(request.sampler for request in request_group.requests)
        scores = any(request.scores_prompt for request in request_group.requests)
        while not engine_thread.runner.can_run(sampler, scores=scores):
            await asyncio.sleep(PROGRAMS_SECONDS)
            engine_thread.commands.check_open()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Their generators yield a last output with finish_reason 'abort'. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            stream = self._streams.get(one)
            if stream is not None:
                stream.aborted = True
                self._engine_thread.abort(one)

    def abort_now(self, request_id: str) -> None:
        """End a request that `submit` has added. An id that is not in use is ignored."""
        self._engine_thread.abort(request_id)

    def stop_answer(self, request_id: str, index: int, num_tokens: int) -> None:
        """End an answer of `submit`, whose text has ended after `num_tokens` tokens; later tokens do not count."""
        self._engine_thread.stop(request_id, index, num_tokens)

    def check_room(self) -> None:
        """Raise CapacityError if the queue is full, NoWeightsError without weights, EngineError if it has ended."""
        self._engine_thread.check_room()

    async def add_lora(
        self, adapter: LoRARequest | str, arrays: Mapping[str, Any] | None = None, *, lora_alpha: float | None = None,
        use_rslora: bool = False,
    ) -> bool:  # fmt: skip
        """Read a LoRA adapter before it is needed, or add one of live arrays. As `LLM.add_lora`."""
        future = self._added_adapter(adapter, arrays, lora_alpha, use_rslora=use_rslora)
        await asyncio.shield(asyncio.wrap_future(future))
        return True

    async def remove_lora(self, adapter: str | int) -> bool:
        """Forget a LoRA adapter, by name or lora_int_id. Running requests keep it. False if there is none."""
        return self.adapters.remove(adapter)

    async def list_loras(self) -> set[int]:
        """Return the lora_int_id of each LoRA adapter that the engine knows."""
        return {known.int_id for known in self.adapters.known()}

    async def check_health(self) -> None:
        """Raise EngineError if an engine has ended, its last step failed, it stalls, or its integrity check failed.

        After a failed integrity check, only a new engine is healthy again.
        """
        self._engine_thread.check_health()

    async def inspect(self, engine: int = 0) -> EngineSnapshot:
        """Return the state of the KV pool, the request table and the queue, all at one moment between two steps.

        engine: index of the engine, with data_parallel_size.
        The snapshot contains no prompts. Raises EngineError when the engine is closed or has ended.
        """
        self._engine_at(engine)
        captured = await asyncio.wrap_future(self._engine_thread.inspect(engine))
        snapshot = await asyncio.to_thread(captured.snapshot)
        return dataclasses.replace(snapshot, engine=engine, num_engines=self.num_engines)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while a request runs.

        With data_parallel_size, each engine resets its own cache. False then means that at least one did not.
        reset_running_requests: preempt running requests instead. They continue, and recompute their KV.
        """
        answer = self._engine_thread.reset_prefix_cache(reset_running_requests=reset_running_requests)
        return await asyncio.wrap_future(answer)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop running steps. New requests wait until `resume_generation`. Returns when no step runs.

        mode:        'abort': running requests end, with finish_reason 'abort'. 'wait': they finish first. 'keep': they
            stop, and continue later.
        clear_cache: empty the prefix cache. Kept requests recompute their KV.
        """
        await asyncio.wrap_future(self._engine_thread.pause(pause_mode(mode), clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        """End a pause. Raises RequestError while the engine sleeps, and NoWeightsError without weights."""
        await asyncio.wrap_future(self._engine_thread.resume())

    async def update_weights(
        self, weights: Any, *, version: WeightVersion | None = None, layout: Any = None, mode: str = "keep"
    ) -> WeightUpdate:
        """Replace all weights, as `LLM.update_weights`.

        mode: running requests: 'wait': they finish first, and new ones wait. 'keep': they continue with the new
            weights, and keep the KV of the old ones. 'recompute': they continue, and recompute their KV. 'abort': they
            end, with finish_reason 'abort'.

        `CompletionOutput.weight_changes` has the first token that the new weights have computed.
        """
        treatment = update_mode(mode)
        leaves = await asyncio.to_thread(self._prepared, weights, layout, version)
        return await asyncio.wrap_future(self._engine_thread.update_weights(leaves, treatment, version))

    def _served(self) -> Sequence[Engine]:
        threads = zip(self.engines, self._engine_thread.threads, strict=True)
        return [engine for engine, thread in threads if thread.commands.is_open] or self.engines

    def _is_updating(self, engine: Engine) -> bool:
        return self._engine_thread.threads[self.engines.index(engine)].is_updating

    async def is_paused(self) -> bool:
        """Return True while new requests are held."""
        return self._engine_thread.is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and free device memory. New requests wait until `wake_up`.

        level: 0: only pause. 1: free the KV pool, and move the weights to the host. Live arrays (`params`) stay on the
            device: only their owner may delete them. On CPU the weights stay too. 2: free the KV pool, and discard the
            weights. Of live arrays, the references are dropped. They are not copied: `update_weights` gives new ones,
            before or after `wake_up`.
        mode:  as in `pause_generation`. Kept requests recompute their KV.
        Raises CapacityError while programs are still being compiled, because compiling uses the weights.
        """
        check_level(level)
        if level > 0 and not self.is_ready:
            raise CapacityError("the engine cannot sleep while programs are being compiled: try later")
        answer = self._engine_thread.pause(pause_mode(mode), clear_cache=level > 0, level=level)
        await asyncio.wrap_future(answer)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` freed, and resume. Compiles nothing, and does not change answers.

        tags: 'weights' or 'kv_cache', to wake up one part only. The engine resumes when both are awake. After level 2
            it also needs `update_weights`. Until then, requests from before `wake_up` wait, and new ones raise
            NoWeightsError.
        Raises EngineError if the device has too little free memory; the engine then keeps sleeping.
        """
        await asyncio.wrap_future(self._engine_thread.wake_up(wake_tags(tags)))

    async def is_sleeping(self) -> bool:
        """Return True while memory that `sleep` freed is not allocated."""
        return self._engine_thread.is_sleeping

    def when_fatal(self, callback: Callable[[EngineError], None]) -> None:
        """Call a function once, on any thread, when the engine (with data_parallel_size: all engines) has failed."""
        self._engine_thread.when_fatal(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Abort running requests (finish_reason 'abort'), and free the device memory. No effect in a forked process."""
        if self._made_in.is_another:
            return
        self._collected.detach()
        _close(self._engine_thread, self._tokenising)
        if self._adapters is not None:
            self._adapters.close()


def _close(engine_thread: EngineThread | EngineThreads, tokenising: TokeniserThreads) -> None:
    """End an AsyncLLM, which may be gone."""
    engine_thread.close()
    tokenising.close()
