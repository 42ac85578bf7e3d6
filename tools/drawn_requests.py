"""Draws hostile requests from a seed, sends them, and judges the answers. `attack.py` runs it."""

import base64
import contextlib
import http.client
import json
import math
import random
import socket
import struct
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
PROMPT = "def read_settings(path):\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
SECONDS = 60.0  # timeout of any answer
MAX_MESSAGE = 2_000  # longest error message, in characters


def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, bytes]:
    """Send a request on a new connection. Returns status and body. headers: additional headers, such as keys."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # answered before the end of the body
            connection.request(method, path, body, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(port: int, data: bytes, *, seconds: float = 3.0, piece: int = 65_536, pause: float = 0.0) -> bytes:
    """Send bytes in pieces. Returns the bytes of the answer until the connection closes or `seconds` have passed."""
    answer, end = b"", time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        with contextlib.suppress(OSError):
            for start in range(0, len(data), piece):
                connection.sendall(data[start : start + piece])
                time.sleep(pause)
                if time.monotonic() > end:
                    break
        with contextlib.suppress(OSError):
            while (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (part := connection.recv(65_536)):
                    break
                answer += part
    return answer


# fmt: off
NUMBERS = [
    0, -1, 1, 2, 3, 7, 0.0, -0.0, 0.5, 1.5, -2.5, 1e-9, 1e308, 5e-324, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1,
    2**63, 2**64, -(2**63) - 1, 10**30, 10**400, math.nan, math.inf, -math.inf,
]
TEXTS = [
    "", " ", "a", "\n", "\0", "é", "🙂", "\ud800", "\u202e", "ﷺ", "a" * 300, "x" * 5_000, "null", "auto", "none", "0",
    "1e5", "true", "demo", "<|endoftext|>", "{{ 7*7 }}", "{% for x in range(10**9) %}{% endfor %}", "../../etc/passwd",
    "$ref", "(a+)+$", "[", "(?=a)", "a{1,100000}", "\\", "root ::= root", 'start: "a" start', "%" * 30,
    "data: [DONE]\n\n", "\r\nx: y", "json", "left", "max", "required", "https://example.com/",
]
KEYS = [
    "type", "text", "role", "content", "name", "function", "parameters", "json", "regex", "grammar", "choice",
    "properties", "items", "enum", "$ref", "pattern", "schema", "json_schema", "strict", "structural_tag",
    "whitespace_pattern", "min_count", "arguments", "include_usage", "0", "5", "-1", "x" * 100, "",
]
# Valid values. The server answers most requests that combine them.
USUAL: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 2.0], "top_p": [0.1, 0.9, 1.0], "top_k": [-1, 0, 1, 50], "min_p": [0.0, 0.5],
    "typical_p": [0.2, 1.0], "seed": [0, -5, 2**40], "n": [1, 2, 4], "best_of": [2, 4], "stop": ["a", ["e", "\n"]],
    "presence_penalty": [-2, 2], "frequency_penalty": [-2, 1.5], "repetition_penalty": [0.5, 2.0], "min_tokens": [1, 3],
    "logit_bias": [{"5": 100}, {"7": -100, "9": 1.5}], "allowed_token_ids": [[5], list(range(300))],
    "bad_words": [["a"], ["the", "self"]], "stop_token_ids": [[5, 6]], "ignore_eos": [True, False],
    "stream": [True, False], "stream_interval": [1, 3], "logprobs": [0, 2, True], "top_logprobs": [1, 5],
    "truncate_prompt_tokens": [1, 3, -1], "truncation_side": ["left", "right"], "include_stop_str_in_output": [True],
    "skip_special_tokens": [False], "spaces_between_special_tokens": [False], "use_beam_search": [True],
    "beam_width": [2, 3], "length_penalty": [0.5, 2.0], "early_stopping": [True, "never"], "priority": [-3, 5],
    "cache_salt": ["x"], "request_id": ["r"], "user": ["u"], "stream_options": [{"include_usage": True}],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "structured_outputs": [
        {"json": {"type": "integer"}}, {"regex": "[a-f]+"}, {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "a" | "b"'},
    ],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 3}], "max_completion_tokens": [1, 3],
    "tool_choice": ["none", "auto", "required"], "reasoning_effort": ["low"], "add_generation_prompt": [True, False],
    "continue_final_message": [True], "parallel_tool_calls": [False], "chat_template_kwargs": [{"x": 1}],
    "thinking_token_budget": [0, 2], "encoding_format": ["base64", "float"],
}
# fmt: on


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, often an unusual one."""
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice([True, False, None])
    if kind == 5:
        return rng.randint(-5, 300)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 1, 2, 3, 40]))]
    if kind == 7:
        return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3]))}
    each = value(rng, depth + 1)
    return [each] * rng.choice([2, 30, 1_500] if isinstance(each, (int, float, str)) else [2, 10])


