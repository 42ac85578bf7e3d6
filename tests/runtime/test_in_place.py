"""KV pages and weights are never copied: asserted on the text and the memory analysis of compiled programs.

Always for CPU. With `-m deviceless` also for an H200 (needs JAX's CUDA plugin) and for a TPU v5e (needs its compiler).
Neither needs the device.
"""

import collections
import contextlib
import dataclasses
import functools
import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.kv_groups import group_layers
from jpaged.models.compressed_spec import Entries
from jpaged.models.families import spec_of
from jpaged.models.recurrent_spec import GatedDelta, KimiDelta, Mamba2, ShortConv
from jpaged.models.spec import DecoderSpec, Experts, Indexer, Latent, LayerKV, QKNorm, Rope, WeightLayout, param_shapes
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import StateSizes, create_state, state_shapes
from jpaged.runtime.step.advance_states import AdvanceShape, compile_advance
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.block_moves import HOST_BUCKET, STATE_BUCKET, BlockMover
from jpaged.runtime.step.forward import compile_forward, flat_weights, run_forward
from pallas_kernels.set_rows import cpu as set_rows
from tests.support.deviceless import H200, V5E, marks

pytestmark = pytest.mark.codegen

# Activations of 8 rows or of a chunk are far smaller than the weights or pages of a layer.
SPEC = DecoderSpec(
    vocab_size=512, hidden_size=1024, intermediate_size=2816, num_layers=3, num_heads=16, num_kv_heads=8, head_dim=64,
    max_position=1024, rope=Rope(),
)  # fmt: skip
LATENT = dataclasses.replace(
    SPEC, num_kv_heads=1, head_dim=576, latent=Latent(q_rank=None, kv_rank=512, nope_dim=64, rope_dim=64, v_dim=64)
)
SPARSE = dataclasses.replace(
    LATENT, head_dim=704, latent=dataclasses.replace(LATENT.latent, q_rank=512, indexer=Indexer(16, 128, top_k=128))
)
# DeepSeek V4: a layer without entries, a sparse one and a heavy one, with heads and entries as in the releases
COMPRESSED = spec_of({
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 3, "vocab_size": 512,
    "hidden_size": 1024, "n_routed_experts": 8, "moe_intermediate_size": 256, "num_hash_layers": 0,
    "hc_sinkhorn_iters": 2, "layer_types": [kind.value for kind in Entries],
    "max_position_embeddings": SPEC.max_position,
})  # fmt: skip
# Six layers of two kinds, in three KV groups over two page arrays. Three layers write and read each array in turn.
MIXED = (96, 96, None, 96, 96, None)
# For the first layers of these: half a page each, a whole page, and none
UNLIKE = (LayerKV(4, 64), LayerKV(4, 64), LayerKV(8, 64, values_are_keys=True), LayerKV(4, 64, source=1))
# Gemma 4: heads of 512 in layers with full attention, 256 in others
WIDE = (LayerKV(1, 256), LayerKV(1, 256), LayerKV(1, 512, values_are_keys=True), LayerKV(1, 256, source=1))
BLOCKS, BLOCK_SIZE, ROWS = 512, 16, 8
# Two recurrent layers, whose slots take far more bytes than the state of all rows
DELTA, SNAPSHOTS = GatedDelta((True, False, True), k_heads=4, v_heads=8, head_dim=128, conv_width=4), 256
KIMI = KimiDelta((True, False, True), k_heads=8, v_heads=8, head_dim=128, conv_width=4)
CONV = ShortConv((True, False, True), width=SPEC.hidden_size, conv_width=33)
MAMBA = Mamba2((True, False, True), heads=8, head_dim=64, groups=2, state_dim=128, conv_width=4)
DECODE = ForwardShape(True, ROWS, ROWS, BLOCK_SIZE)
PREFILL = ForwardShape(False, 64, ROWS, BLOCK_SIZE)

VERIFY = ForwardShape(False, 32, ROWS, BLOCK_SIZE, drafts=3)
ADVANCE = AdvanceShape(VERIFY.tokens, ROWS, VERIFY.drafts, BLOCK_SIZE)

