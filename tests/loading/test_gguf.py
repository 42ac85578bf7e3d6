"""GGUF files: equal to the safetensors checkpoint they were made from, or refused with a clear error."""

import contextlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from jpaged.loading.gguf_file import GgufFile
from tests.golden.checkpoints import BY_NAME, Variant, prompts, write_checkpoint
from tests.loading.ggml_blocks import BLOCKS, random_blocks, values_of
from tests.loading.gguf_files import add_metadata, add_tokenizer, converted, finish, interleaved, write_gguf
from tests.support.dense_leaves import dense
from tests.support.tiny_engine import sampling_programs

LLAMA = BY_NAME["llama"].config
# GGUF files have no query scaling: it is head_dim.
GEMMA2 = Variant("gemma2", BY_NAME["gemma2"].config | {"query_pre_attn_scalar": 16})
YARN = Variant("llama-yarn-turns", LLAMA | {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 16.0, "beta_slow": 2.0,
}})  # fmt: skip
# A GGUF file always has a rope base. A config.json without one means 10,000, and Mixtral's means 1,000,000.
MIXTRAL = Variant("mixtral-theta", BY_NAME["mixtral"].config | {"rope_theta": 1000000.0})
VARIANTS = [YARN, GEMMA2, MIXTRAL] + [BY_NAME[name] for name in (
    "llama", "llama-theta", "llama-linear", "llama-llama3", "llama-yarn", "llama-tied", "llama-mqa", "llama-head-dim-8",
    "llama-head-dim-40", "llama-attention-bias", "llama-mlp-bias", "mistral", "qwen2", "qwen1.5", "qwen3", "gemma",
    "phi3", "phi3-partial-window", "phi3-longrope-partial",
)]  # fmt: skip


def load(path: Path, **options: Any):
    return load_model(EngineConfig(**{"model": str(path), "dtype": "float32", **options}))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with Checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.array(name)) for name in checkpoint.names}


