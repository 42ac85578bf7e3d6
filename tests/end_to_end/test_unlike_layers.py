"""Layers with unlike keys and values: heads of two sizes in one pool, layers that read another layer's pages.

`tests/end_to_end/test_cold_equals_warm.py` has the same model with evictions, preemption and the host tier.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import TransferCosts
from jpaged.errors import ModelLoadError
from jpaged.kv_groups import KVPlace, group_layers
from jpaged.loading import load_model
from jpaged.models.decoder import decode, dense_causal_attend, lm_head
from jpaged.models.kv_scales import KVScales
from jpaged.models.spec import param_shapes
from jpaged.quantizing.checkpoint import quantize_checkpoint
from jpaged.runtime.drafting.draft_state import DraftSizes, draft_block_bytes, draft_state_shapes
from jpaged.runtime.kv_format import FP8, KVFormat
from jpaged.runtime.memory.plan import block_bytes, decide_limits
from jpaged.runtime.memory.refusals import NOT_WITH_UNLIKE_LAYERS
from jpaged.runtime.step.batch import KVGroupRows, rows_by_part
from jpaged.runtime.step.forward import pages_of_layer
from jpaged.speculation_config import SpeculationConfig
from pallas_kernels import KVPages
from pallas_kernels.kv_pages import int8_scale, to_fp8, to_int8
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.support.drafting import Recorded, always_drafting, check_drafts
from tests.support.tiny_engine import (
    BLOCK_SIZE,
    HOST_SLOTS,
    MAX_MODEL_LEN,
    UNLIKE,
    VOCAB_SIZE,
    alone,
    bits,
    make_engine,
    make_runner,
    run,
)

pytestmark = pytest.mark.codegen

SMALL = {
    "row_buckets": (8,), "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64, "dtype": "float32",
    "max_model_len": 160, "skip_tokenizer_init": True,
}  # fmt: skip


def greedy(max_tokens, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2, **{"temperature": 0} | more)


# Slow: the default run compares the layers with Transformers without pages (tests/models), and writes parts of pages
@pytest.mark.slow
def test_answers_have_the_same_bits_alone_together_in_chunks_and_from_the_cache():
    """Prompts are longer than the window of 20, than a chunk of 12, and than a block. Forks copy shared pages."""
    runner = make_runner(UNLIKE)
    rng = np.random.default_rng(0)
    stem = rng.integers(0, VOCAB_SIZE, 50).tolist()
    tails = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 9, 30)]
    requests = [(stem + tail, greedy(12)) for tail in tails]
    requests.append((stem[:23], greedy(9, temperature=0.9, seed=3, n=2)))
    wanted = alone(make_engine(runner, caching=False), requests)
    engine = make_engine(runner, budget=12)
    for _ in range(2):
        done = run(engine, requests)
        assert [bits(done[str(i)]) for i in range(len(requests))] == wanted
    assert engine.stats().prefix_hit_tokens > 150
    runner.close()


def test_layers_share_pages():
    """Three layers have half a page each, in two KV groups. The last two layers have the pages of layers 3 and 1."""
    groups = group_layers(UNLIKE.windows, MAX_MODEL_LEN, parts=UNLIKE.page_parts, sources=UNLIKE.kv_sources)
    assert groups.num_arrays == 1
    assert (groups.windows, groups.parts) == ((20, 20, None), (2, 2, 1))
    own = (KVPlace(0, 0, 0), KVPlace(2, 0), KVPlace(0, 0, 1), KVPlace(1, 0, 0))
    assert [place for (place,) in groups.places] == [*own, own[3], own[1]]
    assert groups.pages_per_token == 2.5
    limits = decide_limits(UNLIKE, EngineConfig(model="", block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN), "cpu")
    # a block holds 8 tokens of the widest layer: keys and values, 2 heads of 32
    assert block_bytes(UNLIKE, limits, KVFormat(np.dtype(np.float32)), "cpu") == 2 * 8 * 2 * 32 * 4


def test_parts_of_a_page_are_disjoint():
    """Each of two layers writes its own half of every page, and reads it back. Padding is written nowhere."""
    slots, tables = np.array([3, 17, -1], np.int32), np.array([[2, 0]], np.int32)
    values = np.arange(2 * 3 * 2 * 16, dtype=np.float32).reshape(2, 3, 2, 16) + 1

    @jax.jit
    def write_and_read(data, values, tables, slots):
        group = KVGroupRows(tables, slots, np.array([3]), np.array([0, 3]))
        parts, unchanged = rows_by_part((group, group), (2, 1), block_size=8)
        assert unchanged is group
        pages = KVPages(data)
        for part, layer in zip(parts, values, strict=True):
            view = pages.in_shape(2, 16)
            pages = view.with_data(view.scatter(layer, -layer, part.slots).data).in_whole()
        view = pages.in_shape(2, 16)
        return pages.data, [view.gather(part.block_tables, jnp.float32) for part in parts]

    data, read = write_and_read(np.zeros((3, 2, 2, 8, 32), np.float32), values, tables, slots)
    assert data.shape == (3, 2, 2, 8, 32)
    assert np.count_nonzero(np.asarray(data)[1]) == 0
    for (keys, negative), layer in zip(jax.tree.map(np.asarray, read), values, strict=True):
        np.testing.assert_array_equal(keys[0, :, [1, 11]], layer[[1, 0]])  # block 2 comes first in the block table
        np.testing.assert_array_equal(negative, -keys)
    with pytest.raises(ValueError, match="cannot be read as pages of 2 heads of 24"):
        KVPages(data).in_shape(2, 24)


def test_pages_of_a_draft_model_have_the_sizes_of_its_layers():
    """The last two layers read the KV of others: they have a page that is not used."""
    state = draft_state_shapes(UNLIKE, DraftSizes(9, BLOCK_SIZE, 4, is_head=False), dtype=np.dtype(np.float32))
    shapes = [data.shape for data, _ in state.page_arrays]
    narrow, wide = (9, 2, 2, BLOCK_SIZE, 16), (9, 2, 2, BLOCK_SIZE, 32)
    assert shapes == [narrow, wide, narrow, narrow, (1, *narrow[1:]), (1, *wide[1:])]
    block = draft_block_bytes(UNLIKE, BLOCK_SIZE, KVFormat(np.dtype(np.float32)))
    assert block == 2 * 2 * BLOCK_SIZE * (3 * 16 + 32) * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "draft"),
    [
        pytest.param("gemma4", "gemma4", marks=pytest.mark.soak), ("gemma3n", "gemma3n"), ("gemma4-moe", "gemma4"),
        ("llama", "gemma4"),
    ],
)  # fmt: skip
def test_drafts_of_a_model_with_unlike_layers_change_no_bit(name, draft, tmp_path):
    """A model that drafts for itself is always right, so its drafts have the model's own keys and values."""
    for each in {name, draft}:
        write_checkpoint(BY_NAME[each], 3, tmp_path / each)
    prompts = [{"prompt_token_ids": list(range(*ends))} for ends in ((3, 60), (70, 95))]

    def answers(llm):
        outputs = llm.generate(prompts, greedy(24), use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with LLM(str(tmp_path / name), **SMALL) as llm:
        plain = answers(llm)
    drafts = {"method": "draft_model", "model": str(tmp_path / draft), "num_speculative_tokens": 4}
    with always_drafting(), LLM(str(tmp_path / name), speculative_config=drafts, **SMALL) as llm:
        llm.wait_until_ready()
        assert [answers(llm), answers(llm)] == [plain, plain]  # the second time from the prefix cache
        stats = llm.stats().speculation
    assert stats.draft_tokens > 30
    assert (stats.accepted_tokens == stats.draft_tokens) == (name == draft)


@pytest.mark.slow
def test_drafts_with_preemption_and_the_host_tier():
    """Windows free blocks while drafts are rejected, and a preempted request returns to its last accepted token."""
    fields = {"method": "custom", "num_speculative_tokens": 5}
    runner = make_runner(UNLIKE, speculative_config=SpeculationConfig.from_fields(fields | {"function": len}))
    rng = np.random.default_rng(1)
    requests = [(rng.integers(0, VOCAB_SIZE, n).tolist(), greedy(40)) for n in (7, 16, 25, 33, 40)]
    requests.append((requests[0][0], greedy(25, temperature=0.9, seed=1, n=3)))
    plain = run(make_engine(runner), requests)
    known = [[*each.prompt_token_ids, *answer.token_ids] for each in plain.values() for answer in each.outputs]
    costs = TransferCosts(seconds_per_move=1e-9, seconds_per_token=1.0)
    for options in ({}, {"host_slots": HOST_SLOTS, "costs": costs}):
        with always_drafting():
            engine = make_engine(runner, drafts=fields | {"function": Recorded(known)}, num_blocks=40, **options)
        for _ in range(2):
            found = run(engine, requests)
            assert [bits(found[name]) for name in plain] == [bits(output) for output in plain.values()]
        check_drafts(engine.stats().speculation)
        assert engine.stats().preemptions > 0
    runner.close()


def rounded_attend(kind):
    """Dense attention to keys and values that are rounded as pages of this kind round them."""

    def rounded(x):
        if kind == "fp8_e4m3":
            return to_fp8(x, jnp.float32(1)).astype(jnp.float32)
        scale = int8_scale(jnp.abs(x).max(-1, keepdims=True))
        return to_int8(x, scale).astype(jnp.float32) * scale.astype(jnp.float32)

    def attend(projection, pages, metadata, options, sinks):
        if projection.has_keys:
            q, k, v = projection.finish()
            finished = dict.fromkeys(("bias", "q_norm", "k_norm", "cos", "sin"))
            projection = dataclasses.replace(projection, product=(q, rounded(k), rounded(v)), **finished)
        return dense_causal_attend(projection, pages, metadata, options, sinks)

    return attend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("gemma4", "fp8_e4m3"), ("gemma4-moe", "fp8_e4m3"), ("gemma3n", "int8")]
)
def test_8_bit_pages_against_dense_attention(name, kind, tmp_path):
    """A number at the middle between two codes may be rounded the other way: 4.4e-4 at one token of `gemma4-moe`."""
    write_checkpoint(BY_NAME[name], 3, tmp_path)
    model = load_model(EngineConfig(model=str(tmp_path), dtype="float32"))
    ids = jnp.arange(3, 60)
    hidden, *_ = decode(
        model.spec, model.params, ids, jnp.arange(len(ids)), [None] * model.spec.num_layers, ids[None],
        rounded_attend(kind),
    )  # fmt: skip
    rows = np.asarray(jax.nn.log_softmax(lm_head(model.spec, model.params, hidden)))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for kv_cache_dtype in ("auto", kind):
        with LLM(str(tmp_path), kv_cache_dtype=kv_cache_dtype, **SMALL) as llm:
            output = llm.generate({"prompt_token_ids": ids.tolist()}, params, use_tqdm=False)[0]
        found.append([next(iter(step.values())).logprob for step in output.prompt_logprobs[1:]])
    of_tokens = rows[np.arange(len(ids) - 1), ids[1:]]
    differences = np.abs(np.array(found) - of_tokens)
    assert np.median(differences[1]) < 2e-5
    assert differences[1].max() < 2e-3
    assert differences[0].max() > 0.03  # pages in the type of the weights


