"""Engines with a KV cache of 8 bits: the option, its bytes, its answers, its quality, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from jpaged import LLM, RequestError, SamplingParams, cli
from jpaged.cli.bench import quality as bench_quality
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant, TransferCosts
from jpaged.errors import ModelLoadError
from jpaged.kv_groups import group_layers
from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.kv_scales import read_kv_scales
from jpaged.models.kv_scales import KVScales
from jpaged.models.quantization import SCHEMES, Scheme
from jpaged.models.spec import param_shapes
from jpaged.planning import plan
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.kv_format import FP8, KVFormat
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.placement import Placement
from jpaged.runtime.targets import TARGETS
from tests.golden.checkpoints import VARIANTS, write_checkpoint, write_safetensors
from tests.support.tiny_engine import (
    BLOCK_SIZE,
    FULL,
    HOST_SLOTS,
    SPECS,
    VOCAB_SIZE,
    alone,
    bits,
    make_engine,
    make_runner,
    run,
    sampling_programs,
)

FETCH = TransferCosts(seconds_per_move=1e-9, seconds_per_token=1.0)
RNG = np.random.default_rng(7)
SCALES = KVScales(*RNG.uniform(0.5, 2, (2, FULL.num_layers, FULL.num_kv_heads)).astype(np.float32))


def requests(count):
    """The first 8 outgrow a small pool together. Then prompts longer than a chunk and a window, half with one stem."""
    rng = np.random.default_rng(5)
    stem = rng.integers(0, VOCAB_SIZE, 40).tolist()
    work = []
    for i in range(count):
        prompt = rng.integers(0, VOCAB_SIZE, (7, 8, 9, 15, 17, 24, 33, 40)[i] if i < 8 else 6 * (i % 8) + 30).tolist()
        prompt = stem + prompt if i >= count // 2 and i % 4 else prompt
        params = SamplingParams(temperature=0, max_tokens=40 if i < 8 else 5, logprobs=2, ignore_eos=True)
        work.append((prompt[:100], params))
    return work


W8A8, W4A8 = SCHEMES["int8"], Scheme("int4", 16, "float")  # on CPU both round activations to 8 bits


@pytest.mark.slow
@pytest.mark.codegen
@pytest.mark.parametrize(
    ("scheme", "kind", "spec"),
    [
        (W4A8, "int8", "windows"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            (W8A8, "auto", "full"), (W4A8, "auto", "windows"), (W8A8, "int8", "full"), (None, "fp8_e4m3", "windows"),
        )),
    ],
)  # fmt: skip
def test_the_same_bits_alone_batched_chunked_cached_preempted_and_swapped(scheme, kind, spec):
    with sampling_programs(SamplerVariant.FULL):
        runner = make_runner(SPECS[spec], scheme, kv_cache_dtype=kind, row_buckets=(8, 32))
    work = requests(32)
    try:
        wanted = alone(make_engine(runner, caching=False), work)
        tight = 28 if spec == "windows" else 18
        engines = {
            "batch": make_engine(runner, rows=32, caching=False),
            "chunks": make_engine(runner, budget=12, caching=False),
            "prefix hits": make_engine(runner),
            "preempted": make_engine(runner, num_blocks=tight, caching=False),
            "host tier": make_engine(runner, num_blocks=tight, host_slots=HOST_SLOTS, costs=FETCH),
        }
        for name, engine in engines.items():
            some = work[:8] if name in ("preempted", "host tier") else work
            done = run(engine, some, check=False)
            assert [bits(done[str(i)]) for i in range(len(some))] == wanted[: len(some)], name
            engine.check_integrity()
        assert engines["prefix hits"].stats().prefix_hit_tokens > 200
        assert engines["preempted"].stats().preemptions > 0
        assert engines["host tier"].stats().blocks_to_device > 0
        assert len({str(answer) for answer in wanted}) == len(work)
        pages = runner.state.pages
        assert pages[0].dtype == {"auto": np.float32, "int8": np.int8, "fp8_e4m3": FP8}[kind]
        per_block = sum(page.data.nbytes + (page.scales.nbytes if kind == "int8" else 0) for page in pages)
        assert per_block == runner.memory_plan.block_bytes * runner.num_blocks
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.codegen
def test_forks_copy_the_scales():
    """Samples share their prompt's blocks, and copy the last one on write."""
    with sampling_programs(SamplerVariant.FULL):
        runner = make_runner(FULL, kv_cache_dtype="int8", swap_space=0.0)
    try:
        shared = SamplingParams(n=3, max_tokens=20, temperature=0.9, seed=3, logprobs=2, ignore_eos=True)
        prompt = list(range(11))  # its last block is not full
        [together] = run(make_engine(runner, caching=False), [(prompt, shared)], check=False).values()
        greedy = dataclasses.replace(shared, n=1, temperature=0, max_tokens=1, logprobs=1)
        for answer in together.outputs:  # the same KV, computed without a fork
            known = prompt + answer.token_ids[:-1]
            [output] = run(make_engine(runner, caching=False), [(known, greedy)], check=False).values()
            own = output.outputs[0].logprobs[0]
            found = max(answer.logprobs[-1].values(), key=lambda entry: entry.logprob)
            assert found.logprob in {entry.logprob for entry in own.values()}
        assert len({tuple(answer.token_ids) for answer in together.outputs}) == 3
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ratio"), [("int8", 0.5156), ("fp8", 0.5)])
def test_a_plan_counts_the_bytes_of_a_block(kind, ratio):
    """int8: one bfloat16 scale for 64 numbers is 1/64 of the bytes of bfloat16 pages."""
    whole = plan("demo", {"dtype": "bfloat16"}).memory
    planned = plan("demo", {"dtype": "bfloat16", "kv_cache_dtype": kind})
    assert planned.memory.block_bytes / whole.block_bytes == pytest.approx(ratio, abs=1e-4)
    assert planned.memory.kv_bytes == planned.memory.block_bytes * planned.memory.num_blocks
    assert planned.kv_dtype == {"int8": "int8", "fp8": "float8_e4m3fn"}[kind]
    assert planned.rows[-1].note.endswith(planned.kv_dtype)


