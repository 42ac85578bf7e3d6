"""Engines on several devices: the answers of one device, with every feature, and programs without surplus traffic."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, LoRARequest, SamplingParams
from jpaged.engine.step_plan import SamplerVariant, TransferCosts
from jpaged.errors import ModelLoadError, RequestError
from jpaged.models.experts import pairs_of_devices
from jpaged.models.recurrent_spec import GatedDelta, KimiDelta
from jpaged.models.sharding import Shards
from jpaged.models.spec import Latent, Norm, QKNorm, param_shapes
from jpaged.runtime.prediction.program_text import Program
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.output_programs import SampleShape
from tests.golden.checkpoints import BY_NAME as CHECKPOINTS
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.loading.recorded_adapters import recorded
from tests.parallel.sameness import check_each_request_alone
from tests.support.drafting import Recorded, always_drafting, check_drafts
from tests.support.random_requests import OPTIONS, answers, workload
from tests.support.tiny_engine import FULL, random_tree, sampling_programs

CACHED = OPTIONS | {"enable_prefix_caching": True, "max_model_len": 256}


def write(name, folder):
    write_checkpoint(next(v for v in VARIANTS if v.name == name), 0, folder)
    return str(folder)


@pytest.fixture(scope="module")
def two(checkpoint):
    with LLM(checkpoint, **CACHED, tensor_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def one(checkpoint):
    with LLM(checkpoint, **CACHED) as llm:
        yield llm


def close(a, b, limit=1e-5):
    """Equal tokens, and log-probabilities within `limit`."""
    for (tokens, logprobs, reason), (others, other_logprobs, other_reason) in zip(a, b, strict=True):
        assert (tokens, reason) == (others, other_reason)
        for step, other in zip(logprobs or (), other_logprobs or (), strict=True):
            assert step.keys() == other.keys()
            assert max(abs(step[token].logprob - other[token].logprob) for token in step) < limit


def test_a_batch_on_two_devices_gives_the_answers_of_one(one, two):
    """Greedy, top_k, top_p, min_p, seeds and log-probabilities; 64 requests on 8 rows; then from the prefix cache."""
    prompts, params = workload(24, seed=1)
    first = answers(one.generate(prompts, params, use_tqdm=False))
    close(answers(two.generate(prompts, params, use_tqdm=False)), first)
    hits = two.stats().prefix_hit_tokens
    close(answers(two.generate(prompts, params, use_tqdm=False)), first)
    assert two.stats().prefix_hit_tokens > hits
    assert two.stats().compiles_after_ready == 0


@pytest.mark.codegen
def test_each_request_alone_has_the_bits_of_the_batch(two):
    check_each_request_alone(two)


@pytest.mark.slow
def test_preemption_and_swap_give_the_same_bits(checkpoint, two):
    prompts, params = workload(16, seed=2)
    calm = answers(two.generate(prompts, params, use_tqdm=False))
    block = 2 * 16 * two.spec.num_kv_heads // 2 * two.spec.head_dim * 4 * two.spec.num_layers  # of one device
    tight = {"kv_cache_memory_bytes": 14 * block, "max_model_len": 200, "swap_space": 64 * block / 2**30}
    with LLM(checkpoint, **OPTIONS | tight, tensor_parallel_size=2) as small:
        assert answers(small.generate(prompts, params, use_tqdm=False)) == calm
        assert small.stats().preemptions > 0
        assert small.stats().used_blocks == 0


def test_beams_grammars_penalties_and_prompt_logprobs(one, two):
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 9}
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    of_beams = [[s.tokens for s in llm.beam_search([prompt], beams)[0].sequences] for llm in (one, two)]
    assert of_beams[0] == of_beams[1]
    extras = [
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, logit_bias={9: 20.0}, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=[3, 4, 300], ignore_eos=True),
        SamplingParams(temperature=0.8, typical_p=0.6, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2),
    ]
    outputs = [llm.generate([prompt] * len(extras), extras, use_tqdm=False) for llm in (one, two)]
    close(answers(outputs[1]), answers(outputs[0]))
    of_prompt = [output[-1].prompt_logprobs[1:] for output in outputs]
    for a, b in zip(*of_prompt, strict=True):
        assert max(abs(a[token].logprob - b[token].logprob) for token in a) < 1e-5


@pytest.mark.slow
def test_one_token_of_a_json_schema_is_the_same_on_two_devices():
    """Masks of a grammar, on the demo model, which has a tokenizer."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    params = SamplingParams(temperature=0, max_tokens=24, structured_outputs={"json": schema})
    texts = []
    for size in (1, 2):
        with LLM("demo", **OPTIONS, max_model_len=128, tensor_parallel_size=size) as llm:
            texts.append(llm.generate(["Answer:"], params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert texts[0].lstrip().startswith("{")


@pytest.mark.slow
@pytest.mark.codegen
def test_deterministic_bits_do_not_depend_on_the_number_of_devices(checkpoint):
    prompts, params = workload(10, seed=4, longest=60)
    found = []
    for size in (1, 8):  # 2 and 4: benchmarks/parallel_matrix.py
        with LLM(checkpoint, **OPTIONS, max_model_len=128, deterministic=True, tensor_parallel_size=size) as llm:
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("deepseek-v3", True), ("deepseek-v32", False), ("olmo2", False), ("lfm2", False), ("granite4-hybrid", False),
        ("kimi-linear", True), ("gemma4", False), ("gemma4-moe", False), ("gemma3n", False),
    ],  # all others: benchmarks/parallel_matrix.py
)
def test_families_with_parts_of_their_own(name, experts, tmp_path):
    """Experts, latent attention, a norm over all heads, unlike layers: on 2 devices; and equal bits on 8."""
    folder = write(name, tmp_path)
    prompts, _ = workload(10, seed=6, longest=60)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    found = {}
    for deterministic, size in ((False, 1), (False, 2), (True, 1), (True, 8)):
        if deterministic and name in ("olmo2", "kimi-linear", "gemma3n"):  # heads not in 8 parts; a mean of gates
            continue
        options = OPTIONS | {"deterministic": deterministic, "tensor_parallel_size": size, "max_model_len": 128}
        with sampling_programs(SamplerVariant.FULL), LLM(folder, **options, enable_expert_parallel=experts) as llm:
            found[deterministic, size] = answers(llm.generate(prompts, params, use_tqdm=False))
    # Two devices add in another order. An Intel Xeon with AVX-512 gives 1.001e-5 for DeepSeek-V3. Both answers are
    # within 3.4e-5 of Transformers' (benchmarks/results/parallel_matrix.json). Gemma 4 with experts differs by 4.2e-5.
    close(found[False, 2], found[False, 1], limit=1e-4 if name == "gemma4-moe" else 3e-5)
    if (True, 1) in found:
        assert found[True, 8] == found[True, 1]


