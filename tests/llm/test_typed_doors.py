"""Entry points for vLLM's users: typed options, vLLM's names and flags, YAML files, numbers with units."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest

import jpaged
from jpaged import LLM, BeamSearchParams, RequestError, SamplingParams, cli
from jpaged.cli.flags import engine as flags
from jpaged.cli.flags.config_file import with_config_file
from jpaged.cli.flags.numbers import with_whole_numbers
from jpaged.config import EngineConfig
from jpaged.engine_arguments import EngineArguments
from jpaged.frontend.engine_config import ALIASES, NOT_YET, SPECULATION_KEYS, engine_config
from jpaged.frontend.generation_defaults import generation_defaults
from jpaged.loading.hub import find_model
from jpaged.metric_families import Counter, Gauge, Histogram

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from write_engine_arguments import PATH, text
from write_sampling_fields import DOCS, FIELDS, docs_text, fields_text

SIZES = {
    "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,),
}  # fmt: skip


def test_typed_options_are_written_from_those_of_the_engine():
    """A type checker knows each option, with the type that EngineConfig has."""
    assert PATH.read_text(encoding="utf-8") == text(), "run tools/write_engine_arguments.py"
    typed, hints = typing.get_type_hints(EngineArguments), typing.get_type_hints(EngineConfig)
    names = hints.keys() - {"model"} | NOT_YET.keys() | ALIASES.keys() | SPECULATION_KEYS.keys()
    assert set(typed) == names | {"logits_processors"}
    assert typed["max_model_len"] == hints["max_model_len"] == int | None


def test_sampling_fields_are_written_from_their_declaration():
    for path, written in ((FIELDS, fields_text()), (DOCS, docs_text())):
        assert path.read_text(encoding="utf-8") == written, "run tools/write_sampling_fields.py"


def test_names_of_vllm():
    names = ("EngineArgs", "AsyncEngineArgs", "AsyncLLMEngine", "TextPrompt", "TokensPrompt", "BeamSearchParams")
    for name in names:
        assert name in jpaged.__all__
        assert hasattr(jpaged, name)
    args = jpaged.EngineArgs(model="demo", max_model_len=64)
    assert dataclasses.asdict(args)["max_model_len"] == 64
    assert importlib.import_module("jpaged.sampling_params").BeamSearchParams is BeamSearchParams


@pytest.fixture(scope="module")
def llm():
    with LLM.from_engine_args(jpaged.EngineArgs(model="demo", generation_config="vllm", **SIZES)) as made:
        yield made


def test_repr_says_what_the_engine_is(llm):
    text = repr(llm)
    assert text.startswith("LLM('demo', max_model_len=256, max_num_seqs=8, KV cache ")
    assert text.endswith(" blocks of 16, 0 running, 0 waiting)")


def test_beam_search_has_the_answers_of_generate(llm):
    prompt = "def read_json(path):"
    [found] = llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
    params = SamplingParams(n=3, beam_width=3, use_beam_search=True, max_tokens=6, temperature=0, logprobs=0)
    [output] = llm.generate(prompt, params, use_tqdm=False)
    assert len(found.sequences) == 3
    for sequence, answer in zip(found.sequences, output.outputs, strict=True):
        assert sequence.tokens == output.prompt_token_ids + answer.token_ids
        assert sequence.text == prompt + answer.text
        assert sequence.cum_logprob == answer.cumulative_logprob
        assert [entries[token].logprob for entries, token in zip(sequence.logprobs, answer.token_ids, strict=True)]
    with pytest.raises(RequestError, match="beam_width"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=6))
    with pytest.raises(RequestError, match="BeamSearchParams"):
        llm.beam_search(prompt, SamplingParams())


def test_get_metrics_is_vllms(llm):
    """vLLM's names and classes, with the values of this engine."""
    llm.reset_stats()
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    found = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
    own = ("demo", "0")
    assert found["vllm:generation_tokens", *own] == Counter(
        name="vllm:generation_tokens", labels={"model_name": "demo", "engine": "0"}, value=4
    )
    assert found["vllm:request_success", *own, "length"].value == 1
    assert found["vllm:num_requests_running", *own] == Gauge(
        name="vllm:num_requests_running", labels={"model_name": "demo", "engine": "0"}, value=0
    )
    lengths = found["vllm:request_prompt_tokens", *own]
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum) == (1, 3)
    assert (lengths.buckets["2.0"], lengths.buckets["5.0"], lengths.buckets["+Inf"]) == (0, 1, 1)


