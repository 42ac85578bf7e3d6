"""The corpus on the engine with the demo model: at least 90% of the answers finish, and these match their grammar."""

import re
import warnings
from collections.abc import Callable, Iterator

import pytest

from jpaged import LLM, RequestOutput, SamplingParams
from jpaged.params.sampling import StructuredOutputsParams
from tests.structured import corpus

pytestmark = pytest.mark.slow

SCHEMAS = corpus.schemas()
PROMPT = "def read_settings(path):\n    return "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demo model with 32 rows."""
    with LLM("demo", max_num_seqs=32, max_model_len=640) as made:
        yield made


def answers(llm: LLM, grammars: list[StructuredOutputsParams], temperature: float) -> list[RequestOutput]:
    """Return one answer for each grammar, from one call."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=512, structured_outputs=grammar)
        for i, grammar in enumerate(grammars)
    ]
    outputs = llm.generate([PROMPT] * len(params), params)
    assert all(isinstance(output, RequestOutput) for output in outputs)
    return list(outputs)


def check(outputs: list[RequestOutput], names: list[str], checks: Callable[[str, str], None]) -> None:
    """Assert that at least 90% have finished, and that each of these passes."""
    finished = 0
    for name, output in zip(names, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length"), name
        if answer.finish_reason == "stop":
            finished += 1
            try:
                checks(name, answer.text)
            except Exception as error:
                raise AssertionError(f"{name}: {answer.text!r}: {error}") from error
    assert finished >= 0.9 * len(names), finished


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_schemas(llm: LLM, temperature: float):
    names = list(SCHEMAS)
    outputs = answers(llm, [StructuredOutputsParams(json=SCHEMAS[name]) for name in names], temperature)
    check(outputs, names, lambda name, text: corpus.check_json(SCHEMAS[name], text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regexes(llm: LLM, temperature: float):
    def matches(regex: str, text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about "[[", a future nested set
            assert re.fullmatch(regex, text)

    outputs = answers(llm, [StructuredOutputsParams(regex=regex) for regex in corpus.REGEXES], temperature)
    check(outputs, list(corpus.REGEXES), matches)
