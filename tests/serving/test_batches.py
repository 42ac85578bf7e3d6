"""/v1/files and /v1/batches with the official client: uploads, answers, limits, keys, and a restart of the server."""

import asyncio
import dataclasses
import errno
import json
import threading
import time
from collections.abc import Iterator

import httpx
import msgspec
import openai
import pytest
from openai.types import Batch, FileObject

from jpaged.errors import RequestError
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.files import batch_files, batch_jobs
from jpaged.serving.files import store as file_store
from jpaged.serving.files.batch_run import run_requests
from jpaged.serving.files.store import FileLimits, FileStore
from jpaged.serving.server_state import Server
from tests.serving.http_client import error_of, strict, wait_for
from tests.support.http_server import running

URL = "/v1/completions"


def lines(*bodies: dict, url: str = URL) -> bytes:
    """The bytes of an input file: one request for each body."""
    requests = ({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies))
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def ask(prompt: str, **fields) -> dict:
    return {"prompt": prompt, "max_tokens": 3, **fields}


@pytest.fixture
def store(tmp_path):
    made = FileStore(tmp_path / "batches", FileLimits(max_files=6, max_bytes=20_000, max_file_bytes=9_000))
    yield made
    made.close()


@pytest.fixture
def url(engine, host, store):
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(files=store))
    return host[1]


def connect(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def upload(client: openai.OpenAI, data: bytes) -> FileObject:
    return client.files.create(file=("in.jsonl", data), purpose="batch")


def start(client: openai.OpenAI, data: bytes, **fields) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, data).id, endpoint=URL, completion_window="24h", **fields
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_for(lambda: client.batches.retrieve(batch.id).status in batch_jobs.ENDED)
    return client.batches.retrieve(batch.id)


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, dict]:
    """The answers of an output file by custom_id."""
    assert file_id is not None
    read = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    return {one["custom_id"]: one["response"] for one in read}


def test_files(client, url, store):
    data = "ä".encode() * 1_000 + b"\r\n--\r\n"
    made = upload(client, data)
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(data), "in.jsonl", "batch", "processed")
    strict(FileObject, httpx.get(f"{url}/v1/files/{made.id}").text)
    assert client.files.content(made.id).content == data
    other = upload(client, b"")
    assert [one.id for one in client.files.list()] == [other.id, made.id]
    assert [one.id for one in client.files.list(order="asc", limit=1)] == [made.id, other.id]  # over two pages
    assert not list(client.files.list(purpose="batch_output"))
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.content(made.id)
    assert store.num_bytes == 0


def test_a_batch(client, url, engine):
    data = lines(ask("abc"), ask("bad", temperature=-1), ask("xyz"))
    made = start(client, data, metadata={"a": "b"})
    assert (made.status, made.object, made.endpoint) == ("validating", "batch", URL)
    done = ended(client, made)
    strict(Batch, httpx.get(f"{url}/v1/batches/{made.id}").text)
    assert (done.status, done.metadata) == ("completed", {"a": "b"})
    assert done.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    right, wrong = answers(client, done.output_file_id), answers(client, done.error_file_id)
    assert {name: one["body"]["choices"][0]["text"] for name, one in right.items()} == {"r0": "abc", "r2": "xyz"}
    assert (wrong["r1"]["status_code"], wrong["r1"]["body"]["error"]["param"]) == (400, "temperature")
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    again = ended(client, start(client, lines(ask("a"))))
    assert (again.error_file_id, [one.id for one in client.batches.list()]) == (None, [again.id, made.id])
    assert [one.id for one in client.batches.list(limit=1)] == [again.id, made.id]  # over two pages
    with pytest.raises(openai.ConflictError, match="completed"):
        client.batches.cancel(made.id)
    assert not engine.running


