"""TLS flags of the commands that send requests to a server: the certificates that they accept.

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
    """Certificates of https servers that a command accepts."""

    ca_file: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Trust the certificates in this PEM file instead of the system's, for a self-signed server certificate."""

    insecure: bool = False
    """Do not check the server's certificate. Prefer --ca-file: unchecked, another machine could receive the key."""

    def context(self) -> "ssl.SSLContext":
        """Return the client's TLS context. Raises RequestError for a bad file, and if both flags are given."""
        from jpaged.load_client.http_get import client_tls

        return client_tls(insecure=self.insecure, ca_file=self.ca_file)


# A command has the field `server_tls: ServerTlsArguments = SERVER_TLS_DEFAULTS`.
ServerTlsArguments = Annotated[ServerTlsFlags, tyro.conf.arg(name="")]
SERVER_TLS_DEFAULTS = ServerTlsFlags()
