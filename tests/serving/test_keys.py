"""Where keys come from, the warnings at the start, and the flags about who may use the server."""

import asyncio
import dataclasses
import logging
import pathlib
from typing import Any

import pytest

from jpaged import RequestError, cli
from jpaged.cli.flags.access import AccessFlags
from jpaged.serving.web.auth import RequireKey
from jpaged.serving.web.keys import ADMIN_VARIABLES, API_VARIABLES, read_keys
from jpaged.serving.web.process import AddressError, take_unix_socket


@pytest.fixture
def key_file(tmp_path) -> pathlib.Path:
    path = tmp_path / "keys.txt"
    path.write_text("from-file\n\n  second \n")
    path.chmod(0o600)
    return path


def flags(*words: str) -> AccessFlags:
    return cli.parse(["serve", "demo", *words]).access


def options(host: str | None = "127.0.0.1", **given: Any) -> Any:
    return AccessFlags(**given).app_options(host)


def test_keys_of_all_sources_count(key_file, monkeypatch, caplog):
    monkeypatch.setenv("JPAGED_API_KEY", "from-env")
    monkeypatch.setenv("VLLM_API_KEY", "from-vllm")
    monkeypatch.setenv("JPAGED_ADMIN_KEY", "admin-env")
    made = flags("--api-key", "typed", "--api-key-file", str(key_file)).app_options("127.0.0.1")
    assert made.api_keys == ("typed", "from-file", "second", "from-env", "from-vllm")
    assert made.admin_keys == ("admin-env",)
    assert "--api-key: every user of this machine can read keys on the command line" in caplog.text
    assert not [key for key in made.api_keys if key in caplog.text]


def test_keys_out_of_sight_give_no_warning(key_file, monkeypatch, caplog):
    monkeypatch.setenv("JPAGED_API_KEY", "from-env")
    assert options(api_key_file=key_file).api_keys == ("from-file", "second", "from-env")
    assert not caplog.records


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o644, True)])
def test_keys_of_a_config_file_are_not_on_the_command_line(tmp_path, caplog, mode, warns):
    path = tmp_path / "serve.yaml"
    path.write_text("api-key: in-file\nadmin_key: [one, two]\nport: 1234\n")
    path.chmod(mode)
    made = flags("--config", str(path)).app_options("127.0.0.1")
    assert (made.api_keys, made.admin_keys) == (("in-file",), ("one", "two"))
    assert "command line" not in caplog.text
    assert (f"config: other users can read the keys in {path}. Run: chmod 600" in caplog.text) == warns
    caplog.clear()
    path.write_text("port: 1234\n")
    assert flags("--config", str(path), "--admin_key=typed").admin_key == ("typed",)
    assert [record.getMessage()[:11] for record in caplog.records] == ["--admin-key"]


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_gives_a_warning(key_file, caplog, mode, warns):
    key_file.chmod(mode)
    assert read_keys("api_key", (), key_file, API_VARIABLES, {}) == ("from-file", "second")
    assert ("chmod 600" in caplog.text) == warns


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"", "has no key"), (b"\n \n", "has no key"), (b"a b\n", "without spaces"), (b"\xff", "cannot be read"),
     ("schlüssel".encode(), "printable ASCII"), (b"x" * 2**21, "at most")],
)  # fmt: skip
def test_a_bad_file_is_refused(key_file, content, match):
    """Never a server without keys because the file was empty."""
    key_file.write_bytes(content)
    with pytest.raises(RequestError, match=match) as raised:
        options(api_key_file=key_file)
    assert "api_key_file" in str(raised.value)


def test_a_missing_file_and_an_empty_variable_are_refused(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="No such file"):
        options(admin_key_file=tmp_path / "none")
    for variable in (*API_VARIABLES, *ADMIN_VARIABLES):
        monkeypatch.setenv(variable, "")
        with pytest.raises(RequestError, match=f"{variable} must not be empty"):
            options()
        monkeypatch.delenv(variable)


