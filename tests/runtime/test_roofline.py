"""Predicted times of programs, compiled for devices that need not be there."""

import dataclasses

import jax
import pytest

from jpaged import planning
from jpaged.errors import ModelLoadError, RequestError
from jpaged.models.spec import DecoderSpec, Experts, QKNorm, Rope, param_shapes
from jpaged.runtime.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.roofline import Load, experts_read, least_bytes, predict
from jpaged.runtime.step import ForwardShape
from jpaged.runtime.targets import TARGETS, Target
from tests.deviceless import H200, V5E, marks

# A layer of Qwen3 0.6B's shape, and a small vocabulary.
SPEC = DecoderSpec(
    vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=128,
    max_position=8192, rope=Rope(), qk_norm=QKNorm.HEAD,
)  # fmt: skip
KV = 2 * 8 * 128 * 2  # bytes of a token in a layer


def prediction(target: Target, layers: int, **options):
    spec = dataclasses.replace(SPEC, num_layers=layers)
    config = planning.engine_config("test", {"max_num_seqs": 64, "max_num_batched_tokens": 256, **options})
    model = ServedModel(spec, param_shapes(spec, "bfloat16"))
    build = Blueprint.draw(model, config, Placement.for_target(target)).fit(free_bytes=2**30)
    return predict(build, target, [Load(64, 1000), Load(65, 1)])


@pytest.mark.parametrize("target", [pytest.param(t, marks=marks(t), id=t.name) for t in (H200, V5E)])
def test_a_layer_adds_its_weights_its_kv_and_twelve_kernels(target):
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
        assert decode.kernels - two.programs[0].kernels <= 12
        assert {cost.commands for cost in three.programs} == {1}


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


@pytest.mark.parametrize(("shape", "load", "read"), [
    (ForwardShape(True, 8, 8, 16), Load(1, 100), 4),                       # one token chooses 4
    (ForwardShape(True, 8, 8, 16), Load(3, 100), 16 * (1 - 0.75**3)),      # padding rows choose none
    (ForwardShape(False, 512, 8, 16), Load(1, 512), 16),
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
    [({"roofline_context": 0}, "roofline_context=0"), ({"roofline_context": 9}, "must be a GPU or TPU"),
     ({"roofline_context": 9, "target": "cpu"}, "must be a GPU or TPU")],
)  # fmt: skip
def test_bad_arguments(options, message):
    with pytest.raises(RequestError, match=message):
        planning.plan("demo", **options)
