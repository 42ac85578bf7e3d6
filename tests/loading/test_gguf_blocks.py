"""GGUF tensors that stay quantised: their numbers equal the gguf library's, bit for bit."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from jpaged.errors import ModelLoadError
from jpaged.loading.gguf_blocks import KEPT, quantized, quantized_shape
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from pallas_kernels import QuantizedWeight
from tests.golden.checkpoints import BY_NAME
from tests.loading.ggml_blocks import HALVES, blocks_of
from tests.loading.gguf_files import add_metadata, finish, write_gguf

LLAMA = BY_NAME["llama"].config | {"hidden_size": 256, "num_hidden_layers": 1}  # 4 query heads and 2 KV heads of 64
KIND_AND_GROUP = {
    "Q8_0": ("int8", 32), "Q4_0": ("int4", 32), "Q4_1": ("int4", 32), "Q5_0": ("int8", 32), "Q5_1": ("int8", 32),
    "Q4_K": ("int4", 32), "Q5_K": ("int8", 32), "Q6_K": ("int8", 16),
}  # fmt: skip


def numbers(weight: QuantizedWeight) -> np.ndarray:
    """The weights in float32, as a product sees them."""
    on_device = jax.tree.map(jnp.asarray, weight)
    return np.asarray(dataclasses.replace(on_device, dtype=np.dtype(np.float32)).dequantize())


def shapes(weight: QuantizedWeight) -> QuantizedWeight:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), weight)


def random_halves(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(scale=0.01, size=count).astype(np.float16)


def extreme_halves(rng: np.random.Generator, count: int) -> np.ndarray:
    """Zeros, subnormal numbers, the smallest and the largest, of both signs."""
    bits = np.array([0, 1, 3, 0x03FF, 0x0400, 0x0401, 0x3C00, 0x7BFE, 0x7BFF], np.uint16)
    return (rng.choice(bits, count) | rng.integers(0, 2, count, np.uint16) << 15).view(np.float16)


@pytest.mark.parametrize("halves", [random_halves, extreme_halves])
@pytest.mark.parametrize("kind", KEPT)
def test_the_bits_of_the_gguf_library(kind: str, halves: Callable[[np.random.Generator, int], np.ndarray]) -> None:
    """More blocks than are unpacked at once."""
    block, _ = gguf.GGML_QUANT_SIZES[Type[kind]]
    rows, columns = 70_000 // block // 2 * 2, 2 * block
    raw = blocks_of(kind, rows * columns // block, halves).reshape(rows, -1)
    weight = quantized(raw, kind, (2, rows // 2, columns))
    assert weight is not None
    assert shapes(weight) == quantized_shape(kind, (2, rows // 2, columns))
    assert (weight.kind, weight.group_size) == KIND_AND_GROUP[kind]
    assert (weight.layout, weight.activations, weight.dtype) == ("plain", "float", np.dtype(ml_dtypes.bfloat16))
    wanted = dequantize(raw, Type[kind]).reshape(weight.shape)
    np.testing.assert_array_equal(numbers(weight).reshape(weight.shape), wanted)  # 0 and -0 are equal
    if weight.kind == "int4":
        assert int(weight.codes.max()) == 15


@pytest.mark.parametrize("kind", [*KEPT, "Q2_K", "IQ4_XS"])
def test_a_factor_that_is_no_number_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[Type[kind]]
    whole, at = blocks_of(kind, 256 * 64 // block, random_halves), HALVES.get(kind, (0,))[-1]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_metadata(writer, LLAMA)
    writer.add_tensor("token_embd.weight", np.ones((64, 256), np.float16))
    tensors = {"attn_output": None, "ffn_gate": np.nan, "ffn_up": np.inf, "ffn_down": -np.inf}
    for name, value in tensors.items():
        blocks = whole.copy()
        if value is not None:
            blocks[-1, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", blocks.reshape(64, -1), raw_dtype=Type[kind])
    finish(writer)
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        for read in (checkpoint.array, checkpoint.quantized):
            read("model.layers.0.self_attn.o_proj.weight")
        for part in ("gate", "up", "down"):
            name = f"model.layers.0.mlp.{part}_proj.weight"
            label = rf"blk.0.ffn_{part}.weight \({name}\) has "
            if kind in KEPT:
                with pytest.raises(ModelLoadError, match=rf"{label}the factor -?(nan|inf) in block {len(whole) - 1}"):
                    checkpoint.quantized(name)
            with pytest.raises(ModelLoadError, match=rf"{label}a weight that is NaN or infinite: the file is damaged"):
                checkpoint.array(name)


def test_other_types_are_not_kept() -> None:
    for kind in ("F16", "BF16", "Q2_K", "Q3_K", "IQ4_XS", "MXFP4"):
        assert quantized(np.zeros((1, 1), np.uint8), kind, (1, 256)) is None
        assert quantized_shape(kind, (1, 256)) is None


@pytest.mark.parametrize(
    "kind", ["Q8_0", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q4_1", "Q4_K", "Q6_K"))]
)
def test_a_llama_and_its_rows_of_queries_and_keys(kind: str, tmp_path: Path) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[Type[kind]]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_metadata(writer, LLAMA)
    for name, rows in {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}.items():
        raw = blocks_of(kind, rows * 256 // block, random_halves).reshape(rows, -1)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=Type[kind])
    writer.add_tensor("token_embd.weight", np.ones((64, 256), np.float16))
    writer.add_tensor("blk.0.attn_norm.weight", blocks_of(kind, 256 // block, random_halves).reshape(-1),
                      raw_dtype=Type[kind])  # fmt: skip
    finish(writer)
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        for part in "qkvo":
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            weight = checkpoint.quantized(name)
            assert weight is not None
            assert shapes(weight) == checkpoint.quantized_shape(name)
            np.testing.assert_array_equal(numbers(weight), checkpoint.array(name))
        for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
            assert checkpoint.quantized(name) is None
            assert checkpoint.quantized_shape(name) is None


@pytest.mark.parametrize("kind", ["Q4_0", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q5_1", "Q8_0"))])
def test_experts_in_one_tensor(kind: str, tmp_path: Path) -> None:
    config = BY_NAME["mixtral"].config | {"num_hidden_layers": 1}
    rng, at = np.random.default_rng(1), "model.layers.0.block_sparse_moe.experts"
    tensors = {"model.embed_tokens.weight": rng.normal(size=(320, 64)).astype(np.float32)}
    for expert in range(config["num_local_experts"]):
        for name, shape in {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}.items():
            tensors[f"{at}.{expert}.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    with GgufCheckpoint(write_gguf(tmp_path / "m.gguf", config, tensors, Type[kind])) as checkpoint:
        for name, values in tensors.items():
            weight = checkpoint.quantized(name)
            assert weight is not None
            assert shapes(weight) == checkpoint.quantized_shape(name)
            assert weight.shape == values.shape
            np.testing.assert_array_equal(numbers(weight), checkpoint.array(name))
            assert np.abs(numbers(weight) - values).max() < 0.4


def test_the_log_names_the_types_that_are_dequantised_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_metadata(writer, LLAMA)
    kinds = {"attn_q": "Q2_K", "attn_k": "Q2_K", "attn_v": "Q3_K", "attn_output": "Q4_K"}
    for name, kind in kinds.items():
        raw = np.zeros((128 if name in ("attn_k", "attn_v") else 256, gguf.GGML_QUANT_SIZES[Type[kind]][1]), np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=Type[kind])
    writer.add_tensor("token_embd.weight", np.ones((64, 256), np.float16))
    finish(writer)
    with caplog.at_level(logging.INFO, "jpaged"), GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        for part in "ovqk":
            weight = checkpoint.quantized(f"model.layers.0.self_attn.{part}_proj.weight")
            assert (weight is not None) == (part == "o")
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'm.gguf'}: tensors of these types are dequantised: Q2_K (2), Q3_K (1). ")


@pytest.mark.slow
def test_rows_of_an_embedding() -> None:
    """The kept tensor is a table of rows, as other quantised weights are."""
    raw = blocks_of("Q6_K", 8, random_halves)
    weight = quantized(raw, "Q6_K", (8, 256))
    assert weight is not None
    found = jax.tree.map(jnp.asarray, weight).rows(jnp.array([5, 0, 7]))
    np.testing.assert_array_equal(np.asarray(found), dequantize(raw, Type.Q6_K)[[5, 0, 7]].astype(ml_dtypes.bfloat16))