@pytest.mark.slow  # two engines and a dense model; benchmarks/quality.py has fp8 and the whole text
def test_perplexity(tmp_path, capsys):
    """On 3,000 tokens of the held-out text, against the same weights with float pages. On all 28,899, int8: 1.0002."""
    text, results = tmp_path / "held_out.txt", tmp_path / "results.json"
    text.write_text(bench_quality.HELD_OUT.read_text("utf-8")[:9_000], "utf-8")
    words = ["bench", "quality", "demo", "--kv-cache-dtype", "int8", "--against", "demo", "--text", str(text)]
    words += ["--max-num-seqs", "8", "--row-buckets", "8", "--token-buckets", "512", "--max-model-len", "1100"]
    with sampling_programs():
        assert cli.main([*words, "--output-json", str(results)]) == 0
    written = json.loads(results.read_text())
    found = list(written["results"].values())
    assert len(found) == 2
    assert 0 < written["divergence"]["mean"] < 0.01  # the comparison sees the rounded pages
    assert found[0]["tokens"] > 2500
    assert found[0]["perplexity"] != found[1]["perplexity"]
    assert 1 / 1.003 < found[0]["perplexity"] / found[1]["perplexity"] < 1.003
    assert "demo (int8 KV)" in capsys.readouterr().out


def blueprint(target, scales=None, **options):
    params = param_shapes(FULL, "bfloat16")
    config = EngineConfig(model="test", **options)
    return Blueprint.draw(ServedModel(FULL, params, kv_scales=scales), config, Placement(TARGETS[target], None))


def test_fp8_scales_are_those_of_the_checkpoint():
    """Layers of two KV groups share a page array, whose scale is the largest of theirs."""
    spec = dataclasses.replace(FULL, num_layers=2, sliding_window=(20, None))
    kv_groups = group_layers(spec.windows, 128)
    assert kv_groups.num_arrays == 1
    found = KVFormat(FP8, SCALES).create_pages(spec, kv_groups, BLOCK_SIZE, 4, None)
    wanted = np.stack([SCALES.keys.max(0), SCALES.values.max(0)])
    np.testing.assert_array_equal(found[0].scales, wanted)
    apart = KVFormat(FP8, SCALES).create_pages(FULL, group_layers(FULL.windows, 128), BLOCK_SIZE, 4, None)
    for layer, pages in enumerate(apart):
        np.testing.assert_array_equal(pages.scales, [SCALES.keys[layer], SCALES.values[layer]])
    assert blueprint("h200", SCALES, kv_cache_dtype="fp8").kv_format.scales is SCALES
    assert blueprint("h200", SCALES, kv_cache_dtype="int8").kv_format.scales is None


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("a100", "fp8_e4m3", r"kv_cache_dtype='fp8_e4m3' needs .* 8\.9 .*A100.* has 8\.0: use kv_cache_dtype='int8'"),
        ("h200", "int4", "kv_cache_dtype='int4': must be one of auto, int8, fp8_e4m3"),
        ("a100", "int8", None), ("l4", "fp8", None), ("v5e", "int8", None), ("v5e", "fp8", None), ("cpu", "fp8", None),
    ],
)  # fmt: skip
def test_devices(target, kind, message):
    if message is None:
        assert blueprint(target, kv_cache_dtype=kind).kv_format.dtype.itemsize == 1
        return
    with pytest.raises(ModelLoadError, match=message):
        blueprint(target, kv_cache_dtype=kind)


