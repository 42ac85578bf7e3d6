"""`jpaged quantize`: its files, their bits read by an independent unpacker, GPTQ's error, and refused inputs."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jpaged import cli
from jpaged.config import EngineConfig
from jpaged.divergence import divergence
from jpaged.loading import load_model
from jpaged.loading.checkpoint import Checkpoint
from jpaged.quantizing import checkpoint as quantizing
from jpaged.quantizing.gptq import gptq
from jpaged.quantizing.rounding import find_grid, round_to_nearest
from jpaged.quantizing.schemes import SCHEMES
from tests.golden.checkpoints import BY_NAME, Variant, write_checkpoint, write_safetensors

DEMO = Path(quantizing.__file__).parents[1] / "demo_model"
CONFIG = json.loads((DEMO / "config.json").read_text()) | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model with two layers in bf16, and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_checkpoint(Variant("tiny", CONFIG), 5, folder)
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors(folder).items()}
    write_safetensors(folder / "model.safetensors", arrays)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((DEMO / "held_out.txt").read_text()[:9_000])
    return path


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with Checkpoint(folder) as opened:
        return {name: np.array(opened.array(name)) for name in opened.names}


def quantize(model: Path, out: Path, *words: str) -> dict[str, np.ndarray]:
    assert cli.main(["quantize", str(model), str(out), *words]) == 0
    return tensors(out)


def unpacked(words: np.ndarray, count: int) -> np.ndarray:
    """The signed 4-bit codes of rows of int32, from the definition: a stream of bits, least significant first."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : 4 * count]
    return bits.reshape(len(words), count, 4) @ np.array([1, 2, 4, 8]) - 8


def dequantized(found: dict[str, np.ndarray], name: str) -> np.ndarray:
    scales = found[f"{name}_scale"].astype(np.float64)
    codes = found.get(name)
    if codes is None:
        codes = unpacked(found[f"{name}_packed"], int(found[f"{name}_shape"][1]))
    return codes.astype(np.float64) * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


@pytest.mark.parametrize(
    ("scheme", "largest", "mean"),
    [("w4a16", 0.25, 0.12), ("w4a8", 0.25, 0.12), ("w8a8", 0.01, 0.01), ("fp8", 0.1, 0.03)],
)
def test_files(model, tmp_path, scheme, largest, mean):
    """Errors are within shares of the largest and the mean weight. Everything else is copied bit for bit."""
    source, found = tensors(model), quantize(model, tmp_path / "out", "--scheme", scheme)
    matrices = [name for name in source if "_proj" in name]
    assert len(matrices) == 14
    for name in matrices:
        weights, ours = source[name].astype(np.float64), dequantized(found, name)
        assert ours.shape == weights.shape
        assert np.abs(weights).max() * largest > np.abs(ours - weights).max()
        assert np.sqrt(((ours - weights) ** 2).mean() / (weights**2).mean()) < mean
        assert found[f"{name}_scale"].dtype == ml_dtypes.bfloat16
    for name in source.keys() - set(matrices):
        assert source[name].tobytes() == found[name].tobytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG
    assert quantization["ignore"] == ["lm_head", "model.embed_tokens"]
    group = quantization["config_groups"]["group_0"]
    four = scheme.startswith("w4")
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == ((4, 32) if four else (8, None))
    assert (group["input_activations"] is None) == (scheme == "w4a16")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_gptq_of_a_matrix():
    """GPTQ's squared error of the outputs is well below that of rounding to nearest."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((48, 128)).astype(np.float32)
    inputs = random.standard_normal((512, 24)) @ random.standard_normal((24, 128)) + random.standard_normal((512, 128))
    for scheme, group_size in (("w4a16", 32), ("w8a8", None), ("fp8", None)):
        grid = find_grid(weights, SCHEMES[scheme], group_size, np.dtype(np.float32))
        errors = []
        for codes in (round_to_nearest(weights, grid), gptq(weights, inputs.T @ inputs, grid)):
            numbers = grid.matrix(codes).astype(np.float64)
            errors.append(((inputs @ (numbers - weights).T) ** 2).sum())
        assert errors[1] < 0.6 * errors[0], scheme


def test_gptq_of_a_model(model, text, tmp_path):
    """Predictions of other text are closer to the source's than with rounding to nearest."""
    words = ["--scheme", "w4a16", "--group-size", "32"]
    found = {
        "rtn": quantize(model, tmp_path / "rtn", *words),
        "gptq": quantize(model, tmp_path / "gptq", *words, "--method", "gptq", "--calibration", str(text)),
    }
    source = {name: array.astype(np.float32) for name, array in tensors(model).items()}
    exact = load_model(EngineConfig(model=str(model), dtype="float32"))
    ids = exact.tokenizer.encode((DEMO / "held_out.txt").read_text()[20_000:22_000])[:129]
    errors = {}
    for method, arrays in found.items():
        dense = {n: dequantized(arrays, n).astype(np.float32) if "_proj" in n else a for n, a in source.items()}
        folder = shutil.copytree(model, tmp_path / f"dense-{method}")
        write_safetensors(folder / "model.safetensors", dense)
        errors[method] = divergence(load_model(EngineConfig(model=str(folder), dtype="float32")), exact, [ids]).mean
    assert errors["gptq"] < 0.9 * errors["rtn"]


