"""What an engine's programs are made from, before anything is on a device: shapes, options, and the kind of device.

A start and `jpaged plan` both draw one, so that the plan compiles the program that the engine will run, and sizes its
pool with the same arithmetic.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.models.spec import DecoderSpec, WeightLayout
from jpaged.params.logits_processors import LogitsProcessor
from jpaged.runtime import memory
from jpaged.runtime.estimate import estimate_temporaries
from jpaged.runtime.heads import HeadShape, compile_head
from jpaged.runtime.jax_settings import pinned
from jpaged.runtime.programs import Shape, bucket_shapes, temp_bytes
from jpaged.runtime.sampler import SamplerOptions
from jpaged.runtime.state import StateSizes, state_shapes
from jpaged.runtime.step import ForwardShape, compile_forward
from pallas_kernels import KVPages
from pallas_kernels.paged_attention import IMPLEMENTATIONS, choose_implementation


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Shapes and decisions that all programs of an engine share. Make it with `draw`."""

    spec: DecoderSpec
    config: EngineConfig
    params: Any          # the parameter tree as ShapeDtypeStructs
    allowed: Any         # bool[vocab_size] as a ShapeDtypeStruct, or None
    layout: WeightLayout
    device: Any          # a jax Device, or what stands for one (`targets.Target`)
    sharding: Any        # where the arrays will lie; None: nothing is compiled
    limits: memory.Limits  # as asked for: the pool may shrink them
    implementation: str  # of attention
    processors: tuple[LogitsProcessor, ...] = ()

    @classmethod
    def draw(
        cls,
        spec: DecoderSpec,
        config: EngineConfig,
        params: Any,
        device: Any,
        *,
        sharding: Any = None,
        layout: WeightLayout = WeightLayout(),
        masked: bool = False,
        processors: tuple[LogitsProcessor, ...] = (),
    ) -> "Blueprint":
        """Decide what the options leave open.

        params: arrays or ShapeDtypeStructs. masked: not all ids may be sampled.
        Raises ModelLoadError where an option does not fit the model or the device.
        """
        limits = memory.decide_limits(spec, config, device.platform)
        limits = dataclasses.replace(limits, custom=sum(len(each.parameters) for each in processors))
        dtype = params["embed"].dtype
        mask = jax.ShapeDtypeStruct((spec.vocab_size,), np.dtype(bool), sharding=sharding) if masked else None
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)
        implementation = _implementation(spec, config, limits, dtype, device)
        return cls(spec, config, abstract, mask, layout, device, sharding, limits, implementation, processors)

    @property
    def dtype(self) -> np.dtype:
        """Of the weights and the KV pages."""
        return self.params["embed"].dtype

    @property
    def num_logprobs(self) -> int:
        """Most log-probabilities a token that the programs give."""
        return min(self.config.max_logprobs, self.spec.vocab_size)

    @property
    def sampler_options(self) -> SamplerOptions:
        """What all heads have in common."""
        return SamplerOptions(
            self.num_logprobs, self.config.logprobs_mode, self.processors, can_skip=self.device.platform != "gpu"
        )

    def shapes(self, limits: memory.Limits) -> list[Shape]:
        """The program table."""
        return bucket_shapes(
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size, num_groups=len(limits.groups.windows),
            smallest=limits.smallest_bucket,
            row_buckets=self.config.row_buckets, token_buckets=self.config.token_buckets, pools=self.spec.pools,
        )  # fmt: skip

    @property
    def largest_shapes(self) -> tuple[ForwardShape, HeadShape]:
        """The programs whose temporaries are the largest: most tokens; most rows, and all that a sampler can do."""
        shapes = self.shapes(self.limits)
        forward = max((s for s in shapes if isinstance(s, ForwardShape)), key=lambda s: (s.tokens, not s.is_decode))
        return forward, max((s for s in shapes if isinstance(s, HeadShape)), key=lambda s: (s.rows, s.variant or 0))

    def sizes(self, limits: memory.Limits, num_blocks: int) -> StateSizes:
        """Of the device state."""
        return StateSizes(
            num_blocks, limits.block_size, limits.max_num_seqs, limits.width, limits.state_tokens, limits.custom
        )

    def state(self, limits: memory.Limits, num_blocks: int) -> Any:
        """The device state as ShapeDtypeStructs."""
        sizes = self.sizes(limits, num_blocks)
        return state_shapes(self.spec, limits.groups, sizes, dtype=self.dtype, sharding=self.sharding)

    def compile(self, shape: Shape, limits: memory.Limits, num_blocks: int) -> Any:
        """Compile one program: see `compile_forward` and `compile_head`."""
        state = self.state(limits, num_blocks)
        with pinned():  # here, too: settings are a thread's, and programs compile in several
            if isinstance(shape, HeadShape):
                return compile_head(
                    self.params, self.allowed, state, spec=self.spec, layout=self.layout, shape=shape,
                    options=self.sampler_options, sharding=self.sharding,
                )  # fmt: skip
            return compile_forward(
                self.params, state, spec=self.spec, groups=limits.groups, layout=self.layout, shape=shape,
                implementation=self.implementation, sharding=self.sharding,
            )  # fmt: skip

    def largest_temporaries(self, free_bytes: int | None) -> tuple[Shape, int]:
        """The program with the most temporaries, and their bytes: compiled over a pool about as large as it will be.

        They do depend on the pool: for Llama 3.1 8B XLA kept a copy of the logits less over 2,048 blocks than over
        8,192 (427 and 559 MB on an H200, deviceless). free_bytes: see `fit`.
        """
        table = memory.table_bytes(self.spec, self.limits, self.dtype)
        each = memory.block_bytes(self.spec, self.limits, self.dtype, self.device.platform)
        if free_bytes is not None:
            free_bytes = max(0, free_bytes - estimate_temporaries(self)[1] - table)
        blocks = max(1, memory.round_down(memory.pool_bytes(self.config, self.limits, each, free_bytes) // each))
        sizes = [(shape, temp_bytes(self.compile(shape, self.limits, blocks))) for shape in self.largest_shapes]
        return max(sizes, key=lambda size: size[1])

    def fit(self, *, temp_bytes: int = 0, free_bytes: int | None = None) -> memory.MemoryPlan:
        """The memory plan: see `memory.fit`."""
        return memory.fit(
            self.spec, self.config, self.limits, dtype=self.dtype, weight_bytes=memory.tree_bytes(self.params),
            platform=self.device.platform, temp_bytes=temp_bytes, free_bytes=free_bytes,
        )  # fmt: skip


def _implementation(
    spec: DecoderSpec, config: EngineConfig, limits: memory.Limits, dtype: Any, device: Any
) -> str:
    """The attention implementation that the options ask for, or the one for the platform and the model's shape."""
    q = jax.ShapeDtypeStruct((limits.max_num_batched_tokens, spec.num_heads, spec.head_dim), np.dtype(dtype))
    pages = KVPages.shapes(1, limits.block_size, spec.num_kv_heads, spec.head_dim, dtype, v_dim=spec.page_v_dim)
    tables = jax.ShapeDtypeStruct((limits.max_num_seqs, limits.width), np.dtype(np.int32))
    call = (q, pages, tables, limits.max_num_batched_tokens)
    name = config.attention_implementation
    if name is None:
        return choose_implementation(device, *call)
    if name not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ModelLoadError(f"attention_implementation={name!r}: there are {known}; leave it out to have one chosen")
    reason = IMPLEMENTATIONS[name].refuse(device, *call)
    if reason is not None:
        raise ModelLoadError(
            f"attention_implementation={name!r} cannot serve this model here: {reason}; leave it out to have one chosen"
        )
    return name
