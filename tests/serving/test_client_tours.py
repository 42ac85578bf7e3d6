"""The checkers of tools/client_tours find missing fields, extra fields, wrong types and errors."""

import json
import pathlib
import sys

import pytest
from openai.types import Model
from openai.types.chat import ChatCompletionChunk

pytest.importorskip("httpx2", reason="httpx2 is not installed: the client's newer versions need it")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "client_tours"))
from checks import Checks
from strict import Answer, Route, StrictChecks, Validator

ROUTES = [Route("GET", "/m", Model), Route("POST", "/c", None, lambda _: ChatCompletionChunk)]
GOOD = {"id": "a", "created": 1, "object": "model", "owned_by": "b"}
CHUNK = {"id": "a", "created": 1, "model": "m", "object": "chat.completion.chunk", "choices": []}


def answer(document: dict, path: str = "/m") -> Answer:
    if path == "/m":
        return Answer("GET", path, 200, "application/json", bytearray(json.dumps(document).encode()))
    stream = f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n".encode()
    return Answer("POST", path, 200, "text/event-stream", bytearray(stream))


@pytest.mark.parametrize(("path", "good"), [("/m", GOOD), ("/c", CHUNK)])
def test_a_valid_answer_passes_and_others_do_not(path, good):
    validator = Validator(ROUTES, Model, {"Model.known", "ChatCompletionChunk.known"})
    validator.validate([answer(good, path), answer(good | {"known": 1}, path)])
    assert validator.bodies + validator.events == 2
    assert {name.partition(".")[2] for name in validator.extras} == {"known"}
    missing = {name: value for name, value in good.items() if name != "created"}
    for bad in (missing, good | {"created": "1"}, good | {"unknown": None}):
        with pytest.raises((AssertionError, ValueError), match=r"created|unknown"):
            validator.validate([answer(bad, path)])


def test_checks_record_errors_and_go_on():
    checks = StrictChecks(ROUTES, Model, set())
    with checks.check("valid"):
        checks.answers.append(answer(GOOD))
    with checks.check("invalid"):
        checks.answers.append(answer(GOOD | {"more": 1}))
    with checks.check("without an answer"):
        pass
    assert checks.passed == ["valid"]
    assert list(checks.failed) == ["invalid", "without an answer"]


def test_a_limit_must_show_its_error():
    checks = Checks()
    for name, error in (("as said", "no vocabulary"), ("another", "no network")):
        with checks.limit(name, "vocabulary", "reason"):
            raise ValueError(error)
    with checks.limit("gone", "vocabulary", "reason"):
        pass
    assert checks.limits == {"as said": "reason"}
    assert list(checks.failed) == ["another", "gone"]
