"""Leaves that are quantised in a checkpoint: how they are fused, joined, placed and multiplied."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.loading import load_model, source
from jpaged.loading.checkpoint import Checkpoint
from jpaged.models import quantization
from jpaged.models.quantization import SCHEMES, Quantizer, quantized_parts
from jpaged.models.spec import param_shapes
from jpaged.planning import plan
from jpaged.runtime.memory.weight_bytes import tree_bytes
from pallas_kernels import QuantizedWeight, quantized_dot
from pallas_kernels.quantized_dot.weight import LanesWeight, RowsWeight, TilesWeight, quantize_plain
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.support.dense_leaves import dense

RNG = np.random.default_rng(0)
KINDS = ["int4", "int8", "fp8", "fp4", "minima", "two levels", "divided"]


def plain(kind, outputs=40, inputs=192, group=32):
    """Random weights in the layout "plain", and their numbers in float64 by the formula."""
    groups = inputs // group
    scales = RNG.uniform(0.5, 2, (outputs, groups)).astype(np.float32)
    fields = dict.fromkeys(("zeros", "outer", "mins", "outer_mins", "order"))
    by_group = lambda array: np.repeat(np.asarray(array, np.float64), group, 1)  # noqa: E731
    if kind == "fp4":
        codes = RNG.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes] * by_group(scales)
    elif kind == "fp8":
        codes = RNG.standard_normal((outputs, inputs)).astype(jnp.float8_e4m3fn)
        numbers = codes.astype(np.float64) * by_group(scales)
    elif kind == "int8":
        codes = RNG.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        numbers = codes.astype(np.float64) * by_group(scales)
    else:
        codes = RNG.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        zeros = RNG.integers(0, 17, (outputs, groups)).astype(np.uint8)
        if kind == "int4":
            fields["zeros"] = zeros
            numbers = (codes - by_group(zeros)) * by_group(scales)
        elif kind == "divided":
            fields["outer"] = RNG.uniform(2, 9, (outputs, 1)).astype(np.float32)
            numbers = (codes - 8.0) * by_group(scales) / fields["outer"]
        else:
            fields["mins"] = RNG.uniform(0, 3, (outputs, groups)).astype(np.float32)
            numbers = codes * by_group(scales) - by_group(fields["mins"])
            if kind == "two levels":
                fields |= {name: RNG.uniform(1, 2, (outputs, 2)).astype(np.float32) for name in ("outer", "outer_mins")}
                wide = lambda array: np.repeat(np.float64(array), inputs // 2, 1)  # noqa: E731
                numbers = codes * by_group(scales) * wide(fields["outer"])
                numbers = numbers - by_group(fields["mins"]) * wide(fields["outer_mins"])
    stored = {"minima": "int4", "two levels": "int4", "divided": "int4"}.get(kind, kind)
    weight = QuantizedWeight(
        codes, scales, kind=stored, shape=(outputs, inputs), dtype=np.dtype(np.float32),
        activations="float", divides=kind == "divided", **fields,
    )  # fmt: skip
    return weight, numbers


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, kind in enumerate(KINDS)]
)
def test_numbers_and_products_of_every_kind(kind):
    weight, numbers = plain(kind)
    limit = 1e-6 * np.abs(numbers).max()
    rows = RowsWeight.of(weight)
    for one in (weight, rows):
        np.testing.assert_allclose(np.asarray(one.dequantize(), np.float64), numbers, atol=limit, rtol=0)
    ids = jnp.array([3, 39, 0, 77])
    np.testing.assert_allclose(np.asarray(rows.rows(ids), np.float64), numbers[[3, 39, 0, 39]], atol=limit, rtol=0)
    x = RNG.standard_normal((9, 192)).astype(np.float32)
    expected = x.astype(np.float64) @ numbers.T
    for name in ("xla", "reference", None):
        found = np.asarray(jax.jit(lambda x: quantized_dot(x, rows, 9, implementation=name))(x), np.float64)  # noqa: B023
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max() * 4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8", "fp4", "minima", "two levels", "divided", "zeros of 8 bits"])
def test_tiles_of_every_kind(kind):
    """The native kernel, XLA's operations and float64 with activations in 8 bits."""
    weight, numbers = plain(kind if kind != "zeros of 8 bits" else "int8")
    if kind == "zeros of 8 bits":
        zeros = RNG.integers(-100, 100, weight.scales.shape).astype(np.int8)
        weight = dataclasses.replace(weight, zeros=zeros)
        numbers = numbers - np.repeat(np.float64(weight.scales) * zeros, 32, 1)
    tiles = TilesWeight.of(weight)
    np.testing.assert_allclose(tiles.dequantize(), numbers, atol=2e-6 * np.abs(numbers).max(), rtol=0)
    x = jnp.asarray(RNG.standard_normal((21, 192)), jnp.float32)
    most = np.abs(np.asarray(x)).max(1, keepdims=True)
    codes = np.round(np.asarray(x) * (np.float32(127) / most)).astype(np.float64)
    expected = codes @ numbers.T * most / 127
    for name in ("xla", "cpu"):
        found = np.asarray(quantized_dot(x, tiles, 21, implementation=name))
        np.testing.assert_allclose(found, expected, atol=4e-6 * np.abs(expected).max(), rtol=0)
        np.testing.assert_array_equal(found[:1], np.asarray(quantized_dot(x[:8], tiles, 1, implementation=name))[:1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8", "minima", "two levels", "divided", "zeros of 8 bits"])
def test_lanes_of_every_kind(kind):
    weight, numbers = plain(kind if kind != "zeros of 8 bits" else "int8", inputs=256)
    if kind == "zeros of 8 bits":
        zeros = RNG.integers(-100, 100, weight.scales.shape).astype(np.int8)
        weight = dataclasses.replace(weight, zeros=zeros)
        numbers = numbers - np.repeat(np.float64(weight.scales) * zeros, 32, 1)
    lanes = LanesWeight.of(weight)
    limit = {"rtol": 0, "atol": 2e-6 * np.abs(numbers).max()}
    assert (lanes.groups, lanes.group_size, lanes.num_outputs) == (8, 32, 40)
    np.testing.assert_allclose(lanes.dequantize(), numbers, **limit)
    np.testing.assert_allclose(lanes.rows(jnp.array([3, 39, 0, 77])), numbers[[3, 39, 0, 39]], **limit)
    np.testing.assert_allclose(lanes.slice(11, 7).numbers(), numbers[11:18], **limit)


def test_a_matrix_that_is_quantised_in_parts(monkeypatch):
    leaf = jnp.asarray(RNG.standard_normal((2, 32, 128)), jnp.bfloat16)
    quantizer = Quantizer(SCHEMES["int4"], "tpu")
    whole = quantizer("gate_up", leaf)
    assert whole.layout == "lanes"
    assert quantizer.shape("gate_up", jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) == jax.tree.map(_shape, whole)
    monkeypatch.setattr(quantization, "MOST_NUMBERS", 32 * 128)
    parts = quantizer("gate_up", leaf)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_an_order_of_inputs():
    weight, numbers = plain("int4")
    order = RNG.permutation(192).astype(np.int32)
    rows = RowsWeight.of(dataclasses.replace(weight, order=order))
    natural = np.empty_like(numbers)
    natural[:, order] = numbers
    x = jnp.asarray(RNG.standard_normal((8, 192)), jnp.float32)
    np.testing.assert_allclose(np.asarray(quantized_dot(x, rows, 8)), x @ natural.T, atol=2e-3)
    np.testing.assert_allclose(np.asarray(rows.rows(jnp.arange(4))), natural[:4], atol=1e-4)
    tiles = TilesWeight.of(dataclasses.replace(weight, order=order))
    rounded = np.asarray(quantized_dot(x, tiles, 8))
    assert 0 < np.abs(rounded - x @ natural.T).max() < 0.02 * np.abs(rounded).max()


class Packed(Checkpoint):
    """A checkpoint whose matrices are quantised when they are read. Kinds by the end of a module's name."""

    kinds: dict = {}  # noqa: RUF012

    def quantized(self, name):
        kind = next((kind for end, kind in self.kinds.items() if name.endswith(f"{end}.weight")), None)
        if kind is None:
            return None
        weight = quantize_plain(jnp.array(super().array(name), jnp.float32), kind, 16)
        return dataclasses.replace(jax.tree.map(np.asarray, weight), activations="float")

    def quantized_shape(self, name):
        weight = self.quantized(name)
        return weight if weight is None else jax.eval_shape(lambda: weight)


def write(name, folder, monkeypatch, kinds):
    write_checkpoint(next(v for v in VARIANTS if v.name == name), 0, folder)
    monkeypatch.setattr(Packed, "kinds", kinds)
    monkeypatch.setattr(source, "Checkpoint", Packed)
    return str(folder)


OPTIONS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,)}
OPTIONS |= {"token_buckets": (64,), "dtype": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("llama", {"q_proj": "int4", "v_proj": "int8", "up_proj": "fp8", "down_proj": "fp8", "embed_tokens": "int8"}),
        pytest.param(
            "mixtral", dict.fromkeys(["q_proj", "k_proj", "v_proj", "w1", "w3"], "int4") | {"w2": "fp8"},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_same_answers_as_with_the_dequantised_weights(model, kinds, tmp_path, monkeypatch):
    folder = write(model, tmp_path, monkeypatch, kinds)
    options = OPTIONS | {"quantized_activations": "float"}
    loaded = load_model(EngineConfig(model=folder, **options))
    planned = plan(folder, options)
    assert planned.weight_bytes == tree_bytes(loaded.params)
    leaves = list(quantized_parts(loaded.params))
    assert len(leaves) >= loaded.spec.num_layers
    numbers = dense(loaded.params)
    wanted = jax.tree.leaves(param_shapes(loaded.spec, np.float32))
    assert [leaf.shape for leaf in jax.tree.leaves(numbers)] == [leaf.shape for leaf in wanted]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (4, 19, 33)]
    answers = []
    for engine in (LLM(folder, **options), LLM(loaded.spec, params=numbers, **OPTIONS)):
        with engine as llm:
            answers.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.stats().compiles_after_ready == 0
    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [a[i].logprob for i in a] == pytest.approx([b[i].logprob for i in b], abs=2e-4)


@pytest.mark.codegen
@pytest.mark.parametrize("activations", ["auto", "float"])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "fp4"])
def test_no_copy_of_a_matrix_is_made_on_cpu(kind, activations):
    """Temporaries of a product are those of a block of 256 outputs in float32, an eighth of this matrix."""
    weight, _ = plain(kind, outputs=2048, inputs=512, group=64)
    placed = Quantizer(platform="cpu", activations=activations).packed_shape("o", jax.tree.map(_shape, weight))
    if kind == "fp8" and activations == "auto":
        assert isinstance(placed, jax.ShapeDtypeStruct)  # it is dequantised while it loads
        return
    leaves, tree = jax.tree.flatten(placed)
    product = lambda x, *leaves: quantized_dot(x, jax.tree.unflatten(tree, leaves), 8)  # noqa: E731
    program = jax.jit(product).lower(jax.ShapeDtypeStruct((8, 512), np.float32), *leaves).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2048 * 512 * 4 * 0.15
    assert program.memory_analysis().argument_size_in_bytes < 2048 * 512 * (0.7 if placed.bits == 4 else 1.2)


