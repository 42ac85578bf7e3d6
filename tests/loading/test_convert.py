"""`jpaged convert`: its files, the same model, the original files restored bit for bit, and refused inputs."""

import filecmp
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading import convert as converting
from jpaged.loading import load_model
from jpaged.loading.convert import convert, export
from jpaged.loading.converted_folder import Manifest
from jpaged.loading.folder import complete_or_gone
from tests.golden.checkpoints import BY_NAME, NUM_TOKENS, Variant, tensor_shapes, write_checkpoint, write_safetensors
from tests.golden.pooling import BARE_QWEN3, QWEN3_CLASSIFIER
from tests.loading.gguf_files import write_gguf
from tests.support.checkpoint_files import assert_same, change_config, tensors_of, write_shards
from tests.support.dense_leaves import dense
from tests.support.tiny_engine import sampling_programs

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SMALL_FILES = {"generation_config.json": '{"eos_token_id": 2}', "tokenizer_config.json": "{}", "merges.txt": "a b\n"}


def write(folder: Path, model: str | Variant, dtype: str = "float32") -> Path:
    """Write a tiny checkpoint in a dtype, with small files like those of real checkpoints."""
    write_checkpoint(BY_NAME[model] if isinstance(model, str) else model, 3, folder)
    tensors = {name: values.astype(DTYPES[dtype]) for name, values in tensors_of(folder).items()}
    write_safetensors(folder / "model.safetensors", tensors)
    change_config(folder, torch_dtype=dtype)
    for file, text in SMALL_FILES.items():
        (folder / file).write_text(text)
    (folder / "README.md").write_text("not part of the model")
    return folder


def load(folder: Path, dtype: str = "auto", runner: str = "auto"):
    """Load a folder. Its tokenizer files are dummies, and are deleted first."""
    for scrap in ("tokenizer_config.json", "merges.txt"):
        (folder / scrap).unlink(missing_ok=True)
    return load_model(EngineConfig(model=str(folder), dtype=dtype, runner=runner))


def assert_same_files(a: Path, b: Path) -> None:
    """Check that the files of b are those of a, byte for byte. a may also have a README.md."""
    names = sorted(path.name for path in b.iterdir())
    assert names == sorted(path.name for path in a.iterdir() if path.name != "README.md")
    assert filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


def test_names_of_the_source_are_kept_where_the_dtype_is_changed(tmp_path: Path) -> None:
    """A tensor with two possible names in this family keeps the name it had."""
    source = write(tmp_path / "source", "falcon-new")
    convert(str(source), tmp_path / "out", dtype="bfloat16")
    assert not export(str(tmp_path / "out"), tmp_path / "back").same_files
    assert tensors_of(tmp_path / "back").keys() == tensors_of(source).keys()


def test_the_pooling_config_is_copied(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "qwen3")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    convert(str(source), tmp_path / "out")
    export(str(tmp_path / "out"), tmp_path / "back")
    for folder in ("source", "out", "back"):
        with pytest.raises(ModelLoadError, match="pooling by mean_tokens is not supported"):
            load_model(EngineConfig(model=str(tmp_path / folder), runner="pooling"))


def test_mxfp4_stays_unpacked(tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["gpt-oss-mxfp4"], 3, tmp_path / "source")
    wanted = dense(load(tmp_path / "source", "float32").params)
    assert not convert(str(tmp_path / "source"), tmp_path / "out", dtype="float32").same_files
    assert_same(load(tmp_path / "out").params, wanted)
    export(str(tmp_path / "out"), tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert_same(load(tmp_path / "back").params, wanted)


def test_a_gguf_file_is_converted(tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["llama"], 3, tmp_path / "source")
    file = write_gguf(tmp_path / "model.gguf", BY_NAME["llama"].config, tensors_of(tmp_path / "source"))
    wanted = load_model(EngineConfig(model=str(file), dtype="float32"))
    convert(str(file), tmp_path / "out")
    there = load_model(EngineConfig(model=str(tmp_path / "out"), dtype="float32"))
    assert there.spec == wanted.spec
    assert_same(there.params, wanted.params)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "llama", "llama")


