"""ModelRunner: the engine's interface to the device. It packs plans, chooses programs, and runs them.

Called by: the step pipeline and `Engine`; `frontend/build.py` makes it.
Owns: weights, pages and request table on the device, and the table of compiled programs.
Never: compiles after ready, or knows what a request is.

`dispatch` starts a step and returns a handle at once. `collect` waits for the step's tokens. In between the engine
makes the next plan, so the device does not wait for the host. Masks that depend on the last token are the exception.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.step_plan import (
    BlockMove,
    DeviceDrafter,
    RecurrentSizes,
    ReplacedLeaves,
    RowMask,
    StepPlan,
    StepResult,
    TextShape,
)
from jpaged.errors import EngineError
from jpaged.models.draft_head import HeadSpec
from jpaged.models.kv_scales import KVScales
from jpaged.models.new_leaves import NewDrafter, NewLeaf
from jpaged.models.sharding import find_devices, shards_of
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.models.stages import stages_of
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.phases import phase
from jpaged.runtime.adapter_pool import AdapterOptions
from jpaged.runtime.compile.blueprint import Blueprint, FittedBuild, ServedModel, with_one_pool
from jpaged.runtime.compile.engine_programs import EnginePrograms
from jpaged.runtime.drafting.drafter_model import DrafterModel
from jpaged.runtime.jax_settings import DOWNLOADS, pinned
from jpaged.runtime.memory import device_memory
from jpaged.runtime.memory.host_memory import return_free_memory
from jpaged.runtime.memory.out_of_memory import advice, explained
from jpaged.runtime.parallel.front_stages import FrontStages
from jpaged.runtime.placement import Placement
from jpaged.runtime.profiling import Profiler
from jpaged.runtime.stage_runner import CLOSED, LastStageRunner
from jpaged.runtime.state import DeviceState
from jpaged.runtime.step.batch import ForwardShape, slots_of_tokens
from jpaged.runtime.step.block_moves import host_slots
from jpaged.runtime.step.program_shapes import Shape
from jpaged.runtime.step.result import StepHandle, download
from jpaged.runtime.step_drafter import StepDrafter
from jpaged.runtime.store.cache import CacheCounter, persistent_cache
from jpaged.runtime.weight_update import replace_leaves

HALF_UPDATED = "an update of the weights has failed, and only a part of them was replaced: call update_weights again"
DELETED = (
    "the weights were deleted, for example because an optimiser donated them to a jitted function: call update_weights "
    "with the new ones"
)
DISCARDED = "the engine has no weights, because sleep(level=2) discarded them: call update_weights"


class ModelRunner(EnginePrograms):
    """A model on a device, with its KV pool and its compiled programs. See `engine.step_plan.Runner`."""

    def __init__(
        self, builds: Sequence[FittedBuild], trees: Sequence[Params], token_mask: jax.Array | None, *, progress: bool,
        background: bool, owns_params: bool, cache_counter: CacheCounter, before_first_run: Callable[[], None],
        drafter_params: Params | None = None,
    ):  # fmt: skip
        """Compile the programs and allocate the device state. After that, the engine's thread compiles nothing.

        builds, trees: of each pipeline stage.
        token_mask:    bool[vocab_size], ids that may be sampled; None = all. Required if the model is `masked`.
        cache_counter: has counted cache hits while `builds` were made. drafter_params: of the drafter on the device.
        All others: see `create`.
        """
        *front, build = builds
        blueprint, limits = build.blueprint, build.limits
        self.spec, self._config, placement = blueprint.model.spec, blueprint.config, blueprint.placement
        # On CPU the state is filled while programs are read: 0.4 s for 768 MiB. GPUs and TPUs compile with free memory.
        allocation = ThreadPoolExecutor(1)
        early = allocation.submit(build.create_state) if placement.platform == "cpu" else None
        super().__init__(build, progress=progress, background=background, cache_counter=cache_counter)
        block_bytes = sum(each.memory_plan.block_bytes for each in builds)
        state_bytes = self.memory_plan.slot_bytes if limits.num_snapshots else 0
        self.host_slots = host_slots(self._config.swap_space, block_bytes, state_bytes)
        self._front = FrontStages(
            front, trees[:-1], build, host_slots=self.host_slots, owns_params=owns_params, progress=progress
        )
        self.num_stages = len(builds)
        self._other_programs = [each for stage in self._front.stages for each in stage.programs.programs]
        handover = self._config.kv_handover or self._config.prefill_engines > 0
        with phase("programs that copy"):
            self._last = LastStageRunner(
                build, trees[-1], self.programs, token_mask, on_sampled=self._front.note_sampled,
                host_slots=self.host_slots, owns_params=owns_params, handover=handover,
            )  # fmt: skip
        self._stages = [*self._front.stages, self._last]
        self.num_blocks = self.memory_plan.num_blocks
        self.block_size = limits.block_size
        self.windows = limits.kv_groups.windows
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.text_shapes: Sequence[TextShape] = limits.text_shapes
        self.max_model_len = limits.max_model_len
        self.vocab_size = self.spec.vocab_size
        self.num_devices = placement.shards.num_devices
        # (token, expert) pairs of one token, summed over the layers with experts. 0: experts are not split over devices
        self._pairs_of_token = blueprint.pairs_of_token
        self.hidden_bytes = self.spec.hidden_size * blueprint.dtype.itemsize  # per token
        self.max_logprobs, self.logprobs_mode = blueprint.num_logprobs, self._config.logprobs_mode
        self.returns_routed_experts = self._config.enable_return_routed_experts
        self._mask_words, self.returns_sampling_mask = blueprint.mask_words, blueprint.mask_words > 0
        self.max_drafts = blueprint.max_drafts
        self.num_adapter_slots = 0 if blueprint.model.adapters is None else blueprint.model.adapters.slots
        self.recurrent_sizes = None
        if self.memory_plan.slot_bytes:
            self.recurrent_sizes = RecurrentSizes(
                limits.max_num_seqs, limits.num_snapshots, self.memory_plan.snapshot_interval,
                self.memory_plan.slot_bytes, block_bytes,
            )  # fmt: skip
        shapes = blueprint.program_shapes
        forwards = [shape for shape in shapes if isinstance(shape, ForwardShape)]
        self.decode_sizes: Sequence[int] = [shape.rows for shape in forwards if shape.is_decode and not shape.captures]
        rope = self.spec.rope
        self.longrope_switch_len = rope.original_max_position if rope and rope.scaling == "longrope" else None
        # On CPU a step of 64 tokens takes nearly twice as long as one of 32. Elsewhere reading the weights dominates.
        self.min_jump_per_request = 1.0 if placement.platform == "cpu" else 0.0
        self.block_arrays = self._last.mover.block_arrays if handover else ()
        self.kv_layout = _kv_layout(build, self.block_arrays) if handover else ""
        self._total_bytes = device_memory.total_bytes(placement.first_device)
        self._profiler = Profiler()
        self._half_updated = False
        self._drafter = None
        if blueprint.model.drafter is not None and drafter_params is not None:
            self._drafter = StepDrafter(
                build.draft_build(), blueprint.model.drafter, drafter_params, trees[-1], self.programs.drafters,
                shapes,
            )  # fmt: skip
        self._last.state = early.result() if early is not None else build.create_state()
        allocation.shutdown()
        before_first_run()
        self.transfer_costs = self._last.measure_transfers() if self.host_slots else None
        self.compile_rest()

    @staticmethod
    def check(
        spec: DecoderSpec, params: Params | tuple[Params, ...], config: EngineConfig,
        chosen: Sequence[jax.Device] | None = None,
    ) -> None:  # fmt: skip
        """Raise ModelLoadError as `create`, for bad options or too little free memory, before weights are loaded.

        Allocates nothing. params: the tree of weights, as ShapeDtypeStructs. chosen: see `find_devices`.
        """
        shards, stages = shards_of(config), stages_of(spec, config.pipeline_parallel_size)
        devices = find_devices(shards, len(stages), chosen)
        # lora_dtype="auto" is the checkpoint's dtype, which is not known here: a narrow one refuses nothing that fits
        adapters = AdapterOptions.of(spec, config, np.dtype(jnp.bfloat16))
        for stage, tree, here in zip(stages, _by_stage(params), devices, strict=True):
            model = ServedModel(spec, tree, stage=stage, adapters=adapters)
            Blueprint.draw(model, config, Placement.over(here, shards)).check_memory()

    @classmethod
    def create(
        cls, spec: DecoderSpec, params: Params | tuple[Params, ...], config: EngineConfig, *,
        layout: WeightLayout = WeightLayout(), tokenizer_ids: np.ndarray | None = None,
        processors: tuple[LogitsProcessor, ...] = (), kv_scales: KVScales | None = None,
        drafter: DrafterModel | None = None, adapters: AdapterOptions | None = None, progress: bool = False,
        background: bool = False, owns_params: bool = False, before_first_run: Callable[[], None] = lambda: None,
    ) -> "ModelRunner":  # fmt: skip
        """Size the KV pool by the device's free memory and make a runner: blueprint -> fitted build -> runner.

        params:        the tree of `spec.param_shapes` (or of `layout`), used without a copy. With
                       pipeline_parallel_size: a tuple of trees, one for each stage (`StagedPlacer.finish`).
        tokenizer_ids: bool[vocab_size], ids that may be sampled; None = all.
        kv_scales:     the checkpoint's, for fp8 pages; None: 1.0.
        drafter:       drafts on the device, for `config.speculative_config`; None: no drafts, or from the host.
        adapters:      sizes of the pools of LoRA adapters; None: requests have none.
        progress:      show a bar while compiling.
        background:    compile most programs after this has returned. Only if programs are stored.
        owns_params:   nothing else uses the weights, so `release` may delete them on the device.
        before_first_run: called when the first programs exist, before any of them runs.

        Raises ModelLoadError for an option that does not fit the model or the memory.
        """
        stages, trees = stages_of(spec, config.pipeline_parallel_size), _by_stage(params)
        placement = Placement.of(trees[-1], shards_of(config))
        device = placement.first_device
        token_mask = None
        if tokenizer_ids is not None and not tokenizer_ids.all():
            token_mask = placement.put(np.asarray(tokenizer_ids, np.bool_))
        model = ServedModel(
            spec, trees[-1], layout, masked=token_mask is not None, kv_scales=kv_scales, processors=processors,
            drafter=drafter, adapters=adapters,
        )  # fmt: skip
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
            explained(config, device_memory.total_bytes(device)),
        ):
            with phase("check of the kernels"):
                blueprints = [_checked(blueprint) for blueprint in blueprints]
            with phase("plan of the memory"):
                builds = with_one_pool([blueprint.fit_device(folder) for blueprint in blueprints])
            return cls(
                builds, trees, token_mask, progress=progress, background=background, owns_params=owns_params,
                cache_counter=counter, before_first_run=before_first_run,
                drafter_params=None if drafter is None else drafter.params,
            )  # fmt: skip

    @property
    def params(self) -> Params | None:
        """The weights of the last pipeline stage. None while they are in host memory, and after `close`."""
        return self._last.params

    @property
    def state(self) -> DeviceState | None:
        """The device state of the last pipeline stage. None between `release` and `restore`, and after `close`."""
        return self._last.state

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Start a step; returns at once. Raises EngineError if the device fails. Then the KV pool may be empty."""
        program, last = self.programs.forward(plan), self._last
        with pinned(), self._counter.watching(), self._recovering(program.shape):
            last.load_adapters(plan.adapter_loads)
            if plan.row_inits:
                last.start_rows(plan.row_inits)
            proposed = () if self._drafter is None else self._drafter.before(plan, program.shape, last.live)
            result = last.forward(program, plan, *self._front.forward(plan), *proposed)
            scores = last.score(_in_state(plan, program.shape), plan.score_masks)
            handle = StepHandle.of(
                plan, program.shape, result, scores, *proposed, routes=self.returns_routed_experts
            )
            if not plan.waits_for_masks:
                handle = self._sample(handle, plan.masks)
        needs_counted = handle.output is None or self._pairs_of_token
        self._start_download((scores, handle.output, handle.counted if needs_counted else None, handle.routed))
        return handle

    def sample(self, handle: StepHandle, masks: Sequence[RowMask]) -> StepHandle:
        """Sample for a step whose plan waited for masks; returns at once. Raises EngineError if the device fails."""
        with pinned(), self._counter.watching(), self._recovering():
            handle = self._sample(handle, [*handle.plan.masks, *masks])
        self._start_download(handle.output)
        return handle

    def _sample(self, handle: StepHandle, masks: Sequence[RowMask]) -> StepHandle:
        """Run the programs after a forward pass: `sample` or `pool`, then those of a draft head."""
        plan, last = handle.plan, self._last
        if handle.checked is None:
            output = last.sample_or_pool(plan, masks)
        else:
            output = last.sample_checked(plan, handle.checked, masks)
        if self._drafter is not None:
            self._drafter.after(handle, last.live)
        return dataclasses.replace(handle, output=output, captured=())

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and download its result. Raises EngineError if the device fails."""
        with pinned(DOWNLOADS), self._counter.watching(), self._recovering():
            return download(
                handle, pools=self.spec.pools, pairs_of_token=self._pairs_of_token, mask_words=self._mask_words
            )

    def proposed(self, handle: StepHandle) -> np.ndarray:
        """Drafts of the drafter on the device for a verify step: int32[R, max_drafts]; -1: no draft."""
        if handle.proposed is None:
            raise EngineError("the step has no drafts from the device")
        with pinned(DOWNLOADS), self._counter.watching(), self._recovering():
            return np.asarray(handle.proposed)[: len(handle.plan.rows)]

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """The drafter on the device, as the engine sees it; None: there is none."""
        return None if self._drafter is None else self._drafter.as_engine_sees()

    def read_blocks(self, blocks: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Copies of blocks in host memory, after all dispatched steps; `block_arrays` has their shapes and dtypes.

        Waits for the device. Raises EngineError if it fails.
        """
        with pinned(DOWNLOADS), self._counter.watching(), self._recovering():
            return self._last.mover.read(self._last.live, blocks)

    def write_blocks(
        self, moves: Sequence[tuple[BlockMove, int, int]], blocks: Sequence[int],
        contents: Sequence[tuple[np.ndarray, ...]],
    ) -> None:  # fmt: skip
        """Run moves, then write `contents` (from `read_blocks`) into `blocks`, before the next step.

        Returns at once. Raises EngineError if the device fails.
        """
        with pinned(), self._counter.watching(), self._recovering():
            self._last.write_blocks(moves, blocks, contents)

    def update_params(self, leaves: Iterable[NewLeaf | NewDrafter]) -> ReplacedLeaves:
        """Replace all weights, leaf by leaf. No compile. No step may be in flight.

        The caller must then call the engine's `note_new_weights`, so that KV of the old weights is not reused. Raises
        EngineError while the weights sleep, or if the runner is closed, and the errors of `leaves` before the first
        leaf; the old weights stay. After any later error there are no weights, and `weights_problem` says so until a
        later call succeeds.
        """
        if (refusal := self._last.no_update) is not None:
            raise EngineError(refusal)
        drafters: list[Params] = []
        later = _of_model(leaves, drafters)
        with pinned():
            first = list(itertools.islice(later, 1))  # errors that come before it leave the old weights
            self._half_updated = True
            if self._drafter is not None:
                self._drafter.use_target({})
            replaced = replace_leaves(self._stages, itertools.chain(first, later))
        if self._drafter is not None:
            for tree in drafters:
                self._drafter.use_new(tree)
            self._drafter.use_target(self._last.params or {})
        self._half_updated = False
        return replaced

    @property
    def weight_slots(self) -> list[Params]:
        """The `LeafSlot` of each array of the weights, a tree for each pipeline stage."""
        return [stage.slots for stage in self._stages]

    @property
    def drafter_spec(self) -> DecoderSpec | HeadSpec | None:
        """Spec of the drafter on the device; None: there is none."""
        return None if self._drafter is None else self._drafter.spec

    @property
    def drafter_slots(self) -> Params | None:
        """The `LeafSlot` of each array of the drafter; None: there is none."""
        return None if self._drafter is None else self._drafter.slots

    @property
    def drafter_params(self) -> Params | None:
        """Weights of the drafter; None: there are none on the device."""
        return None if self._drafter is None else self._drafter.params

    @property
    def stage_params(self) -> list[Params]:
        """The weights of each pipeline stage. Raises EngineError if there are none."""
        trees = [stage.params for stage in self._stages]
        if any(tree is None for tree in trees):
            raise EngineError("the engine has no weights: call update_weights")
        return [tree for tree in trees if tree is not None]

    @property
    def first_device(self) -> jax.Device:
        """The first device of the first pipeline stage."""
        return self._stages[0].placement.first_device

    def weights_problem(self) -> str | None:
        """See `engine.step_plan.Runner`. Takes 60 ns per array that the caller may delete."""
        if self._last.closed:
            return CLOSED
        if self._last.discarded:
            return DISCARDED
        if self._half_updated:
            return HALF_UPDATED
        if all(stage.has_params for stage in self._stages):
            return None
        return DELETED

    def release(self, *, discard: bool = False) -> None:
        """Free the device state, and move weights that the runner owns to the host. No step may be in flight.

        On CPU weights stay: they are in host memory. So do the caller's weights, which only the caller may delete.
        discard: delete weights that the runner owns, and drop the references to the caller's. A drafter's own weights
        move to the host, because `update_params` does not replace them.
        """
        if self._last.released and not (discard and not self._last.discarded):
            return
        self.wait_until_ready()  # compiling reads the weights' formats
        # a stage is released already if a call before this one failed for lack of host memory
        jax.block_until_ready([stage.live for stage in self._stages if not stage.released])
        self._front.sampled.clear()
        for stage in self._stages:
            stage.release(discard=discard)
        if self._drafter is not None:
            self._drafter.release()
            if discard:
                self._drafter.use_target({})
        return_free_memory()  # on CPU, the allocator keeps half of 446 MiB otherwise

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        """Allocate the weights, the state, or both again after `release`. No program compiles. The KV pool is empty.

        Raises EngineError if the memory is not free. Then it can be called again.
        """
        try:
            with pinned():
                for stage in self._stages:
                    stage.restore(weights=weights, kv_cache=kv_cache)
                if self._drafter is not None:
                    self._drafter.restore(weights=weights, kv_cache=kv_cache, target=self._last.params)
        except Exception as error:
            reason = advice(error, self._config, self._total_bytes) or error
            raise EngineError(f"the engine cannot wake up: {reason}") from error

    def start_profile(self, folder: str) -> None:
        """Profile host and device into a folder, until `stop_profile`. Raises EngineError if a profile is running."""
        self._profiler.start(folder)

    def stop_profile(self) -> None:
        """Write the profile. Raises EngineError if no profile is running."""
        self._profiler.stop()

    def prefix_cacheable(self, prompt_len: int) -> bool:
        """True if KV of a prompt may be shared. With dynamic rope, the keys of a long prompt depend on its length."""
        if self.spec.encoder is not None:
            return False
        rope = self.spec.rope
        if rope is None or rope.scaling != "dynamic":
            return True
        return prompt_len <= (rope.original_max_position or self.spec.max_position)

    def close(self) -> None:
        """Stop compiling, free the device state, and drop the references to the weights."""
        self.stop_compiling()
        self._profiler.close()
        for stage in self._stages:
            stage.close()
        if self._drafter is not None:
            self._drafter.close()

    def _start_download(self, arrays: Any) -> None:
        """Begin to copy a tree's arrays to the host. On CPU they are there, and each call would take 46 us."""
        if self._last.placement.platform != "cpu":
            jax.tree.map(lambda x: x.copy_to_host_async(), arrays)

    @contextlib.contextmanager
    def _recovering(self, shape: Shape | None = None) -> Generator[None]:
        """Raise exceptions inside as EngineError. Before that, make the state usable for new requests."""
        try:
            yield
        except BaseException as error:
            with pinned():
                self._front.sampled.clear()
                for stage in self._stages:
                    stage.recover()
                if self._drafter is not None:
                    self._drafter.recover()
            if not isinstance(error, Exception):
                raise
            which = "" if shape is None else f" of {shape}"
            # another thread may delete the weights between the engine's check and the call
            reason = self.weights_problem() or advice(error, self._config, self._total_bytes) or error
            raise EngineError(f"the device failed a step{which}: {reason}") from error