def test_parts_of_an_fp8_page_have_its_scale():
    @jax.jit
    def write_and_read(keys):
        pages = KVPages.create(2, 8, 2, 32, FP8, fp8_scales=np.full((2, 2), 0.5, np.float32))
        assert pages_of_layer(pages, 2, 32) is pages
        view = pages_of_layer(pages, 4, 8)
        assert (view.num_blocks, view.scales.shape) == (4, (2, 4))
        written = view.scatter(keys, -keys, jnp.array([19]))
        return *written.gather(jnp.array([[2]]), jnp.float32), to_fp8(keys[0], jnp.float32(0.5)).astype(jnp.float32)

    read, values, rounded = map(np.asarray, write_and_read(np.linspace(-9, 9, 32, dtype=np.float32).reshape(1, 4, 8)))
    np.testing.assert_array_equal(read[0, :, 3], rounded * np.float32(0.5))
    np.testing.assert_array_equal(values, -read)


VALUES = {"kv_handover": True}


@pytest.mark.parametrize("name", NOT_WITH_UNLIKE_LAYERS)
def test_options_that_do_not_work_are_refused(name):
    config = dataclasses.replace(EngineConfig(model=""), **{name: VALUES.get(name, 2)})
    with pytest.raises(ModelLoadError, match=f"{name}=.* does not work with a model whose layers have unlike keys"):
        decide_limits(UNLIKE, config, "cpu")


