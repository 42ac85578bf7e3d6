"""ModelRunner: the engine's interface to the device. It packs plans, chooses programs, and runs them.

Called by: the step pipeline and `Engine`; `frontend/build.py` makes it.
Owns: weights, pages and request table on the device, and the table of compiled programs.
Never: compiles after ready, or knows what a request is.

`dispatch` starts a step and returns a handle at once. `collect` waits for the step's tokens. In between the engine
makes the next plan, so the device never waits for the host.
"""

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.step_plan import (
    BlockMove,
    ExpertLoad,
    RowMask,
    SamplerVariant,
    StepPlan,
    StepResult,
    TransferCosts,
)
from jpaged.errors import EngineError
from jpaged.metrics import ProgramMetrics
from jpaged.models.kv_scales import KVScales
from jpaged.models.sharding import find_devices, shards_of
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.models.stages import stages_of
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.phases import phase
from jpaged.runtime.compile.background import BackgroundCompiler
from jpaged.runtime.compile.blueprint import Blueprint, FittedBuild, ServedModel, with_one_pool
from jpaged.runtime.compile.program_table import Program
from jpaged.runtime.jax_settings import DOWNLOADS, pinned
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.memory.out_of_memory import advice, explained
from jpaged.runtime.memory.sleeping import HostWeights
from jpaged.runtime.new_params import check_params
from jpaged.runtime.parallel.front_stages import FrontStages
from jpaged.runtime.placement import Placement
from jpaged.runtime.profiling import Profiler
from jpaged.runtime.sampling.sampler import unpack
from jpaged.runtime.state import DeviceState
from jpaged.runtime.step.batch import pack, upload_long_rows
from jpaged.runtime.step.block_moves import BlockMover, host_slots
from jpaged.runtime.step.forward import flat_weights, run_forward
from jpaged.runtime.step.output_programs import OutputShape, lm_head_params, uses_extras
from jpaged.runtime.step.program_shapes import SCORE, Shape
from jpaged.runtime.step.row_extras import ExtrasUploader
from jpaged.runtime.store.cache import CacheCounter, CompileCounter, persistent_cache

logger = logging.getLogger(__name__)

CLOSED = "the engine is closed: make a new one"

@dataclasses.dataclass(frozen=True)
class StepHandle:
    """A dispatched step. Its arrays are on the device, and may still be computed."""

    plan: StepPlan
    counted: jax.Array             # see `step.forward`; ready when the forward pass is done
    # Chunks of the plan's `scored` tokens: `Sampled.packed`, or float32[N, size] if the model pools.
    scores: tuple[jax.Array, ...]
    # Rows that sample or pool, then padding: `Sampled.packed`, or float32[rows, size] if the model pools. None: no row
    # samples, or the plan waits for masks.
    output: jax.Array | None