def test_api_and_admin_keys_must_differ():
    with pytest.raises(RequestError, match="also an API key") as raised:
        options(api_key=("same",), admin_key=("other", "same"))
    assert "same" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [("0.0.0.0", (), True), ("::", (), True), ("192.168.1.7", (), True), ("llm.example.com", (), True), ("", (), True),
     ("127.0.0.1", (), False), ("::1", (), False), ("localhost", (), False), (None, (), False),
     ("0.0.0.0", ("k",), False)],
)  # fmt: skip
def test_an_open_address_without_a_key_gives_a_warning(tmp_path, caplog, host, keys, warns):
    path = None
    if keys:
        path = tmp_path / "keys"
        path.write_text("\n".join(keys))
        path.chmod(0o600)
    options(host, api_key_file=path)
    assert ("without a key" in caplog.text) == warns


def test_hosts_by_address():
    assert "localhost" in options("127.0.0.1").allowed_hosts
    assert options("0.0.0.0").allowed_hosts is None
    assert options(None).allowed_hosts is None
    assert options("::1", allowed_hosts=("a.b",)).allowed_hosts[-1] == "a.b"
    assert set(options("0.0.0.0", allowed_hosts=("a.b",)).allowed_hosts) >= {"a.b", "localhost"}
    assert options("127.0.0.1", allowed_hosts=("*",)).allowed_hosts is None


def test_lists_are_words_or_json_as_in_vllm():
    assert flags("--allowed-origins", "https://a.b", "https://c.d").allowed_origins == ("https://a.b", "https://c.d")
    made = flags("--allowed-origins", '["https://a.b"]', "--allowed-methods", '["GET"]', "--allowed-headers", "X-A")
    assert (made.allowed_origins, made.allowed_methods, made.allowed_headers) == (("https://a.b",), ("GET",), ("X-A",))
    assert flags("--allow-credentials").allow_credentials
    for bad in ("[1]", "[", '["a"'):
        with pytest.raises(SystemExit):
            flags("--allowed-origins", bad)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "named origins"),
        ({"root_path": "llm"}, "begin with a slash"),
        ({"root_path": "/llm/"}, "not end"),
        ({"profile_dir": pathlib.Path("x")}, "admin key"),
    ],
)
def test_bad_combinations(given, match):
    with pytest.raises(RequestError, match=match):
        options(**given)


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Every known key is compared, and as hashes of equal length."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("jpaged.serving.web.auth.hmac.compare_digest", compare)
    passed: list[dict] = []

    async def app(scope: dict, *_: object) -> None:
        passed.append(scope)

    async def send(message: dict) -> None:
        """Drop the error."""

    guard = RequireKey(app, ("first", "second", "third"), lambda path: True, "key")

    def accepts(headers: dict[bytes, bytes]) -> bool:
        passed.clear()
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": list(headers.items())}
        asyncio.run(guard(scope, None, send))
        return bool(passed)

    headers = {b"authorization": b"Bearer first"}, {b"authorization": b"Bearer x"}, {b"x-api-key": b"first"}
    for given, known in zip(headers, (True, False, True), strict=True):
        compared.clear()
        assert accepts(given) == known
        assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 3
    assert not accepts({b"authorization": b""})


def test_a_unix_socket_replaces_a_dead_one_only(tmp_path):
    path = tmp_path / "s"
    take_unix_socket(path).close()  # the file stays
    with take_unix_socket(path) as bound:
        assert path.stat().st_mode & 0o777 == 0o660
        bound.listen()
        with pytest.raises(AddressError, match="another process"):
            take_unix_socket(path)
    path.unlink()
    path.write_text("not a socket")
    with pytest.raises(AddressError):
        take_unix_socket(path)
    assert path.read_text() == "not a socket"


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().api_keys = ("x",)


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch, caplog):
    for variable in (*API_VARIABLES, *ADMIN_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    caplog.set_level(logging.WARNING, "jpaged")


