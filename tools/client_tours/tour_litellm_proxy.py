"""Tour of `litellm`'s proxy in front of the server, with OpenAI's client and Anthropic's API in front of the proxy."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from checks import BASE, EMBEDDING_BASE, PROMPT, WEATHER, Checks, wait_until_idle
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": PROMPT}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MODELS = {
    "by-vllm": {"model": "hosted_vllm/demo", "api_base": f"{BASE}/v1"},
    "by-openai": {"model": "openai/demo", "api_base": f"{BASE}/v1"},
    "embedder": {"model": "openai/demo", "api_base": f"{EMBEDDING_BASE}/v1"},
}
READY_SECONDS = 180


class Forecast(BaseModel):
    """Small enough that an answer of the demo model fits."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


@contextlib.contextmanager
def proxy(key: str) -> Iterator[str]:
    """Start the proxy with this master key, and give its base URL. The config is JSON, which is YAML too."""
    models = [{"model_name": name, "litellm_params": given | {"api_key": "none"}} for name, given in MODELS.items()]
    Path("config.yaml").write_text(json.dumps({"model_list": models}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", "config.yaml", "--host", "127.0.0.1"]
    with open("proxy.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"LITELLM_MASTER_KEY": key},
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + READY_SECONDS
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the proxy is not ready: {Path('proxy.log').read_text()[-2000:]}")
            time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def chats(checks: Checks, client: openai.OpenAI, name: str) -> None:
    asked: Any = {"model": name, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    lively: Any = asked | {"max_tokens": 200, "temperature": 1, "seed": 3}
    text = None
    with checks.check(f"{name}: chat"):
        text = client.chat.completions.create(**asked).choices[0].message.content
        assert text
    with checks.check(f"{name}: chat, streamed"):
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == text
    with checks.check(f"{name}: a stream closed early ends its request"):
        stream = client.chat.completions.create(
            **asked | {"max_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        wait_until_idle(30)
    with checks.check(f"{name}: a named tool, whole and streamed"):
        (call,) = client.chat.completions.create(**lively, tools=TOOLS, tool_choice=NAMED).choices[0].message.tool_calls
        assert {"city", "unit"} <= set(json.loads(call.function.arguments))
        stream = client.chat.completions.create(**lively, tools=TOOLS, tool_choice=NAMED, stream=True)
        calls: list[Any] = [call for part in stream if part.choices for call in part.choices[0].delta.tool_calls or []]
        assert {"city", "unit"} <= set(json.loads("".join(call.function.arguments or "" for call in calls)))
    with checks.check(f"{name}: parse with a pydantic model"):
        parsed = client.chat.completions.parse(**lively, response_format=Forecast)
        assert isinstance(parsed.choices[0].message.parsed, Forecast)
    with checks.check(f"{name}: responses, whole and streamed"):
        wanted: Any = {"model": name, "input": PROMPT, "max_output_tokens": 24, "temperature": 0}
        made = client.responses.create(**wanted)
        events = list(client.responses.create(**wanted, stream=True))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == made.output_text
    with checks.check(f"{name}: a bad value is BadRequestError"):
        caught = None
        try:
            client.chat.completions.create(**asked | {"temperature": -1})
        except openai.BadRequestError as error:
            caught = error
        assert caught is not None
        assert "temperature" in str(caught)


def main() -> None:
    checks = Checks()
    key = f"sk-{secrets.token_hex(24)}"  # the proxy does not start without one
    with proxy(key) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        with checks.check("models.list"):
            assert {model.id for model in client.models.list()} == set(MODELS)
        for name in ("by-vllm", "by-openai"):
            chats(checks, client, name)
        with checks.check("embedder: embeddings"):
            made = client.embeddings.create(model="embedder", input=[PROMPT, "x"], encoding_format="float")
            assert [len(data.embedding) for data in made.data] == [256, 256]
        with checks.check("by-vllm: Anthropic's /v1/messages"):
            body = {"model": "by-vllm", "max_tokens": 24, "messages": [{"role": "user", "content": PROMPT}]}
            headers = {"content-type": "application/json", "x-api-key": key}
            request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["content"][0]["text"]
    checks.write()


if __name__ == "__main__":
    main()
