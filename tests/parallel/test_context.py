"""Prompts with tokens on several devices: the bits of one device, with every feature, and one exchange per layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.errors import ModelLoadError, RequestError
from jpaged.models.sharding import Shards, make_mesh
from jpaged.runtime.prediction.program_text import Program
from jpaged.runtime.step import context
from jpaged.runtime.step.batch import Batch, ForwardShape, KVGroupRows
from jpaged.runtime.step.program_shapes import bucket_shapes
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.parallel.sameness import check_a_batch_and_the_prefix_cache, check_each_request_alone
from tests.support.random_requests import OPTIONS, answers, workload

CACHED = OPTIONS | {"enable_prefix_caching": True, "max_model_len": 256}
# The tiny models of these tests need 64 tokens on a device (`smallest_bucket`). Programs of 64 tokens are not split.
FOUR = {"prefill_context_parallel_size": 4, "token_buckets": (64, 256), "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def one(checkpoint):
    with LLM(checkpoint, **CACHED) as llm:
        yield llm


@pytest.fixture(scope="module")
def four(checkpoint):
    with LLM(checkpoint, **CACHED | FOUR) as llm:
        yield llm


def batch_of(rng, tokens, rows):
    """A batch of rows with lengths 0 and more before it, and numbers of tokens that fill some of `tokens`."""
    counts = rng.multinomial(int(rng.integers(1, tokens + 1)), rng.dirichlet(np.ones(rows)))
    before = rng.integers(0, 50, rows)
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.zeros(tokens, int)
    for row in range(rows):
        positions[starts[row] : starts[row + 1]] = before[row] + np.arange(counts[row])
    real = np.arange(tokens) < starts[-1]
    lens = np.where(counts > 0, before + counts, 0)
    group = KVGroupRows(np.zeros((rows, 1), int), np.arange(tokens), lens, starts)
    batch = Batch(np.arange(rows), before + counts, (group,), real, np.arange(tokens), positions, positions + 1)
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize("seed", range(8))
def test_each_device_has_its_tokens_and_their_rows(seed):
    """Every device's tokens belong to the right rows, and each row's length ends with the device's last token of it."""
    rng = np.random.default_rng(seed)
    count, tokens, rows = 4, 64, int(rng.integers(1, 9))
    batch = batch_of(rng, tokens, rows)
    mesh = make_mesh(jax.devices()[:count], Shards(context=count))

    def parts(whole):
        own = context.own_part(whole, count)
        return own.token_ids, own.positions, own.real, own.kv_groups[0].query_start_loc, own.kv_groups[0].context_lens

    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec("context")}
    split = jax.jit(jax.shard_map(parts, mesh=mesh, check_vma=False, **specs))(batch)
    ids, positions, real, starts, lens = (np.asarray(part).reshape(count, -1) for part in split)
    assert (ids.ravel() == np.arange(tokens)).all()
    whole_starts = np.asarray(batch.kv_groups[0].query_start_loc)
    for device in range(count):
        assert starts[device, -1] == real[device].sum()
        for row in range(rows):
            mine = np.arange(starts[device, row], starts[device, row + 1])
            in_batch = device * (tokens // count) + mine
            assert ((in_batch >= whole_starts[row]) & (in_batch < whole_starts[row + 1])).all()
            assert lens[device, row] == (positions[device, mine[-1]] + 1 if len(mine) else 0)


@pytest.mark.slow
def test_a_batch_on_four_devices_has_the_bits_of_one(one, four):
    check_a_batch_and_the_prefix_cache(one, four)


@pytest.mark.slow
@pytest.mark.codegen
def test_each_request_alone_has_the_bits_of_the_batch(four):
    check_each_request_alone(four)


@pytest.mark.slow
def test_beams_penalties_and_prompt_logprobs_have_the_bits_of_one(one, four):
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 15}
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    of_beams = [[s.tokens for s in llm.beam_search([prompt], beams)[0].sequences] for llm in (one, four)]
    assert of_beams[0] == of_beams[1]
    extras = [
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0.8, n=3, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2),
    ]
    outputs = [llm.generate([prompt] * len(extras), extras, use_tqdm=False) for llm in (one, four)]
    assert answers(outputs[1]) == answers(outputs[0])
    assert outputs[1][-1].prompt_logprobs == outputs[0][-1].prompt_logprobs


@pytest.mark.slow
def test_preemption_and_swap_give_the_same_bits(checkpoint, one):
    prompts, params = workload(16, seed=2)
    calm = answers(one.generate(prompts, params, use_tqdm=False))
    block = 2 * 16 * one.spec.num_kv_heads * one.spec.head_dim * 4 * one.spec.num_layers  # every device has it
    tight = {"kv_cache_memory_bytes": 14 * block, "max_model_len": 200, "swap_space": 64 * block / 2**30}
    with LLM(checkpoint, **OPTIONS | tight | FOUR) as small:
        assert answers(small.generate(prompts, params, use_tqdm=False)) == calm
        assert small.stats().preemptions > 0
        assert small.stats().used_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"kv_cache_dtype": "int8"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [  # other families: benchmarks/parallel_matrix.py
                ("deepseek-v3", {}),  # latent attention, experts
                ("deepseek-v32", {}),  # sparse attention
                ("gemma2", {"pipeline_parallel_size": 2}),  # windows and softcap
                ("bloom", {"quantization": "int8"}),  # slopes
                ("llama", {"kv_cache_dtype": "fp8", "data_parallel_size": 2}),
            ]
        ),
    ],
)
def test_other_options_give_the_bits_without_context_parallelism(name, options, tmp_path):
    write_checkpoint(next(v for v in VARIANTS if v.name == name), 0, tmp_path)
    prompts, params = workload(8, seed=3)
    found, loads, options = [], [], CACHED | {"token_buckets": (512,), "max_num_batched_tokens": 512} | options
    for size in (1, 2):
        with LLM(str(tmp_path), **options, prefill_context_parallel_size=size) as llm:
            assert {getattr(p.shape, "token_parts", 1) for p in llm.engine.runner.programs.programs} == {1, size}
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
            stats = llm.stats()
            loads.append((stats.expert_pairs, stats.busiest_expert_pairs))
    assert found[0] == found[1]
    assert loads[0] == loads[1]
    assert bool(loads[0][0]) == ("enable_expert_parallel" in options)