@pytest.mark.parametrize(("data", "line", "said"), [
    (lines(ask("a"), ask("b"), url="/v1/embeddings"), 1, "is not the endpoint of the batch"),
    (lines(ask("a")) + b"{\n", 2, "the input file, line 2"),
    (lines(ask("a", stream=True)), 1, "stream: true"),
    (lines(*[ask("a")] * 3), 3, "at most 2 requests"),
    (b"\n", None, "has no requests"),
    (lines(ask("a", stream="X")).replace(b"X", b"\xff"), 1, "must be a JSON object"),
    (lines(ask("a", stream="X")).replace(b'"X"', b"[" * 2_000 + b"]" * 2_000), 1, "recursion"),
    (lines(ask("a"))[:20] + b"\xff", 1, "line 1"),
    (lines(ask("a")) + b"\n" * 4, 5, "over 4 lines"),
    (lines(ask("a"), ask("b" * 5_000)), 2, "over 5,000 bytes"),
    (b" " * 6_000, 1, "over 5,000 bytes"),
])  # fmt: skip
def test_a_wrong_input_file_fails_the_batch(client, engine, monkeypatch, data, line, said):
    monkeypatch.setattr(batch_jobs, "MAX_REQUESTS", 2)
    monkeypatch.setattr(batch_files, "MAX_LINE", 5_000)
    done = ended(client, start(client, data))
    assert (done.status, done.output_file_id) == ("failed", None)
    assert (done.errors.data[0].line, said in done.errors.data[0].message) == (line, True)
    assert not engine.seen_prompts


def test_a_batch_is_cancelled(client, engine):
    engine.step_seconds = 0.02
    made = start(client, lines(ask("ab", max_tokens=1), ask("never ends", max_tokens=4_000)))
    waits = start(client, lines(ask("later")))
    wait_for(lambda: client.batches.retrieve(made.id).request_counts.completed == 1)
    with pytest.raises(openai.ConflictError, match="cancel the batch first"):
        client.files.delete(made.input_file_id)
    assert client.batches.cancel(waits.id).status == "cancelled"
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    done = ended(client, made)
    assert (done.status, set(answers(client, done.output_file_id))) == ("cancelled", {"r0"})
    assert not engine.running
    assert client.files.delete(made.input_file_id).deleted


def test_requests_of_clients_come_first(client, url, engine):
    """While a client's request is open, a batch has half of the rows. While requests wait, it starts no line."""
    engine.step_seconds, stats, waiting = 0.005, engine.stats, [1]
    engine.stats = lambda: dataclasses.replace(stats(), num_waiting=waiting[0])
    made = start(client, lines(*(ask(f"line {i}", max_tokens=20) for i in range(12))))
    wait_for(lambda: client.batches.retrieve(made.id).status == "in_progress")
    assert not engine.seen_prompts
    with httpx.stream("POST", url + URL, json={"prompt": "mine", "max_tokens": 4_000, "stream": True}):
        waiting[0] = 0
        wait_for(lambda: len(engine.running) == 5)
        assert not any(len(engine.running) > 5 for _ in range(20) if httpx.get(f"{url}/health"))
    assert ended(client, made).request_counts.completed == 12


def test_limits(client, url, store):
    with pytest.raises(openai.APIStatusError, match="larger than 9,000 bytes") as caught:
        upload(client, b"a" * 9_001)
    assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
    kept = [upload(client, b"a" * 8_000) for _ in range(2)]
    with pytest.raises(openai.APIStatusError, match="at most 20,000 bytes"):
        upload(client, b"a" * 8_000)
    client.files.delete(kept[0].id)
    failed = ended(client, start(client, lines(*(ask("a" * 400) for _ in range(12)))))
    assert (failed.status, failed.errors.data[0].code) == ("failed", "storage_full")
    assert answers(client, failed.output_file_id)  # those that fit
    for file in client.files.list():
        client.files.delete(file.id)
    for _ in range(6):
        upload(client, b"")
    with pytest.raises(openai.APIStatusError, match="at most 6 files"):
        upload(client, b"")
    assert (store.num_receiving, store.bytes_received) == (0, 0)


def test_batches_make_no_files_beyond_the_limit(client, store):
    made = upload(client, lines(ask("a")))
    for _ in range(5):
        upload(client, b"")
    with pytest.raises(openai.APIStatusError, match="at most 6 files") as caught:
        client.batches.create(input_file_id=made.id, endpoint=URL, completion_window="24h")
    assert (caught.value.status_code, list(client.batches.list())) == (413, [])


