"""The engine's loop: schedule, dispatch, collect one step late, emit.

Called by: one thread, which belongs to the caller (`LLM`), to `frontend/engine_thread.py` or to `engines_run.py`.
Owns: the scheduler, the pipeline, the output processor, and the counters.
Never: imports JAX, or asks what kind of answer a request wants. `step` does not wait for the newest step; `flush` does.

One call of `Engine.step`:

1. The scheduler makes plan N. It does not know yet which tokens step N-1 samples.
2. The runner dispatches plan N. The device goes from step N-1 straight to step N.
3. The runner collects step N-1.
4. The output processor appends its tokens, ends requests, and emits outputs.
5. If masks of step N depend on these tokens, step N samples only now.

A request that ends in 4 by its text still has a row in step N, and that token is dropped when it arrives. Plan N leaves
out a request that ends by its length. Blocks are free at once: the next owner writes to them in a later step.
"""

import logging
import random
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from jpaged.engine.engine_options import EngineOptions
from jpaged.engine.input.input_processor import InputProcessor, ModelLimits, Prompt
from jpaged.engine.kv_cache.handover import KVHandover
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.observe.engine_metrics import EngineMetrics
from jpaged.engine.observe.engine_stats import EngineCounters, SpeculationCounters, collect_stats
from jpaged.engine.observe.inspect import EngineCapture, capture
from jpaged.engine.observe.step_log import StepLog
from jpaged.engine.output.answer_writer import AnswerWriter
from jpaged.engine.output.output_processor import OutputProcessor
from jpaged.engine.request import RequestStatus
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduling.admission import AdmissionControl
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduler_state import SchedulerCounters, SchedulerLimits
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.engine.spare_time import SpareTime
from jpaged.engine.speculation.speculation import Speculation
from jpaged.engine.step_pipeline import StepPipeline
from jpaged.engine.step_plan import Runner
from jpaged.engine.strategies import CollectedStep, Output, StrategyContext
from jpaged.errors import EngineError, NoWeightsError, RequestError
from jpaged.metrics import EngineMetricsSnapshot, PhaseSeconds
from jpaged.outputs import EngineStats, WeightUpdate, WeightVersion
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.params.scoring import ScoringParams

__all__ = ["Engine", "EngineOptions", "Output", "SchedulingOptions", "StepError"]

logger = logging.getLogger(__name__)


class StepError(EngineError):
    """A step failed on the device. The requests `request_ids` ended with it; all others continue."""

    def __init__(self, request_ids: tuple[str, ...], cause: Exception):
        self.request_ids = request_ids
        super().__init__(f"a step failed, and {len(request_ids)} requests with it: {cause}")


