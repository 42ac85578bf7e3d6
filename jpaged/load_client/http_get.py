"""A GET request and a client's TLS context, for `jpaged inspect` and `jpaged bench serve`."""

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
    """Return a TLS context for https servers. Raises RequestError for a bad file, and if both arguments are given.

    insecure: check no certificate. ca_file: trust these certificates (PEM) instead of the system's.
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
    """Return (status, body) of the answer. Raises LoadError if no HTTP server answers.

    tls: None trusts the system's certificates. timeout: seconds, for each wait on the socket.
    No proxy or redirect is used, because the headers may have a key for this server only.
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
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return None: do not follow. urllib then raises an HTTPError with the redirect's status."""
