"""Flags of the commands that ask a server: which certificates of https servers to accept.

Imported late: the client, which `--help` does not need.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    import ssl


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerTlsFlags:
    """Which certificates of https servers to accept."""

    ca_file: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Trust these certificates, in PEM format, in place of the system's: for a server whose certificate is its own."""

    insecure: bool = False
    """Do not check the certificate of an https server. Prefer --ca-file: another machine could get the key."""

    def context(self) -> "ssl.SSLContext":
        """Return the context of a client. Raises RequestError for a bad file, and if both flags are given."""
        from jpaged.load_client.http_get import client_tls

        return client_tls(insecure=self.insecure, ca_file=self.ca_file)


# A command has the field `server_tls: ServerTlsArguments = SERVER_TLS_DEFAULTS`.
ServerTlsArguments = Annotated[ServerTlsFlags, tyro.conf.arg(name="")]
SERVER_TLS_DEFAULTS = ServerTlsFlags()
