"""`jpaged run-batch`: every line is answered once, even if the process is killed, and mistakes are reported first."""

import asyncio
import codecs
import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from openai.types.chat import ChatCompletion

from jpaged import cli
from jpaged.cli.flags.engine import read_text
from jpaged.errors import RequestError
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.files.batch_files import BatchFileError, BatchResult, check_requests, open_results, read_requests
from jpaged.serving.files.batch_run import answer, run_requests
from jpaged.serving.server_state import Server
from jpaged.serving.web.keys import read_key_file

URL = "/v1/completions"


def line(custom_id: str, prompt: str = "abc", **fields) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": prompt, "max_tokens": 3} | fields}


def write(path, lines: list[dict]):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def read(path) -> dict[str, dict]:
    """The answers of an output file by custom_id, each there once."""
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    answers = {one["custom_id"]: one for one in lines}
    assert len(answers) == len(lines)
    return answers


@pytest.fixture
def app(engine):
    return create_app(Server(engine=engine, model_names=("echo",)), AppOptions(keep_responses=False))


def run(app, source, target, max_inflight: int = 4) -> int:
    expected = check_requests(source)
    with open_results(target, expected) as results:
        requests = read_requests(source, frozenset(results.done))
        ask = functools.partial(answer, app)
        work = run_requests(ask, requests, results, max_inflight=max_inflight, update=lambda _: None)
        return asyncio.run(work)


def test_every_request_has_an_answer(app, engine, tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    lines = [line(f"r{i}", f"prompt {i}") for i in range(20)]
    lines += [line("bad", temperature=-1), line("full", "full")]
    lines.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    source = write(tmp_path / "in.jsonl", lines)
    assert run(app, source, tmp_path / "out.jsonl") == 2
    answers = read(tmp_path / "out.jsonl")
    assert set(answers) == {one["custom_id"] for one in lines}
    assert all(one["id"].startswith("batch_req_") and one["error"] is None for one in answers.values())
    assert [answers[f"r{i}"]["response"]["body"]["choices"][0]["text"] for i in range(20)] == ["pro"] * 20
    assert answers["bad"]["response"]["status_code"] == 400
    assert answers["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert answers["full"]["response"]["status_code"] == 503
    assert answers["chat"]["response"]["request_id"]
    ChatCompletion.model_validate(answers["chat"]["response"]["body"], strict=True)
    assert not engine.running


def test_a_wrong_url_is_an_error_of_its_line(app, tmp_path):
    lines = [line("a") | {"url": "/v1/audio"}, line("b"), line("c") | {"url": "/v1/responses/x/cancel"}]
    source = write(tmp_path / "in.jsonl", lines)
    assert run(app, source, tmp_path / "out.jsonl") == 2
    answers = {name: one["response"] for name, one in read(tmp_path / "out.jsonl").items()}
    assert {name: one["status_code"] for name, one in answers.items()} == {"a": 404, "b": 200, "c": 404}
    error = answers["a"]["body"]["error"]
    assert error["message"].startswith("url '/v1/audio' is not served in a batch: use /classify")
    assert error["param"] == "url"


def test_a_byte_order_mark_is_no_part_of_a_file(app, tmp_path):
    source = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    assert run(app, source, tmp_path / "out.jsonl") == 0
    assert set(read(tmp_path / "out.jsonl")) == {"a", "b"}
    keys = tmp_path / "keys"
    keys.write_bytes(codecs.BOM_UTF8 + b"secret-one\r\nsecret-two\r\n")
    assert read_key_file("api_key_file", keys) == ["secret-one", "secret-two"]
    assert read_text("json_schema", keys).startswith("secret-one")


def test_responses_of_a_batch_are_not_kept(app, tmp_path):
    body = {"input": "hi", "max_output_tokens": 2}
    lines = [{"custom_id": f"r{i}", "url": "/v1/responses", "body": body} for i in range(3)]
    assert run(app, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl") == 0
    assert {one["response"]["body"]["object"] for one in read(tmp_path / "out.jsonl").values()} == {"response"}
    assert (app.state.responses.num_responses, app.state.responses.num_bytes) == (0, 0)


def test_a_second_run_answers_what_is_left(app, engine, tmp_path):
    source = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(8)])
    target = tmp_path / "out.jsonl"
    run(app, source, target)
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:5]) + whole[5][:40])  # killed while it wrote the sixth line
    engine.seen_prompts.clear()
    run(app, source, target)
    assert len(engine.seen_prompts) == 3
    assert target.read_bytes().splitlines(keepends=True)[:5] == whole[:5]
    assert len(read(target)) == 8


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1"),
        ([json.dumps(line("a")), json.dumps(line("a"))], "line 2: custom_id 'a' is also that of line 1"),
        ([json.dumps(line("a") | {"method": "GET"})], "line 1"),
        ([json.dumps(line("a", stream=True))], "stream: true"),
        ([json.dumps(line("a", background=True) | {"url": "/v1/responses"})], "background: true"),
        ([json.dumps(line("a") | {"body": 3})], "body must be a JSON object"),
        ([json.dumps(line(""))], "custom_id must have"),
        (["", " "], "no requests"),
    ],
)
def test_mistakes_in_the_input_are_named(app, tmp_path, lines, said):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(BatchFileError) as error:
        check_requests(path)
    assert said in str(error.value)


