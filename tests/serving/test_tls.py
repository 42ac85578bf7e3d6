"""TLS with a certificate that the test makes, and bad TLS flags."""

import json
import pathlib
import shutil
import ssl
import subprocess

import httpx
import pytest

from jpaged import RequestError, cli
from jpaged.cli.bench.serve import BenchServe
from jpaged.cli.flags.client_tls import ServerTlsFlags
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.tls import TlsOptions
from tests.support.http_server import running

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """A key, and a certificate of it for 127.0.0.1 that it has signed itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=jpaged test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate


def trusting(certificate: pathlib.Path, own: tuple[pathlib.Path, pathlib.Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate))
    if own is not None:
        context.load_cert_chain(own[1], own[0])
    return context


@needs_openssl
def test_https_answers_and_http_does_not(engine, files):
    key, certificate = files
    app = create_app(Server(engine=engine, model_names=("echo",)))
    with running(app, tls=TlsOptions(key, certificate).context()) as url:
        assert url.startswith("https://")
        with httpx.Client(verify=trusting(certificate)) as client:
            body = {"prompt": "abc", "max_tokens": 6, "stream": True}
            assert client.post(f"{url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError), httpx.Client(verify=False) as client:
            client.get(url.replace("https", "http") + "/health")


@needs_openssl
def test_clients_without_a_certificate_are_refused(engine, files):
    key, certificate = files
    app = create_app(Server(engine=engine, model_names=("echo",)))
    with running(app, tls=TlsOptions(key, certificate, certificate, 2).context()) as url:
        with httpx.Client(verify=trusting(certificate, files)) as client:
            assert client.get(f"{url}/health").status_code == 200
        with pytest.raises(httpx.HTTPError), httpx.Client(verify=trusting(certificate)) as client:
            client.get(f"{url}/health")


@needs_openssl
def test_the_commands_that_ask_a_server(engine, files, tmp_path, capsys):
    """`jpaged inspect` and the list of models of `jpaged bench serve`: same flags, same errors."""
    key, certificate = files
    app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(admin_keys=("look",)))
    with running(app, tls=TlsOptions(key, certificate).context()) as url:
        snapshot = tmp_path / "state.json"
        words = ["inspect", url, "--admin-key", "look", "--output-json", str(snapshot)]
        bench = BenchServe(base_url=url, server_tls=ServerTlsFlags(ca_file=certificate))
        assert bench._cards()[0]["id"] == "echo"
        for flags in (["--ca-file", str(certificate)], ["--insecure"]):
            assert cli.main([*words, *flags]) == 0
            assert json.loads(snapshot.read_text())["step"] == 7
            snapshot.unlink()
        assert cli.main(words) != 0
        assert "--ca-file" in capsys.readouterr().err
        with pytest.raises(RequestError, match=r"self-signed certificate.*--insecure"):
            BenchServe(base_url=url)._cards()
        for flags, said in ((["--ca-file", str(key)], "PEM"), (["--ca-file", "a", "--insecure"], "--insecure")):
            assert cli.main([*words, *flags]) != 0
            assert said in capsys.readouterr().err
    assert not snapshot.exists()


def test_no_flags_are_no_tls():
    assert TlsOptions().context() is None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"keyfile": pathlib.Path("k")}, "ssl_keyfile"),
        ({"ca_certs": pathlib.Path("k")}, "ssl_ca_certs"),
        ({"cert_reqs": 2}, "--ssl-certfile"),
        ({"cert_reqs": 3}, "0 .none., 1"),
        ({"certfile": pathlib.Path("/none"), "cert_reqs": 2}, "--ssl-ca-certs"),
        ({"certfile": pathlib.Path("/none")}, "No such file"),
        ({"certfile": pathlib.Path(__file__)}, "ssl_certfile"),
    ],
)
def test_bad_flags(given, match):
    with pytest.raises(RequestError, match=match):
        TlsOptions(**given).context()


@needs_openssl
def test_a_key_with_a_password_and_a_bad_authority_are_refused(files, tmp_path):
    key, certificate = files
    locked = tmp_path / "locked.pem"
    subprocess.run(["openssl", "ec", "-in", key, "-out", locked, "-aes256", "-passout", "pass:x"], check=True,
                   capture_output=True)  # fmt: skip
    with pytest.raises(RequestError, match="without"):
        TlsOptions(locked, certificate).context()
    with pytest.raises(RequestError, match="ssl_ca_certs"):
        TlsOptions(key, certificate, pathlib.Path(__file__), 2).context()