DEVICELESS = marks(H200)
# A mixed step has all kernels for an H200. For a v5e, a decode compiles in half the time.
ONE_EACH = (("h200 kernels", PREFILL), ("v5e kernels", DECODE))
# target of the compiler -> implementation of attention
IMPLEMENTATIONS = {"cpu": "xla_loop", "h200": "xla", "h200 kernels": "triton", "v5e kernels": "mosaic_tpu"}
MARKS = {"cpu": (), "h200": DEVICELESS, "h200 kernels": DEVICELESS, "v5e kernels": marks(V5E)}
HOPPER = "h200 hopper"  # the default on Hopper
# On CPU the default run compiles one of the two programs, and the gate both.
ONE_ON_CPU = [
    pytest.param(name, shape, id=f"{name}-{shape}", marks=[*MARKS[name], *[pytest.mark.slow] * (name == "cpu" and i)])
    for name in IMPLEMENTATIONS
    for i, shape in enumerate((PREFILL, DECODE))
]


def dtype_of(target):
    """bfloat16, except on CPU with JAX 0.10, which converts 16-bit weights in every step."""
    old = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)
    return jnp.dtype("float32" if target == "cpu" and old else "bfloat16")


def sizes(blocks, snapshots=0, verify_tokens=0):
    """Sizes of the device state."""
    return StateSizes(
        blocks, BLOCK_SIZE, ROWS, SPEC.max_position // BLOCK_SIZE, PREFILL.tokens, ROWS, snapshots=snapshots,
        verify_tokens=verify_tokens,
    )  # fmt: skip


def placement_on(target):
    if target == "cpu":
        return Placement.single(jax.devices()[0])
    return Placement.for_target(V5E if target.startswith("v5e") else H200)


@functools.cache
def compiled(
    target, shape, blocks=BLOCKS, layers=SPEC.num_layers, windows=(), experts=None, gated_dot=None, recurrence=None,
    layer_kv=(), base=SPEC,
):  # fmt: skip
    dtype, placement, mesh = dtype_of(target), placement_on(target), contextlib.nullcontext()
    largest = max(layer_kv, key=lambda kv: kv.heads * kv.head_dim, default=LayerKV(base.num_kv_heads, base.head_dim))
    spec = dataclasses.replace(
        base, num_kv_heads=largest.heads, head_dim=largest.head_dim,
        num_layers=layers, sliding_window=windows, experts=experts, recurrence=recurrence, layer_kv=layer_kv,
        qk_norm=QKNorm.HEAD if layer_kv else None,
    )  # fmt: skip
    kv_groups = group_layers(
        spec.windows, spec.max_position, spec.attends, spec.recurrent, spec.page_parts, spec.kv_sources
    )
    if target != "cpu":
        mesh = (V5E if target.startswith("v5e") else H200).tracing()
    snapshots = 0 if recurrence is None else SNAPSHOTS
    verify_tokens = 0 if recurrence is None or spec.compressed is not None else VERIFY.tokens
    state = state_shapes(spec, kv_groups, sizes(blocks, snapshots, verify_tokens), dtype=dtype, placement=placement)
    params = placement.shapes_of(param_shapes(spec, dtype))
    if isinstance(shape, AdvanceShape):
        with mesh:
            return compile_advance(params, state, shape, spec=spec, placement=placement)
    shape = dataclasses.replace(shape, num_kv_groups=len(kv_groups.windows))
    with mesh:
        return compile_forward(
            params, state, shape, spec=spec, kv_groups=kv_groups, layout=WeightLayout(),
            implementation="mosaic_prefill" if target == HOPPER else IMPLEMENTATIONS[target], placement=placement,
            gated_dot=gated_dot,
        )  # fmt: skip


def pool_bytes(target, blocks=BLOCKS):
    """Bytes of one layer's KV pages."""
    return 2 * blocks * BLOCK_SIZE * SPEC.num_kv_heads * SPEC.head_dim * dtype_of(target).itemsize