def test_latent_attention_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    write_checkpoint(next(v for v in VARIANTS if v.name == "deepseek-v3"), 0, tmp_path)
    monkeypatch.setattr("jpaged.loading.model.load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ModelLoadError, match=r"kv_cache_dtype='int8': the model has latent attention.* at auto"):
        LLM(str(tmp_path), kv_cache_dtype="int8")


def test_bad_values(capsys):
    with pytest.raises(RequestError, match=r"kv_cache_dtype must be one of auto, int8, fp8_e4m3, fp8, got 'fp8_e5m2'"):
        LLM("nowhere", kv_cache_dtype="fp8_e5m2")
    assert cli.main(["generate", "demo", "--kv-cache-dtype", "int4"]) == 2
    assert "kv_cache_dtype must be one of auto, int8, fp8_e4m3, fp8, got 'int4'" in capsys.readouterr().err
    assert cli.parse(["serve", "demo", "--kv-cache-dtype", "auto"]).engine.kv_cache_dtype == "auto"


def test_pools_that_kernels_cannot_address_are_smaller():
    """Pages of 2 to 4 GiB in a layer need offsets that Triton does not have: the pool ends at 2 GiB."""
    spec = dataclasses.replace(FULL, num_kv_heads=4, head_dim=128)
    config = EngineConfig(model="test", max_model_len=1000, kv_cache_dtype="int8")
    limits = memory.decide_limits(spec, config, "gpu")
    page = 2 * 16 * 4 * 128
    options = {"dtype": np.dtype(np.float32), "kv_format": KVFormat(np.dtype(np.int8)), "weight_bytes": 0}
    per_block = memory.block_bytes(spec, limits, options["kv_format"], "gpu")
    assert per_block == spec.num_layers * page * 65 // 64
    for wanted, blocks in ((1.0, 2**31), (1.5, 2**31), (2.01, 2**31), (2.2, int(2.125 * 2**31))):
        free = int(wanted * 2**31 / page) * per_block + 2**28
        found = memory.fit(spec, config, limits, platform="gpu", free_bytes=free, temp_bytes=2**27, **options)
        assert found.num_blocks * page <= blocks
        assert found.num_blocks * page > 0.9 * blocks
        options["kv_format"].page_shapes(spec, 16, found.num_blocks)


def with_scales(folder, scales):
    """A checkpoint with tensors of scales in addition to its weights, and its config's values."""
    write_checkpoint(next(v for v in VARIANTS if v.name == "llama"), 0, folder)
    with Checkpoint(folder) as checkpoint:
        tensors = {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
    write_safetensors(folder / "model.safetensors", tensors | scales)
    return str(folder)


def test_scales_in_a_checkpoint(tmp_path):
    """One number a layer, or one a KV head; broken ones are refused by name."""
    options = {"dtype": "float32", "row_buckets": (8,), "token_buckets": (64,), "max_num_seqs": 8}
    options |= {"max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"}
    config = next(v for v in VARIANTS if v.name == "llama").config
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    names = {(i, kind): f"model.layers.{i}.self_attn.{kind}_scale" for i in range(layers) for kind in "kv"}
    given = {name: np.float32([0.25 * (i + 1)]) for (i, _), name in names.items()}
    given[names[0, "k"]] = np.arange(1, heads + 1, dtype=np.float32)
    with sampling_programs(), LLM(with_scales(tmp_path, given), **options) as llm:
        [output] = llm.generate({"prompt_token_ids": [5, 9, 40]}, SamplingParams(temperature=0, max_tokens=5))
        pages = llm.engine.runner.state.pages
        assert len(output.outputs[0].token_ids) == 5
        np.testing.assert_array_equal(pages[0].scales, [np.arange(1, heads + 1), [0.25] * heads])
        np.testing.assert_array_equal(pages[1].scales, np.full((2, heads), 0.5))
        spec = llm.spec
    for change, message in (
        ({names[1, "v"]: np.float32([0])}, r"self_attn.v_scale is \[0\]: must be finite and above 0"),
        ({names[1, "v"]: np.ones(heads + 5, np.float32)}, r"has \d+ numbers: must have 1, or one for each"),
    ):
        folder = tmp_path / "broken"
        with_scales(folder, given | change)
        with Checkpoint(folder) as checkpoint, pytest.raises(ModelLoadError, match=message):
            read_kv_scales(checkpoint, spec)
    del given[names[1, "v"]]
    with_scales(folder, given)
    with Checkpoint(folder) as checkpoint, pytest.raises(ModelLoadError, match=r"layers\.1\..*v_scale is missing"):
        read_kv_scales(checkpoint, spec)
