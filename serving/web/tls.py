"""TLS: makes the server's context before the model is loaded, so that a bad file is reported at once."""

import dataclasses
import pathlib
import ssl

from jpaged.errors import RequestError

CERT_REQS = {0: ssl.CERT_NONE, 1: ssl.CERT_OPTIONAL, 2: ssl.CERT_REQUIRED}


@dataclasses.dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files in PEM format. Names and numbers are uvicorn's.

    cert_reqs: 0: clients need no certificate. 1: one that is sent must be valid. 2: every client must have one.
    """

    keyfile: pathlib.Path | None = None
    certfile: pathlib.Path | None = None
    ca_certs: pathlib.Path | None = None
    cert_reqs: int = 0

    def context(self) -> ssl.SSLContext | None:
        """Load the files, for TLS 1.2 or later. None without a certfile. Raises RequestError that names the flag."""
        if self.cert_reqs not in CERT_REQS:
            raise RequestError("ssl_cert_reqs", self.cert_reqs, "must be 0 (none), 1 (optional) or 2 (required)")
        if self.certfile is None:
            for name in ("keyfile", "ca_certs"):
                if (value := getattr(self, name)) is not None:
                    raise RequestError(f"ssl_{name}", str(value), "goes together with --ssl-certfile")
            if self.cert_reqs:
                raise RequestError("ssl_cert_reqs", self.cert_reqs, "goes together with --ssl-certfile")
            return None
        if self.cert_reqs and self.ca_certs is None:
            accepted = "clients' certificates are checked against --ssl-ca-certs: name that file too"
            raise RequestError("ssl_cert_reqs", self.cert_reqs, accepted)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = CERT_REQS[self.cert_reqs]
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except (OSError, ValueError) as error:
            accepted = f"no certificate and key can be read: {error}"
            raise RequestError("ssl_certfile", str(self.certfile), accepted) from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as error:
                raise RequestError("ssl_ca_certs", str(self.ca_certs), f"cannot be read: {error}") from None
        return context


def _no_password() -> str:
    """Refuse a key with a password. OpenSSL would ask for it on the terminal."""
    raise ValueError("the key has a password: store it without one")