def good_bodies() -> dict[str, list[dict[str, Any]]]:
    """Valid bodies of each path. `drawn_request` changes them."""
    talk = [{"role": "user", "content": "x = 1"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    json_schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    return {
        COMPLETIONS: [
            {"prompt": PROMPT}, {"prompt": [5, 6, 7]}, {"prompt": ["a", "b"], "n": 2}, {"prompt": "a", "logprobs": 2},
            {"prompt": "a", "structured_outputs": {"regex": "[ab]{3}"}}, {"prompt": "a", "stop": ["b"], "stream": True},
            {"prompt": "a", "use_beam_search": True, "beam_width": 2},
            {"prompt": "a", "structured_outputs": {"json": {}}},
        ],
        CHAT: [
            {"messages": talk}, {"messages": talk, "stream": True, "stream_options": {"include_usage": True}},
            {"messages": talk, "tools": tools, "tool_choice": "required"},
            {"messages": talk, "tools": tools, "stream": True}, {"messages": talk, "response_format": json_schema},
            {"messages": talk, "logprobs": True, "top_logprobs": 2}, {"messages": [*talk, called, result]},
        ],
        EMBEDDINGS: [{"input": "a"}, {"input": [[1, 2], [3]]}],
        "/v1/models": [{}], "/tokenize": [{"prompt": "a"}], "/health": [{}], "/metrics": [{}], "/": [{}],
    }  # fmt: skip


def field_names() -> dict[str, list[str]]:
    """The names of all fields of each path."""
    from jpaged.serving.schemas import pooling as pooling_schema
    from jpaged.serving.schemas import requests as schema

    structs = {
        COMPLETIONS: schema.CompletionRequest, CHAT: schema.ChatRequest, EMBEDDINGS: pooling_schema.EmbeddingRequest,
    }  # fmt: skip
    return {path: [*struct.__struct_fields__, *struct.NEUTRAL] for path, struct in structs.items()}


def mutate(rng: random.Random, body: Any) -> Any:
    """Replace, remove, repeat or wrap a random part of a value."""
    if isinstance(body, dict) and body and rng.random() < 0.8:
        key = rng.choice(list(body))
        return body | {key: mutate(rng, body[key])}
    if isinstance(body, list) and body and rng.random() < 0.8:
        at = rng.randrange(len(body))
        return [*body[:at], mutate(rng, body[at]), *body[at + 1 :]]
    times = 50 if isinstance(body, (int, float, str)) else 3
    return rng.choice([value(rng), [body], {"a": body}, [body] * times, None])


def drawn_request(seed: int) -> tuple[str, str, bytes, str]:
    """Draw (method, path, body, kind). `sent` has the kinds: how the request is sent."""
    rng, names = random.Random(seed), field_names()
    bodies = good_bodies()
    path = rng.choices(list(bodies), [10, 10, 2, 0.3, 0.3, 0.2, 0.2, 0.2])[0]
    body: Any = {"max_tokens": rng.choice([1, 2, 5]), **rng.choice(bodies[path])}
    if path == EMBEDDINGS:
        del body["max_tokens"]
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 6])):
        if rng.random() < 0.12:
            body = mutate(rng, body)
        elif isinstance(body, dict):
            known = names.get(path, KEYS)
            name = rng.choice([name for name in known if name in USUAL] or known if rng.random() < 0.85 else known)
            body[name] = rng.choice(USUAL[name]) if name in USUAL and rng.random() < 0.93 else value(rng)
    if isinstance(body, dict) and isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 20:
        body["max_tokens"] = 20 if rng.random() < 0.9 else body["max_tokens"]
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        text = damaged(rng, text)
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    kind = rng.choices(["whole", "chunked", "slow", "left", "half", "reset", "head"], [80, 4, 3, 5, 3, 3, 2])[0]
    return method, path, text, kind


