"""The load of `chaos.py`: requests on every generating route, their offline answers, and a client that checks answers.

The cases are drawn from a seed. `jpaged.LLM` answers all of them before the chaos begins. A client sends a case as a
stream or as a whole, and compares each finished text with the offline one. Some clients leave at a random moment.
"""

import dataclasses
import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from drawn_requests import CHAT, COMPLETIONS

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ROUTES = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
MAX_SECONDS = 90.0  # limit of any answer, including time while the server is stopped
FINISHED = frozenset({"right", "wrong"})
SCHEMA = {
    "type": "object", "required": ["name", "sizes"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    },
}  # fmt: skip
FORMATS: list[dict[str, Any]] = [
    {"json": SCHEMA}, {"regex": "[a-f]{3,20}-[0-9]{2}"}, {"choice": ["yes", "no", "perhaps later"]},
    {"grammar": 'root ::= "(" root ")" | "x"'},
]  # fmt: skip
# Prefixes that several prompts share. All but the first fill some blocks.
SHARED = [
    "",
    "import os\nimport json\n\n\ndef read_settings(path):\n" + "    value = json.load(open(path))\n" * 6,
    "class Queue:\n    def __init__(self, size):\n        self.size = size\n" + "        self.items = []\n" * 8,
    "def add(a, b):\n    return a + b\n\n\n" * 8,
]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One request. `send` chooses between a stream and a whole answer.

    sampling: fields that SamplingParams and the body share.
    format:   fields of StructuredOutputsParams; None: any text.
    """

    number: int
    route: str
    prompt: str
    sampling: dict[str, Any]
    format: dict[str, Any] | None

    def body(self, *, stream: bool) -> dict[str, Any]:
        fields = {name: each for name, each in self.sampling.items() if name != "max_tokens"}
        limit, talk = self.sampling["max_tokens"], [{"role": "user", "content": self.prompt}]
        if self.route in (COMPLETIONS, CHAT):
            if self.format is not None:
                fields["structured_outputs"] = self.format
            asked = {"prompt": self.prompt} if self.route == COMPLETIONS else {"messages": talk}
            return asked | fields | {"max_tokens": limit, "stream": stream}
        if self.route == RESPONSES:
            if self.format is not None:
                fields["text"] = {"format": {"type": "json_schema", "name": "x", "schema": self.format["json"]}}
            return {"input": self.prompt, "max_output_tokens": limit, "stream": stream, "store": False} | fields
        if self.format is not None:
            fields["output_config"] = {"format": {"type": "json_schema", "schema": self.format["json"]}}
        return {"messages": talk, "max_tokens": limit, "stream": stream} | fields


def draw_cases(seed: int, count: int) -> list[Case]:
    rng, cases = random.Random(f"{seed} cases"), []
    for number in range(count):
        route = ROUTES[number % len(ROUTES)]
        prompt = rng.choice(SHARED) + f"\ndef f{rng.randrange(6)}(x):\n" + "    x += 1\n" * rng.choice([0, 0, 1, 5])
        sampling: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 16, 40, 90]), "temperature": 0.0}
        if route != MESSAGES and rng.random() < 0.6:  # Anthropic's API has no seed
            sampling |= {"temperature": rng.choice([0.5, 1.0]), "top_p": rng.choice([0.9, 1.0]), "seed": number}
            sampling |= rng.choice([{}, {"top_k": 20}, {"frequency_penalty": 0.5}, {"min_p": 0.02}])
        if route in (COMPLETIONS, CHAT) and rng.random() < 0.3:
            sampling["n"] = rng.choice([2, 3])
        if route in (COMPLETIONS, CHAT) and rng.random() < 0.2:
            sampling["stop"] = ["return", "\n\n"]
        structure = None
        if rng.random() < 0.3:
            structure = rng.choice(FORMATS) if route in (COMPLETIONS, CHAT) else FORMATS[0]
        cases.append(Case(number, route, prompt, sampling, structure))
    return cases


def offline_answers(model: str, cases: Sequence[Case], sizes: dict[str, Any], cache: str) -> list[list[str]]:
    """The texts of each case, one for each of its `n` answers, from `jpaged.LLM`."""
    import jpaged

    texts = []
    with jpaged.LLM(model, **sizes, compilation_cache_dir=cache) as llm:
        for case in cases:  # one at a time: nothing else is in the batch
            structure = None if case.format is None else jpaged.StructuredOutputsParams(**case.format)
            params = jpaged.SamplingParams(**case.sampling, structured_outputs=structure)
            if case.route == COMPLETIONS:
                output = llm.generate(case.prompt, params, use_tqdm=False)[0]
            else:
                output = llm.chat([{"role": "user", "content": case.prompt}], params, use_tqdm=False)[0]
            texts.append([answer.text for answer in output.outputs])
    return texts


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a request.

    kind: right, wrong, left (the client disconnected), no connection, broken (the connection ended early), hung, error.
    status, code: of an error. Status 200 is an error event in a stream.
    """

    kind: str
    status: int = 0
    code: str | None = None
    detail: str = ""


