"""Start-up as a chain: blueprint -> fitted build -> runner. `ModelRunner` calls `FittedBuild.compile_table`.

1. `Blueprint.draw` chooses sizes, shapes and implementations from model, options and device, before memory is known.
2. `Blueprint.fit` sizes the KV pool and returns a `FittedBuild`. It has every array's shape, and compiles programs.
3. The runner is made from the fitted build and the weights.

`jpaged plan` uses the same chain up to the fitted build, so it compiles the programs that the engine runs.
"""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.step_plan import mask_words
from jpaged.errors import EngineError, ModelLoadError, first_line
from jpaged.models.draft_head import HeadSpec
from jpaged.models.indexer import columns_of_keys
from jpaged.models.kv_scales import KVScales
from jpaged.models.quantization import quantized_parts
from jpaged.models.sharding import local_shapes, local_spec
from jpaged.models.spec import ALONE, DecoderSpec, Params, Stage, WeightLayout
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.phases import phase
from jpaged.runtime.adapter_pool import AdapterOptions
from jpaged.runtime.compile import fused_choice
from jpaged.runtime.compile.estimate import estimate_temporaries
from jpaged.runtime.compile.gated_dot_choice import checked_implementation, named_implementation
from jpaged.runtime.compile.program_table import ProgramTable, temp_bytes
from jpaged.runtime.drafting.draft_head import HeadOptions
from jpaged.runtime.drafting.draft_model import DraftModelOptions
from jpaged.runtime.drafting.draft_state import DraftSizes, TableColumns, draft_block_bytes, draft_table_bytes
from jpaged.runtime.drafting.drafter_model import DrafterModel
from jpaged.runtime.drafting.drafters import DraftBuild
from jpaged.runtime.jax_settings import pinned
from jpaged.runtime.kv_format import KVFormat
from jpaged.runtime.memory import device_memory
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.memory.remembered_pool import PoolSize, remember_pool, remembered_pool
from jpaged.runtime.memory.weight_bytes import tree_bytes
from jpaged.runtime.placement import Placement
from jpaged.runtime.sampling.sampler import SamplerOptions
from jpaged.runtime.state import DeviceState, create_state, formats, state_shapes
from jpaged.runtime.step.advance_states import AdvanceShape, compile_advance
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.block_moves import host_slots
from jpaged.runtime.step.draft_shapes import DraftShape, draft_head_shapes, draft_model_shapes
from jpaged.runtime.step.forward import compile_forward, upload_row
from jpaged.runtime.step.output_programs import PoolShape, SampleShape, compile_output
from jpaged.runtime.step.program_shapes import (
    FIRST_KINDS,
    VERIFY_ROWS,
    VERIFY_ROWS_ON_CPU,
    Shape,
    bucket_shapes,
    kind_of,
    size,
    verify_sizes,
)
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program, program_key
from pallas_kernels import self_check
from pallas_kernels.cpu_kernels import compile_ahead, kernels_of_model
from pallas_kernels.paged_attention import IMPLEMENTATIONS, cpu, usable_implementations
from pallas_kernels.platforms import nvidia_capability

logger = logging.getLogger(__name__)

