"""`jpaged inspect`: what a running server's KV cache, table and queue look like at this moment."""

import dataclasses
import importlib.util
import pathlib
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import tyro

from jpaged.cli.results import OutputJson, check_writable, write_json
from jpaged.errors import RequestError
from jpaged.snapshot import EngineSnapshot

TIMEOUT_SECONDS = 30.0
NO_SERVER = "no jpaged server answers there"
NO_ROUTE = "this server was started without --admin-key: start it with one, `jpaged serve MODEL --admin-key KEY`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print who owns which block of a running server's KV cache, who runs, and who waits.

    The server must have been started with --admin-key. Prompts and answers are not shown: requests go by their ids.

    Example: jpaged inspect http://127.0.0.1:8000 --admin-key SECRET --png blocks.png
    """

    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL", help_behavior_hint="")]
    """Where the server listens, as it printed it: with or without /v1."""

    admin_key: Annotated[str, tyro.conf.arg(metavar="KEY", help_behavior_hint="")]
    """One of the keys that the server was started with."""

    png: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Draw the blocks into this file, coloured by request. Needs matplotlib."""

    output_json: OutputJson = None
    """Write all of it to this file."""

    def run(self) -> int:
        """Fetch, print, draw."""
        if self.png is not None and importlib.util.find_spec("matplotlib") is None:
            accepted = "needs matplotlib: python -m pip install matplotlib (it is in jpaged's extra: 'jpaged[bench]')"
            raise RequestError("png", str(self.png), accepted)
        check_writable(self.png, "png")
        check_writable(self.output_json)
        snapshot = fetch(self.url, self.admin_key)
        from rich.console import Console

        from jpaged.cli.block_map import show

        out = Console(highlight=False)
        show(snapshot, out if out.is_terminal else Console(highlight=False, width=120))
        write_json(self.output_json, dataclasses.asdict(snapshot))
        if self.png is not None:
            from jpaged.cli.block_picture import draw

            draw(snapshot, self.png)
            out.print(f"drawn: {self.png}", markup=False)
        return 0


def fetch(url: str, admin_key: str) -> EngineSnapshot:
    """What the server at `url` holds. Raises RequestError that says why there is no answer."""
    import msgspec

    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError("url", url, "must begin with http:// or https://, e.g. http://127.0.0.1:8000")
    if not admin_key or not (admin_key.isascii() and admin_key.isprintable()):
        raise RequestError("admin_key", "the one given", "must be printable ASCII characters, at least one")
    base = url.split("?")[0].split("#")[0].rstrip("/").removesuffix("/v1")
    request = urllib.request.Request(f"{base}/admin/inspect", headers={"Authorization": f"Bearer {admin_key}"})
    # Straight to the server, and nowhere else: the key goes along.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise RequestError("url", url, _refusal(error.code, error.read())) from None
    except (OSError, ValueError) as error:  # ValueError: a port that is no number
        reason = getattr(error, "reason", error)
        raise RequestError("url", url, f"{NO_SERVER} ({reason}): is it running, and is the address right?") from None
    except Exception as error:  # http.client's own, for what is no HTTP
        raise RequestError("url", url, f"{NO_SERVER}, but something that is no HTTP ({error!r})") from None
    try:
        return msgspec.json.decode(body, type=EngineSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        accepted = f"{NO_SERVER}, or one of another version: what came is no snapshot ({error})"
        raise RequestError("url", url, accepted) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: the key is for this server only."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None: do not follow."""


def _refusal(status: int, body: bytes) -> str:
    """What to do about an answer that is no snapshot."""
    import msgspec

    try:
        error = msgspec.json.decode(body)["error"]
        code, message = error["code"], error["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"{NO_SERVER}: the answer is {status}, without the error body of one"
    match status, code:
        case 401, "invalid_admin_key":
            return "the server does not know this admin key: give one that it was started with"
        case (401, "invalid_api_key") | (404, _):
            return NO_ROUTE
        case _:
            return f"the server answers {status}: {message}"
