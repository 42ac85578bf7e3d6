"""POST /tokenize and /detokenize, /invocations, and the routes for operators."""

import json
import socket

import httpx
import pytest

from jpaged.chat.turn import ChatFormats
from jpaged.params.pooling import PooledModel
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import INLINE_BYTES
from tests.serving.http_client import CHAT, answer, param, post


def test_tokenize_a_text_and_a_conversation(url, engine):
    assert answer(url, "/tokenize", model="echo", prompt="ab") == {
        "count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": None,
    }  # fmt: skip
    assert answer(url, "/tokenize", prompt="ab", return_token_strs=True)["token_strs"] == ["a", "b"]
    assert bytes(answer(url, "/tokenize", messages=CHAT["messages"])["tokens"]) == b"<user>hi<assistant>"
    assert engine.tokenizer.seen_options["add_generation_prompt"] is True
    answer(url, "/tokenize", messages=CHAT["messages"], add_generation_prompt=False)
    assert engine.tokenizer.seen_options["add_generation_prompt"] is False
    long = "é" * (INLINE_BYTES // 2)  # longer than the model takes, and checked by a child process
    assert answer(url, "/tokenize", prompt=long)["count"] == INLINE_BYTES
    assert not engine.seen_prompts


def test_detokenize(url):
    assert answer(url, "/detokenize", tokens=[104, 105]) == {"prompt": "hi"}
    assert answer(url, "/detokenize", tokens=[]) == {"prompt": ""}
    assert param(url, "/detokenize", tokens=[1, 256]) == "tokens[1]"
    assert param(url, "/detokenize", tokens=[-1]) == "tokens[0]"


def test_what_is_refused(url, engine):
    assert param(url, "/tokenize") == "prompt"
    assert param(url, "/tokenize", prompt="a", messages=CHAT["messages"]) == "prompt"
    assert param(url, "/tokenize", prompt="a", add_generation_prompt=True) == "add_generation_prompt"
    assert param(url, "/tokenize", prompt="a", chat_template="{{ messages }}") == "chat_template"
    assert post(url, "/tokenize", {"prompt": "a", "model": "other"}).status_code == 404
    engine.tokenizer = None
    assert param(url, "/tokenize", prompt="a") == "model"
    assert param(url, "/detokenize", tokens=[1]) == "model"


def test_invocations_answer_as_the_route_of_their_fields(url, engine):
    same = ("choices", "object", "model", "usage")
    for path, body in (
        ("/v1/completions", {"prompt": "ab", "max_tokens": 3}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 3}),
        ("/v1/completions", {"prompt": [65] * INLINE_BYTES, "max_tokens": 1}),
    ):
        if len(json.dumps(body)) > INLINE_BYTES:
            engine.max_model_len = 2 * INLINE_BYTES
        one, other = answer(url, path, **body), answer(url, "/invocations", **body)
        assert [one[name] for name in same] == [other[name] for name in same]
    assert param(url, "/invocations", input="ab") == "body"
    assert param(url, "/invocations", prompt="ab", tempreature=1) == "tempreature"
    engine.pooling = PooledModel("embed", 4)
    assert answer(url, "/invocations", input="ab")["data"][0]["object"] == "embedding"
    assert answer(url, "/invocations", query="a", documents=["b"])["results"]
    assert answer(url, "/invocations", text_1="a", text_2="b")["data"]
    assert param(url, "/invocations", prompt="ab") == "body"
    for raw in (b"{", b"[]", b'"x"'):
        assert httpx.post(f"{url}/invocations", content=raw).json()["error"]["param"] == "body"


def test_routes_for_operators(url, engine):
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    engine.running |= {"a", "b"}
    assert httpx.get(f"{url}/load").json() == {"server_load": 2}
    assert [httpx.request(method, f"{url}/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert httpx.get(f"{url}/ready").status_code == 200
    engine.is_ready = False
    starting = httpx.get(f"{url}/ready")
    assert (starting.status_code, starting.headers["retry-after"]) == (503, "1")
    engine.is_ready, engine.dead = True, True
    assert httpx.post(f"{url}/ping").status_code == 503


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/embeddings", "/invocations"])
def test_urls_are_refused_and_never_opened(url, path):
    """A part with a URL or a file is refused by name. The server that the URL names sees no connection."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        target = f"http://127.0.0.1:{other.getsockname()[1]}/x.png"
        for kind, value in (
            ("image_url", {"url": target}), ("input_audio", {"data": target}), ("video_url", {"url": target}),
            ("file", {"file_id": target}),
        ):  # fmt: skip
            parts = [{"type": "text", "text": "see"}, {"type": kind, kind: value}]
            body = {"messages": [{"role": "user", "content": parts}]}
            assert param(url, path, **body) == "messages[0].content[1].type"
        with pytest.raises(BlockingIOError):
            other.accept()


def test_tokenizer_info_needs_its_option(url, engine, host):
    assert httpx.get(f"{url}/tokenizer_info").status_code == 404
    engine.tokenizer.eos_token = "<eos>"
    server = Server(engine=engine, model_names=("echo",), chat=ChatFormats("{{ messages }}"))
    host[0].app = create_app(server, AppOptions(tokenizer_info=True))
    assert httpx.get(f"{url}/tokenizer_info").json() == {
        "tokenizer_class": "ByteTokenizer", "bos_token": None, "eos_token": "<eos>", "pad_token": None,
        "unk_token": None, "chat_template": "{{ messages }}", "model_max_length": 4096,
    }  # fmt: skip
    engine.tokenizer = None
    assert httpx.get(f"{url}/tokenizer_info").json()["error"]["param"] == "model"
