"""A small Hugging Face hub for tests: one repository of files, served on loopback."""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


@dataclasses.dataclass
class Hub:
    """Files and settings of the server, and the requests it received."""

    repo: str
    files: dict[str, bytes]
    token: str | None = None                            # required from clients
    cut_after: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes after which a file's first answers end
    cuts_left: int = 0                                  # number of answers that are still to be cut
    broken: set[str] = dataclasses.field(default_factory=set)  # files whose downloads fail with status 500
    requests: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)  # (method, path, Range header)
    endpoint: str = ""

    def downloads(self, name: str) -> list[str]:
        """Range headers of the requests for a file's bytes, in order; "" means the whole file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith("/" + name)]


class _Handler(BaseHTTPRequestHandler):
    """Answers the client's requests from `hub`, which a subclass sets."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        elif path.startswith(f"/api/models/{self.hub.repo}/tree/"):
            self._send(200, json.dumps([_tree_entry(n, d) for n, d in self.hub.files.items()]).encode(), {}, body)
        elif path in (f"/api/models/{self.hub.repo}", f"/api/models/{self.hub.repo}/revision/main"):
            siblings = [{"rfilename": name} for name in self.hub.files]
            self._send(200, json.dumps({"id": self.hub.repo, "sha": COMMIT, "siblings": siblings}).encode(), {}, body)
        elif body and path.rsplit("/", 1)[-1] in self.hub.broken:
            self._send(500, b"{}", {}, body)
        elif (name := path.removeprefix(f"/{self.hub.repo}/resolve/{COMMIT}/")) in self.hub.files:
            self._send_file(name, body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _send_file(self, name: str, body: bool) -> None:
        data = self.hub.files[name]
        span = self.headers.get("Range", "")
        start = int(span.removeprefix("bytes=").split("-")[0]) if span else 0
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(data) - start),
        }
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        rest = data[start:]
        cut = body and name in self.hub.cut_after and self.hub.cuts_left > 0
        if cut:
            self.hub.cuts_left -= 1
            rest = rest[: self.hub.cut_after[name]]
        self._send(206 if span else 200, rest, headers, body)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(2)
            self.close_connection = True


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve the hub until the block is left; `hub.endpoint` is its address."""

    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tree_entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