CONVERTED = [
    ("llama-all-bias-tied", "float16"), ("gpt2", "float32"), ("gpt-oss", "float16"), ("deepseek-v3", "bfloat16"),
    ("llama", "bfloat16"), ("llama-head-dim-40", "float32"), ("qwen3", "bfloat16"), ("gemma2", "bfloat16"),
    ("phi3", "float16"), ("starcoder2", "float32"), ("gpt2", "float16"), ("opt-125m", "float16"),
    ("opt-350m", "bfloat16"), ("opt-no-bias", "float32"), ("gpt-neox", "bfloat16"), ("falcon-new", "float32"),
    ("mixtral", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*CONVERTED[:4], *(pytest.param(*variant, marks=pytest.mark.slow) for variant in CONVERTED[4:])],
)
def test_converted_and_restored_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", name, dtype)
    written = convert(str(source), tmp_path / "out")
    assert (written.dtype.name, written.same_files) == (dtype, True)
    assert written.num_bytes == sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert export(str(tmp_path / "out"), tmp_path / "back").same_files
    assert_same_files(source, tmp_path / "back")
    for wanted in ("auto", dtype, "float32"):
        there, here = load(source, wanted), load(tmp_path / "out", wanted)
        assert (there.spec, there.dtype) == (here.spec, here.dtype)
        assert jax.tree.structure(there.params) == jax.tree.structure(here.params)
        assert_same(there.params, here.params)
        assert there.generation_config == here.generation_config


