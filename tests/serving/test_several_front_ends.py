"""Two front ends of one engine: each request is answered the same, whichever of them gets it."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.http_client import wait_for
from tests.support.served_processes import Serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the front ends' processes in /proc"),
    pytest.mark.usefixtures("default_sigint"),
]
COUNT = 12  # requests, on a connection each: both front ends get some
USER, OTHER, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("user", "other", "admin"))
ANSWER = {"model": "fake", "input": "abc", "max_output_tokens": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, str]]:
    folder = tmp_path_factory.mktemp("files")
    template = folder / "template.jinja"
    template.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    flags = ("--api-key", "user", "other", "--admin-key", "admin", "--chat-template", str(template))
    serving = Serving("--port", "0", *flags, "--batch-folder", str(folder / "batches"), count=2)
    yield serving, serving.ready()
    serving.kill()


def many(method: str, url: str, headers: dict[str, str], **what: Any) -> list[httpx.Response]:
    """Responses to the same request, on a connection each."""
    return [httpx.request(method, url, headers=headers, timeout=30, **what) for _ in range(COUNT)]


def test_responses_are_found_by_both(server: tuple[Serving, str]) -> None:
    _, url = server
    made = httpx.post(f"{url}/v1/responses", headers=USER, json=ANSWER, timeout=30).json()
    for found in many("GET", f"{url}/v1/responses/{made['id']}", USER):
        assert found.status_code == 200
        assert found.json()["output"] == made["output"]
        assert found.headers["x-request-id"]
    assert {r.status_code for r in many("GET", f"{url}/v1/responses/{made['id']}", OTHER)} == {404}
    assert {r.status_code for r in many("GET", f"{url}/v1/responses/{made['id']}", {})} == {401}
    later = many("POST", f"{url}/v1/responses", USER, json=ANSWER | {"previous_response_id": made["id"]})
    assert len({str(each.json()["output"][0]["content"]) for each in later}) == 1
    for _ in range(COUNT):
        body = ANSWER | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/responses", headers=USER, json=body, timeout=30) as stream:
            events = [line for line in stream.iter_lines() if line.startswith("event: ")]
        assert events[-1] == "event: response.incomplete"


def test_files_and_batches_are_those_of_both(server: tuple[Serving, str]) -> None:
    _, url = server
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "abc"}}\n'
    sent = {"file": ("in.jsonl", line, "application/jsonl")}
    made = httpx.post(f"{url}/v1/files", headers=USER, files=sent, data={"purpose": "batch"}, timeout=30).json()
    assert {r.content for r in many("GET", f"{url}/v1/files/{made['id']}/content", USER)} == {line}
    body = {"input_file_id": made["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = httpx.post(f"{url}/v1/batches", headers=USER, json=body, timeout=30).json()
    wait_for(lambda: httpx.get(f"{url}/v1/batches/{batch['id']}", headers=USER).json()["status"] == "completed")
    found = many("GET", f"{url}/v1/batches/{batch['id']}", USER)
    assert {each.json()["request_counts"]["completed"] for each in found} == {1}


def test_each_request_is_counted_once(server: tuple[Serving, str]) -> None:
    _, url = server
    name = 'http_requests_total{handler="/v1/models",method="GET",status="2xx"}'

    def counted() -> set[float]:
        texts = [each.text for each in many("GET", f"{url}/metrics", USER)]
        return {float(line.split()[-1]) for text in texts for line in text.splitlines() if line.startswith(name)}

    many("GET", f"{url}/v1/models", USER)
    (before,) = counted()
    many("GET", f"{url}/v1/models", USER)
    assert counted() == {before + COUNT}


def test_both_drain(server: tuple[Serving, str]) -> None:
    _, url = server
    status = httpx.post(f"{url}/admin/drain", headers=ADMIN, timeout=30).json()
    assert (status["draining"], status["open_requests"]) == (True, 0)
    wait_for(lambda: {r.status_code for r in many("GET", f"{url}/ready", {})} == {503})
    assert {r.status_code for r in many("POST", f"{url}/v1/responses", USER, json=ANSWER)} == {503}
    httpx.delete(f"{url}/admin/drain", headers=ADMIN, timeout=30)
    wait_for(lambda: {r.status_code for r in many("GET", f"{url}/ready", {})} == {200})


def test_a_front_end_that_starts_while_the_server_drains(server: tuple[Serving, str]) -> None:
    """It drains from the beginning: the engine's process tells it with its first message."""
    serving, url = server
    httpx.post(f"{url}/admin/drain", headers=ADMIN, timeout=30)
    try:
        before = serving.children
        os.kill(max(before), signal.SIGKILL)
        wait_for(lambda: len(set(serving.children) - set(before)) == 1, seconds=30)

        def all_drain() -> bool:
            with contextlib.suppress(httpx.HTTPError):  # the connection waited for the one that was killed
                return {r.status_code for r in many("GET", f"{url}/ready", {})} == {503}
            return False

        assert "the engine sent" not in serving.text
        wait_for(lambda: httpx.get(f"{url}/admin/status", headers=ADMIN, timeout=30).json()["drained"], seconds=30)
        wait_for(all_drain, seconds=30)
        assert len(serving.children) == 2
    finally:  # the tests after it need a server that accepts requests
        httpx.delete(f"{url}/admin/drain", headers=ADMIN, timeout=30)
    wait_for(lambda: {r.status_code for r in many("GET", f"{url}/ready", {})} == {200})


def test_a_client_that_leaves_ends_a_request_that_was_forwarded(server: tuple[Serving, str]) -> None:
    _, url = server
    body = ANSWER | {"stream": True, "max_output_tokens": 1900}
    for _ in range(COUNT):
        with httpx.stream("POST", f"{url}/v1/responses", headers=USER, json=body, timeout=30) as stream:
            next(stream.iter_lines())
    status = lambda: httpx.get(f"{url}/admin/status", headers=ADMIN).json()  # noqa: E731
    wait_for(lambda: (status()["running"], status()["waiting"], status()["open_requests"]) == (0, 0, 0))


def test_the_keeper_is_started_again(server: tuple[Serving, str]) -> None:
    """The last test: responses of before are gone."""
    serving, url = server
    os.kill(min(serving.children), signal.SIGKILL)

    def answered() -> bool:
        found = []
        for _ in range(COUNT):
            try:
                found.append(httpx.post(f"{url}/v1/responses", headers=USER, json=ANSWER, timeout=30).status_code)
            except httpx.HTTPError:  # the connection waited for the one that was killed
                return False
        assert set(found) <= {200, 503}
        return set(found) == {200}

    wait_for(answered, seconds=30)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.ended() == 0