@pytest.mark.slow
@pytest.mark.codegen
def test_recurrent_layers(tmp_path):
    """Each device has some of the heads of gated DeltaNet and their state. Hits and drafts give the same bits."""
    folder = write("qwen3.5", tmp_path)
    requests = [{"prompt_token_ids": [i % 50 + 2 for i in range(length)]} for length in (5, 40, 70)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    with LLM(folder, **CACHED) as llm:
        one = answers(llm.generate(requests, params, use_tqdm=False))
    drafter = Recorded([])
    drafts = {"method": "custom", "num_speculative_tokens": 5, "function": drafter}
    for options in ({}, {"speculative_config": drafts}):
        with always_drafting(), LLM(folder, **CACHED, tensor_parallel_size=2, **options) as llm:
            llm.wait_until_ready()
            outputs = [llm.generate(requests, params, use_tqdm=False) for _ in range(2)]
            assert llm.stats().prefix_hit_tokens > 0
            assert llm.stats().compiles_after_ready == 0
            if options:
                check_drafts(llm.stats().speculation)
        found = [answers(each) for each in outputs]
        if not options:
            two = found[0]
            drafter.sequences = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs[0]]
        assert found == [two, two]
    close(two, one, limit=2e-5)


@pytest.mark.slow
@pytest.mark.codegen
def test_snapshots_return_from_the_host(tmp_path, monkeypatch):
    """Each device's part of a state goes to the host and back, with its part of the blocks."""
    folder = write("qwen3.5", tmp_path)
    for name in ("keeping_pays", "keeping_state_pays", "moves_pay"):
        monkeypatch.setattr(TransferCosts, name, lambda *sizes, **kinds: True)
    requests = [{"prompt_token_ids": [(i * 7 + n) % 50 + 2 for i in range(200 + n)]} for n in range(12)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2)
    options = CACHED | {"max_num_seqs": 2, "swap_space": 0.05, "kv_cache_memory_bytes": 280_000}
    with LLM(folder, **options, tensor_parallel_size=2) as llm:
        found = [[answers(llm.generate([each], params, use_tqdm=False)) for each in requests] for _ in range(3)]
        stats = llm.stats()
    assert found[0] == found[1] == found[2]
    assert min(stats.snapshots_to_host, stats.snapshots_to_device, stats.blocks_to_host, stats.blocks_to_device) > 0
    assert stats.compiles_after_ready == 0


