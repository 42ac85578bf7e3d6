"""Memory plans: sizes that fit, errors for sizes that do not, and a pool that keeps its size between starts."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.kv_groups import group_layers
from jpaged.models.recurrent_spec import Mamba2
from jpaged.models.spec import DecoderSpec, Rope, param_shapes
from jpaged.params.sampling import MAX_LOGIT_BIAS
from jpaged.runtime.compile.blueprint import Blueprint
from jpaged.runtime.memory import device_memory
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.memory.remembered_pool import PoolSize, remember_pool, remembered_pool
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.state import NUM_FIELDS
from jpaged.runtime.step import block_moves
from jpaged.runtime.step.program_shapes import smallest_bucket

SPEC = DecoderSpec(
    vocab_size=1000, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=4096, rope=Rope(),
)  # fmt: skip
CONFIG = EngineConfig(model="test")
BLOCK_BYTES = 2 * 4 * 16 * 2 * 16 * 4
FLOAT32 = jnp.dtype("float32")


def plan(config=CONFIG, platform="cpu", **kwargs):
    limits = memory.decide_limits(SPEC, config, platform)
    return memory.fit(SPEC, config, limits, dtype=FLOAT32, weight_bytes=1000, platform=platform, **kwargs)


def test_states_are_padded_on_a_tpu():
    """A head's state is [32, 64] numbers: a TPU keeps rows of 128. The convolution has 512 channels."""
    mamba = Mamba2((True, False, True, False), heads=4, head_dim=64, groups=4, state_dim=32, conv_width=4)
    spec = dataclasses.replace(SPEC, recurrence=mamba)
    inputs, heads = 3 * 512 * 4, 4 * 32 * 4
    for platform, width in (("cpu", 64), ("gpu", 64), ("tpu", 128)):
        assert memory.slot_bytes(spec, FLOAT32, platform) == 2 * (inputs + heads * width)
        limits = memory.decide_limits(spec, CONFIG, platform)
        of_tables = memory.table_bytes(spec, limits, FLOAT32, platform)
        attention = memory.table_bytes(dataclasses.replace(spec, recurrence=None), limits, FLOAT32, platform)
        assert of_tables == attention + limits.max_num_seqs * 2 * (inputs + heads * width)


def test_on_cpu_the_pool_is_twice_the_need_of_all_rows_and_at_most_a_gibibyte():
    small = dataclasses.replace(CONFIG, max_num_seqs=2, max_model_len=100)
    assert plan(small).num_blocks == 2 * 2 * 7
    assert plan(small).kv_bytes == 28 * BLOCK_BYTES
    large = plan(dataclasses.replace(CONFIG, max_num_seqs=512))
    assert 0.9 * 2**30 < large.kv_bytes <= 2**30


def test_platform_defaults():
    groups = group_layers((None,) * 4, 4096)
    smallest = smallest_bucket(SPEC, "cpu")
    assert memory.decide_limits(SPEC, CONFIG, "cpu") == memory.Limits(4096, 32, 512, 16, groups, smallest)
    assert memory.decide_limits(SPEC, CONFIG, "gpu") == memory.Limits(4096, 256, 2048, 16, groups, 8)
    assert memory.decide_limits(SPEC, CONFIG, "tpu").block_size == 64
    assert memory.decide_limits(SPEC, dataclasses.replace(CONFIG, max_num_batched_tokens=16), "cpu").max_num_seqs == 16


