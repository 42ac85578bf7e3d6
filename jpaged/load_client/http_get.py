"""One GET request, and the TLS context of a client. `jpaged inspect` and `jpaged bench serve` use both."""

import http.client
import pathlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from jpaged.errors import RequestError
from jpaged.load_client.connection import LoadError


def client_tls(*, insecure: bool, ca_file: pathlib.Path | None) -> ssl.SSLContext:
    """Return the context that checks the certificates of https servers.

    insecure: check no certificate. ca_file: trust these certificates (PEM) in place of the system's.

    Raises RequestError for a bad file, and if both are given.
    """
    if insecure and ca_file is not None:
        raise RequestError("ca_file", str(ca_file), "does not go with --insecure, which checks no certificate")
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise RequestError("ca_file", str(ca_file), f"must be certificates in PEM format: {error}") from None
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def get(url: str, headers: Mapping[str, str], *, tls: ssl.SSLContext | None, timeout: float) -> tuple[int, bytes]:
    """Return the status and the body of the answer.

    tls: for an https server. None: the system's certificates are trusted. timeout: in seconds, for each wait.

    No proxy and no redirect is used: the headers may have a key, which is for this server only. Raises LoadError if no
    HTTP server answers.
    """
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), _NoRedirect
    request = urllib.request.Request(url, headers=dict(headers))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (OSError, ValueError) as error:  # ValueError: the port is not a number
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            said = f"{reason.verify_message}: trust its certificate with --ca-file, or check none with --insecure"
            raise LoadError(said) from None
        raise LoadError(str(reason)) from None
    except http.client.HTTPException as error:
        raise LoadError(f"the answer is not HTTP: {error!r}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return None: do not follow."""