def limit(target):
    """Bytes of one layer's KV pages, or of its largest matrix if that is smaller."""
    largest = 2 * SPEC.intermediate_size * SPEC.hidden_size * dtype_of(target).itemsize
    return min(pool_bytes(target), largest)


# Instructions of a GPU program that launch a kernel.
LAUNCHES = ("fusion", "custom-call", "copy", "dot", "convolution", "reduce", "sort", "scatter", "gather", "while")
ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "s64": 8, "f64": 8}


def large_moves(text, least_bytes):
    """Instructions in a program's text that copy, transpose or convert an array of at least `least_bytes` bytes."""
    found = []
    for dtype, dims, operation in re.findall(r"= (\w+)\[([\d,]+)\]\S* (copy|copy-start|transpose|convert)\(", text):
        size = int(np.prod([int(d) for d in dims.split(",")])) * ITEM_BYTES[dtype]
        if size >= least_bytes:
            found.append(f"{operation} {dtype}[{dims}]")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("target", "shape"), ONE_ON_CPU)
def test_experts_are_not_copied(target, shape):
    """No copy of all experts of a layer; on accelerators no copy of a single one. Two kernels per layer multiply."""
    experts = Experts(num=16, per_token=2, intermediate_size=4096, layers=(True,) * SPEC.num_layers)
    program = compiled(target, shape, experts=experts)
    one = 2 * experts.intermediate_size * SPEC.hidden_size * dtype_of(target).itemsize
    text = program.as_text()
    assert large_moves(text, one) == []
    # on CPU the loop copies the expert that it multiplies with
    assert program.memory_analysis().temp_size_in_bytes < (4 if target == "cpu" else 1) * one
    if target != "cpu":
        calls = [line for line in text.splitlines() if "custom-call(" in line and "grouped_dot" in line]
        assert len(calls) == 2 * SPEC.num_layers


@pytest.mark.parametrize(("target", "shape"), ONE_ON_CPU)
def test_no_copy_is_as_large_as_the_kv_or_weights_of_a_layer(target, shape):
    program = compiled(target, shape)
    assert large_moves(program.as_text(), limit(target)) == []
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < limit(target)
    # arguments and results have the same buffers for the pages
    assert memory.alias_size_in_bytes >= SPEC.num_layers * pool_bytes(target)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "shape"), ONE_ON_CPU)
def test_pages_of_several_kv_groups_are_not_copied(target, shape):
    program = compiled(target, shape, layers=len(MIXED), windows=MIXED)
    assert large_moves(program.as_text(), limit(target)) == []
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < limit(target)
    assert memory.alias_size_in_bytes >= 2 * pool_bytes(target)


@pytest.mark.parametrize(
    ("target", "shape", "layer_kv"),
    [
        pytest.param(
            target, shape, layer_kv, id=f"{target}, {shape}, {name}",
            marks=[*MARKS[target], *([] if name == "wide" and (target, shape) in ONE_EACH else [pytest.mark.slow])],
        )
        for name, layer_kv in (("narrow", UNLIKE), ("wide", WIDE)) for shape in (DECODE, PREFILL)
        for target in ("h200", "h200 kernels", *["v5e kernels"] * (layer_kv is WIDE))
    ],
)  # fmt: skip
def test_pages_of_unlike_layers_are_not_copied(target, shape, layer_kv):
    """Two layers share the pages of an array, and a third reads them. The program sees the array in two shapes.

    XLA for CPU would copy it: `KVPages.whole` avoids that, and the test of an engine on CPU shows it.
    """
    program = compiled(target, shape, layers=len(layer_kv), windows=MIXED[: len(layer_kv)], layer_kv=layer_kv)
    text = program.as_text()
    assert large_moves(text, limit(target)) == []
    if target == "v5e kernels":
        assert text.count('custom_call_target="tpu_custom_call"') == 7  # four layers attend, and three of them write
    elif target == "h200 kernels":
        names = collections.Counter(re.findall(r'name = "(\w+)", num_stages', text))
        assert names["paged_decode"] == 4
        assert names["write_kv"] == 3
        assert names["paged_prefill"] == (4 if shape is PREFILL else 0)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < limit(target)
    assert memory.alias_size_in_bytes >= pool_bytes(target)


