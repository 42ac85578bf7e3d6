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
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jpaged.engine import beams
from jpaged.engine.beam_search import BeamSearch
from jpaged.engine.grammar import GrammarCompiler, GrammarLimits
from jpaged.engine.input_processor import InputProcessor, ModelLimits, Prompt
from jpaged.engine.inspect import EngineCapture, capture
from jpaged.engine.kv_cache_manager import KVCacheManager
from jpaged.engine.output_processor import OutputProcessor
from jpaged.engine.pooling import Pooling
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.scheduler_state import ScheduledStep, SchedulerCounters, SchedulerLimits
from jpaged.engine.scheduling_options import SchedulingOptions
from jpaged.engine.step_plan import RowMask, Runner
from jpaged.errors import CapacityError, EngineError, RequestError
from jpaged.outputs import EngineStats, PoolingRequestOutput, RequestOutput
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams

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
    began: float  # seconds of time.monotonic()


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
        scheduling: SchedulingOptions = SchedulingOptions(),
        known_ids: np.ndarray | None = None,
        processors: tuple[LogitsProcessor, ...] = (),
        grammar_limits: GrammarLimits | None = None,
        jump_forward: bool = True,
    ):
        """known_ids: bool[vocab_size], ids that the runner ever samples; None = all. processors: those it has."""
        self.runner = runner
        self.scheduling = scheduling
        self.generated_tokens = 0
        self._jumps = jump_forward
        self._compiler = None
        if tokenizer is not None and pooling is None:
            self._compiler = GrammarCompiler(tokenizer, runner.vocab_size, eos_token_ids, grammar_limits)
        self.inputs = InputProcessor(
            ModelLimits(
                vocab_size=runner.vocab_size,
                max_model_len=runner.max_model_len,
                max_logprobs=runner.max_logprobs,
                eos_token_ids=tuple(eos_token_ids),
                eos_token_id=eos_token_id,
                pooling=pooling,
                known_ids=known_ids,
                processors=processors,
                priorities=scheduling.scheduling_policy == "priority",
            ),
            tokenizer,
            self._compiler,
        )
        self._prefix_cacheable = runner.prefix_cacheable if enable_prefix_caching else _never
        self._scheduler_counters = SchedulerCounters()
        self._scheduler = self._new_scheduler()
        need = self._manager.max_blocks(runner.max_model_len)
        if runner.num_blocks < need:
            raise EngineError(
                f"the KV pool has {runner.num_blocks} blocks of {runner.block_size} tokens, which is less than the "
                f"{need} of one request of max_model_len={runner.max_model_len}"
            )
        self._outputs = OutputProcessor(tokenizer, pooling)
        self._seeds = random.Random(seed)
        self._groups: dict[str, RequestGroup] = {}
        self._in_flight: _StepInFlight | None = None
        self._failure: StepError | None = None  # of a step whose sampling failed, to be raised
        self._num_arrived = 0
        self._last_collect = 0.0
        self._left_waiting = 0  # requests that the last step had no room for
        self._finished_requests = 0

    @property
    def _manager(self) -> KVCacheManager:
        return self._scheduler.manager

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._groups) or self._in_flight is not None or self._failure is not None

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        stream: bool = False,
        priority: int = 0,
    ) -> None:
        """Check a request and put it into the queue. Raises RequestError."""
        self.add(self.inputs.process(request_id, prompt, params, stream=stream, priority=priority))

    def add(self, group: RequestGroup) -> None:
        """Put a request that `inputs.process` made into the queue; waits for its grammar, if it has one.

        Raises RequestError if its id is in use, or its answers can never fit, or what its grammar's compiler raises.
        """
        if group.request_id in self._groups:
            raise RequestError("request_id", group.request_id, "is in use by a running request: choose another")
        self.check_fits(group)
        seed = group.params.seed
        seed = self._seeds.getrandbits(64) if seed is None else seed
        shares = self._prefix_cacheable(len(group.prompt_token_ids))
        for request in group.requests:
            request.admit(seed=seed, arrival=self._num_arrived + request.index)
            self._manager.admit(request, salt=group.cache_salt, shares=shares)
        self._num_arrived += len(group.requests)
        if group.search is not None:
            beams.begin(group)
            followers = []
        else:
            followers = group.requests[1:]
        if group.grammar is not None:
            grammar = group.grammar.result()
            for request in group.requests:
                request.output.matcher = grammar.matcher()
                request.output.jumps = self._jumps and not group.params.samples_forced_tokens
        self._groups[group.request_id] = group
        self._outputs.add(group)
        self._scheduler.add(group.first, followers)

    def check_capacity(self, group: RequestGroup) -> None:
        """Raise CapacityError where the queue is full. Of requests that come and go: a batch is there all at once.

        Unless the last step left somebody waiting, free rows are for those who came since: they do not count.
        """
        waiting, limits = self._scheduler.waiting, self.scheduling
        free_rows = 0 if self._left_waiting else self.runner.max_num_seqs - len(self._scheduler.running)
        if len(waiting) < free_rows:
            return
        # A request's further answers, where they wait for rows, are part of it.
        most, queued = limits.max_queued_requests, len({request.request_id for request in waiting}) - free_rows
        if most is not None and queued >= most:
            raise CapacityError(f"{queued} requests wait, max_queued_requests is {most}: try again later")
        most, tokens = limits.max_queued_tokens, len(group.prompt_token_ids)
        if most is not None and queued > 0 and waiting.num_tokens + tokens > most:
            raise CapacityError(
                f"prompts of {waiting.num_tokens:,} tokens wait, with {tokens:,} more it would be beyond "
                f"max_queued_tokens={most:,}: try again later"
            )

    def check_fits(self, group: RequestGroup) -> None:
        """Raise RequestError for several answers that cannot be held at once: they would throw each other out."""
        count, manager = len(group.requests), self._manager
        if count == 1 or (group.params.max_tokens is None and group.search is None):
            return
        total, prompt = group.first.max_total_tokens, len(group.prompt_token_ids)
        shared = prompt // manager.block_size * manager.windows.count(None)
        at_once = count if group.search is not None else min(count, self.runner.max_num_seqs)
        need = shared + at_once * (manager.max_blocks(total) - shared)
        if need > manager.pool.num_blocks:
            name = "beam_width" if group.search is not None else ("n" if group.params.best_of is None else "best_of")
            raise RequestError(
                name,
                count,
                f"so many answers of {total - prompt:,} tokens to a prompt of {prompt:,} take {need:,} blocks of "
                f"KV cache, there are {manager.pool.num_blocks:,}: ask for fewer, or a smaller max_tokens",
            )

    def prepare_grammars(self) -> None:
        """Read the tokenizer for grammars now: the first request for one would do it, while all streams stand still."""
        if self._compiler is not None:
            try:
                self._compiler.warm_up().result()
            except Exception as error:  # a tokenizer that no grammar can be made for: such requests are told so
                logger.warning("no structured output with this tokenizer: %s", error)

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        """End requests now, in whatever state; their last outputs. Ids of requests that have ended are passed over."""
        live = [self._groups[request_id] for request_id in request_ids if request_id in self._groups]
        return [self._end(group, RequestStatus.ABORTED) for group in live]

    def step(self) -> list[Output]:
        """One turn: outputs of requests that ended, and of streaming ones that have a new token.

        Raises StepError when the device fails a step: the requests that had a part in it have ended, their blocks are
        free, nothing computed before is reused, and the waiting requests go on with the next call.
        """
        previous = self._in_flight
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        try:
            step = self._scheduler.schedule()
            self._left_waiting = len(self._scheduler.waiting)
            began = time.monotonic()
            self._in_flight = None if step is None else _StepInFlight(step, self.runner.dispatch(step.plan), began)
            result = None if previous is None else self._collect(previous)
        except BaseException as error:
            failed = self._fail_running()
            if not isinstance(error, Exception):
                raise  # somebody stops the program, or thinks better of it: the engine can go on either way
            raise StepError(failed, error) from error
        outputs = [] if previous is None or result is None else self._take(previous, result)
        if self._in_flight is not None and self._in_flight.step.plan.waits_for_masks:
            outputs += self._sample(self._in_flight)
        if step is None and previous is None and self._groups:
            raise EngineError(f"{len(self._groups)} requests wait and none can be scheduled")
        if not self._groups and self._manager.pool.num_used:
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
            copied_blocks=counters.copied_blocks,
            blocks_to_host=counters.blocks_to_host,
            blocks_to_device=counters.blocks_to_device,
            host_slots=self.runner.host_slots,
            used_host_slots=0 if pool.host_tier is None else pool.host_tier.num_used,
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
        self._scheduler.counters.reset()
        self._manager.pool.reset_peak()
        self.generated_tokens = self._finished_requests = 0

    def reset_prefix_cache(self) -> bool:
        """Forget everything computed before. Only while no request lives; False, and nothing is done, otherwise."""
        if self._groups:
            return False
        self._manager.pool.forget_all()
        return True

    def note_new_weights(self) -> None:
        """Have nothing be found any more that was computed before: the weights are others from the next step on.

        Requests that run go on with what they have computed; it is never shared, nor found again once given back.
        """
        self._manager.note_new_weights(request for group in self._groups.values() for request in group.requests)

    def check_integrity(self) -> None:
        """Raise EngineError unless queues, rows, tables and pool agree. Takes time: for tests, and when idle."""
        self._scheduler.check_integrity()
        known = {*self._scheduler.running, *self._scheduler.waiting}
        live = set()
        for group in self._groups.values():
            if group.search is not None:
                live.update(beam for beam in group.beams if beam.schedule.row >= 0 or not beam.schedule.on_hold)
            else:
                live.update(r for r in group.requests if not r.schedule.status.is_end and r not in group.first.schedule.followers)
        if known != live:
            raise EngineError(f"{len(known)} requests are scheduled, {len(live)} live")

    def start_over(self) -> None:
        """End all requests without an output, and forget everything computed before: empty queues, a free pool.

        For a caller that was thrown out of a call by a signal handler, and cannot know how far the call had come: it
        may have been anywhere, between two entries that must agree. Nothing in the old books is looked at.
        """
        fresh, old = self._new_scheduler(), self._scheduler
        fresh.manager.pool.peak_used = old.manager.pool.peak_used
        self._finished_requests += len(self._groups)
        self._scheduler, self._groups, self._left_waiting, self._failure = fresh, {}, 0, None
        self._outputs.forget_all()
        self._drop_step_in_flight()

    def close(self) -> None:
        """End all requests and give the device memory back."""
        self.start_over()
        self.runner.close()
        if self._compiler is not None:
            self._compiler.close()

    def _new_scheduler(self) -> Scheduler:
        runner = self.runner
        return Scheduler(
            KVCacheManager(
                runner.num_blocks, runner.block_size, runner.windows, max_chunk=runner.max_num_batched_tokens,
                host_slots=runner.host_slots, transfer_costs=runner.transfer_costs,
            ),
            SchedulerLimits(
                runner.max_num_seqs, runner.max_num_batched_tokens, runner.vocab_size, runner.longrope_switch_len
            ),
            self.scheduling,
            counters=self._scheduler_counters,
        )  # fmt: skip

    def _sample(self, waiting: _StepInFlight) -> list[Output]:
        """Tell the step that runs what may be sampled, now that the tokens before are known.

        Gives the last outputs of requests that this ends, whose grammar turns out to allow nothing or to cost too much.
        """
        masks, ended = [], []
        for request, samples in zip(waiting.step.requests, waiting.step.plan.samples.tolist(), strict=True):
            extras = request.extras
            if not samples or extras is None or not extras.follows_tokens or request.schedule.row < 0:
                continue
            if request in waiting.step.discarded:
                continue
            try:
                masks.append(RowMask(request.schedule.row, request.mask()))
            except Exception as error:  # others go on
                group = self._groups[request.request_id]
                _note_failed_output(request, error)
                self._scheduler.finish(request, RequestStatus.FAILED)
                if group.has_ended:
                    ended.append(group)
        outputs = [self._last_output(group) for group in ended]
        try:
            handle = self.runner.sample(waiting.handle, masks)
        except BaseException as error:
            failed = self._fail_running()
            if not isinstance(error, Exception):
                raise
            self._failure = StepError(failed, error)  # raised by the next call: first this one's outputs are given
            self._failure.__cause__ = error
            return outputs
        self._in_flight = dataclasses.replace(waiting, handle=handle)
        return outputs

    def _collect(self, previous: _StepInFlight) -> Any:
        """What a step gave. The time since the last one's end tells what it cost, as long as the device is busy."""
        result = self.runner.collect(previous.handle)
        now = time.monotonic()
        self._scheduler.note_seconds(previous.step, now - max(self._last_collect, previous.began))
        self._last_collect = now
        return result

    def _take(self, previous: _StepInFlight, result: Any) -> list[Output]:
        step = previous.step
        news: dict[RequestGroup, None] = {}  # groups of which something is to be told, in order
        now, token_ids = time.monotonic(), result.token_ids.tolist()
        for request in self._take_scores(step, result):
            news[self._groups[request.request_id]] = None
        for index, request in self._scheduler.results(step):
            group = self._groups[request.request_id]
            self.generated_tokens += group.pooling is None
            try:
                if group.pooling is not None:
                    end = self._outputs.take_pooled(group, request, result, index)
                elif group.search is None:
                    end = self._outputs.take(request, token_ids[index], now, result, index)
                    if end is None and request.output.jumps:
                        end = self._jump(request, now)
                else:
                    end = self._take_beam(group, group.search, request, result, index)
            except Exception as error:  # whatever one request's text or log-probabilities do, the others go on
                _note_failed_output(request, error)
                end = RequestStatus.FAILED
            if end is not None:
                for ended in [request] if group.search is None else group.requests:
                    self._scheduler.finish(ended, end)
            if end is not None or self._outputs.is_due(group, request):
                news[group] = None
        outputs = []
        for group in news:
            if group.has_ended:
                outputs.append(self._last_output(group))
            elif self._outputs.streams(group):
                outputs.append(self._outputs.output(group))
        return outputs

    def _take_scores(self, step: ScheduledStep, result: Any) -> list[Request]:
        """Keep what a step tells about prompts; the requests that this ends, whose log-probabilities have no text."""
        first, ended = 0, []
        for request, count in step.scored:
            if not request.schedule.status.is_end:
                try:
                    self._outputs.take_scores(request, result.scores, slice(first, first + count))
                except Exception as error:  # the others go on
                    ended.append(request)
                    _note_failed_output(request, error)
                    for each in self._groups[request.request_id].requests:
                        self._scheduler.finish(each, RequestStatus.FAILED)
            first += count
        return ended

    def _jump(self, request: Request, now: float) -> RequestStatus | None:
        """Take the tokens that a request's grammar forces: it goes on from the last of them. Its end, if that is it."""
        forced = [] if request.output.matcher is None else request.output.matcher.forced_tokens()
        # one of them is sampled as fast; beyond that it pays if what it adds to the step is less than what it saves
        if len(forced) < 2 or len(forced) - 1 <= self.runner.min_jump_per_request * len(self._scheduler.running):
            return None
        for token_id in forced:
            self.generated_tokens += 1
            end = self._outputs.append(request, token_id, now)
            if end is not None:
                return end
        self._scheduler.discard_in_flight(request)
        return None

    def _take_beam(
        self, group: RequestGroup, search: BeamSearch, request: Request, result: Any, index: int
    ) -> RequestStatus | None:
        if beams.take(group, request, result, index) and not beams.advance(group, search, self._scheduler):
            return RequestStatus.STOPPED
        return None

    def _end(self, group: RequestGroup, status: RequestStatus) -> Output:
        """End what has not ended of a group; its last output."""
        for request in group.requests:
            if not request.schedule.status.is_end:
                self._scheduler.finish(request, status)
        return self._last_output(group)

    def _last_output(self, group: RequestGroup) -> Output:
        del self._groups[group.request_id]
        self._finished_requests += 1
        try:
            output = self._outputs.output(group)
        except Exception as error:  # the end of its text could not be decoded
            for request in group.requests:
                _note_failed_output(request, error)
                request.schedule.status = RequestStatus.FAILED
            output = self._outputs.output(group)
        self._outputs.forget(group)
        return output

    def _fail_running(self) -> tuple[str, ...]:
        """End every request that a failed step may have touched: the running ones, and those with tokens on the way."""
        self._drop_step_in_flight()
        touched = [
            group
            for group in self._groups.values()
            if any(request.schedule.row >= 0 or request.schedule.num_in_flight for request in group.requests)
        ]
        for group in touched:
            self._end(group, RequestStatus.FAILED)
        self._manager.pool.forget_all()
        return tuple(group.request_id for group in touched)

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


def _note_failed_output(request: Request, error: Exception) -> None:
    if isinstance(error, RequestError):  # of a grammar: told to whoever asked for it
        request.output.stop_reason = error.accepted
        logger.warning("request %s ends: %s", request.request_id, error)
    else:
        logger.error("request %s ends: its output could not be processed", request.request_id, exc_info=error)


def _never(prompt_len: int) -> bool:
    return False