def write_both(variant: Variant, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Write a model as a folder and as a GGUF file."""
    write_checkpoint(variant, 0, folder / "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    return folder / "hf", write_gguf(folder / "model.gguf", config, tensors_of(folder / "hf"), **options)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_float32_is_the_safetensors_model_bit_for_bit(variant: Variant, tmp_path: Path) -> None:
    """The same spec and the same parameters."""
    folder, file = write_both(variant, tmp_path)
    wanted, model = load(folder), load(file)
    assert model.spec == wanted.spec
    jax.tree.map(np.testing.assert_array_equal, model.params, wanted.params)


SIZES = {
    "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "llama-llama3", "qwen2"])
def test_answers_are_the_same(name: str, tmp_path: Path) -> None:
    folder, file = write_both(BY_NAME[name], tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)  # logprobs need the FULL program
    asked = [{"prompt_token_ids": ids} for ids in prompts(320)[:4]]
    answers = []
    for model in (folder, file):
        with sampling_programs(SamplerVariant.FULL):
            llm = LLM(str(model), dtype="float32", **SIZES)
        outputs = llm.generate(asked, params)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert answers[0] == answers[1]


WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}


def write_blocks(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Write a small Llama of random blocks. Returns the bytes of its matrices."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (64, 256), "output": (64, 256), "blk.0.attn_q": (256, 256), "blk.0.attn_k": (128, 256),
              "blk.0.attn_v": (128, 256), "blk.0.attn_output": (256, 256), "blk.0.ffn_gate": (256, 256),
              "blk.0.ffn_up": (256, 256), "blk.0.ffn_down": (256, 256)}  # fmt: skip
    blocks = {f"{name}.weight": random_blocks(kind, *shape, rng) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, WIDE)
    for name, data in blocks.items():
        # for quantized types the writer expects the shape in bytes
        plain = {"F32": np.float32, "F16": np.float16}.get(kind)
        writer.add_tensor(name, data if plain is None else data.view(plain), raw_dtype=Type[kind])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    finish(writer)
    return blocks


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_quantization_is_decoded_as_the_format_defines(kind: str, tmp_path: Path) -> None:
    """Compare the loaded weights with ggml_blocks."""
    blocks = write_blocks(tmp_path / "m.gguf", kind)
    params = dense(load(tmp_path / "m.gguf").params)
    qkv, layer = np.asarray(params["layers"][0]["qkv"]), params["layers"][0]
    found = {
        "token_embd": params["embed"], "blk.0.ffn_gate": layer["gate_up"][0], "blk.0.ffn_down": layer["down"],
        "blk.0.attn_v": qkv[:, -1].reshape(128, 256),
        "blk.0.attn_q": interleaved(qkv[:, :-2].reshape(256, 256), 4),
        "blk.0.attn_k": interleaved(qkv[:, -2].reshape(128, 256), 2),
    }  # fmt: skip
    for name, values in found.items():
        wanted = values_of(kind, blocks[f"{name}.weight"])
        np.testing.assert_allclose(values, wanted, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32"), ("Q8_0", "bfloat16")]
)
def test_the_files_dtype(kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto keeps the stored dtype, and gives bfloat16 for quantized weights (float32 on CPU with this JAX)."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    write_blocks(tmp_path / "m.gguf", kind)
    assert load(tmp_path / "m.gguf", dtype="auto").dtype.name == dtype


def test_experts_of_mixtral(tmp_path: Path) -> None:
    """A merged tensor is split into its experts. Old files have one tensor per expert."""
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    rng, at = np.random.default_rng(1), "model.layers.0."
    shapes = {f"{at}self_attn.{n}_proj.weight": (rows, 64) for n, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    shapes |= {f"{at}block_sparse_moe.gate.weight": (3, 64), f"{at}input_layernorm.weight": (64,)}
    for expert in range(3):
        for name, shape in {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}.items():
            shapes[f"{at}block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    shapes |= {"model.embed_tokens.weight": (320, 64), "lm_head.weight": (320, 64)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    with GgufCheckpoint(write_gguf(tmp_path / "m.gguf", config, tensors)) as checkpoint:
        assert set(checkpoint.names) == set(tensors)
        for name, values in tensors.items():
            assert checkpoint.entry(name).shape == values.shape
            np.testing.assert_array_equal(checkpoint.array(name), values)
            checkpoint.release(name)
        assert checkpoint.config["architectures"] == ["MixtralForCausalLM"]
        assert (checkpoint.config["num_local_experts"], checkpoint.config["num_experts_per_tok"]) == (3, 2)
        name = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
        assert checkpoint.label(name) == f"blk.0.ffn_up_exps.weight ({name})"

    def one_by_one(writer: gguf.GGUFWriter) -> None:
        for expert in range(3):
            values = tensors[f"{at}block_sparse_moe.experts.{expert}.w3.weight"]
            writer.add_tensor(f"blk.0.ffn_up.{expert}.weight", values)

    rest = {name: values for name, values in tensors.items() if ".w3." not in name}
    with GgufCheckpoint(write_gguf(tmp_path / "old.gguf", config, rest, add=one_by_one)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.array(name), tensors[name])


@pytest.mark.slow
def test_the_demo_model_with_its_tokenizer(tmp_path: Path) -> None:
    """A whole model with bfloat16 weights and a tokenizer gives the same text as the folder it was made from."""
    demo = Path(__file__).parents[2] / "jpaged" / "demo_model"
    config = json.loads((demo / "config.json").read_text())
    made = json.loads((demo / "tokenizer.json").read_text())["model"]
    vocab = sorted(made["vocab"], key=lambda token: made["vocab"][token])

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, vocab, [3] + [1] * (len(vocab) - 1), "gpt2", bos=0, eos=0)
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(merge) for merge in made["merges"]])

    tensors = {name: values.astype(np.float32) for name, values in tensors_of(demo).items()}
    write_gguf(tmp_path / "demo.gguf", config, tensors, Type.BF16, tokenizer)
    params = SamplingParams(max_tokens=12, temperature=0)
    prompt = "def read_json(path):"  # the two ways to split text agree on it
    texts = []
    for model in (demo, tmp_path):  # a folder with one GGUF file is loaded from that file
        with sampling_programs(SamplerVariant.GREEDY):
            llm = LLM(str(model), **SIZES)
        texts.append(llm.generate([prompt], params)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert texts[0]


def test_parts(tmp_path: Path) -> None:
    """A model in several files can be named by any of them, or by its folder."""
    _, whole = write_both(BY_NAME["llama"], tmp_path)
    config, parts = dict(LLAMA), tmp_path / "parts"
    parts.mkdir()
    writer = gguf.GGUFWriter(parts / "m.gguf", "llama", split_max_tensors=8)
    add_metadata(writer, config)
    for name, values in converted(config, tensors_of(tmp_path / "hf")).items():
        writer.add_tensor(name, values)
    finish(writer)
    files = sorted(parts.iterdir())
    assert len(files) == 3
    wanted = load(whole).params
    for path in (*files, parts):
        jax.tree.map(np.testing.assert_array_equal, load(path).params, wanted)
    files[1].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf is missing: the model is split into 3 files"):
        load(files[0])
    files[0].rename(parts / "other.gguf")
    with pytest.raises(ModelLoadError, match=r"other\.gguf: split\.count=3: this is a part of a model in 3 files"):
        load(parts / "other.gguf")


class TestRefused:
    """Unsupported files are refused before the device is used. The error names the file and what to do."""

    @pytest.fixture
    def tensors(self, tmp_path: Path) -> dict[str, np.ndarray]:
        write_checkpoint(BY_NAME["llama"], 0, tmp_path / "hf")
        return tensors_of(tmp_path / "hf")

    def refused(self, path: Path, message: str) -> None:
        started = time.perf_counter()
        with pytest.raises(ModelLoadError, match=message):
            load_model(EngineConfig(model=str(path)), check=pytest.fail)
        assert time.perf_counter() - started < 1

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("attention.sliding_window", 64, r"llama\.attention\.sliding_window=64 is not supported"),
            ("attention.value_length", 32, r"llama\.attention\.value_length=32 is not supported by jpaged \(only 16"),
            ("rope.dimension_count", 8, r"llama\.rope\.dimension_count=8 is not supported by jpaged \(only 16"),
            ("rope.scaling.type", "longrope", r"llama\.rope\.scaling\.type='longrope' .*only none, linear and yarn"),
            ("rope.scaling.yarn_attn_factor", 2.0, r"llama\.rope\.scaling\.yarn_attn_factor=2\.0 is not supported"),
            ("logit_scale", 0.5, r"llama\.logit_scale=0\.5 is not supported"),
            ("attention.causal", False, r"llama\.attention\.causal=False is not supported"),
            ("brand_new_option", [1, 2], r"llama\.brand_new_option=\[1, 2\] is not supported"),
            ("attention.head_count_kv", [2, 4], r"head_count_kv=\[2, 4\] .*only one value for all layers"),
            ("attention.head_count_kv", 3, r"m\.gguf: its metadata, converted to a config\.json, is refused: "
             r"config\.json: num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
            ("block_count", "two", r"llama\.block_count='two' must be a whole number"),
            ("block_count", 3, r"tensors blk\.2\.attn_q\.weight \(model\.layers\.2\.self_attn\.q_proj\.weight\).* "
             r"missing, which the file's metadata calls for"),
            ("block_count", 1, r"tensors blk\.1\.\S+ \(model\.layers\.1\.\S+\).* more than the file's metadata"),
            ("feed_forward_length", 95, r"blk\.0\.ffn_down\.weight \(model\.layers\.0\.mlp\.down_proj\.weight\) has "
             r"shape \[64, 96\], the file's metadata calls for \[64, 95\]"),
            ("embedding_length", None, r"llama\.embedding_length is missing"),
        ],
    )  # fmt: skip
    def test_keys(self, key: str, value: Any, message: str, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        def change(writer: gguf.GGUFWriter) -> None:
            keys = writer.kv_data[0]
            keys.pop(f"llama.{key}", None)
            kinds = gguf.GGUFValueType
            if isinstance(value, list):
                writer.add_array(f"llama.{key}", value)
            elif value is not None:
                kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
                writer.add_key_value(f"llama.{key}", value, kind)

        self.refused(write_gguf(tmp_path / "m.gguf", LLAMA, tensors, add=change), message)

    def test_architecture(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", LLAMA | {"model_type": "mistral"}, tensors)
        path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
        self.refused(path, r"general\.architecture='mamba' is not supported .*supported: llama, qwen2, qwen3, gemma")

    def test_a_part_for_a_model(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors)
        path.write_bytes(path.read_bytes().replace(b"\5\0\0\0\0\0\0\0model", b"\5\0\0\0\0\0\0\0lorax"))
        self.refused(path, r"general\.type='lorax' is not a language model")

    def test_rope_freqs_of_another_kind(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        for divisors in (np.arange(1, 9, dtype=np.float32), np.ones(8, np.float32), np.ones(7, np.float32)):
            def add(writer: gguf.GGUFWriter, divisors: np.ndarray = divisors) -> None:
                writer.add_tensor("rope_freqs.weight", divisors)

            path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors, add=add)
            self.refused(path, r"tensor rope_freqs\.weight is not the scaling of Llama 3\.1")

    def test_half_of_longrope(self, tmp_path: Path) -> None:
        write_checkpoint(BY_NAME["phi3"], 0, tmp_path / "phi3")

        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32))

        path = write_gguf(tmp_path / "m.gguf", BY_NAME["phi3"].config, tensors_of(tmp_path / "phi3"), add=add)
        self.refused(path, r"tensor rope_factors_long\.weight has no tensor rope_factors_short\.weight")

    def test_more_tokens_than_rows(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        def add(writer: gguf.GGUFWriter) -> None:
            add_tokenizer(writer, [f"t{i}" for i in range(321)], [1] * 321, "gpt2")

        path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors, add=add)
        embedding = r"the embedding \(token_embd\.weight\) has 320 rows"
        self.refused(path, rf"tokenizer\.ggml\.tokens has 321 tokens, but {embedding}")

    def test_quantization(self, tmp_path: Path) -> None:
        write_blocks(tmp_path / "m.gguf", "Q8_0")
        data = (tmp_path / "m.gguf").read_bytes()
        before = b"blk.0.ffn_up.weight" + struct.pack("<IQQ", 2, 256, 256)
        kind = before + struct.pack("<I", 8)
        assert data.count(kind) == 1
        for number, shown in ((9, "Q8_1"), (99, "type 99")):
            (tmp_path / "m.gguf").write_bytes(data.replace(kind, before + struct.pack("<I", number)))
            message = rf"tensor blk\.0\.ffn_up\.weight is quantized as {shown}, which is not supported \(only F32, "
            self.refused(tmp_path / "m.gguf", message)

    def test_damaged_files(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors)
        whole = path.read_bytes()
        for data, message in (
            (b"", "it is too short; the file is damaged or not a GGUF file"),
            (b"PK\3\4" + whole[4:], 'it does not start with "GGUF"; the file is damaged or not a GGUF file'),
            (whole[:4] + struct.pack("<I", 1) + whole[8:], "of version 1; supported are versions 2 and 3"),
            (whole[:4] + struct.pack(">I", 3) + whole[8:], "written for a big-endian machine"),
            (whole[:-1], r"tensor \S+ should end at byte [\d,]+, the file ends at [\d,]+: truncated"),
            (whole + bytes(32), r"32 bytes follow tensor output\.weight"),
            (whole[:300], r"its header cannot be read at byte [\d,]+ .*truncated"),
            (whole[:8] + struct.pack("<Q", 2**60) + whole[16:], "header cannot be read|tensor .* has .* dimensions"),
        ):
            path.write_bytes(data)
            self.refused(path, rf"m\.gguf: .*{message}")

    def test_offsets_that_leave_a_gap_or_another_order(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        """ggml wants every tensor where the one before it in the header ends. A wrong offset reads other numbers."""
        path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors)
        whole = path.read_bytes()
        at = {name: whole.index(name.encode() + struct.pack("<I", 1)) + len(name) + 16 for name in
              ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")}  # fmt: skip
        first, second = (whole[begin : begin + 8] for begin in at.values())
        for changes in (
            dict(zip(at.values(), (second, first), strict=True)),
            {at["blk.0.attn_norm.weight"]: struct.pack("<Q", struct.unpack("<Q", first)[0] + 32)},
        ):
            data = bytearray(whole)
            for begin, offset in changes.items():
                data[begin : begin + 8] = offset
            path.write_bytes(data)
            self.refused(path, r"tensor blk\.0\.attn_norm\.weight begins at byte [\d,]+, not at [\d,]+, where tensor ")

    @pytest.mark.parametrize(
        ("variant", "name"),
        [("llama-llama3", "rope_freqs.weight"), ("phi3-longrope-partial", "rope_factors_long.weight")],
    )
    def test_divisors_that_are_no_numbers(self, variant: str, name: str, tmp_path: Path) -> None:
        _, path = write_both(BY_NAME[variant], tmp_path)
        whole, file = path.read_bytes(), GgufFile(path)
        begin = file.entries[name].begin
        file.close()
        for value in (np.nan, np.inf, 0.0, -1.0):
            path.write_bytes(whole[:begin] + struct.pack("<f", value) + whole[begin + 4 :])
            self.refused(path, rf"tensor {name} has a factor of {value:g}: must be finite and above 0")

    def test_divisors_that_are_quantised(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_freqs.weight", np.full((1, 34), 255, np.uint8), raw_dtype=Type.Q8_0)

        path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors, add=add)
        self.refused(path, r"tensor rope_freqs\.weight is Q8_0\[1, 32\], but must be F32, F16")

    def test_paths(self, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
        self.refused(tmp_path / "no.gguf", r"there is no file '.*no\.gguf'; a file on the hub must be fetched first")
        self.refused(Path("owner/no.gguf"), r"there is no file 'owner/no\.gguf'")
        for name in ("a.gguf", "b.gguf"):
            write_gguf(tmp_path / name, LLAMA, tensors)
        self.refused(tmp_path, r"has 2 GGUF models: name one of the files, for example .*a\.gguf; the others are b\.")


@settings(max_examples=150)
@given(data=st.data())
def test_noise_is_loaded_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With one byte of the header changed, or the file cut, it is loaded or refused. No other error is raised."""
    folder = tmp_path_factory.getbasetemp() / "gguf-noise"
    if not folder.exists():
        write_both(BY_NAME["llama"], folder)
    whole = bytearray((folder / "model.gguf").read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        whole[data.draw(st.integers(0, 2400))] = data.draw(st.integers(0, 255))
    path = folder / "noise.gguf"
    path.write_bytes(whole)
    with contextlib.suppress(ModelLoadError):
        load(path)


def test_eos_ids(tmp_path: Path) -> None:
    """eos ids come from the keys, and from control tokens whose text ends a turn."""
    tokens = ["<|endoftext|>", "a", "<|im_end|>", "<end_of_turn>", "<other>"]

    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, tokens, [3, 1, 3, 1, 3], "gpt2", bos=0, eos=4, eot=2)
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["a a"])

    _, path = write_both(BY_NAME["llama"], tmp_path, add=add)
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.config["eos_token_id"] == [4, 2, 0]
        assert checkpoint.config["bos_token_id"] == 0
