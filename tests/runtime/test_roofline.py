"""Predicted times of programs, compiled without the devices."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from jpaged import planning
from jpaged.collectives import Link, collective_seconds
from jpaged.errors import ModelLoadError, RequestError
from jpaged.models.spec import DecoderSpec, Experts, LayerEmbedding, LayerKV, QKNorm, Rope, param_shapes
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.prediction.program_text import Operation, Program, Traffic
from jpaged.runtime.prediction.roofline import (
    KERNEL_SECONDS,
    Load,
    _compile,
    _cost,
    _of_kernel,
    _of_load,
    collective_costs,
    experts_read,
    least_bytes,
    predict,
)
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.targets import TARGETS, Target
from tests.support.deviceless import H200, V5E, marks
from tests.support.published_configs import LLAMA as PUBLISHED_LLAMA
from tests.support.tiny_engine import UNLIKE

# A layer of Qwen3 0.6B's shape, and a small vocabulary.
SPEC = DecoderSpec(
    vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=128,
    max_position=8192, rope=Rope(), qk_norm=QKNorm.HEAD,
)  # fmt: skip
KV = 2 * 8 * 128 * 2  # bytes of a token in a layer
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def prediction(target: Target, layers: int, **options):
    spec = dataclasses.replace(SPEC, num_layers=layers)
    config = planning.engine_config("test", {"max_num_seqs": 64, "max_num_batched_tokens": 256, **options})
    model = ServedModel(spec, param_shapes(spec, "bfloat16"))
    build = Blueprint.draw(model, config, Placement.for_target(target)).fit(free_bytes=2**30)
    return predict(build, target, [Load(64, 1000), Load(65, 1)])


@pytest.mark.parametrize("target", [pytest.param(t, marks=marks(t), id=t.name) for t in (H200, V5E)])
def test_a_layer_adds_its_weights_its_kv_and_nine_kernels(target):
    """The predicted bytes are little more than the least. A card copies nothing, and gets one command."""
    two, three = prediction(target, 2), prediction(target, 3)
    assert [step.load.rows for step in three.steps] == [64]  # 65 requests do not run at once
    decode, greedy, random, mixed = three.programs
    weights = 2 * 1024 * (4 * 8 * 128 + 16 * 128 + 3 * 3072)
    added = decode.least_bytes - two.programs[0].least_bytes
    assert added == weights + 64 * 1000 * KV + 2 * 2 * 128
    assert decode.least_bytes < decode.bytes_moved < 1.15 * decode.least_bytes
    assert decode.seconds > decode.least_seconds > 0
    assert three.steps[0].greedy_seconds == decode.seconds + greedy.seconds
    assert random.seconds >= greedy.seconds
    assert mixed.least_seconds > 0
    print(target.name, decode, greedy, random, mixed, sep="\n")
    if target is H200:
        assert decode.copies == 0
        assert decode.kernels - two.programs[0].kernels <= 9
        assert {cost.commands for cost in three.programs} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param(H200, marks=marks(H200))])
def test_a_verify_step_moves_hardly_more_bytes_than_a_decode_step(target, tmp_path):
    """Four layers of Llama 3.1 8B: 8 rows check 4 drafts each. The programs read each weight once, and the keys once.

    In a layer the activations of the drafts are 33 MB more. A second read of any matrix would add 34 MB or more.
    """
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_LLAMA | {"num_hidden_layers": 4}))
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "row_buckets": (8,), "token_buckets": (256,),
               "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}  # fmt: skip
    roofline = planning.plan(str(tmp_path), options, target=target.name, roofline_context=1024).roofline
    loads = [step.load for step in roofline.steps]
    assert loads == [Load(1, 1024), Load(8, 1024), Load(8, 1024, drafts=4)]
    decode, verify = roofline.programs[3:6], roofline.programs[6:9]
    print(*decode, *verify, sep="\n")
    assert [cost.program for cost in verify] == [
        "verify 40 tokens, 8 x 1,024 + 4", "sample greedy 40 drafts", "sample random 40 drafts"
    ]  # fmt: skip
    assert [cost.least_bytes for cost in verify] == [cost.least_bytes for cost in decode]
    for before, after in zip(decode, verify, strict=True):
        assert before.bytes_moved < after.bytes_moved < 1.15 * before.bytes_moved
    smallest_matrix = 2 * 4096 * 4096
    assert verify[0].bytes_moved - decode[0].bytes_moved < 4 * 1.5 * smallest_matrix
    assert verify[0].copies == 0
    assert verify[0].commands == 1
    assert roofline.steps[2].greedy_seconds < 1.15 * roofline.steps[1].greedy_seconds


@pytest.mark.parametrize(("drafts", "heads", "reads"), [(4, 8, 1), (16, 8, 1), (16, 128, 3)])
def test_a_verify_kernel_reads_the_keys_of_a_row_once_per_tile(drafts, heads, reads):
    """By the rule, a tile has 128 query rows: 8 tokens of 16 query heads per KV head. 17 tokens need 3 tiles."""
    spec = dataclasses.replace(SPEC, num_heads=heads)
    model, tokens = ServedModel(spec, param_shapes(spec, "bfloat16")), 8 * (1 + drafts)
    config = planning.engine_config("test", {})
    build = Blueprint.draw(model, config, Placement.for_target(TARGETS["cpu"])).fit()
    shape = ForwardShape(False, tokens, 8, 16, drafts=drafts)
    moved, flops = _of_kernel(build, shape, Load(8, 1000, drafts), "paged_prefill", 0)
    assert moved == 2 * tokens * heads * 128 * 2 + reads * 8 * 1000 * KV
    assert flops == 4 * tokens * 1000 * heads * 128  # of QK and PV; all keys, not half of them as in a prompt


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param(H200, marks=marks(H200))])
def test_one_kernel_for_gate_up_and_activation_is_a_kernel_less(target):
    """The products are counted, and the bytes of a chunk are fewer by two writes and two reads of half the products."""
    (apart, together) = (prediction(target, 2, gated_dot_implementation=name) for name in ("xla", "triton"))
    for before, after in zip(apart.programs, together.programs, strict=True):
        saved = before.kernels - after.kernels
        print(before.program, before.kernels, after.kernels, before.bytes_moved - after.bytes_moved)
        if before.program.startswith(("decode", "mixed")):
            assert saved == 2  # one a layer
            assert before.least_seconds == after.least_seconds
        else:
            assert saved == 0
    chunk = apart.programs[-1], together.programs[-1]
    tokens, layers = 256, 2
    # bf16 numbers, less the number of rows that each kernel reads
    saved = layers * (tokens * 4 * SPEC.intermediate_size * 2 - 4)
    assert chunk[0].bytes_moved - chunk[1].bytes_moved == saved


# Both forms of an all-reduce, an all-gather and an all-to-all of tuples, as XLA writes them for GPU, TPU and CPU.
EXCHANGES = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%layer (t: f32[64,1024]) -> f32[64,1024] {
  %t = f32[64,1024]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %all-reduce.2 = f32[64,1024]{1,0} all-reduce(%t), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
}

%test (u: f32[64,1024]) -> pred[] {
  %u = f32[64,1024]{1,0} parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[64,1024], y: bf16[2,3]) -> f32[64,1024] {
  %x = f32[64,1024]{1,0} parameter(0)
  %y = bf16[2,3]{1,0} parameter(1)
  %all-reduce-start = f32[64,1024]{1,0} all-reduce-start(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  %all-reduce-done = f32[64,1024]{1,0} all-reduce-done(%all-reduce-start)
  %all-gather-start = (bf16[2,3]{1,0}, bf16[8,3]{1,0}) all-gather-start(%y), replica_groups=[1,4]<=[4], dimensions={0}
  %all-gather-done = bf16[8,3]{1,0} all-gather-done(%all-gather-start)
  %all-to-all = (f32[64,1024]{1,0}, bf16[2,3]{1,0}) all-to-all(%all-reduce-done, %y), replica_groups={{0,1,2,3}}
  ROOT %while = f32[64,1024]{1,0} while(%x), condition=%test, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_collectives_of_a_text():
    """An all-reduce in a loop counts once a turn; the ends of those that start early do not count. Groups: 4 of 8."""
    costs = collective_costs(list(Program(EXCHANGES).traffic()), 8, H200)
    array = 64 * 1024 * 4
    counted = {one.kind: (one.count, one.num_bytes) for one in costs}
    assert counted == {"all-reduce": (4, 4 * array), "all-gather": (1, 8 * 3 * 2), "all-to-all": (1, array + 2 * 3 * 2)}
    seconds = {one.kind: one.seconds for one in costs}
    assert seconds["all-reduce"] == pytest.approx(4 * (3 * array / 450e9 + 1.9e-6))  # one-shot is shorter than the ring
    assert seconds["all-gather"] == pytest.approx(3 * 1.9e-6, rel=1e-3)
    assert seconds["all-to-all"] == KERNEL_SECONDS["gpu"]  # longer than 0.75 of the array at 450 GB/s, and a step


def test_collectives_of_a_compiled_program():
    """Two all-reduces and an all-gather over four of the CPU's devices."""
    mesh = Mesh(jax.devices()[:4], "x")

    def body(x):
        once = jax.lax.psum(x, "x")
        twice = jax.lax.psum(jnp.sin(once) * x, "x")
        return twice + jax.lax.all_gather(x, "x").sum(0)

    split = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")))
    text = split.lower(jnp.zeros((4 * 16, 32))).compile().as_text()
    costs = collective_costs(Program(text).traffic(), 4, dataclasses.replace(V5E, link=Link(1e9, 1e-6)))
    array = 16 * 32 * 4
    counted = {one.kind: (one.count, one.num_bytes) for one in costs}
    assert counted == {"all-reduce": (2, 2 * array), "all-gather": (1, 4 * array)}
    assert {one.kind: one.seconds for one in costs} == pytest.approx(
        {"all-reduce": 2 * (3 * array / 1e9 + 1e-6), "all-gather": 3 * array / 1e9 + 3e-6}
    )


