"""The engine's loop: schedule, dispatch, collect one step late, give out.

`Engine.step` is one turn of it:
1. the scheduler makes plan N, not knowing yet what step N-1 samples;
2. the runner dispatches it: the device goes from step N-1 straight to step N;
3. the runner collects step N-1, whose tokens are checked for an end, turned into text, and given out.

A request found finished in 3 has one row too many in step N. Its token is dropped when it arrives; its blocks are free
at once, because whoever gets them writes to them in a later step. Single-threaded: one thread makes all the calls.
"""

import dataclasses
import logging
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from jpaged.engine.input_processor import InputProcessor, ModelLimits, Prompt
from jpaged.engine.inspect import EngineCapture, capture
from jpaged.engine.kv_cache_manager import KVCacheManager
from jpaged.engine.output_processor import OutputProcessor
from jpaged.engine.pooling import Pooling
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduler import ScheduledStep, Scheduler, SchedulerCounters
from jpaged.engine.step_plan import Runner
from jpaged.errors import EngineError, RequestError
from jpaged.outputs import EngineStats, PoolingRequestOutput, RequestOutput
from jpaged.pooling_params import PoolingParams
from jpaged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Output = RequestOutput | PoolingRequestOutput[Any]


class StepError(EngineError):
    """A step failed on the device. `request_ids` are the requests that ended with it; the others go on."""

    def __init__(self, request_ids: tuple[str, ...], cause: Exception):
        self.request_ids = request_ids
        super().__init__(f"a step failed, and {len(request_ids)} requests with it: {cause}")


@dataclasses.dataclass(frozen=True, slots=True)
class _StepInFlight:
    step: ScheduledStep
    handle: Any