def test_tpus_and_8_bit_pages_with_other_scales_are_refused():
    with pytest.raises(ModelLoadError, match=r"KV heads of .*: unlike sizes must be multiples of 128 on TPU"):
        decide_limits(UNLIKE, EngineConfig(model=""), "tpu")
    with pytest.raises(ModelLoadError, match=r"'int8': .*heads of unlike sizes.*use kv_cache_dtype='fp8"):
        KVFormat.choose(UNLIKE, "int8", np.dtype(np.float32), None)
    scales = KVScales(np.ones((6, 2), np.float32), np.ones((6, 2), np.float32))
    with pytest.raises(ModelLoadError, match="kv_cache_dtype='fp8_e4m3': the checkpoint has scales"):
        KVFormat.choose(UNLIKE, "fp8_e4m3", np.dtype(np.float32), jax.devices()[0], scales)


def test_a_layer_has_no_leaves_that_it_does_not_use():
    layers = param_shapes(UNLIKE, jnp.float32)["layers"]
    assert {"qkv", "k_norm"} <= layers[0].keys()
    assert {"q", "k", "k_norm"} <= layers[1].keys()
    assert not {"qkv", "v"} & layers[1].keys()
    assert not {"qkv", "k", "v", "k_norm"} & layers[4].keys()