@pytest.mark.parametrize(
    ("base", "shape"),
    [
        pytest.param(base, shape, id=f"{name}, {shape}", marks=[*DEVICELESS, *[pytest.mark.slow] * slow])
        for name, base, shape, slow in (
            ("latent", LATENT, DECODE, True), ("latent", LATENT, PREFILL, True),
            ("sparse", SPARSE, DECODE, False), ("sparse", SPARSE, PREFILL, True),
        )
    ],
)  # fmt: skip
def test_latent_pages_are_not_copied_for_kernels(base, shape):
    """Sparse attention reads single tokens of the pages, with a row for each token: by the decode kernel alone."""
    program = compiled("h200 kernels", shape, layers=2, base=base)
    text, pool = program.as_text(), BLOCKS * BLOCK_SIZE * base.head_dim * 2
    assert large_moves(text, pool // 4) == []
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * pool
    assert memory.alias_size_in_bytes >= 2 * pool
    names = set(re.findall(r'name = "(\w+)", num_stages', text))
    assert {"write_kv", "paged_decode"} <= names
    assert ("paged_prefill" in names) == (base is LATENT and shape is PREFILL)


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, id=str(shape), marks=[*DEVICELESS, *[pytest.mark.slow] * slow])
              for shape, slow in ((DECODE, False), (PREFILL, True))]
)  # fmt: skip
def test_entries_and_their_inputs_are_not_copied(shape):
    """DeepSeek V4 keeps entries in the pages, and their inputs in a state. The decode kernel reads single lines."""
    blocks, (none, *of_entries) = 16 * BLOCKS, (COMPRESSED.mixers(i)[1] for i in range(3))
    program = compiled(
        "h200 kernels", shape, blocks, base=COMPRESSED, recurrence=COMPRESSED.recurrence, experts=COMPRESSED.experts,
        windows=COMPRESSED.sliding_window,
    )  # fmt: skip
    assert none.state_shapes(jnp.bfloat16) == ()
    inputs = [2 * kind.span * kind.input_size * (ROWS + SNAPSHOTS) for kind in of_entries]
    pool = 2 * blocks * COMPRESSED.lines(BLOCK_SIZE) * COMPRESSED.head_dim
    text, memory = program.as_text(), program.memory_analysis()
    assert large_moves(text, min(inputs)) == []
    assert memory.temp_size_in_bytes < max(inputs) < pool // 2
    assert memory.alias_size_in_bytes >= pool + sum(inputs)
    assert set(re.findall(r'name = "(\w+)", num_stages', text)) == {"paged_decode", "grouped_dot"}


RECURRENCES = {"gated DeltaNet": DELTA, "Kimi delta": KIMI, "short convolution": CONV, "Mamba-2": MAMBA}
IN_THE_GATE = (("h200 kernels", "gated DeltaNet", DECODE), ("v5e kernels", "Mamba-2", DECODE))