class Engine:
    """Runs requests on a runner. Owns scheduler, KV cache manager, input and output processor."""

    def __init__(
        self,
        runner: Runner,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        eos_token_id: int | None = None,
        seed: int = 0,
        enable_prefix_caching: bool = True,
        pooling: Pooling | None = None,
    ):
        self.runner = runner
        self.generated_tokens = 0
        self.inputs = InputProcessor(
            ModelLimits(
                vocab_size=runner.vocab_size,
                max_model_len=runner.max_model_len,
                max_logprobs=runner.max_logprobs,
                eos_token_ids=tuple(eos_token_ids),
                eos_token_id=eos_token_id,
                pooling=pooling,
            ),
            tokenizer,
        )
        self._prefix_cacheable = runner.prefix_cacheable if enable_prefix_caching else _never
        self._scheduler = self._new_scheduler()
        need = self._manager.most_blocks(runner.max_model_len)
        if runner.num_blocks < need:
            raise EngineError(
                f"the KV pool has {runner.num_blocks} blocks of {runner.block_size} tokens, which is less than the "
                f"{need} of one request of max_model_len={runner.max_model_len}"
            )
        self._outputs = OutputProcessor(tokenizer, pooling)
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._in_flight: _StepInFlight | None = None
        self._num_arrived = 0
        self._finished_requests = 0

    @property
    def _manager(self) -> KVCacheManager:
        return self._scheduler.manager

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._requests) or self._in_flight is not None

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, *, stream: bool = False
    ) -> None:
        """Check a request and put it into the queue. Raises RequestError."""
        self.add(self.inputs.process(request_id, prompt, params, stream=stream))

    def add(self, request: Request) -> None:
        """Put a request that `inputs.process` made into the queue. Raises RequestError if its id is in use."""
        if request.request_id in self._requests:
            raise RequestError("request_id", request.request_id, "is in use by a running request: choose another")
        seed = request.params.seed
        request.seed = self._seeds.getrandbits(64) if seed is None else seed
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._outputs.add(request)
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        """End requests now, in whatever state; their last outputs. Ids of requests that have ended are passed over."""
        live = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        return [self._end(request, RequestStatus.ABORTED) for request in live]

    def step(self) -> list[Output]:
        """One turn: outputs of requests that ended, and of streaming ones that have a new token.

        Raises StepError when the device fails a step: the requests that had a part in it have ended, their blocks are
        free, nothing computed before is reused, and the waiting requests go on with the next call.
        """
        previous = self._in_flight
        try:
            step = self._scheduler.schedule()
            self._in_flight = None if step is None else _StepInFlight(step, self.runner.dispatch(step.plan))
            result = None if previous is None else self.runner.collect(previous.handle)
        except BaseException as error:
            failed = self._fail_running()
            if not isinstance(error, Exception):
                raise  # somebody stops the program, or thinks better of it: the engine can go on either way
            raise StepError(failed, error) from error
        outputs = [] if previous is None or result is None else self._take(previous.step, result)
        if step is None and previous is None and self._requests:
            raise EngineError(f"{len(self._requests)} requests wait and none can be scheduled")
        if not self._requests and self._manager.pool.num_used:
            raise EngineError(f"no request is left, but {self._manager.pool.num_used} blocks are held")
        return outputs

    def stats(self) -> EngineStats:
        """The engine's figures."""
        pool, counters = self._manager.pool, self._scheduler.counters
        return EngineStats(
            num_blocks=pool.num_blocks,
            block_size=self._manager.block_size,
            used_blocks=pool.num_used,
            peak_used_blocks=pool.peak_used,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            generated_tokens=self.generated_tokens,
            finished_requests=self._finished_requests,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            kv_waste=counters.waste_sum / counters.steps if counters.steps else 0.0,
            compiles_after_ready=self.runner.compiles_after_ready,
        )

    def inspect(self, answer: Future[EngineCapture]) -> None:
        """Answer another thread that asks what is held now: a copy, which that thread describes."""
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(capture(self._scheduler))
            except Exception as error:  # it concerns whoever asks, and nobody whose request runs
                answer.set_exception(error)

    def reset_stats(self) -> None:
        """Begin counters and peaks anew. `compiles_after_ready` is the runner's and goes on."""
        self._scheduler.counters = SchedulerCounters()
        self._manager.pool.reset_peak()
        self.generated_tokens = self._finished_requests = 0

    def reset_prefix_cache(self) -> bool:
        """Forget everything computed before. Only while no request lives; False, and nothing is done, otherwise."""
        if self._requests:
            return False
        self._manager.pool.forget_all()
        return True

    def check_integrity(self) -> None:
        """Raise EngineError unless queues, rows, tables and pool agree. Takes time: for tests, and when idle."""
        self._scheduler.check_integrity()
        known = {*self._scheduler.running, *self._scheduler.waiting}
        if known != set(self._requests.values()):
            raise EngineError(f"{len(known)} requests are scheduled, {len(self._requests)} live")

    def start_over(self) -> None:
        """End all requests without an output, and forget everything computed before: empty queues, a free pool.

        For a caller that was thrown out of a call by a signal handler, and cannot know how far the call had come: it
        may have been anywhere, between two entries that must agree. Nothing in the old books is looked at.
        """
        fresh, old = self._new_scheduler(), self._scheduler
        fresh.counters = old.counters
        fresh.manager.pool.peak_used = old.manager.pool.peak_used
        self._finished_requests += len(self._requests)
        self._scheduler, self._requests = fresh, {}
        self._outputs.forget_all()
        self._drop_step_in_flight()

    def close(self) -> None:
        """End all requests and give the device memory back."""
        self.start_over()
        self.runner.close()

    def _new_scheduler(self) -> Scheduler:
        runner = self.runner
        return Scheduler(
            KVCacheManager(
                runner.num_blocks, runner.block_size, runner.windows, max_chunk=runner.max_num_batched_tokens
            ),
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            vocab_size=runner.vocab_size,
            prefix_cacheable=self._prefix_cacheable,
            outgrown_after=runner.outgrown_after,
        )

    def _take(self, step: ScheduledStep, result: Any) -> list[Output]:
        outputs = []
        for index, (request, samples) in enumerate(zip(step.requests, step.plan.samples.tolist(), strict=True)):
            if not samples or request.status.is_end:
                continue
            self.generated_tokens += request.pooling is None
            try:
                end = self._outputs.take(request, result, index)
            except Exception:  # whatever one request's text or log-probabilities do, the others go on
                _log_failed_output(request)
                end = RequestStatus.FAILED
            if end is not None:
                outputs.append(self._end(request, end))
            elif request.stream:
                outputs.append(self._outputs.output(request))
        return outputs

    def _end(self, request: Request, status: RequestStatus) -> Output:
        self._scheduler.finish(request, status)
        del self._requests[request.request_id]
        self._finished_requests += 1
        try:
            return self._outputs.output(request)
        except Exception:  # the end of its text could not be decoded
            _log_failed_output(request)
            request.status = RequestStatus.FAILED
            return self._outputs.output(request)

    def _fail_running(self) -> tuple[str, ...]:
        """End every request that a failed step may have touched: the running ones, and those with tokens on the way."""
        self._drop_step_in_flight()
        touched = [request for request in self._requests.values() if request.row >= 0 or request.num_in_flight]
        for request in touched:
            self._end(request, RequestStatus.FAILED)
        self._manager.pool.forget_all()
        return tuple(request.request_id for request in touched)

    def _drop_step_in_flight(self) -> None:
        """Wait for the step that runs, whose tokens nobody wants any more.

        It must not outlive the engine: with JAX 0.11 a step's end takes the GIL, and aborts a process that is ending.
        """
        dropped, self._in_flight = self._in_flight, None
        if dropped is not None:
            try:
                self.runner.collect(dropped.handle)
            except Exception as error:  # its requests have ended already
                logger.debug("a step that was dropped has failed: %s", error)


def _log_failed_output(request: Request) -> None:
    logger.exception("request %s ends: its output could not be processed", request.request_id)


def _never(prompt_len: int) -> bool:
    return False