class ErrorAnswer(Exception):
    """The server answered with an error: by its status, or by an event of a stream."""

    def __init__(self, status: int, body: Any, retry_after: str | None = None):
        super().__init__(f"{status}: {str(body)[:600]}")
        self.status = status
        self.retry_after = retry_after
        error = body.get("error") if isinstance(body, dict) else None
        self.code = (error or {}).get("code") or (error or {}).get("type") if isinstance(error, dict) else None


def send(port: int, case: Case, wanted: list[str], *, stream: bool, leave_after: float | None) -> Outcome:
    """Send a request, read its answer and judge it. leave_after: seconds until the client closes the connection."""
    began = time.monotonic()
    end = began + (MAX_SECONDS if leave_after is None else leave_after)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=max(0.001, end - began))
    try:
        try:
            connection.connect()
        except ConnectionRefusedError as error:
            return Outcome("no connection", detail=repr(error))
        body = json.dumps(case.body(stream=stream))
        connection.request("POST", case.route, body, {"content-type": "application/json"})
        texts = _answer(connection, case, stream, end)
    except TimeoutError:
        if leave_after is None:
            return Outcome("hung")
        if connection.sock is not None and case.number % 2:  # a reset in place of a normal end
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return Outcome("left")
    except ErrorAnswer as error:
        return Outcome("error", error.status, error.code, f"{error} Retry-After: {error.retry_after}")
    except (OSError, http.client.HTTPException) as error:
        return Outcome("broken", detail=repr(error))
    except (KeyError, ValueError, IndexError, TypeError) as error:
        return Outcome("wrong", detail=f"the answer cannot be read: {error!r}")
    finally:
        connection.close()
    if texts == wanted:
        return Outcome("right")
    return Outcome("wrong", detail=f"{json.dumps(case.body(stream=stream))}\ngot {texts}\nwanted {wanted}"[:3_000])


def _answer(connection: http.client.HTTPConnection, case: Case, stream: bool, end: float) -> list[str]:
    """Read an answer. Returns the text of each choice. Raises ErrorAnswer, TimeoutError."""
    answer = connection.getresponse()
    if answer.status != 200 or not stream:
        whole = json.loads(answer.read())
        if answer.status != 200:
            raise ErrorAnswer(answer.status, whole, answer.getheader("retry-after"))
        return _whole_texts(case.route, whole)
    texts, ended = [""] * case.sampling.get("n", 1), False
    for line in answer:
        if time.monotonic() > end:
            raise TimeoutError
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            ended = True
            continue
        event = json.loads(line[6:])
        if "error" in event and event["error"] is not None:
            raise ErrorAnswer(200, event)
        ended = _add_event(case.route, event, texts) or ended
    if not ended:
        raise http.client.IncompleteRead(b"", None)
    return texts


def _whole_texts(route: str, body: dict[str, Any]) -> list[str]:
    if route in (COMPLETIONS, CHAT):
        choices = sorted(body["choices"], key=lambda each: each["index"])
        return [each["text"] if route == COMPLETIONS else each["message"]["content"] or "" for each in choices]
    if route == RESPONSES:
        return ["".join(part["text"] for item in body["output"] for part in item["content"])]
    return ["".join(block["text"] for block in body["content"])]


def _add_event(route: str, event: dict[str, Any], texts: list[str]) -> bool:
    """Add an event's text. Returns True for the last event of a route without `[DONE]`."""
    if route in (COMPLETIONS, CHAT):
        for choice in event["choices"]:
            text = choice["text"] if route == COMPLETIONS else choice["delta"].get("content")
            texts[choice["index"]] += text or ""
        return False
    if event["type"] in ("response.output_text.delta", "content_block_delta"):
        texts[0] += event["delta"] if route == RESPONSES else event["delta"]["text"]
    if event["type"] in ("response.failed", "response.cancelled"):
        raise ErrorAnswer(200, event["response"])
    return event["type"] in ("response.completed", "response.incomplete", "message_stop")
