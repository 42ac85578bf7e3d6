"""Limits of an engine, bytes of its parts, and the number of KV blocks that fit. `jpaged plan` uses it, too."""

import bisect
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jpaged.config import LOGPROBS_MODES, EngineConfig
from jpaged.engine.step_plan import TextShape
from jpaged.errors import ModelLoadError
from jpaged.kv_groups import KVGroups, group_layers, max_blocks
from jpaged.models.sharding import shards_of
from jpaged.models.spec import DecoderSpec
from jpaged.runtime.kv_format import FP8, KVFormat
from jpaged.runtime.memory.refusals import refuse_block_size, refuse_options
from jpaged.runtime.memory.weight_bytes import tree_bytes
from jpaged.runtime.state import StateSizes, bytes_without_pages, state_shapes
from jpaged.runtime.step.program_shapes import smallest_bucket, text_shapes

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 2**30  # maximum of the default KV pool on CPU; other programs need memory, too
# Snapshots of recurrent state: at most this many for each row, and at most this share of the KV pool's bytes
SNAPSHOTS_PER_ROW, SNAPSHOT_SHARE = 4, 4
MAX_LOGPROB_BYTES = 2**28  # maximum size of the ids and log-probabilities that a step downloads


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of an engine. All defaults are filled in."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_groups: KVGroups
    smallest_bucket: int  # minimum tokens and rows of a program
    custom: int = 0       # parameters of all custom logits processors
    samples: bool = True  # False: not the last pipeline stage, so no `lm_head`
    text_shapes: tuple[TextShape, ...] = ()  # of an encoder's programs; (): a decoder
    num_snapshots: int = 0  # of the state of recurrent layers
    verify_tokens: int = 0  # tokens of the largest verify program; 0: the engine does not speculate

    @property
    def state_tokens(self) -> int:
        """Capacity of `DeviceState.hidden`, in tokens: the largest token bucket.

        Of an encoder: the slots of the largest program, and a pooled vector for each of its rows.
        """
        if self.text_shapes:
            return max((shape.length + 1) * shape.rows for shape in self.text_shapes)
        return max(self.max_num_batched_tokens, self.smallest_bucket)

    @property
    def program_rows(self) -> int:
        """Largest row bucket of the program table."""
        return max(self.max_num_seqs, self.smallest_bucket)

    @property
    def width(self) -> int:
        """Entries of a block table = blocks of the longest request in a KV group without a window."""
        return -(-self.max_model_len // self.block_size)

    def state_sizes(self, num_blocks: int) -> StateSizes:
        """Sizes of the device state over a pool of `num_blocks` blocks."""
        return StateSizes(
            num_blocks, self.block_size, rows=self.max_num_seqs, width=self.width, tokens=self.state_tokens,
            program_rows=self.program_rows, custom=self.custom, samples=self.samples,
            snapshots=self.num_snapshots, verify_tokens=self.verify_tokens,
        )  # fmt: skip

    @property
    def blocks_per_request(self) -> int:
        """Maximum blocks that the longest request needs at a time, in all KV groups together."""
        return self.blocks_of(self.max_model_len)

    def blocks_of(self, num_tokens: int) -> int:
        """Maximum blocks that a request of `num_tokens` tokens needs at a time, in all KV groups together."""
        chunk = self.max_num_batched_tokens
        return max_blocks(self.kv_groups.windows, num_tokens, chunk=chunk, block_size=self.block_size)

    def longest_where(self, fits: Callable[[int], bool]) -> int:
        """Tokens of the longest request that fits: whole blocks, at most max_model_len. `fits` must be monotonic."""
        sizes = range(1, self.width + 1)
        count = bisect.bisect_left(sizes, True, key=lambda blocks: not fits(blocks * self.block_size))
        return min(count * self.block_size, self.max_model_len)


@dataclasses.dataclass(frozen=True)
class DrafterBytes:
    """Bytes of a drafter on one device."""

    weights: int = 0
    block: int = 0  # of one block in its pages, which have the block ids of the model
    fixed: int = 0  # its state without the pages

    def total(self, num_blocks: int) -> int:
        """All bytes, over a pool of `num_blocks` blocks."""
        return self.weights + num_blocks * self.block + self.fixed


NO_DRAFTER = DrafterBytes()


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part of an engine, and the number of blocks in its KV pool."""

    limits: Limits
    num_blocks: int
    block_bytes: int  # bytes of one block, which is one page in every page array
    weight_bytes: int
    temp_bytes: int   # temporaries of the largest program; 0 = not known yet
    table_bytes: int  # device state without the pages
    drafter: DrafterBytes = NO_DRAFTER
    adapter_bytes: int = 0  # pools of LoRA adapters
    slot_bytes: int = 0     # state of all recurrent layers, of one row or snapshot; all slots are part of `table_bytes`
    # inputs of all recurrent layers for one token of a verify step; those of the largest one are part of `table_bytes`
    input_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent layers: the state of all rows and snapshots, and inputs for a verify step."""
        slots = self.limits.max_num_seqs + self.limits.num_snapshots
        return slots * self.slot_bytes + self.limits.verify_tokens * self.input_bytes

    @property
    def state_note(self) -> str:
        """Number and size of the slots of recurrent layers."""
        rows, snapshots, tokens = self.limits.max_num_seqs, self.limits.num_snapshots, self.limits.verify_tokens
        note = f"{rows:,} rows and {snapshots:,} snapshots, {self.slot_bytes:,} bytes each"
        return f"{note}; {tokens:,} tokens of a verify step, {self.input_bytes:,} bytes each" if tokens else note

    @property
    def snapshot_interval(self) -> int:
        """Blocks of a prompt between two snapshots: a snapshot takes at most as many bytes as their KV."""
        return max(1, -(-self.slot_bytes // self.block_bytes))

    @property
    def drafter_bytes(self) -> int:
        """Bytes of the drafter: weights, pages and state."""
        return self.drafter.total(self.num_blocks)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        rows = [
            ("weights", self.weight_bytes, ""),
            ("KV pool", self.kv_bytes, f"{self.num_blocks} blocks of {self.limits.block_size} tokens"),
            ("request table", self.table_bytes - self.state_bytes, f"{self.limits.max_num_seqs} rows"),
            ("temporaries", self.temp_bytes, "of the largest program"),
        ]
        if self.state_bytes:
            rows.append(("recurrent state", self.state_bytes, self.state_note))
        if self.drafter_bytes:
            rows.append(("drafter", self.drafter_bytes, f"{self.drafter.block} bytes per block"))
        if self.adapter_bytes:
            rows.append(("LoRA adapters", self.adapter_bytes, ""))
        rows.append(("in all", sum(size for _, size, _ in rows), ""))
        lines = [f"{name:14} {size / 2**20:10.1f} MiB  {note}".rstrip() for name, size, note in rows]
        return "\n".join([*lines, self.request_line()])

    def request_line(self) -> str:
        """KV bytes of the longest request, and the KV groups if there are several."""
        limits, kv_groups = self.limits, self.limits.kv_groups
        line = f"KV of one request of {limits.max_model_len:,} tokens: {size_text(self.request_bytes)}"
        if any(window is not None for window in kv_groups.windows):
            line += f" at most (full attention in every layer would take {size_text(self.full_attention_bytes)})"
        if not kv_groups.windows:
            return "no KV: each text is computed in one step"
        return line if len(kv_groups.windows) == 1 else f"{line}; {kv_groups}"

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the pool, if no KV group has freed blocks before its window."""
        return self.num_blocks // max(len(self.limits.kv_groups.windows), 1) * self.limits.block_size

    def requests_of(self, num_tokens: int) -> int:
        """Number of requests of `num_tokens` tokens that can run at once, each with its maximum of blocks."""
        of_one = self.limits.blocks_of(num_tokens)
        return min(self.num_blocks // of_one, self.limits.max_num_seqs) if of_one else self.limits.max_num_seqs

    @property
    def request_bytes(self) -> int:
        """Maximum KV bytes of the longest request."""
        return self.limits.blocks_per_request * self.block_bytes

    @property
    def full_attention_bytes(self) -> int:
        """KV bytes of the longest request if no layer had a window."""
        kv_groups = self.limits.kv_groups
        return int(self.limits.width * self.block_bytes * kv_groups.pages_per_token) // max(kv_groups.num_arrays, 1)


def size_text(num_bytes: int) -> str:
    """A number of bytes as text in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _check_max_logprobs(spec: DecoderSpec, most: int, max_num_seqs: int) -> None:
    """Raise ModelLoadError for an invalid max_logprobs, or if a step would return more than MAX_LOGPROB_BYTES."""
    if isinstance(most, bool) or not isinstance(most, int) or most < -1:
        raise ModelLoadError(f"max_logprobs={most!r}: must be a whole number of at least 0, or -1 for all ids")
    count = spec.vocab_size if most < 0 else min(most, spec.vocab_size)
    # A sampling mask takes at most 1 / 8 byte for an id: 39 MB for 2,048 rows and 151,936 ids.
    size = max_num_seqs * count * 8  # 4 bytes for an id, 4 for its log-probability
    if size > MAX_LOGPROB_BYTES and not spec.pools:
        fits = MAX_LOGPROB_BYTES // (8 * max_num_seqs)
        raise ModelLoadError(
            f"max_logprobs={most}: the log-probabilities of {max_num_seqs} rows and {count:,} ids take "
            f"{size / 2**20:,.0f} MiB in each step, at most {MAX_LOGPROB_BYTES // 2**20} are possible. Set at most "
            f"{fits:,}, or lower max_num_seqs. For log-probabilities of a few ids, a request can set logprob_token_ids"
        )


def decide_limits(spec: DecoderSpec, config: EngineConfig, platform: str) -> Limits:
    """Fill in options without a value, and check all options. platform: "cpu", "gpu" or "tpu".

    Raises ModelLoadError for an option that does not fit the model or another option.
    """
    refuse_options(spec, config, platform)
    on_cpu = platform == "cpu"
    if spec.encoder is not None:
        return _encoder_limits(spec, config, platform)
    max_model_len = _positive("max_model_len", config.max_model_len, spec.max_position)
    if max_model_len > spec.max_position:
        raise ModelLoadError(f"max_model_len={max_model_len}: the model takes at most {spec.max_position}; lower it")
    if max_model_len < 2:
        raise ModelLoadError(f"max_model_len={max_model_len}: must be at least 2, a prompt token and an output token")
    default_seqs = 32 if on_cpu else 256
    if config.max_num_batched_tokens is not None:
        default_seqs = max(1, min(default_seqs, config.max_num_batched_tokens))
    max_num_seqs = _positive("max_num_seqs", config.max_num_seqs, default_seqs)
    default_budget = max(512 if on_cpu else 2048, max_num_seqs)
    budget = _positive("max_num_batched_tokens", config.max_num_batched_tokens, default_budget)
    if budget < max_num_seqs:
        raise ModelLoadError(
            f"max_num_batched_tokens={budget}: must be at least max_num_seqs={max_num_seqs}, so that every running "
            "request advances in each step; raise it, or lower max_num_seqs"
        )
    block_size = _positive("block_size", config.block_size, 64 if platform == "tpu" else 16)
    _check_max_logprobs(spec, config.max_logprobs, max_num_seqs)
    if config.logprobs_mode not in LOGPROBS_MODES:
        raise ModelLoadError(f"logprobs_mode={config.logprobs_mode!r}: must be one of {', '.join(LOGPROBS_MODES)}")
    if config.enable_return_routed_experts and (spec.experts is None or config.pipeline_parallel_size > 1):
        accepted = "the model has no experts" if spec.experts is None else "does not work with pipeline_parallel_size"
        raise ModelLoadError(f"enable_return_routed_experts=True: {accepted}: leave it out")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ModelLoadError(f"gpu_memory_utilization={config.gpu_memory_utilization}: must be above 0 and at most 1")
    if block_size & (block_size - 1) or not 8 <= block_size <= 128:
        raise ModelLoadError(f"block_size={block_size}: must be 8, 16, 32, 64 or 128")
    if spec.pools and config.row_buckets is not None:
        raise ModelLoadError("row_buckets: with runner='pooling' there are no decode programs; leave it out")
    chunk = next((chunk for chunk in spec.attention_chunks if chunk is not None and chunk % block_size), None)
    if chunk is not None:
        raise ModelLoadError(
            f"block_size={block_size}: must divide attention_chunk_size={chunk} of the model's config.json"
        )
    if spec.compressed is not None:
        refuse_block_size(spec.compressed, block_size)
    kv_groups = group_layers(
        spec.windows, max_model_len, spec.attends, spec.recurrent, spec.page_parts, spec.kv_sources
    )
    smallest = smallest_bucket(spec, platform, shards_of(config).divisor)
    return Limits(max_model_len, max_num_seqs, budget, block_size, kv_groups, smallest)


def _encoder_limits(spec: DecoderSpec, config: EngineConfig, platform: str) -> Limits:
    """`decide_limits` for an encoder: a text is computed in one step, and has no KV."""
    for name, neutral in _DECODERS_ONLY.items():
        if getattr(config, name) != neutral:
            raise ModelLoadError(
                f"{name}={getattr(config, name)!r}: is for decoders, and the model is an encoder: leave it out"
            )
    assert spec.encoder is not None
    longest = min(spec.max_position, spec.encoder.max_length or spec.max_position)
    max_model_len = _positive("max_model_len", config.max_model_len, longest)
    if max_model_len > spec.max_position:
        raise ModelLoadError(f"max_model_len={max_model_len}: the model takes at most {spec.max_position}; lower it")
    max_num_seqs = _positive("max_num_seqs", config.max_num_seqs, 256)
    # On CPU 2,048 tokens fill the cores, and their hidden states stay in the caches.
    default_budget = max(2048 if platform == "cpu" else 16_384, max_model_len)
    budget = _positive("max_num_batched_tokens", config.max_num_batched_tokens, default_budget)
    if budget < max_model_len:
        raise ModelLoadError(
            f"max_num_batched_tokens={budget}: must be at least max_model_len={max_model_len}, because an encoder "
            "computes a text in one step; raise it, or lower max_model_len"
        )
    smallest = smallest_bucket(spec, platform)
    shapes = text_shapes(max_model_len, max_num_seqs, budget, smallest, config.token_buckets, config.row_buckets)
    return Limits(
        max_model_len, max_num_seqs, budget, config.block_size or 16, KVGroups((), (), 0), smallest, text_shapes=shapes
    )


# Options without an effect on an encoder, and their neutral values.
_DECODERS_ONLY: dict[str, Any] = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1, "swap_space": 0,
    "kv_cache_dtype": "auto", "kv_cache_memory_bytes": None, "enable_lora": False, "target_step_ms": None,
    "kv_handover": False, "attention_implementation": None,
}  # fmt: skip


def _positive(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{name}={value!r}: must be a whole number of at least 1")
    return value


def block_bytes(spec: DecoderSpec, limits: Limits, kv_format: KVFormat, platform: str) -> int:
    """Bytes of one KV block on a platform: one page in every page array, including the scales of int8 pages."""
    page = kv_format.page_shapes(spec, limits.block_size)
    if page.dtype == FP8:
        page = dataclasses.replace(page, scales=None)  # 8 bytes per KV head in a whole array, not in each block
    return limits.kv_groups.num_arrays * page.bytes_on(platform)


def pool_bytes(config: EngineConfig, limits: Limits, bytes_per_block: int, free_bytes: int | None) -> int:
    """Upper limit of the KV pool, in bytes. free_bytes: of an accelerator, after weights and temporaries; None on CPU.

    The default on CPU is the smaller of 1 GiB and twice the need of `max_num_seqs` requests of `max_model_len` tokens.
    So a small model does not allocate memory that it cannot use.
    """
    if config.kv_cache_memory_bytes is not None:
        wanted = _positive("kv_cache_memory_bytes", config.kv_cache_memory_bytes, 0)
        return wanted if free_bytes is None else min(wanted, free_bytes)
    if free_bytes is not None:
        return free_bytes
    return min(CPU_POOL_BYTES, 2 * limits.max_num_seqs * limits.blocks_per_request * bytes_per_block)


def table_bytes(spec: DecoderSpec, limits: Limits, dtype: np.dtype, platform: str) -> int:
    """Bytes of the device state without the pages: request table, block tables, hidden states of a step, extras."""
    numbers = bytes_without_pages(state_shapes(spec, limits.kv_groups, limits.state_sizes(1), dtype=dtype))
    padding = slot_bytes(spec, dtype, platform) - slot_bytes(spec, dtype, "cpu")
    return numbers + (limits.max_num_seqs + limits.num_snapshots) * padding


def slot_bytes(spec: DecoderSpec, dtype: np.dtype, platform: str) -> int:
    """Bytes of the state of all recurrent layers, of one row or snapshot. 0: the model has no such layers.

    TPUs pad the last axis of an array to a multiple of 128: heads of 64 take the memory of heads of 128.
    """
    if spec.recurrence is None:
        return 0
    layers = [spec.recurrence.of_layer(layer) for layer, has_state in enumerate(spec.recurrent) if has_state]
    shapes = [shape for kind in layers for shape in kind.state_shapes(dtype)]
    if platform == "tpu":
        shapes = [jax.ShapeDtypeStruct((*x.shape[:-1], -(-x.shape[-1] // 128) * 128), x.dtype) for x in shapes]
    return tree_bytes(shapes)


def input_bytes(spec: DecoderSpec, dtype: np.dtype) -> int:
    """Bytes of the inputs of all recurrent layers for a token of a verify step. 0: the model has no such layers."""
    if spec.recurrence is None:
        return 0
    return sum(spec.recurrent) * tree_bytes(spec.recurrence.input_shapes(dtype))


def fit(
    spec: DecoderSpec,
    config: EngineConfig,
    limits: Limits,
    *,
    dtype: np.dtype,
    kv_format: KVFormat | None = None,
    weight_bytes: int,
    platform: str,
    temp_bytes: int = 0,
    free_bytes: int | None = None,
    drafter: DrafterBytes = NO_DRAFTER,
    adapter_bytes: int = 0,
) -> MemoryPlan:
    """Fit the KV pool into memory. A default max_model_len shrinks to the longest that fits.

    dtype: of hidden states. kv_format: of pages; None: `dtype`. free_bytes: left after all weights, for temporaries,
    table, pool, adapters, and the drafter's pages and state; None on CPU. Raises ModelLoadError if not one block fits,
    or an explicit max_model_len does not.
    """
    kv_format = kv_format or KVFormat(dtype)
    if spec.encoder is not None:
        # a pool has at least one block; without page arrays it takes no memory, and no request holds it
        return MemoryPlan(limits, 1, 0, weight_bytes, temp_bytes, table_bytes(spec, limits, dtype, platform))
    of_model = block_bytes(spec, limits, kv_format, platform)
    per_block = of_model + drafter.block
    page = kv_format.page_shapes(spec, limits.block_size)

    def pool_of(limits: Limits) -> int:
        """Bytes of the pool, at most what kernels can address. Block tables of longer requests make it smaller."""
        tables = table_bytes(spec, limits, dtype, platform) + drafter.fixed + adapter_bytes
        left = None if free_bytes is None else max(0, free_bytes - temp_bytes - tables)
        size = pool_bytes(config, limits, per_block, left)
        usable = page.addressable(size // per_block)
        return size if usable == size // per_block else usable * per_block

    def fits(length: int) -> bool:
        shorter = dataclasses.replace(limits, max_model_len=length)
        return shorter.blocks_per_request * per_block <= pool_of(shorter)

    of_slot = slot_bytes(spec, dtype, platform)
    if of_slot and config.enable_prefix_caching:
        spare = max(0, pool_of(limits) - limits.blocks_per_request * per_block)
        snapshots = min(SNAPSHOTS_PER_ROW * limits.max_num_seqs, spare // SNAPSHOT_SHARE // of_slot)
        limits = dataclasses.replace(limits, num_snapshots=snapshots)
    available = pool_of(limits)
    num_blocks = available // per_block
    if num_blocks >= limits.blocks_per_request:
        rounded = page.addressable(max(round_down(num_blocks), limits.blocks_per_request))
        num_blocks = rounded if rounded >= limits.blocks_per_request else num_blocks
    else:
        longest = limits.longest_where(fits)
        need = limits.blocks_per_request * per_block
        shortage = (
            f"a request of max_model_len={limits.max_model_len} tokens needs {need} bytes of KV cache "
            f"({need / 2**20:.1f} MiB), but only {available} ({available / 2**20:.1f} MiB) are available"
        )
        remedy = "free memory on the device"
        if drafter.block:
            shortage += f". Of each block of {per_block:,} bytes, {drafter.block:,} are the drafter's"
        if free_bytes is None or available == config.kv_cache_memory_bytes:
            remedy = "raise kv_cache_memory_bytes"
        if longest < 2:
            num_kv_groups = len(limits.kv_groups.windows)
            each = f" for each of {num_kv_groups} KV groups" if num_kv_groups > 1 else ""
            raise ModelLoadError(f"{shortage}: not one block of {per_block} bytes fits{each}; {remedy}")
        if config.max_model_len is not None:
            raise ModelLoadError(f"{shortage}: lower max_model_len to at most {longest}, or {remedy}")
        logger.warning("%s: max_model_len is now %d", shortage, longest)
        limits = dataclasses.replace(limits, max_model_len=longest)
        num_blocks = pool_of(limits) // per_block
    tables = table_bytes(spec, limits, dtype, platform)
    return MemoryPlan(
        limits, num_blocks, of_model, weight_bytes, temp_bytes, tables, drafter, adapter_bytes, of_slot,
        input_bytes(spec, dtype),
    )  # fmt: skip


def round_down(num_blocks: int) -> int:
    """Keep the 5 most significant bits of the number of blocks.

    Program shapes contain it. Without rounding, slightly different free memory would recompile every program.
    """
    spare = max(0, num_blocks.bit_length() - 5)
    return num_blocks >> spare << spare