@pytest.mark.parametrize("target", [pytest.param(t, marks=marks(t), id=t.name) for t in (H200, V5E)])
def test_the_collectives_of_a_split_model(target, tmp_path):
    """Two all-reduces a layer and one for the embedding. Weights, pages and heads are those of one device."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    options = {"tensor_parallel_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 2048,
               "row_buckets": (16,), "token_buckets": (256,)}  # fmt: skip
    roofline = planning.plan(
        str(tmp_path), options, target=target.name, roofline_context=1024, link_bandwidth=50e9
    ).roofline
    assert (roofline.num_devices, roofline.link) == (4, Link(50e9, target.link.latency))
    decode, greedy, random, mixed = roofline.programs
    array = 16 * 2048 * 2
    (found,) = decode.collectives
    assert (found.kind, found.count, found.num_bytes) == ("all-reduce", 5, 5 * array)
    assert found.seconds == pytest.approx(5 * collective_seconds("all-reduce", array, 4, roofline.link))
    assert [(one.kind, one.count, one.num_bytes) for one in mixed.collectives] == [("all-reduce", 5, 5 * 16 * array)]
    assert greedy.collectives
    assert "all-to-all" in {one.kind for one in random.collectives}
    products = 2048 * (2 * 2048 + 2 * 1024 + 3 * 8192)
    kv = 1024 * 2 * 8 * 128
    assert decode.least_bytes == 2 * 2 * (products + kv) // 4  # bf16, 2 layers, 4 devices
    assert decode.least_bytes < decode.bytes_moved < 1.3 * decode.least_bytes


def test_unlike_layers_read_their_own_keys():
    """Layers 1 and 5 have wider heads. The last two write no keys: they read layers 3 and 1."""
    params = param_shapes(UNLIKE, "float32")
    config = planning.engine_config("test", {})
    build = Blueprint.draw(ServedModel(UNLIKE, params), config, Placement.for_target(TARGETS["cpu"])).fit()
    shape, load = ForwardShape(True, 8, 8, 16), Load(8, 100)
    kernels = "write_kv paged_decode " * 4 + "paged_decode " * 2

    def call(name):
        return Traffic(Operation(name, "custom-call", "f32[1]", (), f'name = "{name}"'), 1, 1, 1)

    found = [moved for _, moved, _ in _of_load(build, shape, load, map(call, kernels.split()))]
    wanted, kv = [], 0
    for layer, (dim, keys) in enumerate([(16, 20), (32, 100), (16, 20), (16, 20), (16, 20), (32, 100)]):
        queries, of_token = 8 * 4 * dim * 4, 2 * 2 * dim * 4
        wanted += [2 * (queries + 8 * of_token)] * (layer < 4) + [queries + 8 * keys * of_token]
        kv += 8 * keys * of_token
    assert found == wanted
    weights = sum(leaf.size for leaf in jax.tree.leaves([params["layers"], params["layer_embed_in"]]))
    assert least_bytes(build, shape, load) == 4 * weights + kv


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param(H200, marks=marks(H200))])
def test_the_decode_step_of_unlike_layers(target):
    """The predicted bytes are little more than the least. A sixth are partial sums of matmuls, which are small here."""
    narrow, wide = LayerKV(4, 256), LayerKV(2, 512, values_are_keys=True)
    spec = dataclasses.replace(
        SPEC, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=256, v_norm=True, attention_scale=1.0,
        sliding_window=(512, None, 512, None), intermediate_sizes=(3072, 3072, 6144, 6144),
        layer_kv=(narrow, wide, dataclasses.replace(narrow, source=0), dataclasses.replace(wide, source=1)),
        layer_embed=LayerEmbedding(256, 4096),
    )  # fmt: skip
    config = planning.engine_config("test", {"max_num_seqs": 64, "max_num_batched_tokens": 256})
    model = ServedModel(spec, param_shapes(spec, "bfloat16"))
    build = Blueprint.draw(model, config, Placement.for_target(target)).fit(free_bytes=2**31)
    shape = next(one for one in build.blueprint.program_shapes if isinstance(one, ForwardShape) and one.rows == 64)
    decode = _cost(build, target, shape, Load(64, 1000), _compile(build, target, shape))
    print(decode)
    kv = 64 * 2 * (512 + 1000) * 2 * 1024 * 2
    assert decode.least_bytes == kv + 2 * sum(
        leaf.size for leaf in jax.tree.leaves([model.params["layers"], model.params["layer_embed_in"]])
    )
    assert decode.least_bytes < decode.bytes_moved < 1.25 * decode.least_bytes
    assert decode.seconds > decode.least_seconds > 0


@pytest.mark.parametrize(("shape", "load", "read"), [
    (ForwardShape(True, 8, 8, 16), Load(1, 100), 4),                       # one token chooses 4
    (ForwardShape(True, 8, 8, 16), Load(3, 100), 16 * (1 - 0.75**3)),      # padding rows choose none
    (ForwardShape(False, 512, 8, 16), Load(1, 512), 16),
    (ForwardShape(False, 8, 8, 16, drafts=1), Load(3, 100, 1), 16 * (1 - 0.75**6)),  # each token chooses
])  # fmt: skip
def test_least_bytes_count_the_experts_that_tokens_choose(shape, load, read):
    dense = DecoderSpec(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position=1024, rope=Rope(),
    )  # fmt: skip
    spec = dataclasses.replace(dense, experts=Experts(16, 4, 256, layers=(False, True, True)))
    params, config = param_shapes(spec, "float32"), planning.engine_config("test", {})
    build = Blueprint.draw(ServedModel(spec, params), config, Placement.for_target(TARGETS["cpu"])).fit()
    expert = 3 * 64 * 256 * 4
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(params["layers"]))
    kv = load.rows * load.context * 3 * 2 * 2 * 16 * 4
    assert experts_read(spec, shape, load) == pytest.approx(read)
    assert experts_read(dense, shape, load) is None
    assert least_bytes(build, shape, load) == pytest.approx(whole + kv - 2 * (16 - read) * expert, abs=2)


def test_devices_without_rates_or_compiler_are_refused(monkeypatch):
    model, config = ServedModel(SPEC, param_shapes(SPEC, "float32")), planning.engine_config("test", {})
    build = Blueprint.draw(model, config, Placement.for_target(TARGETS["cpu"]))
    with pytest.raises(ModelLoadError, match="the rates of cpu are not known"):
        predict(build.fit(), TARGETS["cpu"], [Load(1, 1)])
    monkeypatch.setattr("jpaged.runtime.targets._installed", lambda module: False)
    with pytest.raises(ModelLoadError, match=r"the compiler for NVIDIA H200 is in jax\[cuda13\]: install it"):
        predict(build.fit(), H200, [Load(1, 1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"roofline_context": 0}, "roofline_context .*, got 0"), ({"roofline_context": 9}, "must be a GPU or TPU"),
     ({"roofline_context": 9, "target": "cpu"}, "must be a GPU or TPU"),
     ({"link_bandwidth": 1e9, "options": {"tensor_parallel_size": 2}, "target": "l4"}, "needs --roofline and"),
     ({"link_latency": 1e-6, "roofline_context": 9, "target": "l4"}, "several devices .--tensor-parallel-size."),
     ({"link_bandwidth": 0, "options": {"tensor_parallel_size": 2}, "roofline_context": 9, "target": "l4"},
      "link_bandwidth .*, got 0"),
     ({"link_latency": -1, "options": {"tensor_parallel_size": 2}, "roofline_context": 9, "target": "l4"},
      "link_latency .*, got -1")],
)  # fmt: skip
def test_bad_arguments(options, message):
    with pytest.raises(RequestError, match=message):
        planning.plan("demo", **options)