def _in_state(plan: StepPlan, shape: ForwardShape) -> np.ndarray:
    """The plan's `scored`, with indices in `DeviceState.hidden`."""
    if not shape.row_len or not plan.scored.shape[1]:
        return plan.scored
    return np.concatenate([slots_of_tokens(plan, plan.scored[0], shape)[None], plan.scored[1:]])


def _by_stage(params: Params | tuple[Params, ...]) -> tuple[Params, ...]:
    """One tree per pipeline stage."""
    return params if isinstance(params, tuple) else (params,)


def _checked(blueprint: Blueprint) -> Blueprint:
    """The blueprint, with kernels that give correct results on its device."""
    device = blueprint.placement.first_device
    if blueprint.has_unchecked_attention:
        blueprint = blueprint.with_checked_attention(device)
    return blueprint.with_checked_gated_dot(device).with_checked_fused(device)


def _kv_layout(build: FittedBuild, block_arrays: Sequence[tuple[tuple[int, ...], np.dtype]]) -> str:
    """See `engine.step_plan.Runner.kv_layout`. It has the weights' quantization, but not their values."""
    blueprint, limits = build.blueprint, build.limits
    spec = hashlib.sha256(repr(blueprint.model.spec).encode()).hexdigest()[:16]
    arrays = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in block_arrays)
    config = blueprint.config
    return (
        f"model {spec}, dtype {blueprint.dtype}, quantization {config.quantization} "
        f"({config.quantized_activations}), blocks of {limits.block_size} tokens, windows "
        f"{list(limits.kv_groups.windows)}, arrays {arrays}"
    )


def _of_model(leaves: Iterable[NewLeaf | NewDrafter], drafters: list[Params]) -> Iterator[NewLeaf]:
    """The leaves of the model. The weights of a drafter are made, and appended to `drafters`."""
    for leaf in leaves:
        if isinstance(leaf, NewDrafter):
            drafters.append(leaf.make())
        else:
            yield leaf
