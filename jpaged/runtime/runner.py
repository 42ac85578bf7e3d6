"""ModelRunner: the device, as the engine sees it. Packs a plan, picks a program, dispatches, collects one step late.

`create` decides the sizes, compiles the program table and makes the state; then `dispatch` returns at once with a
handle, and `collect` waits for what that step sampled. Between the two the engine makes the next plan: the device
never waits for the host.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.step_plan import RowMask, Scores, StepPlan, StepResult, TransferCosts
from jpaged.errors import EngineError, ModelLoadError
from jpaged.models.spec import DecoderSpec, WeightLayout, param_shapes
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.runtime import memory
from jpaged.runtime.block_moves import BlockMover, host_slots
from jpaged.runtime.blueprint import Blueprint
from jpaged.runtime.compile_cache import CompileCounter, persistent_cache
from jpaged.runtime.heads import HeadShape, head_params, pack_places
from jpaged.runtime.jax_settings import pinned
from jpaged.runtime.programs import Program, ProgramTable
from jpaged.runtime.row_extras import ExtrasUploader
from jpaged.runtime.sampler import Sampled
from jpaged.runtime.state import DeviceState, create_state, formats
from jpaged.runtime.step import block_updates, pack, upload_row
from pallas_kernels import KernelCheckError, self_check

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Handle:
    """A step under way."""

    plan: StepPlan
    computed: jax.Array                  # int32[]     there when the forward pass is done
    scores: tuple[Sampled, ...]          # of the plan's `scored`, a chunk each
    given: Sampled | jax.Array | None    # a row a row that samples, and padding; of a model that pools: float32[, size]


class ModelRunner:
    """A model on a device, with its KV pool and its compiled programs. See `engine.step_plan.Runner`."""

    def __init__(
        self,
        spec: DecoderSpec,
        params: Any,
        allowed: Any,
        plan: memory.MemoryPlan,
        programs: ProgramTable,
        upload: Any,
        counter: CompileCounter,
        make_state: Any,
        num_logprobs: int,
        mover: BlockMover,
        host_slots: int,
        uploader: ExtrasUploader | None,
    ):
        self.spec = spec
        self.memory_plan = plan
        self.programs = programs
        self.num_blocks = plan.num_blocks
        self.block_size = plan.limits.block_size
        self.windows = plan.limits.groups.windows
        self.max_num_seqs = plan.limits.max_num_seqs
        self.max_num_batched_tokens = plan.limits.max_num_batched_tokens
        self.max_model_len = plan.limits.max_model_len
        self.vocab_size = spec.vocab_size
        self.max_logprobs = num_logprobs
        longrope = spec.rope is not None and spec.rope.scaling == "longrope"
        self.longrope_switch_len = spec.rope.original_max_position if longrope else None
        self._params = params
        self._head_params = head_params(spec, params)
        self._allowed = allowed
        self._upload = upload
        self._counter = counter
        self._make_state = make_state
        self._state: DeviceState | None = make_state()
        self._device = _only_device(self._state)
        self._mover = mover
        self._uploader = uploader
        self.host_slots = host_slots
        self.transfer_costs = self._measure_transfers() if host_slots else None
        # On CPU a step of 64 tokens takes nearly twice as long as one of 32; elsewhere as long, the weights' time.
        self.min_jump_per_request = 1.0 if self._device.platform == "cpu" else 0.0

    @staticmethod
    def check(spec: DecoderSpec, dtype: Any, config: EngineConfig, device: Any = None) -> None:
        """Raise ModelLoadError where the options or the device's memory cannot serve a model; takes no memory.

        `create` would raise the same, but with the weights on the device already. device: the default one otherwise.
        """
        device = device or jax.devices()[0]
        blueprint = Blueprint.draw(spec, config, param_shapes(spec, dtype), device)
        host_slots(config.swap_space, memory.block_bytes(spec, blueprint.limits, dtype, device.platform))
        free = memory.free_device_bytes(device, config)
        blueprint.fit(free_bytes=None if free is None else max(0, free - memory.tree_bytes(blueprint.params)))

    @classmethod
    def create(
        cls,
        spec: DecoderSpec,
        params: Any,
        config: EngineConfig,
        *,
        layout: WeightLayout = WeightLayout(),
        tokenizer_ids: np.ndarray | None = None,
        processors: tuple[LogitsProcessor, ...] = (),
        progress: bool = False,
    ) -> "ModelRunner":
        """Size the pool, compile every program, make the state: after this nothing compiles.

        params:        the tree of `spec.param_shapes` (or as `layout` says), on one device, used without a copy.
        tokenizer_ids: bool[vocab_size]; ids that may be sampled. None = all.
        progress:      show a bar while compiling.

        Raises ModelLoadError where an option does not fit the model or the memory.
        """
        device = _only_device(params)
        sharding = jax.sharding.SingleDeviceSharding(device)
        allowed = None
        if tokenizer_ids is not None and not tokenizer_ids.all():
            allowed = jax.device_put(np.asarray(tokenizer_ids, bool), sharding)
        blueprint = Blueprint.draw(
            spec, config, params, device, sharding=sharding, layout=layout, masked=allowed is not None,
            processors=processors,
        )  # fmt: skip
        dtype = blueprint.dtype
        with pinned(), persistent_cache(config.compilation_cache_dir) as folder:
            if device.platform != "cpu" and spec.latent is None:  # latent pages: XLA's operations everywhere
                _check_attention(spec, blueprint.limits, blueprint.implementation, dtype, device)
            free = memory.free_device_bytes(device, config)
            if free is None:
                plan = blueprint.fit()
            else:
                plan = blueprint.fit(temp_bytes=blueprint.largest_temporaries(free)[1], free_bytes=free)
                key = f"{device.device_kind} {spec} {config} {jax.__version__}"
                blocks = memory.remembered_blocks(folder, key, plan.num_blocks)
                plan = dataclasses.replace(plan, num_blocks=max(blocks, plan.limits.blocks_per_request))
            start = time.perf_counter()
            table = ProgramTable.compile(
                blueprint.shapes(plan.limits),
                lambda shape: blueprint.compile(shape, plan.limits, plan.num_blocks),
                progress=progress,
            )
            state = blueprint.state(plan.limits, plan.num_blocks)
            row = jax.ShapeDtypeStruct((1 + state.blocks.shape[1],), np.dtype(np.int32), sharding=sharding)
            upload = jax.jit(upload_row, donate_argnums=0, out_shardings=formats(state)).lower(state, row).compile()
            slots = host_slots(config.swap_space, plan.block_bytes)
            mover = BlockMover(state, sharding, host_slots=slots)
            uploader = None if spec.pools else ExtrasUploader(state, plan.limits.max_model_len, sharding)
            seconds = time.perf_counter() - start
            count = len(table.programs) + 1 + mover.num_programs + (uploader.num_programs if uploader else 0)
            logger.info("compiled %d programs in %.1f s:\n%s", count, seconds, table)
            plan = dataclasses.replace(plan, temp_bytes=table.temp_bytes)
            logger.info("device memory:\n%s", plan)
            make_state = functools.partial(
                create_state, spec, plan.limits.groups, blueprint.sizes(plan.limits, plan.num_blocks), dtype=dtype,
                device=sharding,
            )  # fmt: skip
            return cls(
                spec, params, allowed, plan, table, upload, CompileCounter(), make_state, blueprint.num_logprobs, mover,
                slots, uploader,
            )  # fmt: skip

    @property
    def compiles_after_ready(self) -> int:
        """Programs compiled in a step: 0, or the program table has a hole."""
        return self._counter.count

    def dispatch(self, plan: StepPlan) -> Handle:
        """Start a step; returns at once. Raises EngineError when the device fails; the KV pool is empty after that."""
        forward = self.programs.forward(plan)
        width = self.memory_plan.limits.width
        updates = block_updates(plan, width)
        with pinned(), self._counter.watching(), self._recovering(forward):
            if len(plan.moves):
                self._state = self._mover.run(self._live_state, plan.moves)
            # What the packed plan has no room for goes first, a row at a time, longest tables first.
            for init in sorted(plan.row_inits, key=lambda i: -len(i.blocks)):
                if len(updates) <= forward.shape.max_updates:
                    break
                row = np.zeros(1 + self._live_state.blocks.shape[1], np.int32)
                row[0] = init.row
                row[1 + init.blocks[:, 0] * width + init.blocks[:, 1]] = init.blocks[:, 2]
                self._state = self._upload(self._live_state, jax.device_put(row, self._device))
                updates = updates[updates[:, 0] != init.row]
            packed = jax.device_put(pack(plan, updates, forward.shape), self._device)
            for init in plan.row_inits:
                if init.extras is not None and self._uploader is not None:
                    self._state = self._uploader.start(self._live_state, init)
            self._state, computed = forward.run(self._params, self._live_state, packed)
            scores = self._score(plan.scored)
            given = None if plan.waits_for_masks else self._apply_head(plan, plan.masks)
        jax.tree.map(lambda x: x.copy_to_host_async(), (computed, scores, given))
        return Handle(plan, computed, scores, given)

    def sample(self, handle: Handle, masks: Sequence[RowMask]) -> Handle:
        """Sample for a step whose plan waits for masks; returns at once. Raises EngineError when the device fails."""
        with pinned(), self._counter.watching(), self._recovering():
            given = self._apply_head(handle.plan, [*handle.plan.masks, *masks])
        jax.tree.map(lambda x: x.copy_to_host_async(), given)
        return dataclasses.replace(handle, given=given)

    def _score(self, scored: np.ndarray) -> tuple[Sampled, ...]:
        """Log-probabilities of known tokens, in chunks: no more logits are there at a time than a step samples from."""
        chunks, program = [], self.programs.scoring
        if program is None:
            return ()  # it pools: nobody asks
        for first in range(0, scored.shape[1], program.shape.rows):
            part = scored[:, first : first + program.shape.rows]
            places = np.zeros((2, program.shape.rows), np.int32)
            places[1, : part.shape[1]], places[0, : part.shape[1]] = part
            chunks.append(self._run_head(program, places))
        return tuple(chunks)

    def _apply_head(self, plan: StepPlan, masks: Sequence[RowMask]) -> Sampled | jax.Array | None:
        """Sample for the rows of a plan that have reached their end, or pool; None where there are none."""
        count = int(np.count_nonzero(plan.samples))
        if not count:
            return None
        if masks and self._uploader is not None:
            self._state = self._uploader.set_masks(self._live_state, masks)
        head = self.programs.head(count, plan.sampler)
        return self._run_head(head, pack_places(plan, head.shape))

    def _run_head(self, head: Program[HeadShape], places: np.ndarray) -> Any:
        state = self._live_state
        table, sampling, given = head.run(
            self._head_params, self._allowed, state.table, state.sampling, state.hidden,
            jax.device_put(places, self._device),
        )  # fmt: skip
        self._state = state.replace(table=table, sampling=sampling)
        return given

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step and fetch what it sampled."""
        samples = handle.plan.samples
        with pinned(), self._counter.watching(), self._recovering():
            np.asarray(handle.computed)
            scores = _joined(handle.scores, handle.plan.scored.shape[1])
            if handle.given is None:
                return StepResult(np.zeros(len(samples), np.int32), scores=scores)
            host = jax.tree.map(lambda x: _spread(np.asarray(x), samples), handle.given)
        if self.spec.pools:
            return StepResult(np.zeros(0, np.int32), pooled=host)
        return StepResult(host.token_ids, host.logprobs, host.ranks, host.top_ids, host.top_logprobs, scores)

    def prefix_cacheable(self, prompt_len: int) -> bool:
        """Whether KV of such a prompt may be shared: with dynamic rope, keys beyond the first range depend on it."""
        rope = self.spec.rope
        if rope is None or rope.scaling != "dynamic":
            return True
        return prompt_len <= (rope.original_max_position or self.spec.max_position)

    def close(self) -> None:
        """Give the KV pool back and let go of the weights."""
        if self._state is not None:
            for leaf in jax.tree.leaves(self._state):
                if not leaf.is_deleted():
                    leaf.delete()
        self._state = self._params = self._head_params = self._allowed = None
        self._mover.close()
        self._counter.close()

    def _measure_transfers(self) -> TransferCosts:
        """What the choice between moving a block and computing it goes by.

        A step of padding costs what a full one does, but for its attention.
        """
        program = self.programs.forwards[-1]
        nothing = np.zeros(0, np.int32)
        idle = StepPlan(nothing, nothing, 0, nothing.astype(bool), nothing, np.zeros((0, 4), np.int32))
        packed = jax.device_put(pack(idle, np.zeros((0, 3), np.int32), program.shape), self._device)

        def step(state: DeviceState) -> DeviceState:
            return program.run(self._params, state, packed)[0]

        block_bytes = self.memory_plan.block_bytes
        self._state, costs = self._mover.measure(self._live_state, block_bytes, step, program.shape.tokens)
        return costs

    @property
    def _live_state(self) -> DeviceState:
        if self._state is None:
            raise EngineError("the engine is closed: make a new one")
        return self._state

    @contextlib.contextmanager
    def _recovering(self, program: Program[Any] | None = None) -> Generator[None]:
        """Failures inside are EngineErrors, and leave a runner that serves."""
        try:
            yield
        except BaseException as error:
            self._recover()
            if not isinstance(error, Exception):
                raise
            which = "" if program is None else f" of {program.shape}"
            raise EngineError(f"the device failed a step{which}: {error}") from error

    def _recover(self) -> None:
        """After a failed step the donated state is gone: make an empty one, so that new requests can be served."""
        if self._state is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            with pinned():
                self._state = self._make_state()