def test_an_output_file_of_other_requests_is_kept(tmp_path):
    path = tmp_path / "out.jsonl"
    for content in (b'{"custom_id": "other"}\n', b"notes\n", b'{"custom_id": "a"}\n{"custom_id": "a"}\n'):
        path.write_bytes(content)
        with pytest.raises(BatchFileError, match="name another output file"), open_results(path, {"a"}):
            pass
        assert path.read_bytes() == content


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    with open_results(path, {"a"}), pytest.raises(BatchFileError, match="another run-batch"), open_results(path, {"a"}):
        pass
    with pytest.raises(RequestError, match="cannot be written"), open_results(tmp_path / "no" / "out", {"a"}):
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_run_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    result = BatchResult.of("a", 200, "r", b"{}")
    with open_results(path, {"a", "b"}) as results:
        results.append(result)
        with open("/dev/full", "wb") as full, monkeypatch.context() as patched:
            write = os.write
            places = iter([(results._file, 9)])  # nine bytes fit, then the disk is full

            def scarce(_: int, data: bytes) -> int:
                file, room = next(places, (full.fileno(), None))
                return write(file, data[:room])

            patched.setattr(os, "write", scarce)
            with pytest.raises(BatchFileError, match=r"No space left on device.* 1 answers are in it"):
                results.append(BatchResult.of("b", 200, "r", b"{}"))
    assert list(read(path)) == ["a"]


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    """SIGKILL in the middle, twice, then a run to the end: every line is answered once, as without a kill."""
    count, sizes = 60, ["--max-model-len", "256", "--max-num-seqs", "8", "--row-buckets", "8", "--token-buckets", "64"]
    sizes += ["--max-num-batched-tokens", "64"]
    lines = [line(f"r{i}", f"def f{i}(", max_tokens=16, temperature=0) for i in range(count)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "jpaged", "run-batch", "demo", "-i", str(source), "-o", str(target), *sizes]
    killed_at = 0
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while killed_at < 10 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
        killed_at = target.read_bytes().count(b"\n") if target.exists() else 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 10 <= killed_at < count
    assert cli.main(command[3:]) == 0
    answers = read(target)
    assert set(answers) == {f"r{i}" for i in range(count)}
    whole = tmp_path / "whole.jsonl"
    command[command.index(str(target))] = str(whole)
    assert cli.main(command[3:]) == 0
    texts = {key: one["response"]["body"]["choices"][0]["text"] for key, one in answers.items()}
    assert texts == {key: one["response"]["body"]["choices"][0]["text"] for key, one in read(whole).items()}
