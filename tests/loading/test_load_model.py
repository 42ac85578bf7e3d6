"""load_model on checkpoint folders: accepted and refused checkpoints, error messages, and peak memory."""

import contextlib
import dataclasses
import gc
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading import dtypes, load_model
from jpaged.loading.checkpoint import Checkpoint
from jpaged.models.families import family_of
from jpaged.models.spec import param_shapes
from tests.golden.checkpoints import BY_NAME, NEWER, VARIANTS, tensor_shapes, write_checkpoint, write_safetensors
from tests.support.checkpoint_files import assert_same, change_config, tensors_of, write_shards


def load(folder: Path, **options: Any):
    return load_model(EngineConfig(**{"model": str(folder), "dtype": "float32", **options}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_checkpoint(BY_NAME["llama"], 0, tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, id=v.name, marks=[pytest.mark.slow] * (v.config["model_type"] in NEWER and v.name != "glm4"))
        for v in VARIANTS if not v.is_packed
    ],
)  # fmt: skip
def test_every_tensor_is_loaded_to_its_place_in_the_table(variant, tmp_path: Path) -> None:
    """The tree has the shapes of param_shapes. Gathering each leaf by the name table gives the file's tensors."""
    write_checkpoint(variant, 7, tmp_path)
    model = load(tmp_path)
    assert jax.tree.map(jax.typeof, model.params) == jax.tree.map(jax.typeof, param_shapes(model.spec, np.float32))
    wanted = tensors_of(tmp_path)
    for leaf in family_of(variant.config).tensors(model.params):
        tree = model.params if leaf.layer is None else model.params["layers"][leaf.layer]
        array = np.asarray(tree[leaf.leaf])
        for tensor in leaf.tensors:
            bare = {name.removeprefix(family_of(variant.config).prefix) for name in tensor.names}
            for name in wanted.keys() & (bare | set(tensor.names)):
                np.testing.assert_array_equal(tensor.rule.gather(leaf.block(array, tensor)), wanted.pop(name))
    assert not wanted