def _joined(chunks: Sequence[Sampled], count: int) -> Scores | None:
    """Scores in the order of the plan; None where there are none."""
    if not chunks:
        return None
    names = [field.name for field in dataclasses.fields(Scores)]
    return Scores(**{
        name: np.concatenate([np.asarray(getattr(chunk, name)) for chunk in chunks])[:count] for name in names
    })  # fmt: skip


def _spread(given: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """What the rows that sample were given, in the places of a plan's rows."""
    if samples.all():
        return given[: len(samples)]
    spread = np.zeros((len(samples), *given.shape[1:]), given.dtype)
    spread[samples] = given[: np.count_nonzero(samples)]
    return spread


def _check_attention(
    spec: DecoderSpec, limits: memory.Limits, implementation: str, dtype: Any, device: Any
) -> None:
    """Raise ModelLoadError where the kernels are wrong on this device: rather no answer than a wrong one."""
    largest = 0.0
    for window in dict.fromkeys(spec.windows):
        try:
            errors = self_check(
                q_heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
                block_size=limits.block_size, dtype=dtype, sliding_window=window, logit_softcap=spec.attention_softcap,
                with_sinks=spec.sinks, with_alibi=spec.alibi is not None, implementation=implementation, device=device,
            )  # fmt: skip
        except KernelCheckError as error:
            raise ModelLoadError(f"{error}: attention_implementation='xla'") from error
        largest = max(largest, *errors.values())
    logger.info("attention %r agrees with its reference: largest difference %.2g", implementation, largest)


def _only_device(tree: Any) -> Any:
    """The one device that all arrays of a tree are on."""
    devices = {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
    if len(devices) != 1:
        raise ModelLoadError(f"the parameters are on {len(devices)} devices: put them on one")
    return devices.pop()