BIDIRECTIONAL = "bidirectional"  # `Blueprint.implementation` of an encoder: `models.encoder.BidirectionalAttend`


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model as an engine runs it. The values of its weights are not used."""

    spec: DecoderSpec
    params: Params  # arrays or ShapeDtypeStructs
    layout: WeightLayout = WeightLayout()
    masked: bool = False  # only ids that the tokenizer has are sampled
    kv_scales: KVScales | None = None  # the checkpoint's, for fp8 pages; None: 1.0
    processors: tuple[LogitsProcessor, ...] = ()
    stage: Stage = ALONE  # pipeline stage of `params`; `spec` is the whole model's
    drafter: DrafterModel | None = None  # None: no drafter on the device
    adapters: AdapterOptions | None = None  # None: requests have no LoRA adapters


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Sizes and shapes of an engine, before memory is known. Make it with `draw`."""

    model: ServedModel  # its params are ShapeDtypeStructs
    config: EngineConfig
    placement: Placement
    limits: memory.Limits  # `fit` may lower max_model_len
    implementation: str    # attention implementation
    kv_format: KVFormat
    gated_dot: str | None = None  # implementation; None: the tuning table chooses one for each program
    fused: str | None = None      # of `fused_choice.fused_implementation`

    @classmethod
    def draw(cls, model: ServedModel, config: EngineConfig, placement: Placement) -> "Blueprint":
        """Fill in options without a value. Raises ModelLoadError for an option that does not fit model or device."""
        kv_format = KVFormat.choose(
            model.spec, config.kv_cache_dtype, _dtype(model.params), placement.device, model.kv_scales
        )
        _check_activations(config.quantized_activations, model.params, placement.device)
        if placement.platform == "cpu":
            compile_ahead(_kernels(model))
        limits = memory.decide_limits(model.spec, config, placement.platform)
        custom = sum(len(processor.parameters) for processor in model.processors)
        drafts = 0 if config.speculative_config is None else config.speculative_config.num_drafts
        verifies = verify_sizes(
            drafts, _verify_rows(placement), limits.smallest_bucket, limits.program_rows, limits.state_tokens
        )
        limits = dataclasses.replace(
            limits, custom=custom, samples=model.stage.is_last, verify_tokens=max(verifies, default=0)
        )
        if model.stage is not ALONE:
            limits = dataclasses.replace(limits, kv_groups=limits.kv_groups.of_layers(model.stage.layers))
            kv_format = kv_format.of_layers(model.stage.layers)
        here = local_spec(model.spec, placement.shards)
        implementation = BIDIRECTIONAL
        if model.spec.encoder is None:
            calls = _attention_calls(here, _dtype(model.params), limits, kv_format)
            implementation = _implementation(config, calls, placement)
        params = local_shapes(model.params)
        gated_dot = named_implementation(config, here, params, model.layout, placement.device)
        fused = fused_choice.fused_implementation(
            config, here, params, model.layout, placement.device, placement.shards, _dtype(model.params)
        )
        model = dataclasses.replace(model, params=placement.shapes_of(model.params))
        if model.drafter is not None:
            drafter = dataclasses.replace(model.drafter, params=placement.shapes_of(model.drafter.params))
            model = dataclasses.replace(model, drafter=drafter)
        return cls(model, config, placement, limits, implementation, kv_format, gated_dot, fused)

    @property
    def local_spec(self) -> DecoderSpec:
        """The spec of the model's part on one device."""
        return local_spec(self.model.spec, self.placement.shards)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the weights and the hidden states."""
        return _dtype(self.model.params)

    @property
    def step_params(self) -> Params:
        """The weights that programs of a step take, with the pools of adapters, as ShapeDtypeStructs."""
        adapters = self.model.adapters
        if adapters is None:
            return self.model.params
        return {**self.model.params, "adapters": adapters.shapes(self.placement)}

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the pools of adapters on one device."""
        adapters = self.model.adapters
        return 0 if adapters is None else tree_bytes(adapters.shapes(self.placement))

    @property
    def num_logprobs(self) -> int:
        """Maximum log-probabilities that the programs return for a token."""
        most, vocab_size = self.config.max_logprobs, self.model.spec.vocab_size
        return vocab_size if most < 0 else min(most, vocab_size)

    @property
    def sampler_options(self) -> SamplerOptions:
        """Options of every `sample` and `score` program."""
        rows = 8 if self.placement.platform == "cpu" else 64
        return SamplerOptions(
            self.num_logprobs, self.config.logprobs_mode, self.model.processors, rows_per_search=rows,
            fixed_sums=self.placement.shards.parts > 1, returns_mask=self.mask_words > 0,
        )  # fmt: skip

    @property
    def mask_words(self) -> int:
        """Words of the kept ids that FULL `sample` programs return for each token; 0: they return none."""
        return mask_words(self.model.spec.vocab_size) if self.config.return_sampling_mask else 0

    @property
    def mask_shape(self) -> jax.ShapeDtypeStruct | None:
        """Mask of the tokenizer's token ids, bool[vocab]; None = every id may be sampled."""
        return self.placement.shape((self.model.spec.vocab_size,), np.bool_) if self.model.masked else None

    @property
    def max_drafts(self) -> int:
        """Most drafts per row of a verify step; 0: the engine does not speculate."""
        speculation = self.config.speculative_config
        return 0 if speculation is None else speculation.num_drafts

    @property
    def proposes(self) -> bool:
        """True if a drafter on the device makes drafts."""
        return self.model.drafter is not None

    @property
    def program_shapes(self) -> list[Shape]:
        """Shapes of the program table."""
        limits, config = self.limits, self.config
        shapes = bucket_shapes(
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size, num_kv_groups=len(limits.kv_groups.windows), smallest=limits.smallest_bucket,
            row_buckets=config.row_buckets, token_buckets=config.token_buckets,
            on_gpu=self.placement.platform == "gpu", pools=self.model.spec.pools,
            context=self.placement.shards.context, drafts=self.max_drafts, proposes=self.proposes,
            captures=self.model.drafter is not None and self.model.drafter.is_head,
            verify_rows=_verify_rows(self.placement), advances=self.model.spec.recurrence is not None,
            processed_scores=self.sampler_options.processed, texts=limits.text_shapes,
        )  # fmt: skip
        forwards = [shape for shape in shapes if isinstance(shape, ForwardShape)]
        if self.model.drafter is not None:
            shapes += draft_head_shapes(forwards) if self.model.drafter.is_head else draft_model_shapes(forwards)
        return [shape for shape in shapes if self.model.stage.is_last or isinstance(shape, ForwardShape)]

    @property
    def pairs_of_token(self) -> int:
        """(token, expert) pairs that the forward programs count for each token; 0: they count none."""
        spec, layers = self.model.spec, self.model.params["layers"]
        if spec.experts is None or not self.placement.shards.splits_experts:
            return 0
        return spec.experts.per_token * sum("router" in leaves for leaves in layers)

    @property
    def largest_shapes(self) -> tuple[ForwardShape | SampleShape | PoolShape, ...]:
        """The programs with the largest temporaries: largest forward program, and largest FULL sampler or pooler."""
        shapes = self.program_shapes
        forwards = [shape for shape in shapes if isinstance(shape, ForwardShape)]
        samplers = [shape for shape in shapes if isinstance(shape, SampleShape)]
        poolers = [shape for shape in shapes if isinstance(shape, PoolShape)]
        forward = max(forwards, key=lambda shape: (shape.tokens, not shape.is_decode))
        if poolers:
            return forward, max(poolers, key=lambda shape: shape.rows)
        if not samplers:  # not the last pipeline stage
            return (forward,)
        return forward, max(samplers, key=lambda shape: (shape.rows, shape.variant))

    @property
    def first_shapes(self) -> list[Shape]:
        """Programs that an engine needs to start: the largest decode, mixed, greedy and pool programs."""
        largest = {kind_of(shape): shape for shape in sorted(self.program_shapes, key=size)}
        return [largest[kind] for kind in FIRST_KINDS if kind in largest]

    def fit(self, *, temp_bytes: int = 0, free_bytes: int | None = None) -> "FittedBuild":
        """Size the KV pool. Arguments and errors: see `memory.fit`."""
        plan = memory.fit(
            self.local_spec, self.config, self.limits, dtype=self.dtype, kv_format=self.kv_format,
            weight_bytes=tree_bytes(self.model.params), platform=self.placement.platform,
            temp_bytes=temp_bytes, free_bytes=free_bytes, drafter=self.drafter_bytes, adapter_bytes=self.adapter_bytes,
        )  # fmt: skip
        return FittedBuild(self, plan)

    @property
    def drafter_bytes(self) -> memory.DrafterBytes:
        """Bytes of the drafter on the device; all 0 without one."""
        drafter, limits = self.model.drafter, self.limits
        if drafter is None:
            return memory.NO_DRAFTER
        spec, dtype = drafter.layer_spec, _dtype(drafter.params)
        fixed = draft_table_bytes(spec, limits.max_num_seqs, dtype, is_head=drafter.is_head)
        block = draft_block_bytes(spec, limits.block_size, KVFormat(dtype))
        return memory.DrafterBytes(tree_bytes(drafter.params), block, fixed)

    def fit_device(self, cache_folder: pathlib.Path | None) -> "FittedBuild":
        """Size the KV pool by the free memory of the devices, which already have the weights.

        On an accelerator, compiles the programs with the largest temporaries, and may reuse an earlier pool size.
        """
        free, kind = self._free_bytes(), self.placement.device.device_kind
        # stored programs have no shardings
        several = self.placement.mesh is not None or self.model.stage is not ALONE
        store = None if several else ProgramStore.open(
            cache_folder, self.placement.platform, _kernels(self.model), kind
        )  # fmt: skip
        if free is None or self.model.spec.encoder is not None:
            return dataclasses.replace(self.fit(), store=store)
        key = f"{kind} {self.model.spec} {self.config} {program_key()}"
        pool = remembered_pool(cache_folder, key)
        build = None if pool is None else self.fit(temp_bytes=pool.temp_bytes, free_bytes=free)
        if pool is None or build is None or not pool.still_fits(build.memory_plan.num_blocks):
            temp_bytes = self.largest_temporaries(free)[1]
            build = self.fit(temp_bytes=temp_bytes, free_bytes=free)
            pool = PoolSize(build.memory_plan.num_blocks, temp_bytes)
            remember_pool(cache_folder, key, pool)
        blocks = self.placement.least(max(pool.num_blocks, build.limits.blocks_per_request))
        return dataclasses.replace(build.with_blocks(blocks), store=store)

    def _free_bytes(self) -> int | None:
        """Free bytes of the fullest device of all processes, because all run the same programs. None on CPU."""
        each = [device_memory.free_device_bytes(device, self.config) for device in self.placement.own_devices]
        known = [free for free in each if free is not None]
        return self.placement.least(min(known)) if len(known) == len(each) else None

    def check_memory(self) -> None:
        """Raise ModelLoadError if free device memory cannot serve the model. For devices without the weights."""
        free = self._free_bytes()
        weights = tree_bytes(self.model.params) + self.drafter_bytes.weights
        plan = self.fit(free_bytes=None if free is None else max(0, free - weights)).memory_plan
        host_slots(self.config.swap_space, self.block_bytes, plan.slot_bytes * (plan.limits.num_snapshots > 0))

    @property
    def has_unchecked_attention(self) -> bool:
        """True if attention must be checked: on accelerators, and for a CPU kernel that was just compiled.

        False for encoders, and for latent pages (spec.latent) without a Pallas kernel.
        """
        if self.model.spec.encoder or (self.model.spec.latent and not self.implementation.startswith("triton")):
            return False
        return self.placement.platform != "cpu" or (self.implementation == "cpu" and cpu.is_new())

    def with_checked_attention(self, device: jax.Device) -> "Blueprint":
        """The blueprint with the first attention implementation that agrees with its reference on this device.

        Logs each failure as an error, then tries the next implementation: smaller tiles, then XLA operations. Raises
        ModelLoadError if all fail, or if the options name one and it fails.
        """
        named, failures = self.config.attention_implementation, []
        if self.placement.shards.fixed_kernels(self.dtype):
            named = self.implementation  # another one has other sums
        calls = _attention_calls(self.local_spec, self.dtype, self.limits, self.kv_format)
        names = (named,) if named else _usable(self.placement, calls)
        if names == ("xla",) and self.placement.platform == "gpu":
            reasons = [IMPLEMENTATIONS["triton"].refuse(self.placement.device, *call) for call in calls]
            refused = next(reason for reason in reasons if reason is not None)
            logger.warning("attention runs without kernels, which is slow: %s", refused)
        for name in names:
            attempt = dataclasses.replace(self, implementation=name)
            try:
                attempt.check_attention(device)
            except Exception as error:  # wrong results, or a kernel that does not compile or run on this device
                if name == "cpu":
                    cpu.discard()
                reason = f"{type(error).__name__}: {first_line(error)}"
                failures.append(f"{name}: {reason}")
                if named:
                    raise ModelLoadError(
                        f"attention_implementation={name!r} does not work on {device.device_kind}: "
                        f"{reason}; leave it out to try others"
                    ) from error
                logger.error(
                    "attention %r does not work on %s, so another implementation is tried: %s. `jpaged report` writes "
                    "what is needed to find out why", name, device.device_kind, reason,
                )  # fmt: skip
            else:
                if failures:
                    logger.warning("attention %r is used instead. It is slower", name)
                return attempt
        raise ModelLoadError(
            f"no implementation of attention works on {device.device_kind}: {'; '.join(failures)}. `jpaged report` "
            "writes what is needed to find out why"
        )

    def with_checked_gated_dot(self, device: jax.Device) -> "Blueprint":
        """The blueprint with a `gated_dot` that works on this device. See `checked_implementation`."""
        model, shapes = self.model, self.program_shapes
        tokens = [shape.tokens for shape in shapes if isinstance(shape, ForwardShape)]
        params = local_shapes(model.params)
        name = checked_implementation(self.gated_dot, self.local_spec, params, model.layout, tokens, device)
        return dataclasses.replace(self, gated_dot=name)

    def with_checked_fused(self, device: jax.Device) -> "Blueprint":
        """The blueprint with fused layers that work on this device. See `fused_choice.checked_implementation`."""
        forwards = [shape for shape in self.program_shapes if isinstance(shape, ForwardShape)]
        tokens = sorted({shape.tokens for shape in forwards if fused_choice.takes_fused(self.fused, shape)})
        params = local_shapes(self.model.params)
        name = fused_choice.checked_implementation(self.fused, self.config, params, tokens, device)
        return dataclasses.replace(self, fused=name)

    def check_attention(self, device: jax.Device) -> None:
        """Compare attention with its reference. Raises KernelCheckError if results are wrong on this device."""
        spec, largest = self.local_spec, 0.0
        layers = [(window, spec.kv_of(i).heads, spec.kv_of(i).head_dim) for i, window in enumerate(spec.windows)]
        for window, kv_heads, head_dim in dict.fromkeys(layers):
            errors = self_check(
                q_heads=spec.num_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=self.limits.block_size,
                dtype=self.dtype, kv_dtype=self.kv_format.dtype, v_dim=spec.page_v_dim, key_dim=columns_of_keys(spec),
                sliding_window=window, logit_softcap=spec.attention_softcap, with_sinks=spec.sinks,
                with_alibi=spec.alibi is not None, implementation=self.implementation, device=device,
            )  # fmt: skip
            largest = max(largest, *errors.values())
        logger.info("attention %r agrees with its reference: largest difference %.2g", self.implementation, largest)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return memory.block_bytes(self.local_spec, self.limits, self.kv_format, self.placement.platform)

    @property
    def table_bytes(self) -> int:
        """Bytes of the device state without the pages."""
        return memory.table_bytes(self.local_spec, self.limits, self.dtype, self.placement.platform)

    def with_blocks(self, num_blocks: int) -> "FittedBuild":
        """A build with a pool of `num_blocks` blocks, even if they do not fit into memory."""
        weights = tree_bytes(self.model.params)
        plan = memory.MemoryPlan(
            self.limits, num_blocks, self.block_bytes, weights, 0, self.table_bytes, self.drafter_bytes,
            self.adapter_bytes,
        )  # fmt: skip
        return FittedBuild(self, plan)

    def largest_temporaries(self, free_bytes: int | None) -> tuple[Shape, int]:
        """The program with the most temporaries, and their bytes. Compiles with a pool of about the final size.

        The temporaries depend on the pool. For Llama 3.1 8B on an H200 (deviceless) they are 427 MB with 2,048 blocks
        and 559 MB with 8,192: XLA keeps one more copy of the logits. free_bytes: see `memory.fit`.
        """
        if free_bytes is not None:
            tables = self.table_bytes + self.drafter_bytes.fixed + self.adapter_bytes
            free_bytes = max(0, free_bytes - estimate_temporaries(self)[1] - tables)
        per_block = self.block_bytes + self.drafter_bytes.block
        pool = memory.pool_bytes(self.config, self.limits, per_block, free_bytes)
        page = self.kv_format.page_shapes(self.local_spec, self.limits.block_size)
        build = self.with_blocks(max(1, page.addressable(memory.round_down(pool // per_block))))
        sizes = [(shape, temp_bytes(build.compile(shape))) for shape in self.largest_shapes]
        return max(sizes, key=lambda size: size[1])


def with_one_pool(builds: Sequence["FittedBuild"]) -> list["FittedBuild"]:
    """The builds of pipeline stages, all with the smallest number of blocks and the smallest max_model_len."""
    blocks = min(build.memory_plan.num_blocks for build in builds)
    length = min(build.limits.max_model_len for build in builds)
    limits = [dataclasses.replace(build.limits, max_model_len=length) for build in builds]
    return [
        dataclasses.replace(build, memory_plan=dataclasses.replace(build.memory_plan, num_blocks=blocks, limits=of_one))
        for build, of_one in zip(builds, limits, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class FittedBuild:
    """A blueprint with a memory plan, so every array's shape is known. Make it with `Blueprint.fit`."""

    blueprint: Blueprint
    memory_plan: memory.MemoryPlan
    store: ProgramStore | None = None  # store of the programs; None: every start traces them

    @property
    def limits(self) -> memory.Limits:
        """Limits of the engine, after fitting into memory."""
        return self.memory_plan.limits

    def with_blocks(self, num_blocks: int) -> "FittedBuild":
        """The same build with a pool of `num_blocks` blocks."""
        return dataclasses.replace(self, memory_plan=dataclasses.replace(self.memory_plan, num_blocks=num_blocks))

    def state_shapes(self) -> DeviceState:
        """The device state as ShapeDtypeStructs."""
        blueprint, sizes = self.blueprint, self.limits.state_sizes(self.memory_plan.num_blocks)
        return state_shapes(
            blueprint.model.spec, self.limits.kv_groups, sizes, dtype=blueprint.dtype, kv_format=blueprint.kv_format,
            placement=blueprint.placement,
        )  # fmt: skip

    def create_state(self) -> DeviceState:
        """Allocate the device state."""
        blueprint, sizes = self.blueprint, self.limits.state_sizes(self.memory_plan.num_blocks)
        with pinned(), phase("KV pool"):  # another thread may call this
            return create_state(
                blueprint.model.spec, self.limits.kv_groups, sizes, dtype=blueprint.dtype,
                kv_format=blueprint.kv_format, placement=blueprint.placement,
            )  # fmt: skip

    def compile(self, shape: Shape) -> jax.stages.Compiled:
        """Compile one program of the table: see `compile_forward` and `compile_output`."""
        blueprint, model, state = self.blueprint, self.blueprint.model, self.state_shapes()
        with pinned():  # settings are per thread, and several threads compile
            if isinstance(shape, ForwardShape):
                return compile_forward(
                    blueprint.step_params, state, shape, spec=model.spec, kv_groups=self.limits.kv_groups,
                    layout=model.layout, implementation=blueprint.implementation, gated_dot=blueprint.gated_dot,
                    fused=blueprint.fused if fused_choice.takes_fused(blueprint.fused, shape) else None,
                    placement=blueprint.placement, store=self.store, stage=model.stage,
                    capture=model.drafter.capture if model.drafter is not None and shape.captures else None,
                    routes=blueprint.config.enable_return_routed_experts,
                )  # fmt: skip
            if isinstance(shape, AdvanceShape):
                return compile_advance(
                    model.params, state, shape, spec=model.spec, placement=blueprint.placement, store=self.store
                )
            if isinstance(shape, DraftShape):
                return self.draft_build().compile(shape)
            return compile_output(
                blueprint.step_params, blueprint.mask_shape, state, shape, spec=model.spec, layout=model.layout,
                options=blueprint.sampler_options, placement=blueprint.placement, max_drafts=blueprint.max_drafts,
                store=self.store,
            )  # fmt: skip

    def draft_build(self) -> DraftBuild:
        """Everything that the programs of the drafter are compiled from. Only with a drafter on the device."""
        blueprint, model, limits = self.blueprint, self.blueprint.model, self.limits
        drafter, placement = model.drafter, blueprint.placement
        if drafter is None:
            raise EngineError("the engine has no drafter on the device")
        layers, dtype = drafter.layer_spec, _dtype(drafter.params)
        calls = _attention_calls(layers, dtype, limits, KVFormat(dtype))
        # no start compares a drafter's attention with its reference, and Mosaic GPU's prefill needs that
        names = [name for name in _usable(placement, calls) if name != "mosaic_prefill"]
        common: dict[str, Any] = {
            "columns": TableColumns.of(limits.kv_groups, limits.width), "layout": drafter.layout,
            "implementation": names[0],
        }  # fmt: skip
        if isinstance(drafter.spec, HeadSpec):
            options: Any = HeadOptions(
                drafter.spec, model.spec, target_layout=model.layout, shards=placement.shards, **common
            )
        else:
            options = DraftModelOptions(drafter.spec, target_vocab=model.spec.vocab_size, **common)
        sizes = DraftSizes(self.memory_plan.num_blocks, limits.block_size, limits.max_num_seqs, drafter.is_head)
        return DraftBuild(
            options, drafter.params, model.params, self.state_shapes(), sizes, dtype, placement, store=self.store
        )

    def compile_table(self, *, progress: bool, first_only: bool = False) -> ProgramTable:
        """Compile the program table. progress: show a bar. first_only: the remaining programs will be added later."""
        shapes = self.blueprint.program_shapes
        first = self.blueprint.first_shapes if first_only else shapes
        missing = [shape for shape in shapes if shape not in first]
        return ProgramTable.compile(first, self.compile, progress=progress, missing=missing)

    def compile_upload_row(self) -> jax.stages.Compiled:
        """Compile `upload_row`."""
        state = self.state_shapes()
        row = self.blueprint.placement.shape((1 + state.blocks.shape[1],), np.int32)
        call = functools.partial(upload_row)
        return compile_program(call, (state, row), donate=(0,), out_shardings=formats(state), store=self.store)


def _verify_rows(placement: Placement) -> tuple[int, ...]:
    """Rows with the maximum of drafts, for each verify program."""
    return VERIFY_ROWS_ON_CPU if placement.platform == "cpu" else VERIFY_ROWS


def _dtype(params: Params) -> np.dtype:
    return (params["embed"] if "embed" in params else params["layers"][0]["o"]).dtype  # not every stage embeds


def _kernels(model: ServedModel) -> tuple[str, ...]:
    """Modules of the native kernels that a model's programs may call on CPU."""
    quantized = any(weight.layout == "tiles" for weight in quantized_parts(model.params))
    recurrence = model.spec.recurrence
    return kernels_of_model(
        quantized=quantized, experts=model.spec.experts is not None, adapters=model.adapters is not None,
        convolutions=recurrence is not None, scans=recurrence is not None and recurrence.scans,
    )


def _check_activations(name: str, params: Any, device: Any) -> None:
    """Raise ModelLoadError if no matmul of the model can use such activations, or the device cannot."""
    if name not in ("int8", "fp8"):
        return
    if not any(weight.activations == name for weight in quantized_parts(params)):
        usable = {
            "int8": "in 8 bits without zero points (on CPU: in 4 or 8 bits), which int8 activations need: use a w8a8 "
            "checkpoint or quantization='w8a8'",
            "fp8": "in fp8 (fp8 activations need them): use a checkpoint in fp8 or quantization='fp8'",
        }
        raise ModelLoadError(
            f"quantized_activations={name!r}: the model has no weights {usable[name]}, or leave it at auto"
        )
    if name == "int8":
        return
    capability = nvidia_capability(device)
    if device.platform == "gpu" and (capability is None or capability < (8, 9)):
        has = "is not from NVIDIA" if capability is None else f"has {'.'.join(map(str, capability))}"
        raise ModelLoadError(
            "quantized_activations='fp8' needs an NVIDIA card of compute capability 8.9 (Ada) or newer, and "
            f"{device.device_kind} {has}: leave it at auto, which does not round activations"
        )


def _attention_call(
    spec: DecoderSpec, dtype: np.dtype, limits: memory.Limits, kv_format: KVFormat
) -> tuple[Any, ...]:
    """Arguments of the largest attention call, as shapes. spec: the part on one device."""
    q = jax.ShapeDtypeStruct((limits.max_num_batched_tokens, spec.num_heads, spec.head_dim), dtype)
    pages = kv_format.page_shapes(spec, limits.block_size)
    tables = jax.ShapeDtypeStruct((limits.max_num_seqs, limits.width), np.dtype(np.int32))
    return q, pages, tables, limits.max_num_batched_tokens


def _attention_calls(
    spec: DecoderSpec, dtype: np.dtype, limits: memory.Limits, kv_format: KVFormat
) -> list[tuple[Any, ...]]:
    """`_attention_call` of each kind of layer, by the heads of its KV."""
    kinds = {(kv.heads, kv.head_dim) for kv in spec.layer_kv} or {(spec.num_kv_heads, spec.head_dim)}
    specs = [dataclasses.replace(spec, num_kv_heads=heads, head_dim=width) for heads, width in sorted(kinds)]
    return [_attention_call(one, dtype, limits, kv_format) for one in specs]


def _usable(placement: Placement, calls: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """Attention implementations that take all calls, best first."""
    first, *rest = (usable_implementations(placement.device, *call) for call in calls)
    return tuple(name for name in first if all(name in names for names in rest))


def _implementation(config: EngineConfig, calls: Sequence[tuple[Any, ...]], placement: Placement) -> str:
    """The attention implementation of the options, or the default for the device and the calls."""
    name = config.attention_implementation
    if placement.shards.fixed_kernels(calls[0][0].dtype):
        if name not in (None, "triton_fixed"):
            raise ModelLoadError(
                f"attention_implementation={name!r}: must be 'triton_fixed' with deterministic=True and 16-bit weights"
            )
        name = "triton_fixed"
    if name is None:
        return _usable(placement, calls)[0]
    if name not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ModelLoadError(f"attention_implementation={name!r}: must be one of {known}; leave it out for the default")
    reasons = [IMPLEMENTATIONS[name].refuse(placement.device, *call) for call in calls]
    reason = next((reason for reason in reasons if reason is not None), None)
    if name in ("mosaic_gpu", "mosaic_prefill") and placement.device.platform == "cpu":
        # `refuse` accepts a CPU for tests of the kernels, which run in JAX's interpreter of Mosaic GPU
        reason = "it is for NVIDIA's Hopper (compute capability 9), not for a CPU"
    if reason is not None:
        raise ModelLoadError(
            f"attention_implementation={name!r} cannot serve this model here: {reason}; leave it out for the default"
        )
    return name