def test_a_layer_exchanges_its_keys_and_values_and_nothing_else(four):
    """One all-gather a layer of keys and values, and one of hidden states. Programs that decode exchange nothing."""
    spec, kinds = four.spec, {}
    for program in four.engine.runner.programs.programs:
        if not isinstance(program.shape, ForwardShape):
            continue
        found = [op for op in Program(program.run.as_text()).operations() if op.collective]
        assert {op.collective for op in found} <= {"all-gather"}
        kinds[str(program.shape)] = sorted(op.num_bytes for op in found)
        assert {op.group_size for op in found} <= {4}
    of_layer = 256 * 2 * spec.num_kv_heads * spec.head_dim * 4
    hidden = 256 * spec.hidden_size * 4
    assert kinds == {
        "decode 64 rows": [], "mixed 64 tokens": [],
        "mixed 256 tokens": sorted([*[of_layer] * spec.num_layers, hidden]),
    }  # fmt: skip


def test_no_program_copies_the_pages(four):
    state = four.engine.runner.state
    page = state.page_arrays[0][0]
    assert page.sharding.is_fully_replicated
    size = page.size * page.dtype.itemsize
    for program in four.engine.runner.programs.programs:
        for operation in Program(program.run.as_text()).operations():
            assert operation.kind != "copy" or operation.num_bytes < size, operation.name


@pytest.mark.slow
def test_pages_of_16_bits_are_not_converted(checkpoint):
    """XLA's scatter on CPU would convert all pages to float32 and back, with JAX 0.10."""
    options = CACHED | FOUR | {"dtype": "bfloat16", "prefill_context_parallel_size": 2, "token_buckets": (128,)}
    with LLM(checkpoint, **options | {"max_num_batched_tokens": 128}) as llm:
        pages = llm.engine.runner.state.page_arrays[0][0]
        texts = {str(p.shape): p.run.as_text() for p in llm.engine.runner.programs.programs}
    assert pages.dtype == jnp.bfloat16
    shape = ",".join(map(str, pages.shape))
    assert f"bf16[{shape}]" in texts["mixed 128 tokens"]
    assert all(f"f32[{shape}]" not in text for text in texts.values())


def test_each_device_computes_its_part_of_the_tokens(four):
    """No kernel but the write into the pages, and no product, has more than a quarter of the program's 256 tokens."""
    (program,) = (p for p in four.engine.runner.programs.programs if str(p.shape) == "mixed 256 tokens")
    pages, sizes = four.engine.runner.state.page_arrays[0][0].shape, set()
    for operation in Program(program.run.as_text()).operations():
        if operation.kind in ("custom-call", "dot"):
            results = re.findall(r"\w\d+\[([\d,]+)\]", operation.shape)
            shapes = [tuple(map(int, result.split(","))) for result in results]
            sizes |= set() if pages in shapes else {shape[0] for shape in shapes if shape[1:]}
    assert sizes == {1, 64}  # 1: see `finish_qkv`


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"prefill_context_parallel_size": 0}, RequestError, "must be a number of devices, from 1"),
        (
            {"prefill_context_parallel_size": 4, "tensor_parallel_size": 4}, ModelLoadError,
            "tensor_parallel_size=4 with prefill_context_parallel_size=4 needs 16 devices, there are 8 .* product is "
            "at most 8",
        ),
        ({"prefill_context_parallel_size": 16}, ModelLoadError, "use prefill_context_parallel_size=8 or less"),
        (
            {"prefill_context_parallel_size": 2, "tensor_parallel_size": 3, "nnodes": 4}, RequestError,
            "times 2 for the context must be a multiple of nnodes=4",
        ),
        (
            {"prefill_context_parallel_size": 4, "data_parallel_size": 4}, ModelLoadError,
            "needs 16 devices, there are 8 .*: use sizes whose product is at most 8",
        ),
    ],
)  # fmt: skip
def test_bad_sizes_are_refused_before_weights_are_read(options, error, says):
    with pytest.raises(error, match=says):
        LLM("nowhere", **options) if "data_parallel_size" in options else LLM("demo", **options)


def test_a_size_that_splits_no_program_is_refused():
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": 16}
    with pytest.raises(ModelLoadError, match=r"split into 3 parts of 8 tokens or more .*with a multiple of 24"):
        bucket_shapes(**sizes, context=3)
    assert bucket_shapes(**sizes, context=3, token_buckets=(480,), pools=True)[0].token_parts == 3


def test_programs_are_split_if_each_part_is_large_enough():
    shapes = bucket_shapes(
        max_num_seqs=64, max_num_batched_tokens=1024, block_size=16, smallest=64, token_buckets=(64, 128, 264, 512),
        context=4,
    )  # fmt: skip
    forwards = [shape for shape in shapes if isinstance(shape, ForwardShape)]
    assert {(s.is_decode, s.tokens): s.token_parts for s in forwards} == {
        (True, 64): 1, (False, 64): 1, (False, 128): 1, (False, 264): 4, (False, 512): 4, (False, 1024): 4,
    }  # fmt: skip
