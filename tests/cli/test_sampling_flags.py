"""Each flag of `generate` reaches the field of its name."""

import pathlib
from typing import Any

import pytest
import tyro

from jpaged import RequestError, SamplingParams
from jpaged.cli.flags.sampling import SamplingFlags
from jpaged.params.structured_outputs import StructuredOutputsParams
from tests.support.sampling_values import NUMBER_VALUES

FLAGS = {
    "n": "3", "best_of": "4", "top_k": "7", "max_tokens": "9", "min_tokens": "2", "logprobs": "4",
} | {name: str(value) for name, value in NUMBER_VALUES.items() if name != "length_penalty"}  # needs a beam search


def given(*words: str) -> SamplingParams:
    return tyro.cli(SamplingFlags, args=list(words)).sampling_params("a-model")


def test_numbers():
    words = [word for name, value in FLAGS.items() for word in ("--" + name.replace("_", "-"), value)]
    params = given(*words, "--sampling-seed", "5", "--ignore-eos")
    fields: dict[str, Any] = {name: float(value) if "." in value else int(value) for name, value in FLAGS.items()}
    assert params == SamplingParams(**fields, seed=5, ignore_eos=True)


def test_the_demo_model_has_its_own_repetition_penalty():
    def penalty(*words: str) -> float:
        return tyro.cli(SamplingFlags, args=list(words)).sampling_params("demo").repetition_penalty

    assert given().repetition_penalty == 1
    assert penalty() == 1.15
    assert penalty("--repetition-penalty", "1") == 1
    assert penalty("--use-beam-search", "--beam-width", "2") == 1  # a beam search takes no penalty


def test_texts(tmp_path: pathlib.Path):
    assert given("--stop", "a", "--stop", "b c", "--bad-words", "x") == SamplingParams(
        temperature=0, max_tokens=64, stop=["a", "b c"], bad_words=["x"]
    )
    schema, lark = tmp_path / "a.json", tmp_path / "a.lark"
    schema.write_text('{"type":"object"}')
    lark.write_text('start: "é"')
    cases: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
        (("--json-schema", str(schema)), {"json": '{"type":"object"}'}),
        (("--grammar", str(lark)), {"grammar": 'start: "é"'}),
        (("--regex", "[ab]+"), {"regex": "[ab]+"}),
        (("--choice", "yes", "--choice", "no"), {"choice": ("yes", "no")}),
    )
    for words, wanted in cases:
        assert given(*words).structured_outputs == StructuredOutputsParams(**wanted)


@pytest.mark.parametrize(
    ("words", "parameter"),
    [
        (("--regex", "a", "--choice", "b"), "structured_outputs"),
        (("--json-schema", "/no/such/file"), "json_schema"),
        (("--typical-p", "0"), "typical_p"),
        (("--n", "2"), "temperature"),
    ],
)
def test_bad_flags_are_refused(words: tuple[str, ...], parameter: str):
    with pytest.raises(RequestError) as caught:
        given(*words)
    assert caught.value.parameter == parameter
