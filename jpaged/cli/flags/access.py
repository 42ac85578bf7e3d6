"""Flags of `jpaged serve` for access control: keys, hosts, origins and TLS.

Imported late: the server, which `--help` does not need.
"""

import dataclasses
import json
import logging
import os
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jpaged.cli.flags.engine import one_line_help
from jpaged.errors import RequestError

if TYPE_CHECKING:
    from jpaged.serving.app_options import AppOptions
    from jpaged.serving.web.tls import TlsOptions

logger = logging.getLogger("jpaged.serving")


def _keys(words: list[str]) -> tuple[str, ...]:
    """Return the keys after a flag. Raises ValueError if there are none, because the server would require no key."""
    if not words:
        raise ValueError("write at least one key after it; leave the flag out for a server without keys")
    return tuple(words)


def _words(words: list[str]) -> tuple[str, ...]:
    """Return the words after a flag. One word may be a JSON list, as in vLLM: '["https://example.com"]'."""
    if len(words) == 1 and words[0].startswith("["):
        try:
            listed = json.loads(words[0])
        except json.JSONDecodeError as error:
            raise ValueError(f"is not a JSON list: {error}") from None
        if not all(isinstance(word, str) for word in listed):
            raise ValueError("must be a JSON list of strings")
        return tuple(listed)
    return tuple(words)


def _list_of(name: str, read: Any) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{name} [{name} ...]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=list,
    )


_NO_HINT = tyro.conf.arg(help_behavior_hint="")
Keys = Annotated[tuple[str, ...], _list_of("KEY", _keys), _NO_HINT]
Words = Annotated[tuple[str, ...], _list_of("WORD", _words), _NO_HINT]
File = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessFlags:
    """Access control of the server."""

    api_key: Keys = ()
    """Require one of these keys (Authorization: Bearer KEY) except on /health, /ready, /ping, /ui and /admin.
    Every user of the machine can read them in the list of processes: prefer --api-key-file, or the environment variable
    JPAGED_API_KEY or VLLM_API_KEY. Keys of all these sources are accepted. Default: require no key."""

    api_key_file: File = None
    """File with API keys, one per line. Only its owner should have read permission."""

    admin_key: Keys = ()
    """Serve the routes under /admin to requests with one of these keys (Authorization: Bearer KEY). Prefer
    --admin-key-file, or the environment variable JPAGED_ADMIN_KEY. Default: no /admin routes."""

    admin_key_file: File = None
    """File with admin keys, one per line. Only its owner should have read permission."""

    allowed_hosts: Words = ()
    """Host headers to accept in addition to localhost: names, addresses, *.example.com, or * for any. Default: only
    localhost on a loopback --host, against DNS rebinding by web pages; any on another --host."""

    allowed_origins: Words = ()
    """Origins whose web pages may use the server (CORS), such as https://chat.example.com; * for all. Default: none."""

    allowed_methods: Words = ("*",)
    """HTTP methods that pages of --allowed-origins may use."""

    allowed_headers: Words = ("*",)
    """Headers that pages of --allowed-origins may send."""

    allow_credentials: bool = False
    """Let pages of --allowed-origins send cookies and client certificates."""

    root_path: Annotated[str, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = ""
    """Prefix that a proxy adds to all paths, such as /llm."""

    profile_dir: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Folder for profiles. Adds /admin/profile/start and /admin/profile/stop. Needs an admin key."""

    batch_folder: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Folder for the files and batches of clients. Adds /v1/files and /v1/batches. Only one server at a time may use a
    folder. Default: no such routes."""

    ssl_keyfile: File = None
    """Private key for TLS, in PEM format. Not needed if --ssl-certfile contains it."""

    ssl_certfile: File = None
    """Certificate for TLS, in PEM format. With it, the server uses https."""

    ssl_ca_certs: File = None
    """CA certificates in PEM format, to check the certificates of clients."""

    ssl_cert_reqs: int = 0
    """Certificates of clients. 0: none needed. 1: one that is sent must be valid. 2: every client must have one."""

    def app_options(self, host: str | None, *, keeps: bool = True) -> "AppOptions":
        """Return the options of the application. host: address that the server listens on; None: a Unix socket.

        keeps: open the folder of files and batches, which one process may have open. It also warns.
        Raises RequestError for a bad value. Warns if other machines can use the server without a key.
        """
        from jpaged.serving.app_options import AppOptions, CrossOrigin
        from jpaged.serving.files.store import FileStore
        from jpaged.serving.web.browser_guards import LOOPBACK_HOSTS, is_loopback
        from jpaged.serving.web.keys import ADMIN_VARIABLES, API_VARIABLES, check_apart, read_keys

        api_keys = read_keys("api_key", self.api_key, self.api_key_file, API_VARIABLES, os.environ)
        admin_keys = read_keys("admin_key", self.admin_key, self.admin_key_file, ADMIN_VARIABLES, os.environ)
        check_apart(api_keys, admin_keys)
        local = host is not None and is_loopback(host)
        if host is not None and not local and not api_keys and keeps:
            logger.warning(
                "--host %s without a key: everyone who reaches this machine can use the server. Set --api-key-file",
                host,
            )
        hosts = (*LOOPBACK_HOSTS, *self.allowed_hosts) if local or self.allowed_hosts else None
        if "*" in self.allowed_hosts:
            hosts = None
        if self.allow_credentials and "*" in self.allowed_origins:
            raise RequestError("allow_credentials", True, "needs named origins: --allowed-origins must not be *")
        root = self.root_path
        if root and (not root.startswith("/") or root.endswith("/")):
            raise RequestError("root_path", root, "must begin with a slash, and not end with one")
        if self.profile_dir is not None and not admin_keys:
            raise RequestError("profile_dir", str(self.profile_dir), "needs an admin key: add --admin-key-file")
        origins = CrossOrigin(self.allowed_origins, self.allowed_methods, self.allowed_headers, self.allow_credentials)
        files = FileStore(self.batch_folder) if self.batch_folder is not None and keeps else None
        return AppOptions(
            api_keys, admin_keys, hosts, origins, root, self.profile_dir, files=files,
            forwards_files=self.batch_folder is not None and not keeps,
        )  # fmt: skip

    def tls(self) -> "TlsOptions":
        from jpaged.serving.web.tls import TlsOptions

        return TlsOptions(self.ssl_keyfile, self.ssl_certfile, self.ssl_ca_certs, self.ssl_cert_reqs)


# `Serve` has the field `access: AccessArguments = ACCESS_DEFAULTS`.
AccessArguments = Annotated[AccessFlags, tyro.conf.arg(name="")]
ACCESS_DEFAULTS = AccessFlags()