@pytest.mark.slow
def test_quantised_weights_and_updates(tmp_path):
    """Weights in 8 bits, also of layers with separate q and k. Then weights of another seed, from a folder."""
    variant, answers = BY_NAME["gemma4-moe"], []
    for seed in (3, 4):
        write_checkpoint(variant, seed, tmp_path / str(seed))
    prompt, params = {"prompt_token_ids": list(range(3, 60))}, greedy(8)
    for folder in ("3", "4"):
        with LLM(str(tmp_path / folder), **SMALL) as llm:
            output = llm.generate(prompt, params)[0].outputs[0]
            answers.append(output.token_ids)
            if folder == "3":
                first = output.logprobs[0]
                llm.update_weights(str(tmp_path / "4"))
                updated = llm.generate(prompt, params)[0].outputs[0].token_ids
                with pytest.raises(ModelLoadError, match="has 0 layers, the config calls for 6"):
                    llm.update_weights({"embed": jnp.zeros((2, 2)), "layers": ()})
    assert answers[0] != answers[1] == updated
    with LLM(str(tmp_path / "3"), quantization="int8", **SMALL) as llm:
        rounded = llm.generate(prompt, params)[0].outputs[0]
    token = answers[0][0]
    assert rounded.token_ids[0] == token
    assert abs(rounded.logprobs[0][token].logprob - first[token].logprob) < 0.3
    with pytest.raises(ModelLoadError, match="experts cannot be quantised yet: Gemma4ForCausalLM is not supported"):
        quantize_checkpoint(str(tmp_path / "3"), tmp_path / "quantised", scheme="w8a8", method="rtn")