def test_shards(model, tmp_path, monkeypatch):
    whole = quantize(model, tmp_path / "whole", "--scheme", "w8a8")
    monkeypatch.setattr(quantizing, "_SHARD", 300_000)
    shards = quantize(model, tmp_path / "shards", "--scheme", "w8a8")
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    assert {name: array.tobytes() for name, array in whole.items()} == {n: a.tobytes() for n, a in shards.items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheme", "w4a16", "--group-size", "64"], "divides the 96 inputs of model.layers.0.mlp.down_proj.weight"),
        (["--scheme", "w4a16", "--group-size", "0"], "32, 16 fit all matrices (group_size=0)"),
        (["--scheme", "w8a8", "--group-size", "32"], "scheme w8a8 has one scale an output: leave it out"),
        (["--scheme", "w4a16", "--method", "gptq"], "gptq needs text that the model's inputs resemble: name a file"),
        (["--scheme", "w4a16", "--method", "gptq", "--calibration", "short"], "and at least 2,048 are needed"),
        (["--scheme", "w4a16", "--calibration", "short"], "has no meaning with method rtn"),
    ],
)
def test_bad_options(model, tmp_path, words, message, capsys):
    (tmp_path / "short").write_text("import os\n")
    words = [str(tmp_path / "short") if word == "short" else word for word in words]
    assert cli.main(["quantize", str(model), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_bad_models(model, tmp_path, capsys):
    quantize(model, tmp_path / "out", "--scheme", "w8a8")
    write_checkpoint(BY_NAME["mixtral"], 0, tmp_path / "experts")
    write_checkpoint(BY_NAME["gpt2"], 0, tmp_path / "gpt2")
    shutil.copytree(model, tmp_path / "damaged")
    arrays = tensors(model)
    arrays["model.layers.1.self_attn.o_proj.weight"][3, 4] = np.nan
    write_safetensors(tmp_path / "damaged/model.safetensors", arrays)
    for source, out, message in (
        (tmp_path / "out", "new", "is quantised already (compressed-tensors): name the checkpoint that it was made"),
        (model, "out", "there is a folder that is not empty: name a new folder, or remove it first"),
        (tmp_path / "experts", "new", "the experts of a mixture of experts cannot be quantised yet: Mixtral"),
        (tmp_path / "gpt2", "new", "matrices that are stored [in, out] cannot be quantised yet"),
        (tmp_path / "damaged", "new", "model.layers.1.self_attn.o_proj.weight has values that are not finite"),
    ):
        assert cli.main(["quantize", str(source), str(tmp_path / out), "--scheme", "w8a8"]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
