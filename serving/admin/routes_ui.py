"""GET /ui: a page to chat with the model and to watch the engine. Its files are in the folder page.

The page needs no key: it holds no data. It asks for a key and sends it with each request for data. The folder ui/ of
the sources has its source, and `npm run build` there makes the files.
"""

import base64
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = pathlib.Path(__file__).parents[1] / "page"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

# No other host, no inline script or style, no eval. Only DOMPurify may turn text into HTML (Trusted Types).
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
CHECK_ALWAYS = "no-cache"  # with an ETag: a new version is seen at once
FOREVER = "public, max-age=31536000, immutable"  # for files whose name has the hash of their content


@dataclasses.dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    headers: dict[str, str]

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the client has it."""
        known = request.headers.get("if-none-match", "")
        if self.headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """The files of the page, by name. All of them are in memory: a few hundred kilobytes."""

    files: dict[str, PageFile]

    @classmethod
    def read(cls) -> "Page":
        """Read the files. Files of other types, such as the manifest, are not served."""
        paths = (path for path in sorted(FOLDER.iterdir()) if path.suffix in CONTENT_TYPES)
        return cls({path.name: _page_file(path) for path in paths})

    @property
    def paths(self) -> frozenset[str]:
        """Paths of all routes. None of them needs a key."""
        return frozenset(route.path for route in self.routes())

    def routes(self) -> Iterable[Route]:
        """Yield the routes; none without files."""
        if not self.files:
            return
        yield Route("/ui", _to_folder)
        yield Route("/ui/", self.files[INDEX].answer)
        for name, file in self.files.items():
            yield Route(f"/ui/{name}", file.answer, include_in_schema=False)


class BrowserAtRoot:
    """ASGI middleware that sends a browser from / to the page. Clients that accept no HTML get the usual answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        browses = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if browses and any(name == b"accept" and b"text/html" in value.lower() for name, value in scope["headers"]):
            headers = {"Location": "ui/", "Vary": "Accept", "Cache-Control": CHECK_ALWAYS}
            await Response(status_code=307, headers=headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _to_folder(request: Request) -> Response:
    """Redirect to the folder. The address is relative, so it works with any prefix of a proxy."""
    return Response(status_code=308, headers={"Location": "ui/"})


def _page_file(path: pathlib.Path) -> PageFile:
    body = path.read_bytes()
    tag = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:12]).decode()
    caching = CHECK_ALWAYS if path.name == INDEX else FOREVER
    kind = {"Content-Type": CONTENT_TYPES[path.suffix], "ETag": f'"{tag}"', "Cache-Control": caching}
    return PageFile(body, HEADERS | kind)