class Engine:
    """Runs requests on a runner.

    inputs:    checks prompts and parameters, and makes request groups. Any thread may call it.
    admission: refuses request groups when there is no room.
    pipeline:  owns the step in flight, and the runner.
    scheduler: owns the queues and, through its KV cache manager, the blocks. `start_over` replaces it.
    seeds:     generates seeds for requests without one.
    """

    def __init__(
        self,
        runner: Runner[Any],
        tokenizer: Any = None,
        options: EngineOptions = EngineOptions(),
        *,
        seeds: random.Random | None = None,
    ):
        """Make an engine without requests.

        tokenizer: a transformers tokenizer; None: prompts and answers are token ids only.
        seeds:     generates seeds for requests without one; None: a new generator, from the options' seed. Engines that
            divide the requests share it. Then requests get the same seeds as in one engine, if added in the same order.
        """
        self.options = options
        self.inputs = InputProcessor.create(ModelLimits.of(runner, options), tokenizer, options)
        self._phases = PhaseSeconds()
        self.pipeline = StepPipeline(runner, self._phases)
        self._writer = AnswerWriter(tokenizer)
        self._counters = EngineCounters()
        if options.speculation is not None:
            self._counters.speculation = SpeculationCounters.of(options.speculation.num_drafts)
        self._steps = StepLog()
        self._spare = SpareTime()
        self._metrics = None
        if not options.disable_log_stats:
            speculates = options.speculation is not None
            self._metrics = EngineMetrics(runner.max_model_len, self._phases, speculates=speculates)
        self.seeds = random.Random(options.seed) if seeds is None else seeds
        self._asleep: frozenset[str] = frozenset()  # as in `EngineMetricsSnapshot`
        self._num_updates = 0  # of the weights; part of every block's name
        self.weight_version: WeightVersion = 0
        self._num_arrived = 0
        self._idle_turns = 0  # consecutive turns without a step to dispatch or collect
        self._replace_state(SchedulerCounters())
        need = self._manager.max_blocks(runner.max_model_len)
        if runner.num_blocks < need:
            raise EngineError(
                f"the KV pool has {runner.num_blocks} blocks of {runner.block_size} tokens, but it needs "
                f"{need} for one request of max_model_len={runner.max_model_len}"
            )

    @property
    def runner(self) -> Runner[Any]:
        """The device."""
        return self.pipeline.runner

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._outputs.request_groups) or self.pipeline.has_work

    @property
    def spare_seconds(self) -> float:
        """How long the caller may wait with the next call of `step`, without letting the device wait. See `spare_time`.

        0 if a request waits already: then a later one would not be in the next step either.
        """
        if self.scheduler.num_waiting or (running := self.pipeline.running()) is None:
            return 0.0
        plan, began = running
        return max(began + self._spare.seconds(plan.total_tokens) - time.monotonic(), 0.0)

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | ScoringParams,
        *,
        stream: bool = False,
        priority: int = 0,
    ) -> None:
        """Check a request and add it to the waiting queue. Raises RequestError."""
        self.add(self.inputs.process(request_id, prompt, params, stream=stream, priority=priority))

    def add(self, request_group: RequestGroup) -> None:
        """Add a request group that `inputs.process` made. Waits for its grammar and its adapter.

        Raises RequestError if its id is in use, or if its answers can never fit. Raises the errors of the grammar
        compiler and of the adapter's reader, and NoWeightsError if the weights are incomplete or deleted.
        """
        request_id, params = request_group.request_id, request_group.params
        if request_id in self._outputs.request_groups:
            raise RequestError("request_id", request_id, "is in use by a running request: choose another")
        self.admission.check_fits(request_group)
        self.require_weights()
        adapter = None if request_group.adapter is None else request_group.adapter.result()
        seed = self.seeds.getrandbits(64) if params.seed is None else params.seed
        prompt_len = len(request_group.prompt_token_ids)
        shares = self.options.enable_prefix_caching and self.runner.prefix_cacheable(prompt_len)
        for request in request_group.requests:
            request.output.note_weights(0, self.weight_version)
            request.admit(seed=seed, arrival=self._num_arrived + request.index, adapter=adapter)
            self._manager.names.admit(request, salt=request_group.cache_salt, shares=shares)
        self._num_arrived += len(request_group.requests)
        self._outputs.add(request_group)

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        """End requests in any state. Returns their final outputs. Ignores ids of requests that have ended."""
        request_groups = self._outputs.request_groups
        live = [request_groups[request_id] for request_id in request_ids if request_id in request_groups]
        return [self._outputs.end(request_group, RequestStatus.ABORTED) for request_group in live]

    def stop(self, request_id: str, index: int, num_tokens: int) -> list[Output]:
        """End one answer, whose text has ended after `num_tokens` tokens. Ignores one that has ended.

        Returns the final output of its request group, if that has ended.
        """
        request_group = self._outputs.request_groups.get(request_id)
        final = None if request_group is None else self._outputs.stop(request_group, index, num_tokens)
        return [] if final is None else [final]

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run one turn. Returns outputs of request groups that ended or, if they stream, have a new token.

        Raises StepError if the device fails a step. Then requests that the step may have affected have ended, their
        blocks are free, and the prefix cache is empty. Waiting requests continue with the next call. If the weights
        are incomplete, or the caller has deleted them, all requests have ended.
        """
        self.pipeline.raise_failure()
        self._check_weights()
        collected = self._turn()
        began = time.monotonic()
        outputs = [] if collected is None else self._outputs.process(collected)
        outputs += self._sample_with_late_masks()
        self._phases.output += time.monotonic() - began
        self._outputs.check_idle()
        return outputs

    def flush(self) -> list[Output]:
        """Collect the steps in flight without starting another. Returns and raises as `step`."""
        self.pipeline.raise_failure()
        outputs: list[Output] = []
        while self.pipeline.has_steps:
            try:
                collected = self.pipeline.turn(None)
            except BaseException as error:
                failed = self._fail_running()
                if not isinstance(error, Exception):
                    raise
                failure = StepError(failed, error)
                failure.__cause__ = error
                if not outputs:
                    raise failure from error
                self.pipeline.failure = failure  # the next call raises it: this one has outputs to return
            else:
                outputs += [] if collected is None else self._outputs.process(collected)
        return outputs

    def _check_weights(self) -> None:
        """End all requests and raise StepError if no step can run with the weights."""
        if self._outputs.request_groups and (problem := self.runner.weights_problem()) is not None:
            self.pipeline.drop()
            failed, cause = self._outputs.fail_all(), NoWeightsError(problem)
            self._forget_kv()  # a dropped step may have failed; and no request of later weights can use it
            raise StepError(failed, cause) from cause

    def _turn(self) -> CollectedStep | None:
        """Schedule and dispatch a step, and collect the step before it."""
        began = time.monotonic()
        try:
            step = self.scheduler.schedule()
            self.admission.note_scheduled()
            self._phases.schedule += time.monotonic() - began
            collected = self.pipeline.turn(step)
        except BaseException as error:
            failed = self._fail_running()
            if not isinstance(error, Exception):
                raise  # an interrupt: the engine can continue, or be closed
            raise StepError(failed, error) from error
        if collected is not None:
            seconds = collected.now - collected.began
            if step is not None:
                self._spare.note(collected.step.plan.total_tokens, seconds, self.pipeline.dispatched - began)
            self.scheduler.note_seconds(collected.step, seconds, collected.result.num_accepted)
            self._steps.add(collected)
            if self._counters.speculation is not None:
                self._counters.speculation.note_step(collected.step.plan, collected.result.num_accepted)
            if collected.result.expert_load is not None:
                self._counters.note_experts(collected.result.expert_load)
            if self._metrics is not None:
                self._metrics.note_step(collected.step.plan, seconds)
        else:
            self._spare.forget()
        idle = step is None and collected is None
        self._idle_turns = self._idle_turns + 1 if idle else 0
        if step is None and self.pipeline.has_steps:
            self.scheduler.counters.empty_turns += 1
        if self._idle_turns >= self.runner.num_stages and self._outputs.request_groups:
            raise EngineError(f"{len(self._outputs.request_groups)} requests wait and none can be scheduled")
        return collected

    def _sample_with_late_masks(self) -> list[Output]:
        """Let the step in flight sample, if it waits for masks. Returns final outputs of request groups that end here.

        If sampling fails, the next call of `step` raises the error, because this call has outputs to return.
        """
        step = self.pipeline.step_without_masks()
        if step is None:
            return []
        masks, outputs = self._outputs.late_masks(step, self.pipeline.proposed)
        try:
            self.pipeline.sample(masks)
        except BaseException as error:
            failed = self._fail_running()
            if not isinstance(error, Exception):
                raise
            self.pipeline.failure = StepError(failed, error)
            self.pipeline.failure.__cause__ = error
        return outputs

    def _fail_running(self) -> tuple[str, ...]:
        """End all requests that a failed step may have affected. Returns their ids."""
        self.pipeline.drop()
        failed = self._outputs.fail_touched()
        self._forget_kv()
        return failed

    def _forget_kv(self) -> None:
        """Note that the device may have lost its state."""
        self._manager.pool.forget_all()
        self.scheduler.note_kv_lost()

    # -- handing KV over ----------------------------------------------------------------------------------------

    def take_kv(self, request_group: RequestGroup) -> KVHandover:
        """Copy to the host the KV of a prompt's first full blocks, if the prefix cache has it on the device.

        request_group: made by `inputs.process`; need not have run. Waits for the device. Raises EngineError if the
        engine was started without kv_handover and prefill_engines.
        """
        self._check_handover()
        request, found = request_group.first, []
        if self.runner.prefix_cacheable(len(request_group.prompt_token_ids)):
            if not request.kv.prefix_root:
                self._manager.names.admit(request, salt=request_group.cache_salt)
            found = self._manager.prefixes.named(request)
        blocks = self.runner.read_blocks([block for _, block in found])
        return KVHandover(self.runner.kv_layout, tuple(name for name, _ in found), tuple(blocks))

    def put_kv(self, handover: KVHandover) -> int:
        """Add KV of another engine to the prefix cache. Returns the number of new blocks.

        Raises RequestError if the KV has another model, block size or KV type, and EngineError as `take_kv`.
        """
        self._check_handover()
        if handover.layout != self.runner.kv_layout:
            known = f"is from an engine with {handover.layout}; this engine has {self.runner.kv_layout}"
            raise RequestError("data", f"{len(handover)} blocks", known)
        if any(not 0 <= name.kv_group < len(self.runner.windows) for name in handover.names):
            raise RequestError("data", f"{len(handover)} blocks", "has a block of an unknown kv_group")
        wanted = self.runner.block_arrays
        for block in handover.blocks:
            found = tuple((array.shape, array.dtype) for array in block)
            if found != wanted:
                raise RequestError("data", found, f"has blocks with other arrays than this engine: {wanted}")
        contents = dict(zip(handover.names, handover.blocks, strict=True))
        names, blocks = self._manager.names.adopt(list(contents))
        moves = self._manager.pool.take_moves()
        try:
            self.runner.write_blocks(moves, blocks, [contents[name] for name in names])
        except BaseException:
            self._manager.pool.forget_all()  # the blocks have names without content
            raise
        return len(blocks)

    def _check_handover(self) -> None:
        if not self.runner.kv_layout:
            raise EngineError("KV cannot be handed over: start the engine with kv_handover=True, or prefill_engines")

    # -- metrics ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine's counters and sizes."""
        return collect_stats(self.scheduler, self.runner, self._counters)

    def metrics(self) -> EngineMetricsSnapshot | None:
        """All metrics, with histograms. None with `disable_log_stats`. Any thread may call it."""
        if self._metrics is None:
            return None
        caching = self.options.enable_prefix_caching
        return self._metrics.snapshot(
            self.scheduler, self.runner, self._counters, enable_prefix_caching=caching, asleep=self._asleep,
            weight_version=self.weight_version,
        )

    def reset_stats(self) -> None:
        """Set counters and peaks to their start values. The runner's `compiles_after_ready` continues."""
        self.scheduler.counters.reset()
        self._counters.reset()
        self._manager.pool.reset_peak()
        if self._metrics is not None:
            self._metrics.reset()

    def inspect(self, answer: Future[EngineCapture]) -> None:
        """Set `answer` to a copy of the engine's state. The thread that asked formats it."""
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(capture(self.scheduler, self._steps, self.stats(), self.weight_version))
            except Exception as error:  # for the thread that asked: running requests are not affected
                answer.set_exception(error)
            except BaseException as error:  # SystemExit and the like would end the caller's event loop too
                answer.set_exception(EngineError(f"the engine has ended: {type(error).__name__}: {error}"))
                raise

    def check_integrity(self) -> None:
        """Raise EngineError unless queues, rows, tables and pool agree. Slow: for tests, and for an idle engine."""
        self.scheduler.check_integrity()
        self._outputs.check_integrity()

    # -- weights, cache, end ------------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV. While there are requests, does nothing and returns False.

        reset_running_requests: preempt running requests instead; they recompute their KV. Call `flush` before.
        """
        if self._outputs.request_groups and not reset_running_requests:
            return False
        self.scheduler.preempt_all()
        self._manager.pool.take_moves()  # no row and no name needs them, and `sleep` frees the arrays
        self._manager.pool.forget_all()
        return True

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Free the KV pool, and the device memory of weights that only the engine uses. Call `flush` before.

        Running requests are preempted, and recompute their KV after `wake_up`. No step may run until then.
        discard_weights: do not keep a copy of the weights. No step may run until there are new ones.
        """
        self.reset_prefix_cache(reset_running_requests=True)
        self.scheduler.note_kv_lost()
        self.runner.release(discard=discard_weights)
        self._asleep = frozenset(("weights", "kv_cache"))

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Allocate again what `sleep` freed. Raises EngineError without enough memory; then the engine stays asleep."""
        self.runner.restore(weights=weights, kv_cache=kv_cache)
        self._asleep -= {"weights"} if weights else set()
        self._asleep -= {"kv_cache"} if kv_cache else set()

    def require_weights(self) -> None:
        """Raise NoWeightsError if no step can run because weights are missing."""
        if (problem := self.runner.weights_problem()) is not None:
            raise NoWeightsError(problem)

    def update_weights(
        self, leaves: Iterable[Any], *, version: WeightVersion | None = None, recompute: bool = False
    ) -> WeightUpdate:
        """Replace all weights. Running requests continue with the new ones. Call `flush` before.

        leaves:    as for `Runner.update_params`.
        version:   label of the new weights; None: the number of updates so far.
        recompute: running requests lose their KV, and recompute it with the new weights.

        Raises EngineError, and the errors of `leaves`. If an error comes after the first leaf was replaced, the engine
        has no weights, and the next `step` ends all requests.
        """
        if self.pipeline.has_steps:
            raise EngineError("steps are in flight while the weights are replaced")
        began = time.monotonic()
        if recompute:
            self.scheduler.preempt_all()
        replaced = self.runner.update_params(leaves)
        self.note_new_weights(version)
        seconds = time.monotonic() - began
        if self._metrics is not None:
            self._metrics.note_update(seconds)
        return WeightUpdate(
            self.weight_version, replaced.num_leaves, replaced.num_by_reference, replaced.copied_bytes, seconds
        )

    def note_new_weights(self, version: WeightVersion | None = None) -> None:
        """Clear the prefix cache. Running requests keep their KV of the old weights, and no new request shares it.

        version: label of the new weights; None: the number of updates so far.
        """
        self._num_updates += 1
        self.weight_version = self._num_updates if version is None else version
        self._outputs.note_weights(self.weight_version)
        self._manager.names.note_new_weights(self._outputs.live_requests(), self._num_updates)
        self.scheduler.note_new_weights()

    def start_over(self) -> None:
        """End all requests without an output, and forget all cached KV. Queues and pool are empty afterwards.

        For a caller that a signal handler interrupted in the middle of a call. Scheduler and pool are replaced unread,
        because their state may be inconsistent.
        """
        peak_used = self._manager.pool.peak_used
        self._counters.finished_requests += len(self._outputs.request_groups)
        if self._metrics is not None:
            self._metrics.note_lost(len(self._outputs.request_groups))
        self._replace_state(self.scheduler.counters)
        self._manager.pool.peak_used = peak_used
        self.pipeline.drop()

    def close(self) -> None:
        """End all requests and free the device memory."""
        self.start_over()
        self.runner.close()
        self.inputs.close()

    def _replace_state(self, counters: SchedulerCounters) -> None:
        """Create an empty pool, empty queues, and the parts that work on them."""
        runner, options = self.runner, self.options
        self._manager = KVCacheManager(
            runner.num_blocks, runner.block_size, runner.windows, max_chunk=runner.max_num_batched_tokens,
            host_slots=runner.host_slots, transfer_costs=runner.transfer_costs, weight_version=self._num_updates,
            recurrent_sizes=runner.recurrent_sizes,
        )  # fmt: skip
        limits = SchedulerLimits(
            runner.max_num_seqs, runner.max_num_batched_tokens, runner.vocab_size, runner.longrope_switch_len,
            runner.num_stages, runner.max_drafts, runner.num_adapter_slots, tuple(runner.text_shapes),
        )
        self.scheduler = Scheduler(
            self._manager, limits, options.scheduling, counters=counters, speculation=self._speculation(),
            verify_sizes=lambda: runner.verify_sizes,
        )  # fmt: skip
        self.admission = AdmissionControl(self.scheduler, options.scheduling, runner.max_num_seqs)
        self._outputs = OutputProcessor(
            StrategyContext(
                self._writer, self.scheduler, self._counters, options.jump_forward, runner.min_jump_per_request,
                options.stream_interval,
            ),
            self._metrics,
        )

    def _speculation(self) -> Speculation | None:
        config = self.options.speculation
        if config is None:
            return None
        return Speculation.create(config, self.runner)