@pytest.mark.parametrize("model", [QWEN3_CLASSIFIER, BARE_QWEN3, BY_NAME["llama"]], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", [pytest.param("auto", marks=pytest.mark.slow), "float16"])
def test_models_that_pool(model: Variant, dtype: str, tmp_path: Path) -> None:
    """Test a classifier, a base model without an lm_head, and a causal model whose lm_head is not used."""
    source = write(tmp_path / "source", model, "bfloat16")
    same_files = convert(str(source), tmp_path / "out", dtype=dtype).same_files
    assert export(str(tmp_path / "out"), tmp_path / "back").same_files == same_files == (dtype == "auto")
    if same_files:
        assert_same_files(source, tmp_path / "back")
    assert tensors_of(tmp_path / "back").keys() == tensors_of(source).keys()
    wanted = load(source, "float16", "pooling")
    for folder in (tmp_path / "out", tmp_path / "back"):
        there = load(folder, "float16", "pooling")
        assert there.spec == wanted.spec
        assert there.params.keys() == wanted.params.keys()
        assert_same(there.params, wanted.params)
    assert ("score" in wanted.params, "lm_head" in wanted.params) == (model is QWEN3_CLASSIFIER, False)
    if model is BARE_QWEN3:
        with pytest.raises(ModelLoadError, match=r"lm_head is missing, config\.json calls for .*runner='pooling'"):
            load(tmp_path / "out")


def test_shards_are_restored(llama: Path, tmp_path: Path) -> None:
    shards = write_shards(llama)
    convert(str(llama), tmp_path / "out")
    export(str(tmp_path / "out"), tmp_path / "back")
    assert_same_files(llama, tmp_path / "back")
    assert (tmp_path / "back" / shards[1]).is_file()


@pytest.mark.parametrize("both", ["same", "different", "head only"])
def test_tied_embeddings(both: str, tmp_path: Path) -> None:
    """Equal matrices are stored once, different ones twice. A single matrix may have either name."""
    source = write(tmp_path / "source", "llama-tied", "bfloat16")
    tensors = tensors_of(source)
    embed = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embed if both != "different" else embed * 2
    if both == "head only":
        del tensors["model.embed_tokens.weight"]
    write_safetensors(source / "model.safetensors", tensors)
    convert(str(source), tmp_path / "out")
    assert (tmp_path / "out/params/lm_head").exists() == (both == "different")
    assert not (tmp_path / "out/source/model.safetensors.rest").read_bytes()
    export(str(tmp_path / "out"), tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    assert_same(load(source).params, load(tmp_path / "out").params)


def test_tensors_outside_the_tree_are_restored(tmp_path: Path) -> None:
    """This includes ignored buffers, names without the prefix, and tensors whose dtype differs from most."""
    source = write(tmp_path / "source", "gpt2", "bfloat16")
    tensors = {name.removeprefix("transformer."): value for name, value in tensors_of(source).items()}
    tensors["h.0.attn.bias"] = np.tri(7, dtype=np.uint8)[None, None]
    tensors["h.0.attn.masked_bias"] = np.float32(-1e4).reshape(())
    tensors["ln_f.weight"] = tensors["ln_f.weight"].astype(np.float32) + np.float32(2**-20)
    write_safetensors(source / "model.safetensors", tensors)
    convert(str(source), tmp_path / "out")
    export(str(tmp_path / "out"), tmp_path / "back")
    assert_same_files(source, tmp_path / "back")


def test_zeros_are_stored(llama: Path, tmp_path: Path) -> None:
    """zarr does not write chunks that equal its fill value. They must be written: a missing file is an error."""
    tensors = tensors_of(llama)
    tensors["model.norm.weight"][:] = 0
    write_safetensors(llama / "model.safetensors", tensors)
    convert(str(llama), tmp_path / "out")
    assert not np.asarray(load(tmp_path / "out").params["final_norm"]).any()


def test_another_dtype(tmp_path: Path) -> None:
    """The arrays equal those of a load in the new dtype. The export is a checkpoint of the new dtype."""
    source = write(tmp_path / "source", "gpt2", "float32")
    written = convert(str(source), tmp_path / "out", dtype="bfloat16")
    assert not written.same_files
    wanted = load(source, "bfloat16").params
    assert_same(load(tmp_path / "out", "bfloat16").params, wanted)
    assert not export(str(tmp_path / "out"), tmp_path / "back").same_files
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {array.dtype.name for array in tensors_of(tmp_path / "back").values()} == {"bfloat16"}
    assert tensors_of(tmp_path / "back").keys() == tensors_of(source).keys()
    assert_same(load(tmp_path / "back", "bfloat16").params, wanted)


def test_auto_is_the_checkpoints_own_dtype_on_cpu_too(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "llama", "bfloat16")
    convert(str(source), tmp_path / "out")
    assert Manifest.read(tmp_path / "out").dtype == "bfloat16"


def test_leaves_split_by_columns_are_in_pieces(llama: Path, tmp_path: Path) -> None:
    convert(str(llama), tmp_path / "out")
    for leaf, files in (("layers.0.o", 8), ("layers.1.down", 8), ("layers.0.qkv", 1), ("embed", 1)):
        assert len(list((tmp_path / "out/params" / leaf).glob("[0-9]*"))) == files


def test_orbax_alone_reads_the_tree(llama: Path, tmp_path: Path) -> None:
    """The tree is an ordinary Orbax checkpoint, which Orbax restores with and without a target."""
    convert(str(llama), tmp_path / "out")
    wanted = load(llama).params
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "out/params")
    assert_same(jax.tree.leaves(found), jax.tree.leaves(wanted))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), wanted)
    assert_same(ocp.StandardCheckpointer().restore(tmp_path / "out/params", target), wanted)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_engine_gives_the_recorded_answers(name: str, tmp_path: Path) -> None:
    """The converted folder gives the answers recorded with Transformers."""
    golden = json.loads(BY_NAME[name].answers.read_text())
    write_checkpoint(BY_NAME[name], golden["seed"], tmp_path / "source")
    convert(str(tmp_path / "source"), tmp_path / "out")
    options = {"row_buckets": (8,), "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with sampling_programs(SamplerVariant.GREEDY), LLM(str(tmp_path / "out"), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": answer["prompt"]} for answer in golden["answers"]], params)
    assert [output.outputs[0].token_ids for output in outputs] == [answer["tokens"] for answer in golden["answers"]]


SHARDED = """
import sys, jax, numpy as np
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
from jpaged.loading.orbax_tree import load_tree
assert jax.device_count() == 4
mesh = jax.make_mesh((2, 2), ("x", "y"))
folder = Path(sys.argv[1])
specs = {"qkv": P("x"), "o": P(None, "x"), "gate_up": P(None, ("x", "y")), "down": P("y", "x"), "embed": P("x")}
def target(path, leaf):
    name = path[-1].key
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, specs.get(name, P())))
from jpaged.models.families import spec_of
from jpaged.models.spec import param_shapes
import json
spec = spec_of(json.loads((folder / "config.json").read_text()))
shapes = param_shapes(spec, np.float32)
whole = load_tree(folder / "params", shapes)
found = load_tree(folder / "params", jax.tree_util.tree_map_with_path(target, shapes))
def check(path, a, b):
    assert b.sharding == target(path, a).sharding, path
    for shard in b.addressable_shards:
        assert shard.data.shape == b.sharding.shard_shape(b.shape)
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(a)[shard.index])
jax.tree_util.tree_map_with_path(check, whole, found)
assert found["layers"][0]["gate_up"].addressable_shards[0].data.size * 4 == whole["layers"][0]["gate_up"].size
"""