def test_layouts_by_platform():
    integers, floats = plain("int4", inputs=256)[0], plain("fp8")[0]
    for platform, activations, expected in (
        ("cpu", "auto", ("tiles", "int8")), ("cpu", "float", ("rows", "float")), ("gpu", "auto", ("rows", "float")),
        ("gpu", "int8", ("rows", "float")), ("tpu", "auto", ("lanes", "float")),
    ):  # fmt: skip
        quantizer = Quantizer(platform=platform, activations=activations)
        placed = quantizer.packed("qkv", integers)
        assert (placed.layout, placed.activations) == expected
        assert quantizer.packed_shape("qkv", integers) == jax.tree.map(_shape, placed)
        fast = (platform, activations) == ("cpu", "auto")  # there they are dequantised
        uneven = integers.with_shape((5, 8, 256))  # no tile has outputs of two experts
        for name, weight in (("qkv", floats), ("expert_down", floats), ("expert_down", uneven)):
            placed = quantizer.packed(name, weight)
            assert isinstance(placed, jax.Array) if fast else placed.layout == "rows"
            assert quantizer.packed_shape(name, weight) == jax.tree.map(_shape, placed)
        whole = plain("int4", outputs=48, inputs=256)[0].with_shape((3, 16, 256))
        assert quantizer.packed("qkv", whole).layout == expected[0]
        assert quantizer.packed("expert_down", whole).layout == ("rows" if platform == "tpu" else expected[0])
    for platform in ("cpu", "gpu", "tpu"):
        quantizer = Quantizer(platform=platform, activations="fp8")
        placed = quantizer.packed("qkv", floats)
        assert (placed.layout, placed.activations) == ("rows", "fp8")
        assert quantizer.packed_shape("qkv", floats) == jax.tree.map(_shape, placed)
        assert quantizer.packed("qkv", integers).activations == ("int8" if platform == "cpu" else "float")  # as auto
    on_tpu = Quantizer(platform="tpu").packed
    assert on_tpu("embed", integers).layout == "rows"  # a row is taken for each token
    assert on_tpu("qkv", plain("int4")[0]).layout == "rows"  # 192 inputs
    grouped = on_tpu("qkv", dataclasses.replace(plain("int8", inputs=256)[0], activations="int8"))
    assert (grouped.layout, grouped.activations) == ("lanes", "int8")
    assert on_tpu("qkv", plain("int8", group=192)[0]).layout == "rows"
    eight = Quantizer(platform="gpu").packed("qkv", dataclasses.replace(plain("int8")[0], activations="int8"))
    assert (eight.layout, eight.activations) == ("rows", "int8")


def _shape(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
