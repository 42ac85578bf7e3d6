"""`jpaged inspect`: shows the KV cache, the request table and the queue of a running server."""

import dataclasses
import importlib.util
import pathlib
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import tyro

from jpaged.cli.flags import one_line_help
from jpaged.cli.results import OutputJson, check_writable, write_json
from jpaged.errors import RequestError
from jpaged.snapshot import EngineSnapshot

TIMEOUT_SECONDS = 30.0
NO_SERVER = "no jpaged server answers there"
NO_ROUTE = "this server was started without --admin-key: start it with one, `jpaged serve MODEL --admin-key KEY`"


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print the state of a running server: the owner of each KV cache block, and the running and waiting requests.

    The server must have been started with --admin-key. Prompts and answers are not shown, only request ids.

    Example: jpaged inspect http://127.0.0.1:8000 --admin-key SECRET --png blocks.png
    """

    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL", help_behavior_hint="")]
    """The server's address, as the server printed it: with or without /v1."""

    admin_key: Annotated[str, tyro.conf.arg(metavar="KEY", help_behavior_hint="")]
    """One of the keys that the server was started with."""

    png: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Draw the blocks into this PNG file, coloured by request. Needs matplotlib."""

    output_json: OutputJson = None
    """Write the state to this file, as JSON."""

    def run(self) -> int:
        """Fetch the state, print it, and write the files."""
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
    """Fetch the state of the server at `url`. Raises RequestError with the reason if the server does not return it."""
    import msgspec

    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError("url", url, "must begin with http:// or https://, e.g. http://127.0.0.1:8000")
    if not admin_key or not (admin_key.isascii() and admin_key.isprintable()):
        raise RequestError("admin_key", "the one given", "must be printable ASCII characters, at least one")
    base = url.split("?")[0].split("#")[0].rstrip("/").removesuffix("/v1")
    request = urllib.request.Request(f"{base}/admin/inspect", headers={"Authorization": f"Bearer {admin_key}"})
    # No proxy and no redirect: the request contains the key, which is for this server only.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise RequestError("url", url, _refusal(error.code, error.read())) from None
    except (OSError, ValueError) as error:  # ValueError: the port is not a number
        reason = getattr(error, "reason", error)
        raise RequestError("url", url, f"{NO_SERVER} ({reason}): is it running, and is the address right?") from None
    except Exception as error:  # http.client's own errors, for an answer that is not HTTP
        raise RequestError("url", url, f"{NO_SERVER}: the answer is not HTTP ({error!r})") from None
    try:
        return msgspec.json.decode(body, type=EngineSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        accepted = f"{NO_SERVER}, or one of another version: the answer is not a snapshot ({error})"
        raise RequestError("url", url, accepted) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for this server only."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return None: do not follow."""


def _refusal(status: int, body: bytes) -> str:
    """Explain an error status, and say what to change."""
    import msgspec

    try:
        error = msgspec.json.decode(body)["error"]
        code, message = error["code"], error["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"{NO_SERVER}: the answer has status {status}, without a jpaged error body"
    match status, code:
        case 401, "invalid_admin_key":
            return "the server does not accept this admin key: use one that it was started with"
        case (401, "invalid_api_key") | (404, _):
            return NO_ROUTE
        case _:
            return f"the server answers {status}: {message}"