class ModelRunner:
    """A model on a device, with its KV pool and its compiled programs. See `engine.step_plan.Runner`."""

    def __init__(
        self,
        build: FittedBuild,
        params: Params,
        token_mask: jax.Array | None = None,
        *,
        front: Sequence[tuple[FittedBuild, Params]] = (),
        progress: bool = False,
        background: bool = False,
        owns_params: bool = False,
        cache_counter: CacheCounter | None = None,
        before_first_run: Callable[[], None] = lambda: None,
    ):
        """Compile the programs and allocate the device state. After that, the engine's thread compiles nothing.

        params:     weights with the shapes of the blueprint, used without a copy.
        token_mask: bool[vocab_size], ids that may be sampled; None = all. Required if the build's model is `masked`.
        front:      builds and weights of the pipeline stages before the last. `build` and `params` are of the last one.
        progress:   show a bar while compiling.
        background: compile most programs after the constructor has returned. Only if `build` has a program store.
        owns_params: nothing else uses the weights, so `release` may delete them on the device.
        cache_counter: a counter that counted cache hits while `build` was made; None: a new one.
        before_first_run: called when the first programs exist, before any of them runs.
        """
        self._cache_counter = cache_counter or CacheCounter()
        blueprint, self._start = build.blueprint, time.perf_counter()
        spec, placement, limits = blueprint.model.spec, blueprint.placement, build.limits
        state = build.state_shapes()
        # On CPU the state is filled while programs are read: 0.4 s for 768 MiB. GPUs and TPUs compile with free memory.
        allocation = ThreadPoolExecutor(1)
        early = allocation.submit(build.create_state) if placement.platform == "cpu" else None
        with phase("step programs"):
            self.programs = build.compile_table(progress=progress, first_only=background and build.store is not None)
        builds = [each for each, _ in front]
        block_bytes = sum(each.memory_plan.block_bytes for each in (*builds, build))
        self.host_slots = host_slots(blueprint.config.swap_space, block_bytes)
        self._front = FrontStages(
            builds, [tree for _, tree in front], build, host_slots=self.host_slots, progress=progress
        )
        self.num_stages = len(builds) + 1
        with phase("programs that copy"):
            self._upload_row = build.compile_upload_row()
            handover = blueprint.config.kv_handover or blueprint.config.prefill_engines > 0
            self._mover = BlockMover(
                state, placement, host_slots=self.host_slots, handover=handover, store=build.store
            )
            self._uploader = None if spec.pools else ExtrasUploader(state, limits.max_model_len, placement, build.store)
        self.memory_plan = build.memory_plan

        self.spec = spec
        self.num_blocks = self.memory_plan.num_blocks
        self.block_size = limits.block_size
        self.windows = limits.kv_groups.windows
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_model_len = limits.max_model_len
        self.vocab_size = spec.vocab_size
        self.num_devices = placement.shards.num_devices
        # (token, expert) pairs of one token, summed over the layers with experts. 0: experts are not split over devices
        self._pairs_of_token = blueprint.pairs_of_token
        self.hidden_bytes = spec.hidden_size * blueprint.dtype.itemsize  # per token
        self.max_logprobs = blueprint.num_logprobs
        longrope = spec.rope is not None and spec.rope.scaling == "longrope"
        self.longrope_switch_len = spec.rope.original_max_position if longrope else None
        # On CPU a step of 64 tokens takes nearly twice as long as one of 32. Elsewhere reading the weights dominates.
        self.min_jump_per_request = 1.0 if placement.platform == "cpu" else 0.0

        self.kv_layout = _kv_layout(build, self._mover) if handover else ""

        self._build = build
        self._placement = placement
        self._total_bytes = memory.total_bytes(placement.first_device)
        self._params: Params | None = params
        self._weights = flat_weights(params)
        self._lm_head_params: Params | None = lm_head_params(spec, params)
        self._owns_params = owns_params
        self._host_weights: HostWeights | None = None  # while released
        self._released = False  # True: `release` freed the device state; `_state` is None
        self._profiler = Profiler()
        self._token_mask = token_mask
        self._counter = CompileCounter()
        self._state: DeviceState | None = early.result() if early is not None else build.create_state()
        allocation.shutdown()
        before_first_run()
        self.transfer_costs = self._measure_transfers() if self.host_slots else None
        self._background = self._compile_rest()

    @staticmethod
    def check(spec: DecoderSpec, params: Params | tuple[Params, ...], config: EngineConfig) -> None:
        """Raise ModelLoadError as `create`, for bad options or too little free memory, before weights are loaded.

        Allocates nothing. params: the tree of weights, as ShapeDtypeStructs.
        """
        shards, stages = shards_of(config), stages_of(spec, config.pipeline_parallel_size)
        devices = find_devices(shards, len(stages))
        for stage, tree, here in zip(stages, _by_stage(params), devices, strict=True):
            model = ServedModel(spec, tree, stage=stage)
            Blueprint.draw(model, config, Placement.over(here, shards)).check_memory()

    @classmethod
    def create(
        cls,
        spec: DecoderSpec,
        params: Params | tuple[Params, ...],
        config: EngineConfig,
        *,
        layout: WeightLayout = WeightLayout(),
        tokenizer_ids: np.ndarray | None = None,
        processors: tuple[LogitsProcessor, ...] = (),
        kv_scales: KVScales | None = None,
        progress: bool = False,
        background: bool = False,
        owns_params: bool = False,
        before_first_run: Callable[[], None] = lambda: None,
    ) -> "ModelRunner":
        """Size the KV pool by the device's free memory and make a runner: blueprint -> fitted build -> runner.

        params:        the tree of `spec.param_shapes` (or of `layout`), used without a copy. With
                       pipeline_parallel_size: a tuple of trees, one for each stage (`StagedPlacer.finish`).
        tokenizer_ids: bool[vocab_size], ids that may be sampled; None = all.
        kv_scales:     the checkpoint's, for fp8 pages; None: 1.0.
        progress:      show a bar while compiling.
        background:    compile most programs after this has returned. Only if programs are stored.
        owns_params, before_first_run: see the constructor.

        Raises ModelLoadError for an option that does not fit the model or the memory.
        """
        stages, trees = stages_of(spec, config.pipeline_parallel_size), _by_stage(params)
        placement = Placement.of(trees[-1], shards_of(config))
        device = placement.first_device
        token_mask = None
        if tokenizer_ids is not None and not tokenizer_ids.all():
            token_mask = placement.put(np.asarray(tokenizer_ids, np.bool_))
        model = ServedModel(
            spec, trees[-1], layout, masked=token_mask is not None, kv_scales=kv_scales, processors=processors
        )
        blueprints = [
            Blueprint.draw(
                dataclasses.replace(model, params=tree, stage=stage), config, Placement.of(tree, shards_of(config))
            )
            for stage, tree in zip(stages, trees, strict=True)
        ]
        blueprints[0].kv_format.log()
        counter = CacheCounter()
        with (
            pinned(),
            persistent_cache(config.compilation_cache_dir) as folder,
            explained(config, memory.total_bytes(device)),
        ):
            with phase("check of the kernels"):
                blueprints = [_checked(blueprint) for blueprint in blueprints]
            with phase("plan of the memory"):
                *front, build = with_one_pool([blueprint.fit_device(folder) for blueprint in blueprints])
            return cls(
                build, trees[-1], token_mask, front=tuple(zip(front, trees[:-1], strict=True)), progress=progress,
                background=background, owns_params=owns_params, cache_counter=counter,
                before_first_run=before_first_run,
            )  # fmt: skip

    def _compile_rest(self) -> BackgroundCompiler | None:
        """Compile missing programs in the background. Returns None if all programs exist."""
        store, table = self._build.store, self.programs
        if store is None or not table.missing:
            self._note_ready()
            return None
        seconds = time.perf_counter() - self._start
        count, missing = len(table.programs), len(table.missing)
        logger.info("%d programs exist after %.1f s; %d are compiled in the background", count, seconds, missing)
        return BackgroundCompiler(self._build, store, table, self._note_ready)

    def _note_ready(self) -> None:
        """Log that all programs exist, and update the memory plan."""
        # Counts as the progress bar and the table do: without the few programs that only copy.
        programs, seconds = self.programs.programs, time.perf_counter() - self._start
        read = sum(program.from_cache for program in programs)
        logger.info(
            "all %d programs exist after %.1f s: %d compiled, %d read from the cache",
            len(programs), seconds, len(programs) - read, read,
        )  # fmt: skip
        self.memory_plan = plan = dataclasses.replace(self.memory_plan, temp_bytes=self.programs.temp_bytes)
        kv, weights = memory.size_text(plan.kv_bytes), memory.size_text(plan.weight_bytes)
        logger.info("the KV cache has %s for %d tokens, and the weights have %s", kv, plan.kv_tokens, weights)
        logger.debug("programs:\n%s", self.programs)
        logger.debug("device memory:\n%s", self.memory_plan)

    @property
    def params(self) -> Params | None:
        """The weights of the last pipeline stage. None while they are in host memory, and after `close`."""
        return self._params

    @property
    def state(self) -> DeviceState | None:
        """The device state of the last pipeline stage. None between `release` and `restore`, and after `close`."""
        return self._state

    @property
    def is_ready(self) -> bool:
        """True if all programs exist."""
        return not self.programs.missing

    def wait_until_ready(self) -> None:
        """Wait until all programs exist. Raises EngineError if one cannot be compiled."""
        self.programs.wait_for_all()

    def can_run(self, sampler: SamplerVariant, *, scores: bool) -> bool:
        """True if the programs of a request exist. Else they are compiled next. Raises as `wait_until_ready`."""
        if self.spec.pools:
            return True
        return self.programs.await_kind(sampler.name) and (not scores or self.programs.await_kind(SCORE))

    @property
    def compiles_after_ready(self) -> int:
        """Number of programs that steps compiled: 0, unless the table lacks a program."""
        return self._counter.count

    def program_metrics(self) -> ProgramMetrics:
        """Number and cost of the programs in the table."""
        table, cache = self.programs, self._cache_counter
        programs = [*self._front.programs, *table.programs]
        seconds = sum(program.seconds for program in programs)
        return ProgramMetrics(len(programs), len(table.missing), seconds, cache.hits, cache.misses)

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Start a step; returns at once. Raises EngineError if the device fails. Then the KV pool may be empty."""
        program = self.programs.forward(plan)
        width, most = self.memory_plan.limits.width, program.shape.max_updates
        with pinned(), self._counter.watching(), self._recovering(program.shape):
            state = self._live_state
            hidden = self._front.forward(plan)
            if len(plan.moves):
                state = self._state = self._mover.run(state, plan.moves)
            self._state, updates = upload_long_rows(state, plan, width, most, self._upload_row, self._placement)
            packed = pack(plan, updates, program.shape)
            for init in plan.row_inits:
                if init.extras is not None and self._uploader is not None:
                    self._state = self._uploader.start(self._live_state, init)
            # `packed` is a numpy array: the call uploads it in 4 us, `jax.device_put` takes 40 to 75 us
            self._state, counted = run_forward(
                program.run, self._weights, self._live_state, packed, *hidden
            )
            scores = self._score(plan.scored)
            output = None if plan.waits_for_masks else self._sample_or_pool(plan, plan.masks)
        needs_counted = output is None or self._pairs_of_token
        self._start_download((scores, output, counted if needs_counted else None))
        return StepHandle(plan, counted, scores, output)

    def sample(self, handle: StepHandle, masks: Sequence[RowMask]) -> StepHandle:
        """Sample for a step whose plan waited for masks; returns at once. Raises EngineError if the device fails."""
        with pinned(), self._counter.watching(), self._recovering():
            output = self._sample_or_pool(handle.plan, [*handle.plan.masks, *masks])
        self._start_download(output)
        return dataclasses.replace(handle, output=output)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and download its result. Raises EngineError if the device fails."""
        result = self._collect(handle)
        if not self._pairs_of_token:
            return result
        with pinned(DOWNLOADS), self._counter.watching(), self._recovering():
            tokens, busiest = np.asarray(handle.counted).tolist()
        return dataclasses.replace(result, expert_load=ExpertLoad(tokens * self._pairs_of_token, busiest))

    def _collect(self, handle: StepHandle) -> StepResult:
        """The result without `expert_load`."""
        with pinned(DOWNLOADS), self._counter.watching(), self._recovering():
            scored = _joined(handle.scores, handle.plan.scored.shape[1])
            host = None if handle.output is None else _spread(np.asarray(handle.output), handle.plan)
            if host is None:
                np.asarray(handle.counted)
        if self.spec.pools:
            return StepResult(np.zeros(0, np.int32), pooled=host, pooled_tokens=scored)
        scores = None if scored is None else unpack(scored)[1]
        if host is None:
            return StepResult(np.zeros(len(handle.plan.rows), np.int32), scores=scores)
        token_ids, of = unpack(host)
        if of is None:
            return StepResult(token_ids, scores=scores)
        return StepResult(token_ids, of.logprobs, of.ranks, of.top_ids, of.top_logprobs, scores)

    @property
    def block_arrays(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of each array of a block, stacked over the page arrays."""
        return self._mover.block_arrays

    def read_blocks(self, blocks: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Copies of blocks in host memory, after all dispatched steps; `block_arrays` has their shapes and dtypes.

        Waits for the device. Raises EngineError if it fails.
        """
        with pinned(DOWNLOADS), self._counter.watching(), self._recovering():
            return self._mover.read(self._live_state, blocks)

    def write_blocks(
        self, moves: Sequence[tuple[BlockMove, int, int]], blocks: Sequence[int],
        contents: Sequence[tuple[np.ndarray, ...]],
    ) -> None:  # fmt: skip
        """Run moves, then write `contents` (from `read_blocks`) into `blocks`, before the next step.

        Returns at once. Raises EngineError if the device fails.
        """
        with pinned(), self._counter.watching(), self._recovering():
            if len(moves):
                self._state = self._mover.run(self._live_state, np.array(moves, np.int32))
            if len(blocks):
                self._state = self._mover.write(self._live_state, blocks, contents)

    def set_params(self, params: Params) -> None:
        """Replace the weights by a tree of the same structure, shapes, dtypes and placement. No compile, no copy.

        Steps already dispatched use the old weights. The caller must then call the engine's `note_new_weights`, so that
        KV of the old weights is not reused. Raises ModelLoadError for a tree that differs. Raises EngineError with
        pipeline stages, while the weights sleep, or if the runner is closed.
        """
        if self.num_stages > 1:
            raise EngineError(f"set_params: the engine has {self.num_stages} pipeline stages: make a new one")
        if self._host_weights is not None:
            raise EngineError('the weights sleep: call wake_up(["weights"]) before they are replaced')
        if self._state is None and not self._released:
            raise EngineError(CLOSED)
        check_params(self._params, params)
        self._params, self._lm_head_params = params, lm_head_params(self.spec, params)
        self._weights = flat_weights(params)
        self._owns_params = False

    def describe(self, plan: StepPlan) -> str:
        """Name the program of a plan, for a log. Any thread may call it."""
        return str(self.programs.forward(plan).shape)

    def release(self) -> None:
        """Free the device state, and move weights that the runner owns to the host. No step may be in flight.

        On CPU weights stay: they are in host memory. So do the caller's weights, which only the caller may delete.
        """
        if self._released:
            return
        self.wait_until_ready()  # compiling reads the weights' formats
        jax.block_until_ready(self._live_state)
        self._front.block_until_ready()
        self._front.release(weights=self._owns_params)
        self._delete_state()
        self._released = True
        if self._owns_params and self._params is not None and self._placement.platform != "cpu":
            self._host_weights = HostWeights.take(self._params)
            self._params = self._lm_head_params = None
            self._weights = ()

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        """Allocate the weights, the state, or both again after `release`. No program compiles. The KV pool is empty.

        Raises EngineError if the memory is not free. Then it can be called again.
        """
        try:
            with pinned():
                self._front.restore(weights=weights, kv_cache=kv_cache)
            if weights and self._host_weights is not None:
                self._params = self._host_weights.put()
                self._weights = flat_weights(self._params)
                self._lm_head_params = lm_head_params(self.spec, self._params)
                self._host_weights = None
            if kv_cache and self._released:
                with pinned():
                    self._state = jax.block_until_ready(self._build.create_state())
                self._released = False
        except Exception as error:
            reason = advice(error, self._build.blueprint.config, self._total_bytes) or error
            raise EngineError(f"the engine cannot wake up: {reason}") from error

    def start_profile(self, folder: str) -> None:
        """Profile host and device into a folder, until `stop_profile`. Raises EngineError if a profile is running."""
        self._profiler.start(folder)

    def stop_profile(self) -> None:
        """Write the profile. Raises EngineError if no profile is running."""
        self._profiler.stop()

    def prefix_cacheable(self, prompt_len: int) -> bool:
        """True if KV of a prompt may be shared. With dynamic rope, the keys of a long prompt depend on its length."""
        rope = self.spec.rope
        if rope is None or rope.scaling != "dynamic":
            return True
        return prompt_len <= (rope.original_max_position or self.spec.max_position)

    def close(self) -> None:
        """Stop compiling, free the device state, and drop the references to the weights."""
        if self._background is not None:
            self._background.close()
        self._profiler.close()
        self._front.close()
        self._delete_state()
        self._released = False
        self._params = self._lm_head_params = self._token_mask = self._host_weights = None
        self._weights = ()
        self._counter.close()
        self._cache_counter.close()

    def _delete_state(self) -> None:
        """Free the device state, and the blocks of the host tier."""
        for leaf in jax.tree.leaves(self._state):
            if not leaf.is_deleted():
                leaf.delete()
        self._state = None
        self._mover.close()

    def _score(self, scored: np.ndarray) -> tuple[jax.Array, ...]:
        """Log-probabilities of known tokens, or vectors if the model pools. Runs in chunks, to limit live logits."""
        if not scored.shape[1]:
            return ()
        if self.spec.pools:
            return self._pool_tokens(scored[0])
        chunks, program = [], self.programs.score()
        size = program.shape.tokens
        for first in range(0, scored.shape[1], size):
            part = scored[:, first : first + size]
            packed = np.zeros((2, size), np.int32)
            packed[1, : part.shape[1]], packed[0, : part.shape[1]] = part
            chunks.append(self._run_output(program, packed))
        return tuple(chunks)

    def _pool_tokens(self, places: np.ndarray) -> tuple[jax.Array, ...]:
        """Vectors of tokens, from the `pool` programs: at most one token per row of the largest program at a time."""
        most, chunks = self._live_state.output_rows.shape[1], []
        for first in range(0, len(places), most):
            part = places[first : first + most]
            packed = np.full((2, most), -1, np.int32)
            packed[1, : len(part)] = part
            chunks.append(self._run_output(self.programs.pooler(len(part)), packed))
        return tuple(chunks)

    def _sample_or_pool(self, plan: StepPlan, masks: Sequence[RowMask]) -> jax.Array | None:
        """Sample or pool for the plan's rows in `samples`. None if there are none."""
        count = plan.num_samples
        if not count:
            return None
        if masks and self._uploader is not None:
            self._state = self._uploader.set_masks(self._live_state, masks)
        program = self.programs.pooler(count) if self.spec.pools else self.programs.sampler(count, plan.sampler)
        output = self._run_output(program, self._live_state.output_rows)
        if not self.spec.pools:
            self._front.note_sampled(plan, output)
        return output

    def _run_output(self, program: Program[OutputShape], rows: np.ndarray | jax.Array) -> jax.Array:
        state = self._live_state
        extras = state.sampling if uses_extras(program.shape) else None
        table, extras, output = program.run(
            self._lm_head_params, self._token_mask, state.table, extras, state.hidden, rows
        )
        self._state = state.replace(table=table, sampling=state.sampling if extras is None else extras)
        return output

    def _start_download(self, arrays: Any) -> None:
        """Begin to copy a tree's arrays to the host. On CPU they are there, and each call would take 46 us."""
        if self._placement.platform != "cpu":
            jax.tree.map(lambda x: x.copy_to_host_async(), arrays)

    def _measure_transfers(self) -> TransferCosts:
        """Measure with a step of padding only, which takes as long as a full step without attention."""
        program = self.programs.forwards[-1]
        nothing = np.zeros(0, np.int32)
        idle = StepPlan(nothing, nothing, 0, nothing.astype(bool), nothing, np.zeros((0, 4), np.int32))
        packed = self._placement.put(pack(idle, np.zeros((0, 3), np.int32), program.shape))
        hidden: tuple[jax.Array, ...] = ()
        if self.num_stages > 1:
            tokens, dtype = program.shape.tokens, self._build.blueprint.dtype
            hidden = (self._placement.put(np.zeros((tokens, self.spec.hidden_size), dtype)),)

        def step(state: DeviceState) -> DeviceState:
            return run_forward(program.run, self._weights, state, packed, *hidden)[0]

        block_bytes = self.memory_plan.block_bytes
        self._state, costs = self._mover.measure(self._live_state, block_bytes, step, program.shape.tokens)
        return costs

    @property
    def _live_state(self) -> DeviceState:
        if self._state is None:
            raise EngineError(CLOSED)
        return self._state

    @contextlib.contextmanager
    def _recovering(self, shape: Shape | None = None) -> Generator[None]:
        """Raise exceptions inside as EngineError. Before that, make the state usable for new requests."""
        try:
            yield
        except BaseException as error:
            self._recover()
            if not isinstance(error, Exception):
                raise
            which = "" if shape is None else f" of {shape}"
            reason = advice(error, self._build.blueprint.config, self._total_bytes) or error
            raise EngineError(f"the device failed a step{which}: {reason}") from error

    def _recover(self) -> None:
        """Allocate an empty state if the old one was donated to the failed step."""
        with pinned():
            self._front.recover()
        if self._state is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            with pinned():
                self._state = self._build.create_state()


def _by_stage(params: Params | tuple[Params, ...]) -> tuple[Params, ...]:
    """One tree per pipeline stage."""
    return params if isinstance(params, tuple) else (params,)


def _checked(blueprint: Blueprint) -> Blueprint:
    """The blueprint, with kernels that give correct results on its device."""
    device = blueprint.placement.first_device
    if blueprint.has_unchecked_attention:
        blueprint = blueprint.with_checked_attention(device)
    return blueprint.with_checked_gated_dot(device)


def _joined(chunks: Sequence[jax.Array], count: int) -> np.ndarray | None:
    """All chunks, in the order of the plan, without padding. None if there are no chunks."""
    return np.concatenate([np.asarray(chunk) for chunk in chunks])[:count] if chunks else None


def _spread(output: np.ndarray, plan: StepPlan) -> np.ndarray:
    """Outputs of the rows that sample, at their indices in the plan's rows; 0 elsewhere."""
    rows, count = len(plan.rows), plan.num_samples
    if count == rows:
        return output[:rows]
    spread = np.zeros((rows, *output.shape[1:]), output.dtype)
    spread[plan.samples] = output[:count]
    return spread


def _kv_layout(build: FittedBuild, mover: BlockMover) -> str:
    """See `engine.step_plan.Runner.kv_layout`. It has the weights' quantization, but not their values."""
    blueprint, limits = build.blueprint, build.limits
    spec = hashlib.sha256(repr(blueprint.model.spec).encode()).hexdigest()[:16]
    arrays = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in mover.block_arrays)
    config = blueprint.config
    return (
        f"model {spec}, dtype {blueprint.dtype}, quantization {config.quantization} "
        f"({config.quantized_activations}), blocks of {limits.block_size} tokens, windows "
        f"{list(limits.kv_groups.windows)}, arrays {arrays}"
    )