def test_shards_give_the_same_parameters_as_one_file(llama: Path) -> None:
    whole = load(llama).params
    write_shards(llama)
    assert_same(load(llama).params, whole)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("gpt2", "transformer."), ("opt-125m", "model."), ("llama-tied", "model."), ("bloom", "transformer.")],
)
def test_files_of_the_bare_base_model(name: str, prefix: str, tmp_path: Path) -> None:
    write_checkpoint(BY_NAME[name], 0, tmp_path)
    wanted = load(tmp_path).params
    bare = {tensor.removeprefix(prefix): value for tensor, value in tensors_of(tmp_path).items()}
    if name == "gpt2":  # buffers that old versions saved
        bare |= {"h.0.attn.bias": np.ones((1, 1, 256, 256), np.uint8), "h.1.attn.masked_bias": np.zeros((), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", bare)
    assert_same(load(tmp_path).params, wanted)


def test_names_of_old_files(tmp_path: Path) -> None:
    """GPT-NeoX and Pythia files on the hub have embed_out where Transformers now has lm_head."""
    write_checkpoint(BY_NAME["gpt-neox"], 0, tmp_path)
    wanted, tensors = load(tmp_path).params, tensors_of(tmp_path)
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert_same(load(tmp_path).params, wanted)


def test_tied_embeddings_as_transformers_reads_them(tmp_path: Path) -> None:
    """If one matrix is missing, the other is used for both. If they differ, both are used."""
    write_checkpoint(BY_NAME["llama-tied"], 0, tmp_path)
    wanted, tensors = load(tmp_path), tensors_of(tmp_path)
    embed = tensors["model.embed_tokens.weight"]

    write_safetensors(tmp_path / "model.safetensors", tensors | {"lm_head.weight": embed})
    model = load(tmp_path)
    assert model.spec == wanted.spec
    assert_same(model.params, wanted.params)

    write_safetensors(tmp_path / "model.safetensors", tensors | {"lm_head.weight": embed + 1})
    model = load(tmp_path)
    assert not model.spec.tie_embeddings
    np.testing.assert_array_equal(model.params["lm_head"], embed + 1)

    del tensors["model.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors | {"lm_head.weight": embed})
    assert_same(load(tmp_path).params, wanted.params)


@pytest.mark.parametrize("wrong", [np.float32(1).reshape(()), np.ones(320, np.float32)], ids=["scalar", "vector"])
def test_tied_embeddings_that_are_no_matrices_are_refused_by_name(wrong: np.ndarray, tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["llama-tied"], 0, tmp_path)
    both = {"lm_head.weight": wrong, "model.embed_tokens.weight": wrong}
    write_safetensors(tmp_path / "model.safetensors", tensors_of(tmp_path) | both)
    with pytest.raises(ModelLoadError, match=r"(lm_head|embed_tokens)\.weight has shape \[(320)?\], config\.json"):
        load(tmp_path)


def test_an_index_wins_over_a_single_file_that_is_left_over(llama: Path) -> None:
    tensors = tensors_of(llama)
    write_shards(llama)
    write_safetensors(llama / "model.safetensors", {"lm_head.weight": tensors["lm_head.weight"]})
    with Checkpoint(llama) as checkpoint:
        assert set(checkpoint.names) == set(tensors)


class TestRefused:
    """Each error names the file, the tensor and what to do. No array is made on the device before it."""

    @pytest.fixture(autouse=True)
    def no_device_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("memory was taken before the check"))

    def test_a_missing_tensor(self, llama: Path) -> None:
        tensors = tensors_of(llama)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        write_safetensors(llama / "model.safetensors", tensors)
        with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
            load(llama)

    def test_many_missing_tensors(self, llama: Path) -> None:
        change_config(llama, num_hidden_layers=4)
        with pytest.raises(ModelLoadError, match=r"tensors model\.layers\.2\.\S+, \S+, \S+ and 15 others are missing"):
            load(llama)

    def test_too_many_tensors(self, llama: Path) -> None:
        change_config(llama, num_hidden_layers=1)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: tensors model\.layers\.1\..* more than config"):
            load(llama)

    def test_more_layers_than_any_file_could_have(self, llama: Path) -> None:
        change_config(llama, num_hidden_layers=10**12)
        with pytest.raises(ModelLoadError, match="num_hidden_layers=1000000000000, but the weights have only 21 tens"):
            load(llama)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": 1}, "architectures=1"),
            ({"rope_theta": [1]}, r"rope_theta=\[1\]"),
            ({"hidden_act": {}}, "hidden_act={}"),
            ({"num_attention_heads": "8"}, "num_attention_heads='8'"),
            ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 8}, "config.json calls for .* fits no memory"),
            ({"eos_token_id": -1}, "eos_token_id=-1 must be a token id .* from 0 to 319"),
            ({"eos_token_id": [2, 320]}, r"eos_token_id=\[2, 320\] must be"),
        ],
        ids=str,
    )
    def test_impossible_values(self, llama: Path, changes: dict[str, Any], message: str) -> None:
        change_config(llama, **changes)
        with pytest.raises(ModelLoadError, match=message):
            load(llama)

    def test_another_shape(self, llama: Path) -> None:
        change_config(llama, intermediate_size=100)
        message = r"model\.safetensors: model\.layers\.0\.mlp\.\S+ has shape \[\d+, \d+\], config.json calls for"
        with pytest.raises(ModelLoadError, match=message):
            load(llama)

    def test_integers_as_weights(self, llama: Path) -> None:
        tensors = tensors_of(llama)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.uint8)
        write_safetensors(llama / "model.safetensors", tensors)
        with pytest.raises(ModelLoadError, match=r"lm_head\.weight is U8; supported are"):
            load(llama)

    def test_a_missing_shard(self, llama: Path) -> None:
        shards = write_shards(llama)
        (llama / shards[1]).unlink()
        with pytest.raises(ModelLoadError, match=f"{shards[1]} is missing; .* lists model"):
            load(llama)

    def test_a_truncated_shard(self, llama: Path) -> None:
        shards = write_shards(llama)
        data = (llama / shards[1]).read_bytes()
        (llama / shards[1]).write_bytes(data[: len(data) // 2])
        with pytest.raises(ModelLoadError, match=rf"{shards[1]}: tensor \S+ should end at byte .* truncated"):
            load(llama)

    def test_an_index_of_another_checkpoint(self, llama: Path) -> None:
        shards = write_shards(llama)
        tensors = tensors_of(llama)
        write_safetensors(llama / shards[1], {"lm_head.weight": tensors["lm_head.weight"]})
        with pytest.raises(ModelLoadError, match=r"has no tensor \S+, but model\.safetensors\.index\.json lists it"):
            load(llama)

    def test_an_index_that_leaves_the_folder(self, llama: Path) -> None:
        write_shards(llama)
        (llama / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret"}}')
        with pytest.raises(ModelLoadError, match="must be a file in the same folder"):
            load(llama)

    def test_shards_without_an_index(self, llama: Path) -> None:
        write_shards(llama)
        (llama / "model.safetensors.index.json").unlink()
        with pytest.raises(ModelLoadError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
            load(llama)

    def test_pickles(self, llama: Path) -> None:
        (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
        with pytest.raises(ModelLoadError, match=r"only pytorch_model\.bin.*Supported are model\.safetensors"):
            load(llama)

    def test_no_config(self, llama: Path) -> None:
        (llama / "config.json").unlink()
        with pytest.raises(ModelLoadError, match=r"config\.json is missing: model must be a folder"):
            load(llama)

    @pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
    def test_a_config_that_is_not_an_object(self, llama: Path, text: str) -> None:
        (llama / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            load(llama)

    def test_an_unknown_dtype(self, llama: Path) -> None:
        with pytest.raises(RequestError, match=r"^dtype must be auto, bfloat16, float16, float32, got 'int8'"):
            load(llama, dtype="int8")

    def test_a_model_with_its_own_code(self, llama: Path) -> None:
        change_config(llama, architectures=["TinyForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling.Tiny"})
        for trust in (False, True):
            with pytest.raises(ModelLoadError, match=r"TinyForCausalLM is not supported .*auto_map.*supported: Llama"):
                load(llama, trust_remote_code=trust)


def test_trust_remote_code_is_accepted_for_supported_models(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jpaged"):
        load(llama, trust_remote_code=True)
    assert "the checkpoint's code is not needed and not run" in caplog.text


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_dtypes(llama: Path, stored: str, asked: str) -> None:
    source, target = (np.dtype(getattr(ml_dtypes, n, None) or n) for n in (stored, asked))
    tensors = {name: tensor.astype(source) for name, tensor in tensors_of(llama).items()}
    write_safetensors(llama / "model.safetensors", tensors)
    model = load(llama, dtype=asked)
    assert model.dtype == target
    np.testing.assert_array_equal(model.params["embed"], tensors["model.embed_tokens.weight"].astype(target))


@pytest.mark.parametrize("key", ["torch_dtype", "dtype", None])
@pytest.mark.parametrize("native", [True, False])
def test_dtype_auto(
    llama: Path, key: str | None, native: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto is the config's dtype, under either key, else the weights'.

    On CPU before JAX 0.11 it is float32, logged, unless native kernels compute all products.
    """
    bf16 = np.dtype(ml_dtypes.bfloat16)
    write_safetensors(llama / "model.safetensors", {n: t.astype(bf16) for n, t in tensors_of(llama).items()})
    change_config(llama, **{"torch_dtype": None, "dtype": None} | ({key: "bfloat16"} if key else {}))
    monkeypatch.setattr(dtypes, "has_native_matmul", lambda spec, dtype: native)
    with caplog.at_level(logging.INFO, "jpaged"):
        dtype = load(llama, dtype="auto").dtype
    old = jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu" and not native
    assert dtype == (np.dtype(np.float32) if old else bf16)
    assert ("converts every 16-bit matrix" in caplog.text) == old


def test_weights_beyond_the_range_of_float16(llama: Path) -> None:
    tensors = tensors_of(llama)
    tensors["model.norm.weight"][3] = 1e5
    write_safetensors(llama / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has values beyond the range of float16"):
        load(llama, dtype="float16")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_an_error_of_the_reading_thread_leaves_no_mapped_file(llama: Path) -> None:
    """Without the garbage collector: no cycle keeps the error's frames."""
    tensors = tensors_of(llama)
    tensors["model.norm.weight"][3] = 1e5
    write_safetensors(llama / "model.safetensors", tensors)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ModelLoadError):
            load(llama, dtype="float16")
        assert str(llama) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_generation_config(llama: Path) -> None:
    assert load(llama).eos_token_ids == (2,)  # config.json's
    (llama / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [5, 7]}')
    model = load(llama)
    assert model.generation_config["temperature"] == 0.6
    assert model.eos_token_ids == (5, 7)
    assert model.generation_config["bos_token_id"] == 1
    (llama / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ModelLoadError, match=r"eos_token_id=\['</s>'\] must be a token id"):
        load(llama)


def test_no_tokenizer_is_only_a_warning(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(llama).tokenizer is None
    assert "prompts must be token ids" in caplog.text


_MEASURE = """
import sys
from pathlib import Path
import jax
from jpaged.config import EngineConfig
from jpaged.loading import load_model

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

jax.block_until_ready(jax.numpy.zeros(8) + 1)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
model = load_model(EngineConfig(model=sys.argv[1], dtype=sys.argv[2]))
leaves = jax.tree.leaves(model.params)
print(status("VmHWM") - before, sum(a.nbytes for a in leaves), max(a.nbytes for a in leaves))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_peak_host_memory(tmp_path: Path) -> None:
    """In addition to the parameters, loading needs less memory than one fused tensor plus 200 MB.

    VmHWM is the peak of resident memory, which includes the pages of the mapped file. The test passes because a
    tensor's pages are released as soon as the tensor is copied.
    """
    config = BY_NAME["llama"].config | {
        "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }  # fmt: skip
    noise = np.random.default_rng(0).integers(0x3000, 0x3F00, 1 << 24, dtype=np.uint16)  # bf16 between 5e-10 and 0.5
    for dtype in ("bfloat16", "float32"):
        folder = tmp_path / dtype
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
        tensors = {
            name: np.resize(noise, np.prod(shape)).view(ml_dtypes.bfloat16).astype(kind).reshape(shape)
            for name, shape in tensor_shapes(config).items()
        }
        write_safetensors(folder / "model.safetensors", tensors)
        del tensors
        for target in ("float32",) if dtype == "float32" else ("bfloat16", "float32"):
            done = subprocess.run(
                [sys.executable, "-c", _MEASURE, str(folder), target], capture_output=True, text=True, timeout=250,
                cwd=Path(__file__).parents[2], check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            grown, held, largest = map(int, done.stdout.split())
            print(f"{dtype} as {target}: {held / 1e6:.0f} MB held, {(grown - held) / 1e6:.0f} MB above it at the peak")
            assert grown - held < largest + 200e6, (dtype, target)
        shutil.rmtree(folder)


def test_loaded_model_is_frozen(llama: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(llama).spec = None
