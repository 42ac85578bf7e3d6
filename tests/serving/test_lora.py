"""Adapters over HTTP: `model` chooses one, the operator loads and unloads them, and everything else is refused.

The engine is the fake one with the real registry and reader, over the shapes of a tiny checkpoint.
"""

import asyncio
import concurrent.futures
import json
import re
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from jpaged import AsyncLLM, LoRARequest, SamplingParams
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.frontend.adapters import adapter_registry
from jpaged.models.spec import WeightLayout
from jpaged.runtime.adapter_pool import AdapterOptions
from jpaged.serving.adapters.served_adapters import AdapterModule, ServedAdapters, chat_template_of
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.golden.checkpoints import BY_NAME as CHECKPOINTS
from tests.golden.checkpoints import write_checkpoint
from tests.loading.recorded_adapters import recorded
from tests.serving.http_client import error_of
from tests.support.http_server import running

ADMIN = {"Authorization": "Bearer look"}
TEMPLATE = "{{ messages[0].content }}!"
TURN, ONE = {"role": "user", "content": "hi"}, {"max_tokens": 1}
BODIES = {  # of every route that generates
    "/v1/completions": {"prompt": ["a", "b"]} | ONE,
    "/v1/chat/completions": {"messages": [TURN]} | ONE,
    "/v1/chat/completions/batch": {"messages": [[TURN]]} | ONE,
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [TURN]} | ONE,
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": ONE},
    "/invocations": {"prompt": "a"} | ONE,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Adapters below `allowed`: sql and code fit the model, phi3 does not. One more is elsewhere."""
    made = tmp_path_factory.mktemp("adapters")
    for name, adapter in (("sql", "llama"), ("code", "llama-qv"), ("phi3", "phi3"), ("ranks", "llama-patterns")):
        recorded(adapter).write(made / "allowed" / name)
    (made / "allowed" / "code" / "chat_template.jinja").write_text(TEMPLATE)
    recorded("llama").write(made / "elsewhere" / "secret")
    (made / "allowed" / "link").symlink_to(made / "elsewhere" / "secret")
    (made / "allowed" / "half").mkdir()
    (made / "allowed" / "half" / "adapter_config.json").symlink_to(
        made / "elsewhere" / "secret" / "adapter_config.json"
    )
    return made


@pytest.fixture
def registry():
    """The registry of an engine for adapters of rank 4 of the tiny llama."""
    base = recorded("llama")
    loaded = types.SimpleNamespace(config=base.config, spec=base.spec, stored_spec=None, layout=WeightLayout())
    config = EngineConfig(model="tiny", enable_lora=True, max_loras=2, max_lora_rank=4)
    options = AdapterOptions.of(base.spec, config, np.dtype(np.float32))
    made = adapter_registry(loaded, config, options)  # ty: ignore[invalid-argument-type]
    yield made
    made.close()


@pytest.fixture
def adapters(registry, folders) -> ServedAdapters:
    made = ServedAdapters(registry, ("echo", "alias"), [folders / "allowed"])
    made.load_modules([AdapterModule("sql", str(folders / "allowed" / "sql"))])
    return made


@pytest.fixture
def url(engine, adapters, host) -> str:
    server = Server(engine=engine, model_names=("echo", "alias"), root="a/checkpoint", adapters=adapters)
    host[0].app = create_app(server, AppOptions(admin_keys=("look",)))
    return host[1]


def load(url: str, name: str, path: object, **more: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN)


def unload(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/unload_lora_adapter", json=body, headers=ADMIN)


def asked(engine) -> list[str | None]:
    """Adapters of the requests so far, by name."""
    return [None if one is None else one.lora_name for one in engine.seen_adapters]


def test_every_generating_route_takes_the_adapter_of_its_model(client, url, engine):
    for path, body in BODIES.items():
        engine.seen_adapters.clear()
        answer = httpx.post(url + path, json={"model": "sql", **body}).raise_for_status().json()
        assert answer.get("model", "sql") == "sql"
        assert asked(engine) == ["sql"] * (2 if path == "/v1/completions" else 1), path
        httpx.post(url + path, json={"model": "alias", **body}).raise_for_status()
        httpx.post(url + path, json=body).raise_for_status()
        assert set(asked(engine)[-2:]) == {None}, path
    engine.seen_adapters.clear()
    chunks = list(client.chat.completions.create(model="sql", messages=[TURN], stream=True, max_tokens=1))
    assert {chunk.model for chunk in chunks} == {"sql"}
    assert asked(engine) == ["sql"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_is_unloaded_while_a_prompt_is_prepared(url, engine, registry, folders, monkeypatch, stream):
    """The request is refused. The model alone does not answer in the adapter's name."""
    model_name = Server.model_name

    def unloaded_next(server, name):
        found = model_name(server, name)
        registry.remove("sql")
        return found

    monkeypatch.setattr(Server, "model_name", unloaded_next)
    for path, body in BODIES.items():
        registry.get(LoRARequest("sql", 1, str(folders / "allowed" / "sql")))
        said = httpx.post(url + path, json={"model": "sql", **body} | ({"stream": True} if stream else {}))
        if stream and "/batch" in path:
            continue  # has no streams
        assert said.status_code == 404 or '"type":"response.failed"' in said.text, path
        assert "model is not served here" in said.text, path
    assert not engine.seen_adapters


