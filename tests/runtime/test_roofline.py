"""Predicted times of programs, compiled for devices that need not be there."""

import dataclasses

import pytest

from jpaged import planning
from jpaged.errors import ModelLoadError, RequestError
from jpaged.models.spec import DecoderSpec, QKNorm, Rope, param_shapes
from jpaged.runtime.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.roofline import Load, predict
from jpaged.runtime.targets import TARGETS, Target
from tests.deviceless import H200, V5E, marks

# A layer of Qwen3 0.6B's shape, and a small vocabulary.
SPEC = DecoderSpec(
    vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=128,
    max_position=8192, rope=Rope(), qk_norm=QKNorm.HEAD,
)  # fmt: skip
KV = 2 * 8 * 128 * 2  # bytes of a token in a layer


def prediction(target: Target, layers: int):
    spec = dataclasses.replace(SPEC, num_layers=layers)
    config = planning.engine_config("test", {"max_num_seqs": 64, "max_num_batched_tokens": 256})
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
    [({"roofline_context": 0}, "roofline_context=0"), ({"roofline_context": 9}, "needs a GPU or TPU as --target"),
     ({"roofline_context": 9, "target": "cpu"}, "needs a GPU or TPU as --target")],
)  # fmt: skip
def test_bad_arguments(options, message):
    with pytest.raises(RequestError, match=message):
        planning.plan("demo", **options)