def test_a_tpu_pads_heads():
    """A head of 16 numbers takes the space of 128 there, and blocks have 64 tokens."""
    assert plan(platform="tpu").block_bytes == BLOCK_BYTES * (128 // 16) * (64 // 16)


def test_the_default_max_model_len_shrinks_and_an_explicit_one_is_refused(caplog):
    few = dataclasses.replace(CONFIG, kv_cache_memory_bytes=40 * BLOCK_BYTES)
    shrunk = plan(few)
    assert shrunk.limits.max_model_len == 640
    assert "max_model_len is now 640" in caplog.text
    with pytest.raises(ModelLoadError, match=r"max_model_len=1000 .* at most 640, or raise kv_cache_memory_bytes"):
        plan(dataclasses.replace(few, max_model_len=1000))
    assert plan(dataclasses.replace(few, max_model_len=640)).num_blocks == 40


def test_a_request_that_fits_exactly_is_accepted():
    """Rounding the number of blocks down must not refuse a request that fits."""
    for blocks in (33, 63, 250):
        config = dataclasses.replace(CONFIG, kv_cache_memory_bytes=blocks * BLOCK_BYTES, max_model_len=16 * blocks)
        assert plan(config).num_blocks == blocks


def test_the_log_probabilities_of_the_whole_vocabulary_are_bounded():
    whole = dataclasses.replace(CONFIG, max_logprobs=-1)
    assert memory.decide_limits(SPEC, whole, "gpu") == memory.decide_limits(SPEC, CONFIG, "gpu")
    with pytest.raises(ModelLoadError, match=r"max_logprobs=-1: .* take 305 MiB in each step.*Set at most 131,072"):
        memory.decide_limits(dataclasses.replace(SPEC, vocab_size=156_250), whole, "gpu")


def test_the_pool_of_an_accelerator_is_the_free_memory():
    def device(**stats):
        return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    free = device_memory.free_device_bytes(device(bytes_limit=1000, bytes_in_use=300), CONFIG)
    assert free == 600
    cpu = types.SimpleNamespace(platform="cpu", memory_stats=lambda: None)
    assert device_memory.free_device_bytes(cpu, CONFIG) is None
    for share in (0, -0.5, 1.5, math.nan, math.inf):
        with pytest.raises(ModelLoadError, match=f"gpu_memory_utilization={share}: must be above 0"):
            memory.decide_limits(SPEC, dataclasses.replace(CONFIG, gpu_memory_utilization=share), "cpu")
    table = memory.table_bytes(SPEC, memory.decide_limits(SPEC, CONFIG, "gpu"), FLOAT32, "gpu")
    # counts of 1,000 ids, their mask in 32 words, 1,024 ids with their biases
    sampling = 4 * (1000 + 32 + 2 * MAX_LOGIT_BIAS)
    assert table == 256 * (4 * (NUM_FIELDS + 4096 // 16 + 2) + sampling) + 2048 * SPEC.hidden_size * 4
    free = 5000 * BLOCK_BYTES + table
    assert plan(platform="gpu", free_bytes=free).num_blocks == memory.round_down(5000)
    assert plan(platform="gpu", free_bytes=free + 777, temp_bytes=777).num_blocks == memory.round_down(5000)
    assert plan(platform="gpu", free_bytes=4096 * BLOCK_BYTES + table).num_blocks == 4096
    assert plan(platform="gpu", free_bytes=4096 * BLOCK_BYTES + table - 1).num_blocks == memory.round_down(4095)
    capped = dataclasses.replace(CONFIG, kv_cache_memory_bytes=10**12)
    assert plan(capped, platform="gpu", free_bytes=512 * BLOCK_BYTES + table).num_blocks == 512


def test_jax_allocates_the_share_of_a_gpu_that_the_engine_may_use(monkeypatch):
    """With JAX's default of 75% the engine would get 67.5% of the card. Asserted on JAX's option, without a card."""
    option = "jax_pjrt_client_create_options"
    before = getattr(jax.config, option)
    plugins = {"jax_cuda13_plugin"}
    monkeypatch.setattr(device_memory.importlib.util, "find_spec", lambda name: name if name in plugins else None)
    monkeypatch.setattr(device_memory, "backends_are_started", lambda: False)
    for name in device_memory.GPU_MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def claimed(started=False, **options):
        jax.config.update(option, None)
        monkeypatch.setattr(device_memory, "backends_are_started", lambda: started)
        device_memory.claim_gpu_memory(dataclasses.replace(CONFIG, **options))
        return getattr(jax.config, option)

    try:
        assert claimed(gpu_memory_utilization=0.5) == {"memory_fraction": 0.75}
        assert claimed(started=True) is None  # too late: JAX has read the option
        assert claimed(gpu_memory_utilization=math.nan) is None
        with monkeypatch.context() as patch:
            patch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
            assert claimed() is None
        assert claimed(gpu_memory_utilization=0.8) == {"memory_fraction": 0.9}
        # the back end reports nine tenths of a card of 1,000 bytes: the engine may use 800 bytes
        stats = {"bytes_limit": 900, "bytes_in_use": 100}
        gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
        most = dataclasses.replace(CONFIG, gpu_memory_utilization=0.8)
        assert device_memory.device_bytes(gpu) == (1000, 100)
        assert device_memory.free_device_bytes(gpu, most) == 700
        assert device_memory.free_device_bytes(gpu, dataclasses.replace(most, gpu_memory_utilization=1.0)) == 800
        plugins.clear()
        assert claimed() is None
    finally:
        jax.config.update(option, before)


def test_the_pool_keeps_the_size_of_an_earlier_start_if_it_fits(tmp_path):
    assert memory.round_down(31) == 31
    assert memory.round_down(1023) == 992
    pool = PoolSize(992, 2**20)
    assert [pool.still_fits(blocks) for blocks in (992, 1024, 991, 800, 1200)] == [True, True, False, False, False]
    assert remembered_pool(tmp_path / "new", "a") is None
    remember_pool(tmp_path / "new", "a", pool)
    assert remembered_pool(tmp_path / "new", "a") == pool
    assert remembered_pool(tmp_path / "new", "b") is None
    remember_pool(None, "a", pool)
    assert remembered_pool(None, "a") is None
    for damaged in ("{cut short", "{}", '{"num_blocks": 0, "temp_bytes": 5}', '{"num_blocks": 5}'):
        next((tmp_path / "new").glob("pool-*.json")).write_text(damaged)
        assert remembered_pool(tmp_path / "new", "a") is None


def gemma_3(num_layers, kv_heads, window):
    """Shapes of Gemma 3's KV: every sixth layer has full attention, heads of 256."""
    windows = tuple(None if (layer + 1) % 6 == 0 else window for layer in range(num_layers))
    return dataclasses.replace(
        SPEC, num_layers=num_layers, num_heads=4, num_kv_heads=kv_heads, head_dim=256, max_position=32768,
        sliding_window=windows,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "blocks", "line"),
    [
        # 26 layers, 22 of them with a window, in KV groups of 4. Blocks of 16 tokens: 2,048 for the KV group with full
        # attention, 161 (512 - 1 tokens and a chunk of 2,048) for each of the others.
        (
            gemma_3(26, 1, 512), 2048 + 6 * 161,
            "KV of one request of 32,768 tokens: 188.4 MiB at most (full attention in every layer would take "
            "832.0 MiB); groups of 4 layers: 6 with a window of 512, 1 with full attention",
        ),
        # 34 layers, 29 of them with a window, in KV groups of 5
        (
            gemma_3(34, 4, 1024), 2048 + 6 * 193,
            "KV of one request of 32,768 tokens: 1001.9 MiB at most (full attention in every layer would take "
            "4.2 GiB); groups of 5 layers: 6 with a window of 1,024, 1 with full attention",
        ),
    ],
    ids=["1B", "4B"],
)  # fmt: skip
def test_kv_of_layers_with_a_window_is_limited_by_the_window(spec, blocks, line):
    """Gemma 3 with 32,768 tokens on an accelerator, bfloat16."""
    limits = memory.decide_limits(spec, CONFIG, "gpu")
    options = {"dtype": jnp.dtype("bfloat16"), "weight_bytes": 1000, "platform": "gpu"}
    plan = memory.fit(spec, CONFIG, limits, free_bytes=2 * 2**30, **options)
    page = 2 * 16 * spec.num_kv_heads * 256 * 2
    assert plan.request_bytes == blocks * (spec.num_layers // 6) * page
    assert plan.full_attention_bytes == 2048 * spec.num_layers * page
    assert plan.full_attention_bytes > 4.3 * plan.request_bytes
    assert plan.limits.max_model_len == 32768
    assert str(plan).splitlines()[-1] == line
    # the exact need of one request is enough, one byte less is not
    need = plan.request_bytes + plan.table_bytes
    exact = memory.fit(spec, CONFIG, limits, free_bytes=need, **options)
    assert (exact.num_blocks, exact.limits.max_model_len) == (blocks, 32768)
    short = memory.fit(spec, CONFIG, limits, free_bytes=need - 1, **options)
    assert short.limits.max_model_len == 32768 - 16


def test_with_several_kv_groups_the_error_names_the_longest_length_that_fits():
    spec = dataclasses.replace(SPEC, sliding_window=(64, 64, 64, None))
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=32, max_num_seqs=2, max_model_len=1000)
    limits = memory.decide_limits(spec, config, "cpu")
    assert len(limits.kv_groups.windows) == 4
    assert limits.blocks_per_request == 63 + 3 * 7  # 63 tokens before a chunk of 32, wherever a block begins
    for blocks, longest in ((84, 1000), (83, 992), (30, 9 * 16), (28, 7 * 16), (27, 6 * 16), (4, 16)):
        assert limits.longest_where(lambda n, blocks=blocks: limits.blocks_of(n) <= blocks) == longest
        # the same by trying every length
        fits = [n for n in range(1001) if limits.blocks_of(n) <= blocks]
        assert max(fits) == longest
    small = dataclasses.replace(config, kv_cache_memory_bytes=83 * BLOCK_BYTES // 4)
    with pytest.raises(ModelLoadError, match="lower max_model_len to at most 992"):
        memory.fit(spec, small, limits, dtype=FLOAT32, weight_bytes=0, platform="cpu")
    none = dataclasses.replace(config, kv_cache_memory_bytes=3 * BLOCK_BYTES // 4)
    with pytest.raises(ModelLoadError, match="not one block of 4096 bytes fits for each of 4 KV groups"):
        memory.fit(spec, none, limits, dtype=FLOAT32, weight_bytes=0, platform="cpu")


def test_the_memory_plan_as_text():
    text = str(plan(dataclasses.replace(CONFIG, max_num_seqs=2, max_model_len=100)))
    assert "28 blocks of 16 tokens" in text
    for word in ("weights", "KV pool", "request table", "temporaries", "in all"):
        assert word in text

def test_host_memory_is_not_read_without_swap_space(monkeypatch):
    """`os.sysconf` does not exist on every system, so only a host tier may need it."""
    monkeypatch.delattr(block_moves.os, "sysconf")
    assert block_moves.host_slots(0.0, 1 << 20) == 0


def test_swap_space_has_room_for_a_snapshot():
    """Refused before weights are loaded. Without a prefix cache there are no snapshots."""
    mamba = Mamba2((True, False, True, False), heads=4, head_dim=64, groups=4, state_dim=32, conv_width=4)
    spec = dataclasses.replace(SPEC, recurrence=mamba)
    config = dataclasses.replace(CONFIG, max_num_seqs=4, max_model_len=1000, swap_space=64 * 2**10 / 2**30)
    of_slot = memory.slot_bytes(spec, FLOAT32, "cpu")
    assert of_slot > 64 * 2**10 > BLOCK_BYTES
    ModelRunner.check(SPEC, param_shapes(SPEC, FLOAT32), config)
    params = param_shapes(spec, FLOAT32)
    with pytest.raises(ModelLoadError, match=f"a snapshot of recurrent state has {of_slot / 2**30:.4f} GiB; raise it"):
        ModelRunner.check(spec, params, config)
    ModelRunner.check(spec, params, dataclasses.replace(config, enable_prefix_caching=False))
    ModelRunner.check(spec, params, dataclasses.replace(config, swap_space=1.0))


def test_the_check_before_loading_counts_the_slots_of_adapters(monkeypatch):
    monkeypatch.setattr(Blueprint, "_free_bytes", lambda self: 2**24)
    params, few = param_shapes(SPEC, FLOAT32), dataclasses.replace(CONFIG, max_num_seqs=4, max_model_len=64)
    for slots in (2, 2000):
        config = dataclasses.replace(few, max_loras=slots)
        ModelRunner.check(SPEC, params, config)
        config = dataclasses.replace(config, enable_lora=True)
        if slots == 2:
            ModelRunner.check(SPEC, params, config)
        else:
            with pytest.raises(ModelLoadError, match="not one block"):
                ModelRunner.check(SPEC, params, config)