def test_a_full_disk(client, url, engine, store, tmp_path, monkeypatch):
    """Nothing is made that has no record, and answers wait until there is room for the record of their file."""
    full, saved = {"batches", "files"}, file_store.save

    def save(path, record) -> None:
        if path.parent.name in full:
            raise OSError(errno.ENOSPC, "no space")
        saved(path, record)

    data = lines(ask("a"), ask("b", temperature=-1))
    kept = upload(client, data)
    monkeypatch.setattr(file_store, "save", save)
    monkeypatch.setattr(batch_jobs, "save", save)
    monkeypatch.setattr(batch_jobs, "RETRY_SECONDS", 0.01)
    create = {"input_file_id": kept.id, "endpoint": URL, "completion_window": "24h"}
    assert error_of(httpx.post(f"{url}/v1/batches", json=create), 413)["code"] == "storage_full"
    files = {"file": ("a", data), "purpose": (None, "batch")}
    assert error_of(httpx.post(f"{url}/v1/files", files=files), 413)["code"] == "storage_full"
    assert ([one.id for one in client.files.list()], list(client.batches.list())) == ([kept.id], [])
    assert {path.stem for path in (tmp_path / "batches" / "files").iterdir()} == {kept.id}
    full.clear()
    engine.step_seconds = 0.01
    made = start(client, lines(ask("a"), ask("b", temperature=-1), ask("c", max_tokens=50)))
    wait_for(lambda: client.batches.retrieve(made.id).request_counts.failed == 1)
    full.add("files")
    wait_for(lambda: client.batches.retrieve(made.id).status == "finalizing")
    time.sleep(0.05)  # five attempts
    assert client.batches.retrieve(made.id).status == "finalizing"
    full.clear()
    done = ended(client, made)
    assert done.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert set(answers(client, done.output_file_id)) == {"r0", "r2"}
    assert len(engine.seen_prompts) == 2  # no line ran again
    assert not [path for path in store.batches.iterdir() if path.suffix != ".json"]


def test_a_disk_that_is_full_for_answers(client, engine, monkeypatch):
    """The lines that ran before get an output file, and none runs twice. Only a part of the second answer fits."""
    append, save, written, full = batch_files.os.write, file_store.save, [], []

    def write(file: int, data: bytes) -> int:
        if not full and len(written) < 2:
            written.append(data)
            return append(file, data if len(written) == 1 else data[:50])
        full.append(1)
        raise OSError(errno.ENOSPC, "no space")

    def save_if_room(path, record) -> None:
        if 0 < len(full) < 4:
            full.append(1)
            raise OSError(errno.ENOSPC, "no space")
        save(path, record)

    monkeypatch.setattr(batch_files.os, "write", write)
    monkeypatch.setattr(batch_jobs, "save", save_if_room)
    monkeypatch.setattr(batch_jobs, "RETRY_SECONDS", 0.01)
    engine.step_seconds = 0.01
    done = ended(client, start(client, lines(*(ask("abc", max_tokens=i) for i in (1, 5, 9)))))
    assert (done.status, done.errors.data[0].code) == ("failed", "storage_full")
    assert set(answers(client, done.output_file_id)) == {"r0"}
    assert len(engine.seen_prompts) == 3


@pytest.mark.parametrize(("param", "body"), [
    ("endpoint", {"endpoint": "/v1/batches"}), ("input_file_id", {"input_file_id": "file-x"}),
    ("completion_window", {"completion_window": "1h"}), ("output_expires_after", {"output_expires_after": {}}),
    ("colour", {"colour": 1}),
])  # fmt: skip
def test_a_refused_batch(client, url, param, body):
    right = {"input_file_id": upload(client, b"").id, "endpoint": URL, "completion_window": "24h"}
    assert error_of(httpx.post(f"{url}/v1/batches", json=right | body), 400)["param"] == param


def test_refused_uploads(url, store, tmp_path):
    address, file = f"{url}/v1/files", {"file": ("a", b"x")}
    assert error_of(httpx.post(address, files=file), 400)["param"] == "purpose"
    assert error_of(httpx.post(address, files=file, data={"purpose": "vision"}), 400)["param"] == "purpose"
    assert error_of(httpx.post(address, files={"purpose": (None, "batch")}), 400)["param"] == "file"
    assert error_of(httpx.post(address, files=file, data={"expires_after[seconds]": "9"}), 400)
    assert error_of(httpx.post(address, json={}), 415)["code"] == "unsupported_media_type"
    page = httpx.post(address, files=file, data={"purpose": "batch"}, headers={"Origin": "http://other"})
    assert error_of(page, 415)
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    cut_off = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx'
    right = b"\r\n".join((
        b"--b", b"Content-Disposition: form-data; name=purpose", b"", b"batch",
        b"--b", b"Content-Disposition: form-data; filename=a.jsonl; name=file; filename*=utf-8''b", b"", b"x", b"--b--",
    ))  # fmt: skip
    for body in (b"", b"--b\r\n", cut_off, b"--b\r\nA: b\r\n\r\n", b"--b" + b"a" * 9_000, b"a" * 9_000 + right):
        assert error_of(httpx.post(address, content=body, headers=form), 400)["param"] == "body"
    assert [path.name for path in (tmp_path / "batches" / "files").iterdir()] == []
    assert httpx.post(address, content=right, headers=form).json()["filename"] == "a.jsonl"
    assert (store.num_receiving, store.bytes_received) == (0, 0)