def test_encode_on_an_engine_that_generates_is_refused(llm):
    with pytest.raises(RequestError, match="pooling"):
        llm.encode("a")


def test_closed_engine_has_a_repr(llm):
    copy = object.__new__(LLM)
    copy.config, copy._engine = llm.config, None
    assert repr(copy) == "LLM('demo', closed)"


# -- options of a checkpoint


def test_sampling_defaults():
    file = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9}
    assert generation_defaults(file).top_k == 20
    changed = generation_defaults(file, {"temperature": 0.1, "max_tokens": 5})
    assert (changed.temperature, changed.top_k, changed.max_tokens) == (0.1, 20, 5)
    with pytest.raises(RequestError, match=r"override_generation_config\.temprature"):
        generation_defaults(file, {"temprature": 1})
    with pytest.raises(RequestError, match="temperature"):
        generation_defaults(file, {"temperature": -1})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_format": "pt"}, "auto, safetensors, gguf, dummy"),
        ({"hf_overrides": [1]}, "a dictionary with names as keys"),
        ({"override_generation_config": {1: 2}}, "a dictionary with names as keys"),
        ({"generation_config": 3}, "must be a string"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(RequestError) as error:
        engine_config("demo", options)
    assert error.value.parameter == next(iter(options))
    assert said in str(error.value)


def test_other_names_of_dtypes():
    assert engine_config("demo", {"dtype": "half"}).dtype == "float16"
    assert engine_config("demo", {"dtype": "float"}).dtype == "float32"


@pytest.mark.slow
def test_dummy_weights_and_overrides(tmp_path):
    """Only config.json is needed; its values are replaced; no weights are read."""
    source = find_model("demo")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "generation_config.json").write_text('{"top_k": 7}')
    options = {"hf_overrides": {"num_hidden_layers": 1}, "generation_config": str(tmp_path / "sampling")}
    with LLM(str(tmp_path), load_format="dummy", **options, **SIZES) as llm:
        assert llm.spec.num_layers == 1
        assert llm.default_sampling_params.top_k == 7
        [output] = llm.generate("def f", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(jpaged.ModelLoadError):
        LLM(str(tmp_path), load_format="safetensors", **SIZES)


def test_a_download_goes_to_the_folder(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(repo: str, **options: object) -> str:
        asked.append((repo, options["cache_dir"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("some/model", None, str(tmp_path / "models")) == tmp_path
    assert asked == [("some/model", str(tmp_path / "models"))]


# -- the command line


def test_config_file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: demo\nport: 8123\nmax_model_len: 4k\nrow-buckets: [8, 16]\nenable-prefix-caching: false\n"
        "hf-overrides: {num_hidden_layers: 1}\nrevision: null\nserved-model-name: [a, b]\n"
    )
    command = cli.parse(["serve", "--config", str(path), "--port", "9000"])
    options = flags.engine_options(command.engine, command.model_argument)
    assert command.port == 9000  # the command line wins
    assert command.served_model_name == ("a", "b")
    assert (options["model"], options["max_model_len"], options["row_buckets"]) == ("demo", 4000, (8, 16))
    assert (options["enable_prefix_caching"], options["revision"]) == (False, None)
    assert options["hf_overrides"] == {"num_hidden_layers": 1}
    other = cli.parse(["serve", "other", f"--config={path}"])
    assert flags.engine_options(other.engine, other.model_argument)["model"] == "other"
    nested = with_config_file(["bench", "latency", "--config", str(path)])
    assert nested[:4] == ["bench", "latency", "--model", "demo"]


@pytest.mark.parametrize(
    ("content", "said"),
    [("- a\n- b\n", "must have lines like"), ("a: [\n", "is not a YAML file"), (None, "is not a YAML file")],
)
def test_wrong_config_files_are_named(tmp_path, content, said):
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=said):
        with_config_file(["serve", "--config", str(path)])


def test_an_unknown_key_of_a_config_file_is_named(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("max-model-length: 5\n")
    with pytest.raises(SystemExit):
        cli.parse(["serve", "demo", "--config", str(path)])
    assert "--max-model-length" in capsys.readouterr().err


def test_numbers_with_units():
    words = ["serve", "demo", "--max-model-len", "32K", "--kv-cache-memory-bytes=1.5G", "--max-num-seqs", "8"]
    full = ["serve", "demo", "--max-model-len", "32768", "--kv-cache-memory-bytes=1610612736", "--max-num-seqs", "8"]
    assert with_whole_numbers(words) == full
    assert with_whole_numbers(["generate", "demo", "32k", "--", "--max-model-len", "1k"])[2:] == [
        "32k", "--", "--max-model-len", "1k",
    ]  # fmt: skip
    with pytest.raises(RequestError, match="must be a whole number"):
        with_whole_numbers(["serve", "--max-num-seqs", "1.0001k"])


def test_flags_of_json_objects(capsys):
    command = cli.parse(["serve", "demo", "--override-generation-config", '{"temperature": 0}'])
    assert flags.engine_options(command.engine, command.model_argument)["override_generation_config"] == {
        "temperature": 0
    }
    for wrong in ("[1]", "{"):
        with pytest.raises(SystemExit):
            cli.parse(["serve", "demo", "--hf-overrides", wrong])
        assert "hf-overrides" in capsys.readouterr().err


def test_api_server_module_is_serve():
    command = [sys.executable, "-m", "jpaged.entrypoints.openai.api_server", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Serve a model over HTTP" in done.stdout


# -- scripts written for vLLM, with the import changed. Model names are folders here; the rest is as people write it.

BATCH = """
from jpaged import LLM, SamplingParams
llm = LLM(model="gpt2", dtype="float16")
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)
outputs = llm.generate(["The future of AI is", "Once upon a time", "In the year 2050,"], sampling_params)
for output in outputs:
    print(f"Prompt: {output.prompt}")
    print(f"Output: {output.outputs[0].text}")
"""
MEMORY = """
from jpaged import LLM, SamplingParams
llm = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.9)
outputs = llm.generate(["Hello, my name is", "The capital of France is"], SamplingParams(temperature=0.8, max_tokens=9))
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
"""
BEAMS = """
from jpaged import LLM, SamplingParams
llm = LLM(model="Qwen/Qwen1.5-7B-Chat", trust_remote_code=True)
sampling_params = SamplingParams(temperature=0.7, top_p=0.9, use_beam_search=True, best_of=4)
outputs = llm.generate(["Explain the first law:", "Explain the second law:"], sampling_params)
for i, output in enumerate(outputs):
    print(f"Prompt: {i + 1}: {output.outputs[0].text[:50]}...")
"""
# Options of such scripts that are refused by name until they are built.
LATER = {
    "cpu_offload_gb": {"model": "x", "tensor_parallel_size": 4, "cpu_offload_gb": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "count"), [(BATCH, 3), (MEMORY, 2), (BEAMS, 2)])
def test_scripts_of_vllm(script, count, tmp_path):
    name = script.split('model="')[1].split('"')[0]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).symlink_to(find_model("demo"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(Path(jpaged.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prompt: ") == count


@pytest.mark.parametrize("option", LATER)
def test_scripts_that_need_later_features_are_refused_by_name(option):
    with pytest.raises(RequestError) as error:
        LLM(**LATER[option])
    assert error.value.parameter == option


def test_overrides_are_copied():
    given: Mapping = {"a": {"b": 1}}
    config = engine_config("demo", {"hf_overrides": given})
    assert config.hf_overrides == given
    assert config.hf_overrides is not given
    assert json.dumps(config.hf_overrides) == '{"a": {"b": 1}}'
