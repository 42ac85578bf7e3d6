"""SpeculationConfig: vLLM's keys, defaults of the methods, and an error for each key and value that is refused."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pytest

from jpaged import RequestError, cli
from jpaged.cli.flags.engine import engine_options
from jpaged.cli.flags.other_engines import without_neutral
from jpaged.frontend.engine_config import engine_config
from jpaged.serving.admin.routes_admin import _options_of
from jpaged.speculation_config import (
    DEFAULT_DRAFTS,
    METHOD_ALIASES,
    METHODS_OF,
    NOT_YET,
    OTHER_METHODS,
    SUFFIX_DEFAULTS,
    SpeculationConfig,
)


def repeat_last(token_ids: Sequence[int], count: int) -> Sequence[int]:
    return [token_ids[-1]] * count


DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "speculative_decoding.md"
LEAST = {"draft_model": {"model": "small"}, "eagle3": {"model": "head"}, "custom": {"function": repeat_last}}


def made(**fields: Any) -> SpeculationConfig:
    return SpeculationConfig.from_fields(fields)


@pytest.mark.parametrize("method", DEFAULT_DRAFTS)
def test_each_method_has_defaults(method: str):
    config = made(method=method, **LEAST.get(method, {}))
    assert (config.method, config.num_drafts) == (method, DEFAULT_DRAFTS[method])
    suffix = {name: getattr(config, name) for name in SUFFIX_DEFAULTS}
    assert suffix == (SUFFIX_DEFAULTS if method == "suffix" else dict.fromkeys(SUFFIX_DEFAULTS))
    lookup = (config.prompt_lookup_min, config.prompt_lookup_max)
    assert lookup == ((2, 5) if method == "ngram" else (None, None))
    assert config.has_model == (method in ("draft_model", "eagle3", "mtp"))
    assert SpeculationConfig.from_fields(config) is config
    assert SpeculationConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}) == config


@pytest.mark.parametrize(
    ("fields", "method", "model"),
    [
        ({"model": "ngram"}, "ngram", None),
        ({"model": "[ngram]"}, "ngram", None),
        ({"model": "suffix"}, "suffix", None),
        ({"method": "ngram", "model": "ngram"}, "ngram", None),
        ({"method": "[ngram]"}, "ngram", None),
        ({"model": "Qwen/Qwen3-0.6B"}, "draft_model", "Qwen/Qwen3-0.6B"),
        ({"model": "AngelSlim/Qwen3-8B_eagle3"}, "eagle3", "AngelSlim/Qwen3-8B_eagle3"),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, "eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ({"method": "draft_model", "model": "a_eagle3"}, "draft_model", "a_eagle3"),
        ({"function": repeat_last}, "custom", None),
        *(({"method": alias}, METHOD_ALIASES[alias], None) for alias in METHOD_ALIASES),
    ],
)
def test_the_method_follows_from_vllms_names(fields: dict[str, Any], method: str, model: str | None):
    config = SpeculationConfig.from_fields(fields)
    assert (config.method, config.model) == (method, model)


@pytest.mark.parametrize(
    ("given", "lookup"),
    [({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_max": 8}, (2, 8)), ({"prompt_lookup_min": 7}, (7, 7)),
     ({"prompt_lookup_min": 3, "prompt_lookup_max": 4}, (3, 4))],
)  # fmt: skip
def test_one_bound_of_the_match_moves_the_default_of_the_other(given: dict[str, int], lookup: tuple[int, int]):
    config = made(method="ngram", **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lookup


REFUSED = [
    ("ngram", r"^speculative_config must be a SpeculationConfig, or its fields as a dict, got 'ngram'"),
    ({}, r"^speculative_config\.method must be one of ngram, suffix, draft_model, eagle3, mtp, custom"),
    ({"num_speculative_tokens": 3}, r"^speculative_config\.method must be one of "),
    ({"method": "n-gram"}, r"^speculative_config\.method must be one of .*, got 'n-gram'"),
    ({"method": 3}, r"^speculative_config\.method must be one of .*, got 3"),
    ({"method": ["ngram"]}, r"^speculative_config\.method must be one of .*, got \['ngram'\]"),
    ({"method": "ngram", "num_spec_tokens": 3}, r"^speculative_config\.num_spec_tokens: unknown field; did you mean"),
    ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, r"^speculative_config\.method: not supported yet: use eagle3"),
    *(({"method": name}, rf"^speculative_config\.method: not supported yet: .*, got '{name}'")
      for name in OTHER_METHODS),
    *(({"method": "ngram", "num_speculative_tokens": bad},
       r"^speculative_config\.num_speculative_tokens must be an integer from 1 to 16, got ")
      for bad in (0, 17, -1, 2.0, "3", True)),
    ({"method": "ngram", "prompt_lookup_min": 0}, r"^speculative_config\.prompt_lookup_min must be an integer from 1"),
    ({"method": "ngram", "prompt_lookup_max": 2.5},
     r"^speculative_config\.prompt_lookup_max must be an integer from 1, got 2.5"),
    ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
     r"^speculative_config\.prompt_lookup_min must be at most prompt_lookup_max=3, got 4"),
    ({"method": "suffix", "suffix_decoding_max_tree_depth": 0},
     r"^speculative_config\.suffix_decoding_max_tree_depth must be an integer from 1, got 0"),
    ({"method": "suffix", "suffix_decoding_max_cached_requests": -1},
     r"^speculative_config\.suffix_decoding_max_cached_requests must be an integer from 0, got -1"),
    *(({"method": "suffix", "suffix_decoding_max_spec_factor": bad},
       r"^speculative_config\.suffix_decoding_max_spec_factor must be a number from 0 to 1e\+09, got ")
      for bad in (-0.5, float("nan"), float("inf"), "1", True)),
    *(({"method": "suffix", "suffix_decoding_min_token_prob": bad},
       r"^speculative_config\.suffix_decoding_min_token_prob must be a number from 0 to 1, got ")
      for bad in (-0.1, 1.1, "0.1")),
    ({"method": "draft_model"}, r"^speculative_config\.model needs the checkpoint of method draft_model"),
    ({"method": "eagle3"}, r"^speculative_config\.model needs the checkpoint of method eagle3"),
    ({"method": "draft_model", "model": 3}, r"^speculative_config\.model must be a string, got 3"),
    ({"method": "draft_model", "model": ""}, r"^speculative_config\.model must be a string, got ''"),
    ({"method": "draft_model", "model": "a", "quantization": 8},
     r"^speculative_config\.quantization must be a string, got 8"),
    ({"method": "draft_model", "model": "a", "max_model_len": 0},
     r"^speculative_config\.max_model_len must be an integer from 1"),
    ({"method": "draft_model", "model": "a", "draft_tensor_parallel_size": 0},
     r"^speculative_config\.draft_tensor_parallel_size must be an integer from 1"),
    ({"method": "custom"}, r"^speculative_config\.function needs a function"),
    *(({"method": "custom", "function": bad},
       r"^speculative_config\.function must be a function, or 'module:function', got ")
      for bad in (3, "json", "json:", ":dumps", "a:b:c", "json:__doc__")),
    ({"method": "custom", "function": "no_module_of_this_name:draft"},
     r"^speculative_config\.function cannot be imported: No module named 'no_module_of_this_name'"),
    ({"method": "custom", "function": "json:draft"},
     r"^speculative_config\.function cannot be imported: module 'json'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_bad_values_are_refused(fields: object, message: str):
    with pytest.raises(RequestError, match=message):
        SpeculationConfig.from_fields(fields)


VALUES: dict[str, Any] = {
    "model": "a", "function": repeat_last, "quantization": "int8", "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("key", METHODS_OF)
def test_a_key_of_another_method_is_refused(key: str):
    for method in DEFAULT_DRAFTS:
        fields = {"method": method, **LEAST.get(method, {}), key: VALUES.get(key, 1)}
        if key == "prompt_lookup_min":
            fields["prompt_lookup_max"] = None
        if method in METHODS_OF[key]:
            assert getattr(SpeculationConfig.from_fields(fields), key) == fields[key]
            continue
        message = rf"^speculative_config\.{key} is for method .*, and method is {method}: leave it out, got "
        with pytest.raises(RequestError, match=message):
            SpeculationConfig.from_fields(fields)


@pytest.mark.parametrize("key", NOT_YET)
def test_keys_that_jpaged_lacks_are_accepted_at_neutral_values_only(key: str):
    neutral, why = NOT_YET[key]
    for value in (None, *neutral):
        assert made(method="ngram", **{key: value}) == made(method="ngram")
    for value in ("x", 7, *({True, False} - set(neutral))):
        with pytest.raises(RequestError, match=rf"^speculative_config\.{key}:? ") as caught:
            made(method="ngram", **{key: value})
        assert f"{why}: leave it out" in str(caught.value)


def test_the_docs_have_every_key():
    text = DOCS.read_text()
    for key, (neutral, why) in NOT_YET.items():
        assert f"| `{key}` | {', '.join(f'`{json.dumps(value)}`' for value in neutral)} | {why} |" in text
    for key in (*(field.name for field in dataclasses.fields(SpeculationConfig)), *DEFAULT_DRAFTS):
        assert re.search(rf"^\| (`\w+`, )?`{key}`", text, re.MULTILINE), key
    assert ", ".join(f"`{method}` {count}" for method, count in DEFAULT_DRAFTS.items()) in text


def test_a_function_by_name():
    assert made(method="custom", function=f"{__name__}:repeat_last").function([3, 4], 2) == [4, 4]
    assert "function" not in repr(made(function=repeat_last)), "processes of one engine compare the repr"


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"method": "ngram"}, {"pipeline_parallel_size": 2},
         r"^speculative_config is not supported with pipeline_parallel_size=2: .* Use tensor_par.*, got 'ngram'"),
        ({"method": "ngram"}, {"runner": "pooling"}, r"^speculative_config is for models that generate"),
        ({"method": "draft_model", "model": "a"}, {"kv_handover": True},
         r"^speculative_config is not supported with kv_handover and method draft_model: .* Use ngram or suffix"),
        ({"method": "mtp"}, {"nnodes": 2, "tensor_parallel_size": 2},
         r"^speculative_config is not supported yet with nnodes=2 and method mtp: use ngram or suffix, got 'mtp'"),
        ({"method": "mtp"}, {"prefill_engines": 1, "data_parallel_size": 2},
         r"^speculative_config is not supported with prefill_engines and method mtp"),
        ({"method": "draft_model", "model": "a", "draft_tensor_parallel_size": 2}, {},
         r"^speculative_config\.draft_tensor_parallel_size must be 1, got 2"),
        ({"method": "draft_model", "model": "a", "draft_tensor_parallel_size": 2}, {"tensor_parallel_size": 4},
         r"^speculative_config\.draft_tensor_parallel_size must be 1, or tensor_parallel_size=4, got 2"),
        ({"method": "draft_model", "model": "a", "quantization": "int3"}, {},
         r"^speculative_config\.quantization must be one of int8, .*, got 'int3'"),
        ({"method": "mtp", "model": "other"}, {},
         r"^speculative_config\.model: method mtp uses the layer in the model's"),
    ],
)  # fmt: skip
def test_options_of_the_engine_that_do_not_go_with_it(fields: dict[str, Any], options: dict[str, Any], message: str):
    engine_config("target", options)  # alone they are valid
    with pytest.raises(RequestError, match=message):
        engine_config("target", {"speculative_config": fields, **options})


def test_options_of_the_engine_that_go_with_it():
    ngram = {"method": "ngram"}
    handover = {"prefill_engines": 1, "data_parallel_size": 2}
    for options in ({"kv_handover": True}, handover, {"tensor_parallel_size": 2}):
        assert engine_config("target", {"speculative_config": ngram, **options}).speculative_config == made(**ngram)
    assert engine_config("target", {"speculative_config": None}).speculative_config is None
    mtp = engine_config("target", {"speculative_config": {"method": "deepseek_mtp", "model": "target"}})
    assert mtp.speculative_config is not None
    assert mtp.speculative_config.method == "mtp"
    hash(mtp)


def test_short_forms():
    options = {"spec_method": "ngram", "spec_tokens": 3, "spec_model": None}
    expected = made(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    more = {"speculative_config": {"prompt_lookup_max": 4}}
    assert engine_config("target", options | more).speculative_config == expected
    small = engine_config("target", {"spec_model": "small"}).speculative_config
    assert small == made(model="small")
    for config in ({"method": "suffix"}, "ngram"):
        with pytest.raises(RequestError, match=r"^spec_method is a short form of speculative_config\.method"):
            engine_config("target", options | {"speculative_config": config})


@pytest.mark.parametrize("command", ["generate", "serve", "chat", "bench throughput", "plan"])
def test_flags(command: str):
    words = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    asked = engine_options(cli.parse([*command.split(), "demo", *words]).engine, "demo")
    assert asked["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}
    short = ["--spec-method", "ngram", "--spec-tokens=3"]
    assert cli.parse([*command.split(), "demo", *short]) == cli.parse([*command.split(), "demo", *words])


def test_short_flags_next_to_the_long_one():
    words = ["serve", "demo", "--spec-tokens", "3", '--speculative-config={"method": "ngram"}', "--port", "1"]
    *rest, flag, value = without_neutral(words)
    assert (rest, flag) == (["serve", "demo", "--port", "1"], "--speculative-config")
    assert json.loads(value) == {"method": "ngram", "num_speculative_tokens": 3}
    for bad in ('{"num_speculative_tokens": 2}', "ngram", "[1]"):
        with pytest.raises(RequestError, match=r"^spec_tokens is a short form of speculative_config\.num_spec"):
            without_neutral(["serve", "demo", "--speculative-config", bad, "--spec-tokens", "3"])


@pytest.mark.parametrize(("word", "says"), [("ngram", "--speculative-config"), ('["ngram"]', "write a JSON object")])
def test_a_flag_that_is_no_json_object(word: str, says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["generate", "demo", "--speculative-config", word])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--speculative-config", '{"method": "medusa"}'], "speculative_config.method: not supported yet: use eagle3"),
        (["--spec-method", "ngram", "--spec-tokens", "x"], "must be an integer from 1 to 16, got 'x'"),
    ],
)
def test_flags_with_bad_values(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["generate", "demo", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_options_that_the_server_shows_are_json():
    config = engine_config("demo", {"speculative_config": {"method": "custom", "function": repeat_last}})
    shown = json.loads(json.dumps(_options_of(config)))["speculative_config"]
    assert (shown["method"], shown["function"]) == ("custom", f"{__name__}:repeat_last")
