"""Who may use the server: keys on every route, hosts, origins, content types; and errors that reveal nothing."""

import gzip
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route

from jpaged.serving.admin.routes_ui import Page
from jpaged.serving.app_options import AppOptions, CrossOrigin
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.auth import OPEN_PATHS
from jpaged.serving.web.browser_guards import LOOPBACK_HOSTS, host_name
from tests.serving.http_client import error_of, wait_for

OPEN = OPEN_PATHS | Page.read().paths
WEB = httpx.Client(verify=False, timeout=20)  # without certificates, which take 0.1 s to load for each client
API, ADMIN = {"Authorization": "Bearer talk"}, {"Authorization": "Bearer look"}


def serve(host, engine, options: AppOptions = AppOptions()) -> str:
    """Let the session's server run an application with these options. Returns its URL."""
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), options)
    return host[1]


@pytest.fixture
def locked(host, engine, tmp_path) -> str:
    return serve(host, engine, AppOptions(("talk", "speak"), ("look",), profile_dir=tmp_path))


def walk(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (method, path) of every route, with a value for each path parameter."""
    for route in routes:
        if isinstance(route, Mount):
            yield from walk(list(route.routes), prefix + route.path)
            yield "GET", f"{prefix}{route.path}/"
        else:
            assert isinstance(route, Route), "a kind of route that this test does not know"
            for method in sorted(route.methods or {"GET"}):
                yield method, prefix + re.sub(r"\{[^}]*\}", "echo", route.path)


def app_routes(host) -> list[tuple[str, str]]:
    app: Starlette = host[0].app
    return list(walk(app.routes))


def test_every_route_requires_its_key(host, engine, locked):
    plain = {path for _, path in walk(create_app(Server(engine=engine, model_names=("echo",))).routes)}
    routes = app_routes(host)
    assert len(routes) > 20
    assert {path for _, path in routes} > plain
    with httpx.Client(base_url=locked, verify=False) as client:
        for method, path in routes:
            right, wrong = (API, ADMIN) if path in plain else (ADMIN, API)
            for headers in ({}, wrong, {"Authorization": "Bearer"}, {"Authorization": "Basic talk"}, {"X-Key": "look"}):
                status = client.request(method, path, headers=headers, follow_redirects=True).status_code
                assert status == (200 if path in OPEN else 401), (method, path, headers)
            assert client.request(method, path, headers=right).status_code != 401, (method, path)
        assert client.get("/v1/models", headers={"Authorization": "Bearer speak"}).status_code == 200


def test_no_spelling_of_a_path_or_host_avoids_the_key(host, locked):
    """Without a key no route but the open ones answers anything but an error, however its path is written."""
    hosts = ("x", "x/health", "x/health?", "localhost/health#", "/health")
    with socket.create_connection(("127.0.0.1", int(locked.rsplit(":", 1)[1]))) as raw:
        answers = raw.makefile("rb")
        for method, path in app_routes(host):
            if path in OPEN or method == "HEAD":
                continue
            for target in (
                path, f"/{path}", f"{path}/", f"/health/..{path}", f"{path}?/health", f"{path}/health", f"/x/..{path}",
                f"{path}%2f", f"/%2e{path}", f"http://x/health{path}", f"http://x{path}", path.replace("/", "/%2F", 1),
                f"{path};/health", f"/health;{path}", "/health%3f" + path, path[:2] + f"%{ord(path[2]):x}" + path[3:],
            ):  # fmt: skip
                asked_host = hosts[len(target) % len(hosts)]
                raw.sendall(f"{method} {target} HTTP/1.1\r\nHost: {asked_host}\r\nContent-Length: 0\r\n\r\n".encode())
                status = int(answers.readline().split()[1])
                assert status in (401, 404), (method, target)
                size = 0
                while (line := answers.readline()) != b"\r\n":
                    if line.lower().startswith(b"content-length:"):
                        size = int(line.split(b":")[1])
                answers.read(size)


def test_a_proxy_prefix_changes_nothing_about_keys(host, engine):
    url = serve(host, engine, AppOptions(("talk",), ("look",), root_path="/llm"))
    for prefix in ("", "/llm"):
        assert WEB.get(f"{url}{prefix}/health").status_code == 200
        assert WEB.get(f"{url}{prefix}/v1/models").status_code == 401
        assert WEB.get(f"{url}{prefix}/v1/models", headers=API).status_code == 200
        assert WEB.get(f"{url}{prefix}/admin/inspect", headers=API).status_code == 401
        assert WEB.get(f"{url}{prefix}/admin/inspect", headers=ADMIN).status_code == 200
    for path in ("/llm/llm/health", "/llm/llm/v1/models", "/llmx/v1/models"):
        assert WEB.get(url + path).status_code == 401
        assert WEB.get(url + path, headers=API).status_code == 404


def test_a_slash_at_the_end_of_a_path(host, engine):
    url = serve(host, engine, AppOptions(("talk",), ("look",)))
    assert WEB.get(f"{url}/health/").status_code == 200
    for path, headers in (("/metrics/", API), ("/v1/models/", API), ("/admin/status/", ADMIN)):
        assert WEB.get(url + path).status_code == 401
        begins = [WEB.get(one, headers=headers).content[:20] for one in (url + path, url + path[:-1])]
        assert begins[0] == begins[1] != b""
    assert WEB.get(f"{url}/health//").status_code == 401
    assert "<html" in WEB.get(f"{url}/ui/").text


def test_an_application_that_is_mounted_needs_the_same_keys(host, engine):
    """Starlette and Ray Serve leave the prefix in the path, and name it in the scope."""
    url = serve(host, engine, AppOptions(("talk",), ("look",)))
    host[0].app = Starlette(routes=[Mount("/llm", app=host[0].app)])
    assert WEB.get(f"{url}/llm/health").status_code == 200
    assert WEB.get(f"{url}/llm/v1/models").status_code == 401
    assert WEB.get(f"{url}/llm/v1/models", headers=API).status_code == 200
    assert WEB.get(f"{url}/llm/admin/inspect", headers=API).status_code == 401
    assert WEB.get(f"{url}/llm/admin/inspect", headers=ADMIN).status_code == 200


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1:80", True), ("127.8.9.1", True),
        ("[::1]:8000", True), ("app.localhost", True), ("localhost.", True),
        ("llm.example.com", True), ("a.example.org:1", True),
        ("evil.example.com", False), ("example.org", False), ("localhost.evil.com", False), ("192.168.1.7", False),
        ("[::1", False), ("[::2]", False), ("localhost:x", False), ("", False), ("localhost, evil.com", False),
        ("evil.com#localhost", False), ("localhost@evil.com", False),
    ],
)  # fmt: skip
def test_the_host_header_is_checked(host, engine, given, accepted):
    """A web page whose name resolves to 127.0.0.1 (DNS rebinding) sends its own name."""
    hosts = (*LOOPBACK_HOSTS, "llm.example.com", "*.example.org")
    url = serve(host, engine, AppOptions(allowed_hosts=hosts))
    answer = WEB.get(f"{url}/v1/models", headers={"Host": given})
    if accepted:
        assert answer.status_code == 200
    else:
        assert error_of(answer, 403)["code"] == "invalid_host"
        assert WEB.get(f"{url}/health", headers={"Host": given}).status_code == 403


def test_two_host_headers_are_refused(host, engine):
    url = serve(host, engine, AppOptions(allowed_hosts=LOOPBACK_HOSTS))
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n")
        assert raw.recv(100).split()[1] == b"400"


def test_a_client_without_a_host_header_is_no_browser(host, engine):
    url = serve(host, engine, AppOptions(allowed_hosts=LOOPBACK_HOSTS))
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert raw.recv(100).split()[1] == b"200"


def test_host_names():
    assert host_name("[fe80::1]:80") == "fe80::1"
    assert host_name("A.b.") == "a.b"
    assert [host_name(bad) for bad in ("[::1]x", "a:b", "", "[::1]:x")] == [None] * 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"}, {"Content-Type": "text/plain;application/json"},
        {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "multipart/form-data; boundary=x"},
        {"Origin": "https://evil.com"}, {"Content-Type": "", "Origin": "null"}, {"Content-Type": "application/jsonx"},
    ],
)  # fmt: skip
def test_a_form_of_a_web_page_is_refused(url, engine, path, headers):
    """A page may send these to any server without asking it. A blob without a type has Origin and no Content-Type."""
    body = json.dumps({"prompt": "a", "input": "a", "messages": [{"role": "user", "content": "a"}]})
    error = error_of(WEB.post(url + path, content=body, headers=headers), 415)
    assert "application/json" in error["message"]
    assert not engine.seen_prompts


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "identity, deflate"])
def test_a_compressed_body_is_refused_by_its_encoding(url, engine, encoding):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = WEB.post(url + "/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert error_of(answer, 415)["message"].startswith(f"Content-Encoding '{encoding}': compressed bodies are not read")
    assert answer.headers["accept-encoding"] == "identity"
    assert not engine.seen_prompts


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "Application/JSON; charset=utf-8", "Origin": "https://a.b"}])
def test_json_is_accepted(url, headers):
    body = json.dumps({"prompt": "ab", "max_tokens": 2})
    assert WEB.post(f"{url}/v1/completions", content=body, headers=headers).status_code == 200


PREFLIGHT = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip


def test_other_origins_are_closed_by_default(host, engine):
    url = serve(host, engine)
    asked = WEB.options(f"{url}/v1/completions", headers=PREFLIGHT)
    assert asked.status_code == 405
    for answer in (asked, WEB.get(f"{url}/v1/models", headers={"Origin": "https://chat.example.com"})):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_other_origins_that_the_operator_names(host, engine):
    options = AppOptions(("talk",), cross_origin=CrossOrigin(("https://chat.example.com",)))
    url = serve(host, engine, options)
    asked = WEB.options(f"{url}/v1/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://chat.example.com"
    answer = WEB.get(f"{url}/v1/models", headers=API | {"Origin": "https://chat.example.com"})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "access-control-allow-credentials" not in answer.headers
    assert WEB.get(f"{url}/v1/models", headers={"Origin": "https://chat.example.com"}).status_code == 401
    evil = WEB.options(f"{url}/v1/completions", headers=PREFLIGHT | {"Origin": "https://evil.com"})
    assert evil.status_code == 400
    assert "access-control-allow-origin" not in evil.headers


LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|\.py\b|/usr/|/home/|/root/|/tmp/|site-packages|secret detail")
BAD: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", "/v1/completions", b"{", {}),
    ("POST", "/v1/completions", b"\xff\xfe", {}),
    ("POST", "/v1/completions", b"[1]", {}),
    ("POST", "/v1/completions", b'{"prompt": {}}', {}),
    ("POST", "/v1/completions", b'{"prompt": [300]}', {}),
    ("POST", "/v1/completions", b'{"prompt": "full"}', {}),
    ("POST", "/v1/completions", b'{"prompt": "a", "model": "x"}', {}),
    ("POST", "/v1/completions", b'{"prompt": "a", "n": 1000000000}', {}),
    ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 5}', {}),  # the engine fails
    ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 5, "stream": true}', {}),
    ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "refuse me"}]}', {}),
    ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', {}),
    ("POST", "/v1/embeddings", b'{"input": []}', {}),
    ("GET", "/nothing", b"", {}),
    ("PUT", "/v1/models", b"", {}),
    ("GET", "/v1/models/unknown", b"", {}),
    ("POST", "/admin/sleep?level=9", b"", ADMIN),
    ("POST", "/admin/pause?mood=keep", b"", ADMIN),
    ("POST", "/admin/profile/stop", b"", ADMIN),
    ("GET", "/admin/inspect", b"", {}),
]


@pytest.mark.parametrize(("method", "path", "body", "headers"), BAD)
def test_errors_contain_no_paths_addresses_or_traces(host, engine, tmp_path, method, path, body, headers):
    url = serve(host, engine, AppOptions(admin_keys=("look",), profile_dir=tmp_path))
    engine.fails_at = 0
    answer = WEB.request(method, url + path, content=body, headers=headers)
    assert answer.status_code >= 400
    assert not LEAK.search(answer.text), answer.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_before_a_route_of_messages_have_the_body_of_anthropic(host, engine, path):
    options = AppOptions(("talk",), ("look",), allowed_hosts=LOOPBACK_HOSTS, root_path="/llm")
    url = serve(host, engine, options) + "/llm"
    form, other = {"Content-Type": "text/plain"}, {"Host": "other.example"}
    answers = [WEB.post(url + path, content="{}", headers=headers) for headers in ({}, API | form, API | other)]
    WEB.post(f"{url}/admin/drain", headers=ADMIN)
    answers.append(WEB.post(url + path, json={}, headers=API))
    assert [(answer.status_code, answer.json()["error"]["type"]) for answer in answers] == [
        (401, "authentication_error"), (415, "invalid_request_error"), (403, "permission_error"),
        (503, "overloaded_error"),
    ]  # fmt: skip
    assert {answer.json()["type"] for answer in answers} == {"error"}


@pytest.mark.parametrize("kind", ["image_url", "input_image", "video_url", "input_audio", "file"])
@pytest.mark.parametrize("target", ["http://169.254.169.254/", "http://127.0.0.1:1/", "file:///etc/passwd"])
def test_media_is_refused_and_never_fetched(url, monkeypatch, kind, target):
    def connect(*args: Any) -> None:
        raise AssertionError("a connection to another server")

    content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": target}}]
    body = {"messages": [{"role": "user", "content": content}]}
    WEB.get(f"{url}/health")  # connected
    monkeypatch.setattr(socket.socket, "connect", connect)
    error_of(WEB.post(f"{url}/v1/chat/completions", json=body), 400)


# -- the operator's routes --------------------------------------------------------------------------------------------


def test_draining_refuses_new_requests_and_finishes_the_others(host, engine):
    url = serve(host, engine, AppOptions(admin_keys=("look",)))
    engine.step_seconds = 0.01
    body = {"prompt": "abc", "max_tokens": 40, "stream": True}
    with WEB.stream("POST", f"{url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert WEB.get(f"{url}/ready").status_code == 200
        state = WEB.post(f"{url}/admin/drain", headers=ADMIN).json()
        assert (state["draining"], state["drained"], state["open_requests"]) == (True, False, 1)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            refused = WEB.post(url + path, json={})
            assert error_of(refused, 503)["code"] == "draining"
            assert int(refused.headers["retry-after"]) > 0
        assert WEB.get(f"{url}/ready").status_code == 503
        assert WEB.get(f"{url}/health").status_code == 200
        assert WEB.get(f"{url}/v1/models").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
    # The client may have the last byte before the server has closed the request.
    wait_for(lambda: WEB.get(f"{url}/admin/status", headers=ADMIN).json()["open_requests"] == 0)
    assert WEB.get(f"{url}/admin/status", headers=ADMIN).json()["drained"]
    assert not WEB.delete(f"{url}/admin/drain", headers=ADMIN).json()["draining"]
    assert WEB.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200


def test_draining_lets_clients_cancel_and_delete_responses(host, engine):
    url = serve(host, engine, AppOptions(admin_keys=("look",)))
    engine.step_seconds = 0.05
    made = [WEB.post(f"{url}/v1/responses", json={"input": "hi", "background": True}).json()["id"] for _ in range(2)]
    assert not WEB.post(f"{url}/admin/drain", headers=ADMIN).json()["drained"]
    assert WEB.post(f"{url}/v1/responses/{made[0]}/cancel").json()["status"] == "cancelled"
    assert WEB.delete(f"{url}/v1/responses/{made[1]}").json()["deleted"]
    assert WEB.get(f"{url}/admin/status", headers=ADMIN).json()["drained"]
    assert error_of(WEB.post(f"{url}/v1/responses", json={"input": "hi"}), 503)["code"] == "draining"


@pytest.mark.parametrize("prefix", ["/admin", ""])
def test_admin_routes_reach_the_engine(host, engine, tmp_path, prefix):
    url = serve(host, engine, AppOptions(admin_keys=("look",), profile_dir=tmp_path))
    with httpx.Client(base_url=url, headers=ADMIN, verify=False) as client:
        assert client.post(f"{prefix}/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        assert client.get("/ready").status_code == 503
        assert client.post(f"{prefix}/resume").json() == {"status": "resumed"}
        assert client.post(f"{prefix}/sleep?level=1&mode=wait").json() == {"status": "sleeping"}
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.get("/admin/status").json()["sleeping"]
        assert client.post(f"{prefix}/wake_up?tags=weights&tags=kv_cache").json() == {"status": "awake"}
        assert client.post(f"{prefix}/wake_up").status_code == 200
        assert client.post(f"{prefix}/reset_prefix_cache").json() == {"success": True}
        start, stop = ("/admin/profile/start", "/admin/profile/stop") if prefix else ("/start_profile", "/stop_profile")
        assert client.post(start).status_code == 200
        assert client.post(stop).status_code == 409
    assert engine.calls == [
        ("pause", "keep", False), ("resume",), ("sleep", 1, "wait"), ("wake_up", ["weights", "kv_cache"]),
        ("wake_up", None), ("reset_prefix_cache", False), ("start_profile", str(tmp_path)),
    ]  # fmt: skip


def test_without_keys_or_a_folder_there_are_no_such_routes(host, engine):
    paths = ("/admin/status", "/pause", "/sleep", "/wake_up", "/reset_prefix_cache", "/admin/profile/start")
    url = serve(host, engine)
    assert [WEB.post(url + path).status_code for path in paths] == [404] * 6
    url = serve(host, engine, AppOptions(admin_keys=("look",)))
    assert [WEB.post(url + path).status_code for path in paths] == [401] * 6
    for path in ("/admin/profile/start", "/start_profile"):
        assert WEB.post(url + path, headers=ADMIN).status_code == 404
    assert not engine.calls
