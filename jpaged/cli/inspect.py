"""`jpaged inspect`: shows the KV cache, the request table and the queue of a running server.

Imported late: modules that `run` needs, so that `--help` and errors in the command line print at once.
"""

import dataclasses
import os
import pathlib
import urllib.parse
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated

import tyro

from jpaged.cli.common.results import OutputJson, check_writable, needs_matplotlib, write_json
from jpaged.cli.flags.client_tls import SERVER_TLS_DEFAULTS, ServerTlsArguments
from jpaged.cli.flags.engine import one_line_help
from jpaged.errors import RequestError
from jpaged.snapshot import EngineSnapshot

if TYPE_CHECKING:
    import ssl

TIMEOUT_SECONDS = 30.0
NO_SERVER = "no jpaged server answers there"
NO_ROUTE = "this server was started without an admin key: start it with one, `jpaged serve MODEL --admin-key-file FILE`"


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print the state of a running server: the owner of each KV cache block, and the running and waiting requests.

    The server must have been started with an admin key. Prompts and answers are not shown, only request ids.

    Example: jpaged inspect http://127.0.0.1:8000 --admin-key-file admin.txt --png blocks.png
    """

    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL", help_behavior_hint="")]
    """The server's address, as the server printed it: with or without /v1."""

    admin_key: Annotated[str | None, tyro.conf.arg(metavar="KEY", help_behavior_hint="")] = None
    """One of the admin keys that the server was started with. Every user of the machine can read it in the list of
    processes: prefer --admin-key-file, or the environment variable JPAGED_ADMIN_KEY."""

    admin_key_file: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with the admin key, such as the file that the server reads."""

    server_tls: ServerTlsArguments = SERVER_TLS_DEFAULTS

    engine: int = 0
    """Index of the engine to show, from 0 to N-1 on a server with --data-parallel-size N."""

    png: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Draw the blocks into this PNG file, coloured by request. Needs matplotlib."""

    output_json: OutputJson = None
    """Write the state to this file, as JSON."""

    def run(self) -> int:
        if self.png is not None:
            needs_matplotlib("png", self.png)
        check_writable(self.png, "png")
        check_writable(self.output_json)
        snapshot = fetch(self.url, self._key(), self.server_tls.context(), engine=self.engine)
        from rich.console import Console

        from jpaged.cli.common.block_map import show

        out = Console(highlight=False)
        if snapshot.num_engines > 1:
            out.print(f"engine {snapshot.engine}, of engines 0 to {snapshot.num_engines - 1}: --engine shows another")
        show(snapshot, out if out.is_terminal else Console(highlight=False, width=120))
        write_json(self.output_json, dataclasses.asdict(snapshot))
        if self.png is not None:
            from jpaged.cli.common.block_picture import draw

            draw(snapshot, self.png)
            out.print(f"drawn: {self.png}", markup=False)
        return 0

    def _key(self) -> str:
        """Return the admin key. Raises RequestError for a missing or bad key."""
        from jpaged.serving.web.keys import ADMIN_VARIABLES, read_keys

        given = () if self.admin_key is None else (self.admin_key,)
        keys = read_keys("admin_key", given, self.admin_key_file, ADMIN_VARIABLES, os.environ)
        if not keys:
            raise RequestError("admin_key", None, f"needed: --admin-key-file, or the variable {ADMIN_VARIABLES[0]}")
        return keys[0]


def fetch(url: str, admin_key: str, tls: "ssl.SSLContext | None" = None, *, engine: int = 0) -> EngineSnapshot:
    """Fetch an engine's state from a server. Raises RequestError. tls: None trusts the system's certificates."""
    import msgspec

    from jpaged.load_client.connection import LoadError
    from jpaged.load_client.http_get import get

    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError("url", url, "must begin with http:// or https://, e.g. http://127.0.0.1:8000")
    if not admin_key or not (admin_key.isascii() and admin_key.isprintable()):
        raise RequestError("admin_key", "(hidden)", "must be one or more printable ASCII characters")
    base = url.split("?")[0].split("#")[0].rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {admin_key}"}
    try:
        query = f"?engine={engine}" if engine else ""  # engine 0 is the default, and older servers know no parameter
        status, body = get(f"{base}/admin/inspect{query}", headers, tls=tls, timeout=TIMEOUT_SECONDS)
    except LoadError as error:
        raise RequestError("url", url, f"{NO_SERVER} ({error}): is it running, and is the address right?") from None
    if status != HTTPStatus.OK:
        raise RequestError("url", url, _refusal(status, body))
    try:
        return msgspec.json.decode(body, type=EngineSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        accepted = f"{NO_SERVER}, or its version differs: the answer is not a snapshot ({error})"
        raise RequestError("url", url, accepted) from None


def _refusal(status: int, body: bytes) -> str:
    """Return the message for an error status."""
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