@pytest.mark.slow
def test_a_sharded_target_is_read_into_shards(llama: Path, tmp_path: Path) -> None:
    convert(str(llama), tmp_path / "out")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_warnings_of_orbax_do_not_reach_the_user(llama: Path, tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        convert(str(llama), tmp_path / "out")
    assert not [record for record in caplog.records if record.name == "absl"]


MEASURE = """
import sys
from pathlib import Path
import jax
from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.loading.convert import convert, export

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def grown(call):
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    result = call()
    return result, status("VmHWM") - before

jax.block_until_ready(jax.numpy.zeros(8) + 1)
source, out, back = map(Path, sys.argv[1:])
print(grown(lambda: convert(str(source), out))[1])
print(grown(lambda: export(str(out), back))[1])
model, peak = grown(lambda: load_model(EngineConfig(model=str(out), dtype="bfloat16")))
print(peak - sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_peak_host_memory(tmp_path: Path) -> None:
    """The model has 460 MB. convert and export have one array of 34 MB in memory at a time, loading has a few."""
    source = tmp_path / "source"
    source.mkdir()
    config = BY_NAME["llama"].config | {
        "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_hidden_layers": 5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).integers(0x3000, 0x3F00, 1 << 24, dtype=np.uint16)  # bf16 between 5e-10 and 0.5
    shapes = tensor_shapes(config)
    tensors = {n: np.resize(noise, np.prod(s)).view(ml_dtypes.bfloat16).reshape(s) for n, s in shapes.items()}
    write_safetensors(source / "model.safetensors", tensors)
    assert (source / "model.safetensors").stat().st_size > 450e6
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out"), str(tmp_path / "back")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert max(map(int, done.stdout.split())) < 250e6


class TestRefused:
    """Errors are raised before anything is written, and before device memory is allocated."""

    def test_out_that_exists(self, llama: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        convert(str(llama), tmp_path / "empty")
        with pytest.raises(RequestError, match=r"^out.* not empty.*, got "):
            convert(str(llama), tmp_path / "empty")
        with pytest.raises(RequestError, match=r"^out: there is a file.*, got "):
            convert(str(llama), llama / "config.json")

    def test_a_full_disk(self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        full = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(RequestError, match=r"needs 1,\d\d\d,\d\d\d bytes, and .* has 1,000 free"):
            convert(str(llama), tmp_path / "a/b/out")
        assert not (tmp_path / "a").exists()

    def test_a_model_that_is_not_supported(self, llama: Path, tmp_path: Path) -> None:
        change_config(llama, architectures=["NewForCausalLM"])
        with pytest.raises(ModelLoadError, match="NewForCausalLM is not supported"):
            convert(str(llama), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_converting_twice_and_exporting_an_unconverted_folder(self, llama: Path, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="--to hf is for folders that jpaged convert wrote"):
            export(str(llama), tmp_path / "out")
        convert(str(llama), tmp_path / "out")
        with pytest.raises(RequestError, match="is converted already"):
            convert(str(tmp_path / "out"), tmp_path / "again")

    def test_values_beyond_float16(self, llama: Path, tmp_path: Path) -> None:
        tensors = tensors_of(llama)
        tensors["model.norm.weight"][3] = 1e6
        write_safetensors(llama / "model.safetensors", tensors)
        with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has values beyond the range of float16"):
            convert(str(llama), tmp_path / "half", dtype="float16")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["llama"]  # nothing is left
        convert(str(llama), tmp_path / "out")
        with pytest.raises(ModelLoadError, match="final_norm has values beyond the range of float16"):
            load(tmp_path / "out", "float16")


@pytest.mark.parametrize("when", [0, 5])
def test_an_interrupted_run_leaves_nothing(when: int, llama: Path, tmp_path: Path, monkeypatch) -> None:
    calls = []

    def assemble(*args):
        if len(calls) == when:
            raise KeyboardInterrupt
        calls.append(args)
        return original(*args)

    original = converting.assemble
    monkeypatch.setattr(converting, "assemble", assemble)
    with pytest.raises(KeyboardInterrupt):
        convert(str(llama), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama"]


class TestDamaged:
    """Each error names the file and what to do. No array is made on the device before it."""

    @pytest.fixture
    def out(self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        convert(str(llama), tmp_path / "out")
        monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("memory was taken before the check"))
        return tmp_path / "out"

    def test_a_truncated_leaf(self, out: Path) -> None:
        leaf = out / "params/layers.1.down/0.3"
        os.truncate(leaf, 1000)
        with pytest.raises(ModelLoadError, match=r"layers\.1\.down/0\.3: it has 1,000 bytes instead of 3,072.*again"):
            load(out)

    def test_a_missing_leaf(self, out: Path) -> None:
        (out / "params/embed/0.0").unlink()
        with pytest.raises(ModelLoadError, match=r"embed/0\.0: it is missing.*convert the model again"):
            load(out)

    @pytest.mark.parametrize("path", ["_METADATA", "embed/.zarray"])
    @pytest.mark.parametrize("text", [None, '{"tree', "{}", "[]"])
    def test_broken_metadata(self, path: str, text: str | None, out: Path) -> None:
        (out / "params" / path).unlink()
        if text is not None:
            (out / "params" / path).write_text(text)
        with pytest.raises(ModelLoadError, match=rf"params/{path}: it cannot be read.*convert the model again"):
            load(out)

    def test_a_leaf_of_another_kind(self, out: Path) -> None:
        path = out / "params/embed/.zarray"
        values = json.loads(path.read_text())
        for changes in (
            {"chunks": [1, 64]}, {"chunks": [0, 64]}, {"chunks": [320, 63]}, {"chunks": [64]}, {"chunks": 64},
            {"compressor": {"id": "zstd"}}, {"dtype": "<x9"}, {"dtype": "<f2"},
        ):
            path.write_text(json.dumps(values | changes))
            with pytest.raises(ModelLoadError, match=r"embed.*convert the model again"):
                load(out)

    def test_no_weights(self, out: Path) -> None:
        shutil.rmtree(out / "params")
        with pytest.raises(ModelLoadError, match=r"params/_METADATA: it cannot be read.*convert the model again"):
            load(out)

    @pytest.mark.parametrize("text", ["{", "{}", "[]", '{"format": 1}', '{"format": 1, "dtype": "int3"}'])
    def test_a_broken_manifest(self, text: str, out: Path) -> None:
        (out / "jpaged.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"jpaged\.json"):
            load(out)

    def test_another_format(self, out: Path) -> None:
        path = out / "jpaged.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99, "version": "9.1"}))
        with pytest.raises(ModelLoadError, match=r"format 99, written by jpaged 9\.1.*reads format 2: convert"):
            load(out)

    def test_config_of_another_model(self, out: Path) -> None:
        change_config(out, vocab_size=321)
        with pytest.raises(ModelLoadError, match=r"embed is float32\[320, 64\], config.json calls for float32\[321"):
            load(out)
        change_config(out, vocab_size=320, num_hidden_layers=1)
        with pytest.raises(ModelLoadError, match=r"attn_norm is float32\[2, 64\], config.json calls for float32\[1"):
            load(out)
        change_config(out, num_hidden_layers=10**9)
        with pytest.raises(ModelLoadError, match="num_hidden_layers=1000000000"):
            load(out)

    def test_export_without_a_header(self, out: Path, tmp_path: Path) -> None:
        (out / "source/model.safetensors.header").unlink()
        with pytest.raises(ModelLoadError, match=r"source: the saved parts of model\.safetensors cannot be read"):
            export(str(out), tmp_path / "back")
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_the_target_of_a_link_is_written(exists: bool, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    with complete_or_gone(tmp_path / "link") as work:
        (work / "config.json").write_text("{}")
    assert (tmp_path / "target/config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]