def test_files_and_batches_belong_to_their_key(engine, host, store):
    options = AppOptions(api_keys=("one", "two"), files=store)
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), options)
    with connect(host[1], "one") as mine, connect(host[1], "two") as other:
        done = ended(mine, start(mine, lines(ask("a"))))
        assert done.status == "completed"
        assert (list(other.files.list()), list(other.batches.list())) == ([], [])
        for call, name in (
            (other.batches.retrieve, done.id),
            (other.batches.cancel, done.id),
            (other.files.delete, done.output_file_id),
            (other.files.content, done.output_file_id),
            (other.files.retrieve, done.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call(name)


def test_lines_are_read_outside_of_the_event_loop(tmp_path):
    """Reading a line of 16 MB takes 50 ms, and finding the first of 50,000 lines that is not done takes longer."""
    readers = set()

    def requests() -> Iterator[batch_files.BatchRequest]:
        for i in range(6):
            readers.add(threading.current_thread())
            yield batch_files.BatchRequest(str(i), URL, msgspec.Raw(b"{}"))

    async def answered(request: batch_files.BatchRequest) -> tuple[int, str, bytes]:
        return 200, request.custom_id, b"{}"

    with batch_files.open_results(tmp_path / "out.jsonl", ()) as results:
        asyncio.run(run_requests(answered, requests(), results, max_inflight=3, update=lambda status: None))
    assert (len(results.done), threading.current_thread() in readers) == (6, False)


def test_a_restart_goes_on(engine, store, tmp_path):
    server = Server(engine=engine, model_names=("echo",))
    engine.step_seconds = 0.01
    with running(create_app(server, AppOptions(files=store))) as url, connect(url) as client:
        made = start(client, lines(*(ask(f"p{i}", max_tokens=1 if i < 4 else 2_000) for i in range(8))))
        wait_for(lambda: client.batches.retrieve(made.id).request_counts.completed == 4)
        with pytest.raises(RequestError, match="another server"):
            FileStore(tmp_path / "batches")
    folder = tmp_path / "batches"
    parts = ["files/file-" + "0" * 48 + end for end in ("", ".part", ".tmp")] + ["batches/batch_1.tmp"]
    kept = ["files/file-" + "1" * 48 + end for end in ("", ".json")]  # whose record cannot be read
    for name in (*parts, *kept):
        (folder / name).write_bytes(b"x")
    engine.step_seconds, engine.closed = 0, False
    engine.seen_prompts.clear()
    again = create_app(server, AppOptions(files=FileStore(tmp_path / "batches")))
    with running(again) as url, connect(url) as client:
        done = ended(client, made)
        assert (done.status, done.request_counts.completed) == ("completed", 8)
        assert len(engine.seen_prompts) == 4
        assert set(answers(client, done.output_file_id)) == {f"r{i}" for i in range(8)}
    assert [name for name in (*parts, *kept) if (folder / name).exists()] == kept
    (folder / f"batches/{made.id}.errors").touch()
    last = FileStore(folder)
    create_app(server, AppOptions(files=last))
    last.close()
    assert [path.name for path in last.batches.iterdir()] == [f"{made.id}.json"]


def test_a_line_on_which_the_server_fails_runs_again(client, engine, monkeypatch):
    monkeypatch.setattr(batch_jobs, "ATTEMPT_SECONDS", 0.01)
    engine.fails_at = 0
    made = start(client, lines(ask("a")))
    wait_for(lambda: len(engine.seen_prompts) == 2)
    engine.fails_at = None
    assert ended(client, made).request_counts.completed == 1


def test_the_routes_need_a_folder_and_are_described(engine, host, url):
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    assert paths["/v1/batches"]["post"]["requestBody"]
    described = {path for path in paths if path.startswith(("/v1/files", "/v1/batches"))}
    assert described == {"/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches",
                         "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"}  # fmt: skip
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)))
    assert httpx.get(f"{url}/v1/files").status_code == 404