def test_adapters_are_listed_with_their_base_model(client, url, folders):
    listed = client.models.list().data
    assert [(model.id, model.parent) for model in listed] == [("echo", None), ("alias", None), ("sql", "echo")]
    assert [model.root for model in listed] == ["a/checkpoint"] * 2 + [str(folders / "allowed" / "sql")]
    assert client.models.retrieve("sql") == listed[2]
    listed = httpx.get(f"{url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [model["id"] for model in listed["data"]] == ["echo", "alias", "sql"]


def test_an_unknown_model_is_refused_with_the_names_that_exist(client, url):
    with pytest.raises(openai.NotFoundError, match=r"use echo or alias, or an adapter \(sql\), got 'nosql'"):
        client.completions.create(model="nosql", prompt="a")
    error = error_of(httpx.post(f"{url}/v1/embeddings", json={"model": "sql", "input": "a"}), 400)
    assert "does not support LoRA adapters" in error["message"]


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(client, url, engine, folders):
    answer = load(url, "code", folders / "allowed" / "code")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'code' added successfully.")
    turn = [{"role": "user", "content": "hi"}]
    for model in ("code", "sql", "echo"):
        client.chat.completions.create(model=model, messages=turn, max_tokens=1)
    assert asked(engine) == ["code", "sql", None]
    assert [one.lora_int_id for one in engine.seen_adapters[:2]] == [2, 1]
    counted = httpx.post(f"{url}/tokenize", json={"model": "code", "messages": turn}).json()["count"]
    assert counted == httpx.post(f"{url}/tokenize", json={"model": "echo", "messages": turn}).json()["count"]
    assert load(url, "code", "code", load_inplace=True).status_code == 200  # below --lora-dirs
    answer = unload(url, lora_name="code")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'code' removed successfully.")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="code", prompt="a")
    assert unload(url, lora_int_id=1).status_code == 200
    assert [model.id for model in client.models.list().data] == ["echo", "alias"]


def test_an_adapter_has_its_own_chat_template(client, url, engine, folders, tmp_path):
    assert load(url, "code", folders / "allowed" / "code").status_code == 200
    used = []
    engine.tokenizer.apply_chat_template = lambda messages, **options: used.append(options["chat_template"]) or "x"
    for model in ("code", "sql"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    assert used == [TEMPLATE, None]
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    for stored, template in (("text", "text"), (named, "plain"), (None, None)):
        config.write_text(json.dumps({"chat_template": stored}))
        assert chat_template_of(tmp_path) == template
    config.write_text("{")
    with pytest.raises(ModelLoadError, match="chat template cannot be read"):
        chat_template_of(tmp_path)


def test_adapters_that_cannot_be_loaded_are_refused(client, url, folders, tmp_path):
    refused = (
        ("echo", "sql", 400, "'echo' is the name of the model"),
        ("sql", "sql", 400, "The lora adapter 'sql' has already been loaded"),
        ("line\nbreak", "sql", 400, "lora_name must have no line breaks"),
        ("other", "phi3", 400, "the adapter is for another model"),
        ("other", "ranks", 400, "rank"),
        ("other", "missing", 404, "there is no adapter_config.json"),
        ("other", "x" * 300, 404, "no adapter found"),
        ("other", "sql\0", 404, "no adapter found"),
        ("other", "half", 403, "is not below a folder of --lora-dirs"),
        ("other", "link", 403, "is not below a folder of --lora-dirs"),
        ("other", "../elsewhere/secret", 403, "is not below a folder of --lora-dirs"),
        ("other", folders / "elsewhere" / "secret", 403, "is not below a folder of --lora-dirs"),
    )
    for name, path, status, said in refused:
        error = error_of(load(url, name, path), status)
        assert said in error["message"], path
    assert error_of(load(url, "", "sql"), 400)["param"] == "lora_name"
    assert error_of(unload(url), 400)["param"] == "lora_name"
    assert "cannot be found: there are sql" in error_of(unload(url, lora_name="other"), 404)["message"]
    assert "lora_int_id 7" in error_of(unload(url, lora_name="sql", lora_int_id=7), 404)["message"]
    assert [model.id for model in client.models.list().data] == ["echo", "alias", "sql"]


def test_a_failed_reload_keeps_the_adapter(client, url, registry):
    before = registry.find("sql").loaded
    error_of(load(url, "sql", "phi3", load_inplace=True), 400)
    assert registry.find("sql").loaded is before
    assert load(url, "sql", "code", load_inplace=True).status_code == 200
    assert registry.find("sql").loaded is not before
    assert client.models.retrieve("sql").root.endswith("code")


def test_loading_needs_an_admin_key_adapters_and_folders(url, engine, registry, folders, host):
    assert httpx.post(f"{url}/v1/load_lora_adapter", json={}).status_code == 401
    named = {"engine": engine, "model_names": ("echo",)}
    closed = ServedAdapters(registry, ("echo",))
    host[0].app = create_app(Server(**named, adapters=closed), AppOptions(admin_keys=("look",)))
    assert "start it with --lora-dirs" in error_of(load(url, "a", folders / "allowed" / "sql"), 403)["message"]
    host[0].app = create_app(Server(**named), AppOptions(admin_keys=("look",)))
    assert "--enable-lora" in error_of(load(url, "a", "sql"), 400)["message"]
    assert "--enable-lora" in error_of(unload(url, lora_name="a"), 400)["message"]
    host[0].app = create_app(Server(**named))
    assert load(url, "a", "sql").status_code == 404


def test_other_requests_are_answered_while_an_adapter_is_read(client, url, registry, monkeypatch):
    """The answer to a load comes when the adapter is in memory, and not before."""
    may_read, reading = threading.Event(), threading.Event()
    read = registry._read

    def slow(*arguments):
        reading.set()
        assert may_read.wait(20)
        return read(*arguments)

    monkeypatch.setattr(registry, "_read", slow)
    answers = []
    loading = threading.Thread(target=lambda: answers.append(load(url, "sql", "code", load_inplace=True)))
    loading.start()
    assert reading.wait(20)
    client.completions.create(model="sql", prompt="a", max_tokens=2)
    assert registry.find("sql").loaded.rank == 2  # the old one
    assert not answers
    may_read.set()
    loading.join()
    assert answers[0].status_code == 200


def test_an_adapter_has_its_chat_template_after_its_client_went_away(registry, folders, monkeypatch):
    may_read, reading, read = threading.Event(), threading.Event(), registry._read

    def slow(*arguments):
        reading.set()
        assert may_read.wait(20)
        return read(*arguments)

    monkeypatch.setattr(registry, "_read", slow)
    served = ServedAdapters(registry, ("echo",), [folders / "allowed"])

    async def cancelled() -> None:
        loading = asyncio.ensure_future(served.load("code", "code", in_place=False))
        assert await asyncio.to_thread(reading.wait, 20)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        may_read.set()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(cancelled())
    assert served.chat_template("code") == TEMPLATE


@pytest.mark.parametrize("path", ["a\0b", "~no-such-user/a", "x" * 300])
def test_a_path_that_no_folder_can_have_is_refused(registry, path):
    with pytest.raises(ModelLoadError, match=r"is not the path of a folder|cannot be read: File name too long"):
        registry.get(LoRARequest("a", 1, path)).result(20)
    assert registry.known() == []


def test_adapters_of_the_command_line(registry, folders):
    sql = AdapterModule("sql", str(folders / "allowed" / "sql"), "meta/base")
    with pytest.raises(RequestError, match="is the name of the model"):
        ServedAdapters(registry, ("sql",)).load_modules([sql])
    with pytest.raises(RequestError, match="is there twice"):
        ServedAdapters(registry, ("echo",)).load_modules([sql, sql])
    with pytest.raises(ModelLoadError, match=r"LoRA adapter 'bad': .* is for another model"):
        ServedAdapters(registry, ("echo",)).load_modules([AdapterModule("bad", str(folders / "allowed" / "phi3"))])
    [card] = ServedAdapters(registry, ("echo",)).cards()
    assert (card.name, card.parent) == ("sql", "echo")
    with pytest.raises(RequestError, match="is not a folder"):
        ServedAdapters(registry, ("echo",), [folders / "missing"])


@pytest.fixture(scope="module")
def real(tmp_path_factory, folders) -> Iterator[tuple[str, AsyncLLM]]:
    """A server of a tiny checkpoint, with two slots. Yields its URL and its engine."""
    base = tmp_path_factory.mktemp("base")
    write_checkpoint(CHECKPOINTS["llama"], 3, base)
    engine = AsyncLLM(
        str(base), enable_lora=True, max_loras=2, max_lora_rank=4, dtype="float32", skip_tokenizer_init=True,
        row_buckets=(16,), token_buckets=(64,), max_num_seqs=16, max_num_batched_tokens=64, max_model_len=128,
    )  # fmt: skip
    engine.wait_until_ready()
    adapters = ServedAdapters(engine.adapters, ("tiny",), [folders / "allowed"])
    app = create_app(Server(engine=engine, model_names=("tiny",), adapters=adapters), AppOptions(admin_keys=("look",)))
    with running(app) as url:
        yield url, engine


def tokens_of(url: str, model: str, prompt: list[int], count: int) -> list[int]:
    """Greedy token ids of a model."""
    params = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
    body = {"model": model, "token_ids": prompt, "sampling_params": params}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=120).raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


def streamed_tokens_of(url: str, model: str, prompt: list[int], count: int) -> list[int]:
    """`tokens_of`, as a stream of openai-python."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=count, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    found: list[int] = []
    for chunk in stream:
        for choice in chunk.choices:
            found += (choice.model_extra or {}).get("token_ids") or []
    return found


@pytest.mark.slow
def test_a_real_engine_answers_with_the_adapter_while_others_come_and_go(real, folders):
    """16 streams of the base model and two adapters go on while adapters are loaded, replaced and unloaded."""
    url, engine = real
    for name in ("sql", "code"):
        assert load(url, name, name).status_code == 200
    models, prompt = ["tiny", "sql", "code", "tiny"] * 4, [3, 4, 5, 6]
    expected = {model: tokens_of(url, model, prompt, 100) for model in models}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    with concurrent.futures.ThreadPoolExecutor(len(models)) as pool:
        answers = [pool.submit(streamed_tokens_of, url, model, prompt, 100) for model in models]
        while engine.stats().num_running < len(models) and not all(answer.done() for answer in answers):
            time.sleep(0.001)
        turns = 0
        while not all(answer.done() for answer in answers) or turns < 4:
            assert load(url, "more", "sql").status_code == 200
            assert load(url, "more", "code", load_inplace=True).status_code == 200
            assert load(url, "sql", "code", load_inplace=True).status_code == 200
            assert unload(url, lora_name="more").status_code == 200
            assert error_of(load(url, "bad", "phi3"), 400)
            turns += 1
        assert [answer.result() for answer in answers] == [expected[model] for model in models]
    assert tokens_of(url, "sql", prompt, 100) == expected["code"]
    assert unload(url, lora_name="sql").status_code == 200
    assert unload(url, lora_name="code").status_code == 200
    assert tokens_of(url, "tiny", prompt, 100) == expected["tiny"]
    metrics = httpx.get(f"{url}/metrics").text
    assert re.search(r'^vllm:lora_requests_info\{max_lora="2",.*\} 1\.\d+e\+09$', metrics, re.MULTILINE)
    assert re.search(r"^jpaged:lora_loads_total\{.*\} [3-9]\.0$", metrics, re.MULTILINE)
    folder = str(folders / "allowed" / "code")
    alone = asyncio.run(first_tokens(engine, LoRARequest("again", 9, folder), prompt))
    assert alone == expected["code"]


async def first_tokens(engine: AsyncLLM, adapter: LoRARequest, prompt: list[int]) -> list[int]:
    """The answer of `AsyncLLM.generate` with an adapter."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    outputs = engine.generate({"prompt_token_ids": prompt}, params, lora_request=adapter)
    return [output async for output in outputs][-1].outputs[0].token_ids