@pytest.mark.parametrize(
    ("target", "recurrence", "shape"),
    [
        pytest.param(
            *(target, recurrence, shape), id=f"{target}, {name}, {shape}",
            marks=[*MARKS[target], *([] if (target, name, shape) in IN_THE_GATE else [pytest.mark.slow])],
        )
        for target in IMPLEMENTATIONS if target != "h200"
        for name, recurrence in RECURRENCES.items()
        for shape in (PREFILL, DECODE, VERIFY, ADVANCE)
    ],
)  # fmt: skip
def test_recurrent_state_is_not_copied(target, recurrence, shape):
    """Temporaries are smaller than the slots of one layer, and the slots have the buffers of the arguments."""
    program = compiled(target, shape, recurrence=recurrence)
    array = recurrence.state_shapes(dtype_of(target))[-1]
    slots = (ROWS + SNAPSHOTS) * array.size * array.dtype.itemsize
    assert large_moves(program.as_text(), slots // 2) == []
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < slots
    assert memory.alias_size_in_bytes >= 2 * slots + (0 if shape is ADVANCE else pool_bytes(target))


@pytest.mark.parametrize(
    ("target", "recurrence"),
    [
        pytest.param(
            *(target, recurrence), id=f"{target}, {name}",
            marks=[*MARKS[target], *([] if (target, name, DECODE) in IN_THE_GATE else [pytest.mark.slow])],
        )
        for target in IMPLEMENTATIONS if target != "h200"
        for name, recurrence in RECURRENCES.items()
    ],
)  # fmt: skip
def test_moving_a_snapshot_copies_no_other_states(target, recurrence):
    """Copies of states, and moves from the host, update the slots in place. Moves to the host only read one slot."""
    placement, spec = placement_on(target), dataclasses.replace(SPEC, recurrence=recurrence)
    kv_groups = group_layers(spec.windows, spec.max_position, spec.attends, spec.recurrent)
    state = state_shapes(spec, kv_groups, sizes(16, SNAPSHOTS), dtype=dtype_of(target), placement=placement)
    mover = BlockMover(state, placement, host_slots=1)
    of_slot = 2 * sum(x.size * x.dtype.itemsize for x in recurrence.state_shapes(dtype_of(target)))
    whole = of_slot * (ROWS + SNAPSHOTS)
    for program, moved in ((mover._copy_states, STATE_BUCKET), (mover._put_state, 1), (mover._take_state, 1)):
        memory = program.memory_analysis()
        assert large_moves(program.as_text(), whole // 8) == []
        assert memory.temp_size_in_bytes <= 3 * moved * of_slot
        if program is not mover._take_state:
            assert memory.alias_size_in_bytes >= whole
            assert memory.output_size_in_bytes - memory.alias_size_in_bytes < of_slot


@pytest.mark.parametrize(("shape", "kernels"), [(DECODE, 3), (PREFILL, 4)], ids=["decode", "prefill"])
@pytest.mark.parametrize("target", [pytest.param("h200 kernels", marks=DEVICELESS)])
def test_number_of_custom_calls_of_a_layer(target, shape, kernels):
    """write_qkv, decode, its merge (two splits cover the table), and prefill if rows may have several tokens."""
    text = compiled(target, shape).as_text()
    names = re.findall(r'name = "(\w+)", num_stages', text)
    assert len(names) == kernels * SPEC.num_layers, collections.Counter(names)
    assert set(names) <= {"write_qkv", "paged_prefill", "paged_decode", "paged_decode_merge"}


@pytest.mark.parametrize("target", [pytest.param(HOPPER, marks=DEVICELESS)])
def test_the_prefill_for_hopper_copies_no_pages(target):
    """One kernel of Mosaic GPU a layer, besides Triton's write and decode. Its pages are read in place."""
    program = compiled(target, PREFILL)
    text = program.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == SPEC.num_layers
    names = re.findall(r'name = "(\w+)", num_stages', text)
    assert set(names) <= {"write_qkv", "paged_decode", "paged_decode_merge"}
    assert large_moves(text, limit(target)) == []
    assert program.memory_analysis().temp_size_in_bytes < limit(target)


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
@pytest.mark.parametrize("target", [pytest.param("v5e kernels", marks=marks(V5E))])
def test_a_layer_has_two_custom_calls_on_tpu(target, shape):
    """write_kv and paged_attention."""
    text = compiled(target, shape).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2 * SPEC.num_layers


@pytest.mark.parametrize("target", [pytest.param("h200 kernels", marks=DEVICELESS)])
@pytest.mark.parametrize(("gated_dot", "calls", "most"), [("xla", 3, 12), ("triton", 4, 11)])
def test_kernels_of_a_decode_layer(target, gated_dot, calls, most):
    """Each launch of a kernel takes some microseconds. A small decode step consists mostly of launches."""
    one_less, whole = (
        operations(main_computation(compiled(target, DECODE, layers=n, gated_dot=gated_dot).as_text()))
        for n in (SPEC.num_layers - 1, SPEC.num_layers)
    )
    layer = {name: whole[name] - one_less[name] for name in LAUNCHES}
    assert layer["custom-call"] == calls
    assert sum(layer.values()) <= most, layer


@pytest.mark.parametrize("target", [pytest.param("h200 kernels", marks=DEVICELESS)])
def test_gated_dot_writes_no_product(target):
    """No array of a chunk holds both products, [tokens, 2 * intermediate], and the matrices are not copied."""
    both = f"[{PREFILL.tokens},{2 * SPEC.intermediate_size}]"
    assert both in compiled(target, PREFILL, gated_dot="xla").as_text()
    text = compiled(target, PREFILL, gated_dot="triton").as_text()
    assert both not in text
    assert large_moves(text, limit(target)) == []


@pytest.mark.parametrize("blocks", [BLOCKS, pytest.param(10 * BLOCKS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", [pytest.param(n, marks=MARKS[n]) for n in ("cpu", "h200", "v5e kernels")])
def test_moving_blocks_copies_no_other_pages(target, blocks):
    """Copy on write and moves from the host update the pages in place. Moves to the host only read them."""
    placement, kv_groups = placement_on(target), group_layers(SPEC.windows, SPEC.max_position)
    state = state_shapes(SPEC, kv_groups, sizes(blocks), dtype=dtype_of(target), placement=placement)
    mover = BlockMover(state, placement, host_slots=1)
    all_pages = SPEC.num_layers * pool_bytes(target, blocks)
    a_block = all_pages // blocks
    programs = [*((program, size) for size, program in mover._copies.items())]
    for program, moved in [*programs, (mover._put, HOST_BUCKET), (mover._take, HOST_BUCKET)]:
        memory = program.memory_analysis()
        assert large_moves(program.as_text(), pool_bytes(target, blocks)) == []
        assert memory.temp_size_in_bytes <= 3 * moved * a_block
        if program is not mover._take:
            assert memory.alias_size_in_bytes >= all_pages
            assert memory.output_size_in_bytes - memory.alias_size_in_bytes < a_block


@pytest.mark.skipif(set_rows.kernel().name is None, reason="native kernels cannot run here")
@pytest.mark.parametrize(("spec", "kv_cache_dtype"), [
    (SPEC, "auto"),
    pytest.param(SPEC, "int8", marks=pytest.mark.slow),
    pytest.param(SPEC, "fp8", marks=pytest.mark.slow),
    pytest.param(LATENT, "auto", marks=pytest.mark.slow),
    pytest.param(
        dataclasses.replace(SPEC, layer_kv=UNLIKE[1:3], sliding_window=(96, None), qk_norm=QKNorm.HEAD), "auto",
        marks=pytest.mark.slow,
    ),
    pytest.param(SPARSE, "auto", marks=pytest.mark.slow),
], ids=["auto", "int8", "fp8", "latent", "unlike", "sparse"])  # fmt: skip
def test_every_program_of_an_engine_on_cpu_updates_pages_in_place(spec, kv_cache_dtype):
    """With weights of 16 bits and pages of each type, also with JAX 0.10. XLA converts pages that it updates itself."""
    sizes = {"row_buckets": (8,), "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}
    spec = dataclasses.replace(spec, num_layers=2)
    model = ServedModel(spec, param_shapes(spec, jnp.bfloat16))
    config = EngineConfig(model="", max_model_len=256, kv_cache_dtype=kv_cache_dtype, **sizes)
    build = Blueprint.draw(model, config, Placement.single(jax.devices()[0])).with_blocks(8 * BLOCKS)
    state = build.state_shapes()
    mover = BlockMover(state, build.blueprint.placement, host_slots=1)
    moves = [*mover._copies.values(), mover._put]
    forwards = [build.compile(shape) for shape in build.blueprint.program_shapes if isinstance(shape, ForwardShape)]
    pages = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.pages)]
    smallest = min(size for size in pages if size > 2**16)  # int8 pages have scales; those of fp8 belong to no block
    for program in [*forwards, *moves]:
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(pages)
        assert memory.temp_size_in_bytes < max(smallest, 2**23)
        assert not large_moves(main_computation(program.as_text()), smallest)
    assert mover._take.memory_analysis().temp_size_in_bytes < max(smallest, 2**23)


def test_large_moves_finds_a_copy():
    """The assertions above can fail: a program that does not donate its argument copies it."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    program = jax.jit(lambda a: (a.at[0].set(1.0), a.T.copy())).lower(x).compile()
    assert large_moves(program.as_text(), 4 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "shape"), ONE_ON_CPU)
def test_ten_times_the_pool_adds_no_work(target, shape):
    small, large = compiled(target, shape), compiled(target, shape, 10 * BLOCKS)
    if target.startswith("v5e"):  # XLA keeps slightly other activations and weights in fast memory
        assert large.memory_analysis().temp_size_in_bytes <= small.memory_analysis().temp_size_in_bytes
        return
    assert small.memory_analysis().temp_size_in_bytes == large.memory_analysis().temp_size_in_bytes
    assert operations(small.as_text()) == operations(large.as_text())
    if target != "cpu":
        return  # without the device the compiler does not count flops and bytes
    costs = [_costs(program) for program in (small, large)]
    assert costs[0]["flops"] == costs[1]["flops"]
    # XLA counts the whole operand of a gather or an in-place update as accessed. So the count may grow by whole pools.
    grown = pool_bytes(target, 10 * BLOCKS) - pool_bytes(target)
    more = costs[1]["bytes accessed"] - costs[0]["bytes accessed"]
    assert more == pytest.approx(round(more / grown) * grown, rel=1e-6)  # the count is a float32
    assert more < 4.5 * SPEC.num_layers * grown  # two reads, for keys and values; the write reads and writes


def operations(text):
    """Number of uses of each operation in a program's text, or in a part of it."""
    return collections.Counter(re.findall(r"^  \S.*? = (?:\(.*?\)|\S+) ([\w-]+)\(", text, re.MULTILINE))


def main_computation(text):
    """The part of a program's text that launches kernels."""
    return re.search(r"^ENTRY .*?^}", text, re.DOTALL | re.MULTILINE)[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_a_step_takes_as_long_over_ten_times_the_pool(shape):
    """The medians of interleaved steps differ by less than 1.2x. On a busy machine there are three tries."""
    dtype = dtype_of("cpu")
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), param_shapes(SPEC, dtype))
    packed = np.full(shape.packed_size, -1, np.int32)
    packed[shape.cuts["rows"]] = np.arange(ROWS)
    if not shape.is_decode:
        packed[shape.cuts["num_decodes"]] = 0
        packed[shape.cuts["num_tokens"]] = shape.tokens // ROWS
        packed[shape.cuts["prompt_tokens"]] = 7
    states, times = {}, {}
    for blocks in (BLOCKS, 10 * BLOCKS):
        kv_groups = group_layers(SPEC.windows, SPEC.max_position)
        states[blocks] = create_state(SPEC, kv_groups, sizes(blocks), dtype=dtype, placement=placement_on("cpu"))
        states[blocks] = states[blocks].replace(blocks=states[blocks].blocks.at[:].set(_scattered_tables(blocks)))
    for _ in range(3):
        for blocks in states:
            times[blocks] = []
        for _ in range(15):
            for blocks in states:
                start = time.perf_counter()
                run = compiled("cpu", shape, blocks)
                states[blocks], computed = run_forward(run, flat_weights(params), states[blocks], packed)
                jax.block_until_ready((states[blocks], computed))
                times[blocks].append(time.perf_counter() - start)
        ratio = statistics.median(times[10 * BLOCKS]) / statistics.median(times[BLOCKS])
        print(f"{shape}: {ratio:.3f} times as long over ten times the blocks")
        if ratio < 1.2:
            return
    pytest.fail(f"{ratio:.2f} times as long over ten times the blocks")


def _scattered_tables(blocks):
    """Block tables of all rows, with blocks from the whole pool."""
    width = SPEC.max_position // BLOCK_SIZE
    return np.random.default_rng(0).permutation(blocks)[: ROWS * width].reshape(ROWS, width).astype(np.int32)


def _costs(program):
    analysis = program.cost_analysis()
    return {name: analysis[name] for name in ("flops", "bytes accessed")}