def damaged(rng: random.Random, text: bytes) -> bytes:
    """Return JSON text with bytes removed, changed, repeated or added."""
    at = rng.randrange(len(text) + 1)
    return rng.choice([
        text[:at], text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :], text + text, text[:at] + text[at // 2 :],
        b"\xef\xbb\xbf" + text, text.decode("utf-8", "replace").encode("utf-16"), b"[" * 50_000, b"", b"null",
        text[:at] + rng.choice([b"\0", b"}", b"]", b'"', b"\\", b"\xff", b",", b"NaN", b"1e999"]) + text[at:],
        base64.b64encode(text), b" " * 100_000 + text,
    ])  # fmt: skip


def sent(port: int, method: str, path: str, body: bytes, kind: str, rng: random.Random) -> tuple[int, bytes]:
    """Send a request as `kind` says. Returns the answer's status and body; status 0 if the client does not wait."""
    if kind == "whole":
        return ask(port, method, path, body)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n".encode()
    length = b"content-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        if kind == "chunked":
            half = len(body) // 2
            parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
            connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n")
        elif kind == "slow":
            whole = head + length + body
            step = max(1, len(whole) // 10)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # answered before the end of the body
                for start in range(0, len(whole), step):
                    connection.sendall(whole[start : start + step])
                    time.sleep(0.01)
        elif kind == "half":
            connection.sendall(head + length + body)
            connection.shutdown(socket.SHUT_WR)
        elif kind == "head":  # a damaged head
            data = bytearray(head + length)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            connection.sendall(bytes(data) + body)
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.recv(4_096)
            return 0, b""
        else:  # "left" and "reset": the client does not wait for the end
            connection.sendall(head + length + body[: len(body) if rng.random() < 0.7 else len(body) // 2])
            time.sleep(rng.choice([0, 0.01, 0.1]))
            if kind == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return 0, b""
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        return answer.status, answer.read()


def fault_of(path: str, body: bytes, status: int, answer: bytes, seconds: float) -> str | None:
    if status >= 500 and status != 503:
        return f"status {status}"
    if 400 <= status < 500 and path.startswith("/v1/") and status not in (404, 405):
        try:
            error = json.loads(answer)["error"]
        except (ValueError, KeyError, TypeError):
            return "an error that is not of OpenAI's shape"
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            return "an error that is not of OpenAI's shape"
        if len(error["message"]) > MAX_MESSAGE:
            return f"an error message of {len(error['message']):,} characters"
        if "structured_outputs" not in error["message"] and seconds > SECONDS / 4:
            return f"an error after {seconds:.1f} s"
    if status == 200 and path in (COMPLETIONS, CHAT):
        text = answer.decode(errors="replace")
        if "data: " in text[:20]:
            if "data: [DONE]" not in text:
                return "a stream without an end"
            if '"error": {' in text or '"error":{' in text:
                return "a stream that ends with an error"
        elif any(choice["finish_reason"] in (None, "error") for choice in json.loads(text)["choices"]):
            return "finish_reason of an answer"
    return None
