"""Plans of an engine's memory, compared with numbers worked out by hand and with engines that start."""

import dataclasses
import json
import logging

import pytest

from jpaged import planning
from jpaged.errors import ModelLoadError, RequestError
from jpaged.frontend.build import build_engine
from jpaged.models.families import spec_of
from jpaged.models.spec import param_shapes
from jpaged.runtime import targets
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.compile.estimate import estimate_temporaries
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.memory.weight_bytes import tree_bytes
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import NUM_FIELDS, state_shapes
from tests.support.deviceless import H200, V5E, marks
from tests.support.published_configs import GEMMA, LLAMA, LLAMA_PARTS, LLAMA_WEIGHTS, QWEN_MOE

pytestmark = pytest.mark.codegen

GIB = 2**30

LLAMA_TOKEN = 131_072  # bytes of KV: 32 layers, 8 heads of 128, keys and values
LLAMA_BLOCK = 16 * LLAMA_TOKEN


@pytest.fixture
def no_compilers(monkeypatch):
    """As if neither jax[cuda13] nor jax[tpu] was installed."""
    monkeypatch.setattr(targets, "_installed", lambda module: False)


@pytest.fixture
def folder(tmp_path):
    """A function that writes a config.json, and nothing else, into a folder."""

    def write(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return str(tmp_path)

    return write


def llama_tables(max_model_len):
    """Bytes of the device state without the pages.

    The request table, the block tables, and a hidden state of 4,096 numbers of two bytes for each of 2,048 tokens. For
    each of 256 rows: counts of all ids, a mask of 4,008 words, 1,024 ids with their biases, and 2 indices.
    """
    sampling = 4 * (128_256 + 4_008 + 2 * 1_024)
    return 256 * (4 * (NUM_FIELDS + max_model_len // 16 + 2) + sampling) + 2048 * 4096 * 2


def hand_made(device_bytes, temp_bytes, max_model_len=131_072):
    """Blocks of Llama's pool, and the longest request, by trying every length."""
    while True:
        left = device_bytes * 9 // 10 - LLAMA_WEIGHTS - temp_bytes - llama_tables(max_model_len)
        blocks = left // LLAMA_BLOCK
        if blocks * 16 >= max_model_len:
            break
        max_model_len -= 16
    if max_model_len < 131_072:
        return blocks, max_model_len
    step = 1
    while blocks // step >= 32:
        step *= 2
    return max(blocks // step * step, max_model_len // 16), max_model_len


def check_llama(plan, device_bytes, temp_bytes):
    blocks, longest = hand_made(device_bytes, temp_bytes)
    fitted = plan.memory
    assert plan.weight_parts == LLAMA_PARTS
    assert plan.weight_bytes == fitted.weight_bytes == LLAMA_WEIGHTS
    assert fitted.block_bytes == LLAMA_BLOCK
    assert fitted.temp_bytes == temp_bytes
    assert (fitted.num_blocks, fitted.limits.max_model_len) == (blocks, longest)
    assert fitted.kv_tokens == 16 * blocks
    assert fitted.kv_bytes == fitted.kv_tokens * LLAMA_TOKEN
    assert fitted.table_bytes == llama_tables(longest)
    assert plan.largest_max_model_len == longest
    # the rows add up to all bytes of the device, and the share that the options keep free stays free
    assert sum(row.num_bytes for row in plan.rows) == plan.device_bytes == device_bytes
    rows = {row.name: row.num_bytes for row in plan.rows}
    assert rows["kept free"] == device_bytes - device_bytes * 9 // 10
    assert 0 <= rows["left over"] < rows["KV pool"] // 16 + LLAMA_BLOCK + 2**23
    for length, at_once in plan.requests:
        assert at_once == min(256, blocks // -(-length // 16))


MEMORIES = [("24GiB", 24 * GIB), ("80GiB", 80 * GIB), ("141GB", 141 * 10**9)]


@pytest.mark.parametrize(("size", "device_bytes"), MEMORIES)
def test_llama_by_hand(size, device_bytes, folder, no_compilers):
    assert sum(LLAMA_PARTS.values()) == LLAMA_WEIGHTS
    plan = planning.plan(folder(LLAMA), device_memory=planning.parse_size("device_memory", size))
    assert not plan.temporaries.measured
    assert "jax[cuda13]" in plan.temporaries.how
    # 4.5 copies of the logits, and six hidden states per row: see runtime/estimate.py
    check_llama(plan, device_bytes, int(4.5 * 4 * 256 * 128_256) + 6 * 256 * 4096 * 2)


@pytest.mark.parametrize("target", [pytest.param("h200", marks=marks(H200))])
def test_llama_compiled_for_a_device_that_is_not_there(target, folder):
    """The estimate is at least the compiler's figure, and less than 1.7 times as much."""
    plan = planning.plan(folder(LLAMA), target=target)
    assert plan.temporaries.measured
    check_llama(plan, 141 * 10**9, plan.temporaries.num_bytes)
    _, estimate = estimate_temporaries(blueprint_of(LLAMA, H200))
    print(f"{plan.temporaries.program}: {plan.temporaries.num_bytes:,}, estimated {estimate:,}")
    assert 1 <= estimate / plan.temporaries.num_bytes < 1.7


def blueprint_of(values, target, **options):
    spec = spec_of(values)
    config = planning.engine_config("test", options)
    return Blueprint.draw(ServedModel(spec, param_shapes(spec, "bfloat16")), config, Placement.for_target(target))


def shallow(values, layers):
    """The model with fewer layers. Temporaries are those of one layer and of the sampler."""
    return values | {"num_hidden_layers": layers}


COMPILED = [
    # Each takes minutes: one per compiler is in the gate, the others are for changes of the estimate.
    pytest.param(
        values, target, id=f"{name} {target.name}", marks=[*marks(target), *[pytest.mark.slow] * (name != "llama")]
    )
    for target in (H200, V5E)
    for name, values in (("llama", LLAMA), ("gemma", GEMMA), ("qwen-moe", QWEN_MOE))
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("values", "target"), COMPILED)
def test_the_estimate_is_on_the_high_side(values, target):
    """Also: the bytes that the plan counts are those of the program's arguments, with the device's padding."""
    blueprint = blueprint_of(shallow(values, 2), target)
    free = 8 * GIB
    shape, estimate = estimate_temporaries(blueprint)
    table, each = blueprint.table_bytes, blueprint.block_bytes
    blocks = memory.round_down((free - estimate - table) // each)
    with target.tracing():
        largest, measured = blueprint.largest_temporaries(free)
        forward = blueprint.with_blocks(blocks).compile(blueprint.largest_shapes[0])
    print(f"{target.name}: {largest} {measured:,}, estimated {shape} {estimate:,}, ratio {estimate / measured:.2f}")
    assert 1 <= estimate / measured < 2
    limits = blueprint.limits
    state = state_shapes(blueprint.model.spec, limits.kv_groups, limits.state_sizes(1), dtype=blueprint.dtype)
    table -= tree_bytes(state.sampling)  # a forward program does not take it
    counted = tree_bytes(blueprint.model.params) + blocks * each + table
    assert counted == pytest.approx(forward.memory_analysis().argument_size_in_bytes, rel=0.001)


def test_memory_left_by_the_weights_limits_max_model_len(folder, no_compilers):
    """The error for a max_model_len that does not fit names the largest that fits. The engine accepts that length."""
    path, options = folder(LLAMA), {"device_memory": 24 * GIB}
    refused = planning.plan(path, {"max_model_len": 100_000}, **options)
    largest = planning.plan(path, **options).largest_max_model_len
    assert refused.memory is None
    assert refused.largest_max_model_len == largest
    assert f"lower max_model_len to at most {largest}, or free memory" in refused.problem
    assert planning.plan(path, {"max_model_len": largest}, **options).memory.limits.max_model_len == largest
    assert planning.plan(path, {"max_model_len": largest + 1}, **options).memory is None
    less = planning.plan(path, {"gpu_memory_utilization": 0.8}, **options)
    # each token needs its KV, and every 16 tokens an entry in the block tables of 256 rows
    assert largest - less.largest_max_model_len == pytest.approx(2.4 * GIB / (LLAMA_TOKEN + 64), abs=32)
    capped = planning.plan(path, {"kv_cache_memory_bytes": GIB}, device_memory=80 * GIB)
    assert (capped.memory.num_blocks, capped.largest_max_model_len) == (512, 8192)
    assert "kv_cache_memory_bytes" in next(row.note for row in capped.rows if row.name == "left over")
    assert sum(row.num_bytes for row in capped.rows) == 80 * GIB


def test_weights_that_do_not_fit(folder, no_compilers):
    plan = planning.plan(folder(LLAMA), target="v5e")
    assert (plan.memory, plan.largest_max_model_len, plan.requests) == (None, None, ())
    assert "not one block" in plan.problem
    assert plan.weight_bytes == LLAMA_WEIGHTS > plan.device_bytes


def test_a_windowed_model(folder, no_compilers):
    """Gemma 3 1B has 999,885,952 weights. The plan counts blocks by window."""
    plan = planning.plan(folder(GEMMA), device_memory=24 * GIB, request_lens=[1000, 32_768])
    assert plan.weight_bytes == 2 * 999_885_952
    fitted = plan.memory
    assert fitted.block_bytes == 4 * 2 * 16 * 256 * 2
    assert fitted.requests_of(32_768) == fitted.num_blocks // (2048 + 6 * 161)
    assert plan.requests == ((1000, 256), (32_768, fitted.num_blocks // (2048 + 6 * 161)))
    assert fitted.kv_tokens == fitted.num_blocks // 7 * 16
    assert sum(row.num_bytes for row in plan.rows) == 24 * GIB


def test_a_model_with_experts(folder, no_compilers):
    """Qwen3 30B A3B has 30,532,122,624 weights, nearly all of them in experts."""
    plan = planning.plan(folder(QWEN_MOE), device_memory=80 * GIB)
    assert plan.weight_bytes == 2 * 30_532_122_624
    # 48 layers of 128 experts of three matrices of 768 x 2,048, and a router
    assert plan.weight_parts["experts"] == 2 * 48 * (128 * 3 * 768 * 2048 + 128 * 2048)
    assert "feed-forward" not in plan.weight_parts
    assert plan.memory.block_bytes == 48 * 2 * 16 * 4 * 128 * 2
    assert planning.plan(folder(QWEN_MOE), device_memory=48 * GIB).memory is None


OPTIONS = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,), "dtype": "float32",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"kv_cache_memory_bytes": 32 * 2**20},
    {"kv_cache_memory_bytes": 2**20},
    {"kv_cache_memory_bytes": 2**21, "max_model_len": 48, "block_size": 8, "mask_unknown_tokens": False},
    {},
    {"dtype": "auto", "max_model_len": 256},  # those of other tests: the programs are cached
])  # fmt: skip
def test_an_engine_agrees_with_its_plan(options, caplog):
    caplog.set_level(logging.WARNING, "jpaged")
    plan = planning.plan("demo", OPTIONS | options)
    warnings = [record.getMessage() for record in caplog.records if "max_model_len is now" in record.getMessage()]
    caplog.clear()
    built = build_engine("demo", None, OPTIONS | options, progress=False)
    try:
        runner = built.engine.runner
        real = runner.memory_plan
        # limits, number of blocks, and bytes of weights, table and a block
        assert dataclasses.replace(plan.memory, temp_bytes=0) == dataclasses.replace(real, temp_bytes=0)
        assert plan.temporaries.measured
        same = next(p for p in runner.programs.programs if str(p.shape) == plan.temporaries.program)
        if warnings:  # measured with block tables of the length that did not fit
            assert same.temp_bytes <= plan.memory.temp_bytes < 1.1 * same.temp_bytes
        else:
            assert same.temp_bytes == plan.memory.temp_bytes
            # the greedy program with as many tokens took 640 bytes more, of 4.5 million
            assert plan.memory.temp_bytes == pytest.approx(real.temp_bytes, rel=0.001)
        assert real.weight_bytes == sum(leaf.nbytes for leaf in leaves(runner.params))
        assert real.kv_bytes == sum(leaf.nbytes for leaf in leaves(runner.state.pages))
        state = runner.state
        assert real.table_bytes == sum(leaf.nbytes for leaf in leaves(state.with_pages(())))
    finally:
        built.engine.close()
    again = [record.getMessage() for record in caplog.records if "max_model_len is now" in record.getMessage()]
    assert set(again) == set(warnings)  # both warn that the default shrinks
    shrunk = plan.memory.limits.max_model_len < built.spec.max_position and "max_model_len" not in options
    assert bool(warnings) == shrunk


def leaves(tree):
    import jax

    return jax.tree.leaves(tree)


@pytest.mark.slow
def test_engine_and_plan_refuse_the_same_options():
    options = OPTIONS | {"kv_cache_memory_bytes": 2**20}
    longest = planning.plan("demo", options).largest_max_model_len
    options["max_model_len"] = longest + 1
    plan = planning.plan("demo", options)
    assert plan.memory is None
    assert f"at most {longest}, or raise kv_cache_memory_bytes" in plan.problem
    with pytest.raises(ModelLoadError) as refused:
        build_engine("demo", None, options, progress=False)
    assert str(refused.value) == plan.problem


def test_ways_to_name_a_model(folder, no_compilers, tmp_path):
    path = folder(LLAMA)
    by_folder = planning.plan(path, target="h100")
    by_file = planning.plan(path + "/config.json", target="h100")
    assert by_file == dataclasses.replace(by_folder, model=by_file.model)
    with pytest.raises(ModelLoadError, match="no folder"):
        planning.plan(str(tmp_path / "nothing"), target="h100")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        planning.plan(str(tmp_path / "empty"), target="h100")


def test_a_checkpoints_own_headers_decide_the_dtype(no_compilers):
    """The plan of the demo model follows the headers of its files."""
    plan = planning.plan("demo", target="l4")
    assert plan.dtype == "bfloat16"
    assert plan.memory.limits.max_num_seqs == 256


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB), ("141GB", 141 * 10**9), ("80 gib", 80 * GIB), ("1.5TiB", 3 * 2**39), ("512MiB", 2**29),
        ("1000", 1000), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert planning.parse_size("device_memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24G", "24 parsecs", "-1GiB", "0", "1e9", "nan", "0.0GB"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(RequestError, match=r"^device_memory.*24GiB .*80GB.*, got "):
        planning.parse_size("device_memory", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h900"}, r"target must be one of h200, h100.*, got 'h900'"),
        ({"target": "cpu", "device_memory": GIB}, "no meaning on CPU"),
        ({"request_lens": [0]}, "request_len"),
        ({"request_lens": [10**9]}, "longer than max_model_len"),
    ],
)
def test_bad_arguments_are_refused(options, message, no_compilers):
    with pytest.raises(RequestError, match=message):
        planning.plan("demo", OPTIONS, **({"target": "l4"} | options))