@pytest.mark.slow
@pytest.mark.codegen
@pytest.mark.parametrize("kind", ["gated delta", "kimi delta"])
def test_deterministic_bits_of_recurrent_layers(kind):
    """8 key heads, a gate for each query, and repeated KV heads; a decay for each channel, and latent attention."""
    recurrence = GatedDelta((True, False, True), k_heads=8, v_heads=16, head_dim=16, conv_width=4)
    spec = dataclasses.replace(
        FULL, num_layers=3, norm=Norm.RMS_OFFSET, qk_norm=QKNorm.HEAD, attention_gate=True, recurrence=recurrence
    )
    if kind == "kimi delta":
        spec = dataclasses.replace(
            FULL, num_layers=3, num_kv_heads=1, head_dim=40, latent=Latent(None, 32, 16, 8, 12),
            rope_layers=(False,) * 3, recurrence=KimiDelta(recurrence.layers, 8, 8, head_dim=16, conv_width=4),
        )  # fmt: skip
    tree = random_tree(param_shapes(spec, jnp.float32))
    requests = [{"prompt_token_ids": [i % 50 + 2 for i in range(length)]} for length in (5, 40, 70)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    found = []
    for size in (1, 8):
        options = {"max_model_len": 128, "deterministic": True, "tensor_parallel_size": size}
        with sampling_programs(SamplerVariant.FULL), LLM(spec, params=tree, **OPTIONS, **options) as llm:
            found.append(answers(llm.generate(requests, params, use_tqdm=False)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_weights_are_split(scheme, checkpoint):
    """Each device rounds its own part, and parts of `o` and `down` have own scales: answers are near, not equal."""
    prompts, _ = workload(4, seed=8, longest=40)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    values = []
    for size in (1, 2):
        with LLM(checkpoint, **OPTIONS, max_model_len=128, quantization=scheme, tensor_parallel_size=size) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        of_prompts = [step for output in outputs for step in output.prompt_logprobs[1:]]
        values.append([next(iter(step.values())).logprob for step in of_prompts])
    differences = [abs(a - b) for a, b in zip(*values, strict=True)]
    assert 0 < sum(differences) / len(differences) < {"int8": 0.05, "int4": 0.5}[scheme]


def programs(llm):
    return {program.shape: program.run.as_text() for program in llm.engine.runner.programs.programs}


def collectives(text):
    """(kind, result) of each collective of a program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(", text)
    return sorted((kind, shape) for shape, kind in found)


@pytest.mark.codegen
def test_a_layer_has_two_sums_over_devices_and_nothing_is_gathered(two):
    layers, hidden = two.spec.num_layers, two.spec.hidden_size
    for shape, text in programs(two).items():
        kinds = [kind for kind, _ in collectives(text)]
        if isinstance(shape, ForwardShape):
            assert kinds == ["all-reduce"] * (2 * layers + 1), shape  # and one for the embedding
            assert all(f"{shape.tokens},{hidden}]" in result for _, result in collectives(text))
        elif isinstance(shape, SampleShape) and shape.variant is SamplerVariant.GREEDY:
            assert kinds == ["all-gather"], shape
        else:  # each logit is sent once; what is gathered are the results
            assert kinds.count("all-to-all") == 1, shape
            gathered = [result for kind, result in collectives(text) if kind == "all-gather"]
            assert all(int(n) < two.spec.vocab_size for result in gathered for n in re.findall(r"[\[,](\d+)", result))


@pytest.mark.codegen
def test_pages_and_weights_are_not_copied(two):
    runner = two.engine.runner
    page = runner.state.page_arrays[0][0]
    half = page.size * page.dtype.itemsize // 2
    assert page.sharding.shard_shape(page.shape)[2] == page.shape[2] // 2
    for shape, text in programs(two).items():
        if not isinstance(shape, ForwardShape):
            continue
        smallest = min(leaf.size for leaf in jax.tree.leaves(runner.params["layers"])) // 2
        for operation in Program(text).operations():
            if operation.kind == "copy":
                assert operation.num_bytes < min(half, 4 * smallest), operation.name


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tensor_parallel_size": 0}, RequestError, "must be a number of devices, from 1"),
        ({"tensor_parallel_size": 16}, ModelLoadError, "there are 8 .* use tensor_parallel_size=8 or less"),
        ({"tensor_parallel_size": 3, "deterministic": True}, RequestError, "must be 1, 2, 4 or 8 with deterministic"),
        ({"deterministic": True, "quantization": "int8"}, ModelLoadError, "weights that are not quantised"),
        ({"deterministic": True, "dtype": "bfloat16"}, ModelLoadError, "add dtype='float32'"),
    ],
)
def test_bad_options_are_refused_before_weights_are_read(options, error, says, checkpoint):
    with pytest.raises(error, match=says):
        LLM(checkpoint, **options)


@pytest.mark.slow
def test_the_load_of_experts_is_counted(tmp_path):
    """All pairs: each token of each step, in each layer. The busiest of two devices has more than half of them."""
    folder = write("qwen3-moe", tmp_path)
    prompts, params = workload(6, seed=9)
    options = OPTIONS | {"max_model_len": 256, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    with LLM(folder, **options) as llm:
        spec, runner = llm.spec, llm.engine.runner
        seen, dispatch = [], runner.dispatch

        def note_tokens(plan):
            seen.append(plan.total_tokens)
            return dispatch(plan)

        runner.dispatch = note_tokens
        llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
        llm.reset_stats()
        assert llm.stats().expert_pairs == llm.stats().busiest_expert_pairs == 0
    layers = sum(map(spec.is_sparse, range(spec.num_layers)))
    assert stats.expert_pairs == sum(seen) * spec.experts.per_token * layers
    assert stats.expert_pairs / 2 < stats.busiest_expert_pairs < stats.expert_pairs


@pytest.mark.parametrize(("num_experts", "devices"), [(8, 2), (6, 4), (5, 1)])
def test_the_pairs_of_devices_against_numpy(num_experts, devices):
    """Devices have equal numbers of experts; the last ones may have fewer, or none. Padding counts nowhere."""
    rng = np.random.default_rng(0)
    share = -(-num_experts // devices)
    choices = rng.integers(0, num_experts, (3, 16, 2))
    choices[:, 12:] = share * devices  # padding
    expected = [np.bincount(layer[layer < num_experts] // share, minlength=devices) for layer in choices]
    np.testing.assert_array_equal(pairs_of_devices(list(jnp.asarray(choices)), num_experts, Shards(devices)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, count) for count in (2, 4)
          for name in ("llama-patterns", "llama-embeddings", "qwen3", "mixtral-fused", "qwen2-moe", "gpt2")),
        ("qwen3.5", 2), ("gemma4", 2), ("gemma4", 4),
    ],
)  # fmt: skip
def test_adapters_are_split_like_their_matrices(name, count, tmp_path):
    """PEFT's answers on several devices, which repeat or pad heads."""
    record = recorded(name)
    write_checkpoint(CHECKPOINTS[record.variant.base], record.values["base_seed"], tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
    adapter = LoRARequest("a", 1, str(record.write(tmp_path / "adapter")))
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "row_buckets": [8], "token_buckets": [32]}
    with sampling_programs(SamplerVariant.FULL):
        llm = LLM(
            str(tmp_path / "model"), **options, tensor_parallel_size=count, max_model_len=64, dtype="float32",
            skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8, max_loras=2,
        )  # fmt: skip
    with llm:
        prompts = [record.values["prompt"]] * 2
        adapted, base = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapter, None])
    assert list(adapted.outputs[0].token_ids) == record.values["tokens"]
    assert list(base.outputs[0].token_ids) == record.values["base_tokens"]
