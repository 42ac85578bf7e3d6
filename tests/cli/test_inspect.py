"""`jpaged inspect`: its output, file and picture, and its errors."""

import contextlib
import dataclasses
import http.server
import io
import json
import pathlib
import socket
import threading
from collections.abc import Iterator

import matplotlib.image
import msgspec
import numpy as np
import pytest
from rich.console import Console

from jpaged import cli
from jpaged.cli.common import block_map, block_picture
from jpaged.cli.inspect import fetch
from jpaged.errors import RequestError
from jpaged.outputs import EngineStats, SpeculationStats
from jpaged.snapshot import BlockOwner, BlockSnapshot, EngineSnapshot, PoolSnapshot, RequestSnapshot, StepSnapshot

PREFIX_HASH = "ab" * 32
STATS = EngineStats(*([0] * 15))
REST = (8, 64, STATS, (StepSnapshot(3, 2, 1, 9, 0.01, 0.5),))  # of the fields that are not drawn


def request(request_id: str, num_blocks: int, sample: int = 0, **fields) -> RequestSnapshot:
    made = RequestSnapshot(request_id, sample, "decode", 0, 0, 20, 3, 23, 16, num_blocks, 0, 1.5)
    return dataclasses.replace(made, **fields)


def used(block: int, *owners: tuple[str, int], tokens: int = 16) -> BlockSnapshot:
    owned = tuple(BlockOwner(request_id, sample, 0, 0) for request_id, sample in owners)
    return BlockSnapshot(block, len(owned), owned, PREFIX_HASH if tokens == 16 else None, 9, tokens)


def made(num_blocks: int = 128) -> EngineSnapshot:
    """Block 0 is shared by two requests, block 1 by two samples.

    The first request owns blocks 2 and 4, the second owns block 3, half full. Block 5 is cached.
    """
    blocks = [
        used(0, ("first", 0), ("second", 0)),
        used(1, ("second", 0), ("second", 1)),
        used(2, ("first", 0)),
        used(3, ("second", 0), tokens=8),
        used(4, ("first", 0)),
        BlockSnapshot(5, 0, (), PREFIX_HASH, 3, 16),
    ]
    blocks += [BlockSnapshot(block, 0, (), None, None, 0) for block in range(6, num_blocks)]
    pool = PoolSnapshot(num_blocks, 16, 1, 5, 2, 1, num_blocks - 6, 7, 72)
    running = (request("first", 3), request("second", 3, row=1), request("second", 1, 1, row=2))
    return EngineSnapshot(9, pool, tuple(blocks), running, (request("queued", 0, status="waiting", row=None),), *REST)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers every request with the given status and body."""

    status, body, headers_sent = 200, b"", {}
    seen: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        self.send_response(self.status)
        for name, value in (self.headers_sent | {"Content-Length": str(len(self.body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args) -> None:
        pass


@contextlib.contextmanager
def answering(status: int, body: bytes, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list]]:
    """Yield a server's URL and the requests that it received."""
    handler = type("Handler", (Server,), {"status": status, "body": body, "headers_sent": headers or {}, "seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", handler.seen
        finally:
            server.shutdown()
            thread.join()


def error_body(code: str | None, message: str = "no") -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}}).encode()


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_key_may_be_out_of_sight(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, source: str):
    words = []
    if source == "file":
        path = tmp_path / "key"
        path.write_text("secret\n")
        words = ["--admin-key-file", str(path)]
    else:
        monkeypatch.setenv("JPAGED_ADMIN_KEY", "secret")
    with answering(200, msgspec.json.encode(made())) as (url, seen):
        assert cli.main(["inspect", url, *words]) == 0
    assert seen == [("/admin/inspect", "Bearer secret")]


def test_one_of_several_engines(capsys: pytest.CaptureFixture[str]):
    snapshot = dataclasses.replace(made(), engine=1, num_engines=3)
    with answering(200, msgspec.json.encode(snapshot)) as (url, seen):
        assert cli.main(["inspect", url, "--admin-key", "secret", "--engine", "1"]) == 0
    assert seen == [("/admin/inspect?engine=1", "Bearer secret")]
    assert capsys.readouterr().out.startswith("engine 1, of engines 0 to 2: --engine shows another\n")


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (None, None),
        (SpeculationStats(4, 0, 0, 0, (0, 0, 0, 0), 0.0), "speculation: 0.0 drafts per row now, at most 4\n"),
        (
            SpeculationStats(2, 400, 1000, 625, (400, 225), 1.75),
            "speculation: 1.8 drafts per row now, at most 2; 62.5% of 1,000 drafts accepted, 2.56 tokens per row and "
            "step with drafts\n",
        ),
    ],
)
def test_speculation_is_one_line(
    stats: SpeculationStats | None, line: str | None, capsys: pytest.CaptureFixture[str]
):
    snapshot = dataclasses.replace(made(), stats=dataclasses.replace(STATS, speculation=stats))
    with answering(200, msgspec.json.encode(snapshot)) as (url, _):
        assert cli.main(["inspect", url, "--admin-key", "secret"]) == 0
    printed = capsys.readouterr().out
    assert "speculation" not in printed if line is None else line in printed.replace("\r", "")


def test_without_a_key_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("JPAGED_ADMIN_KEY", raising=False)
    assert cli.main(["inspect", "http://127.0.0.1:1"]) == 2
    assert "--admin-key-file, or the variable JPAGED_ADMIN_KEY" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_output_and_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], ending: str):
    path = tmp_path / "snapshot.json"
    with answering(200, msgspec.json.encode(made())) as (url, seen):
        assert cli.main(["inspect", url + ending, "--admin-key", "secret", "--output-json", str(path)]) == 0
    assert seen == [("/admin/inspect", "Bearer secret")]
    printed = capsys.readouterr().out
    assert "5 of 128 blocks of 16 tokens used (4%), 1 cached, 122 empty" in printed
    assert "2 have several owners: without sharing, 7 blocks would be used" in printed
    assert "10.0% of the slots" in printed  # 72 of 80 are filled
    assert "3 running, 1 waiting" in printed
    for name in ("first", "second", "second #1", "queued"):
        assert name in printed
    assert "wrong" not in printed
    lines = [line.strip() for line in printed.splitlines()]
    assert "0  22aba-" + "." * 58 in lines
    assert "64  0 cached, 64 empty" in lines
    assert msgspec.convert(json.loads(path.read_text()), EngineSnapshot) == made()


def test_colours_are_those_of_the_picture():
    snapshot = made()
    known = block_map.looks(snapshot)
    assert list(known) == ["first", "second"]
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=150)
    block_map.show(snapshot, out)
    for look in known.values():
        red, green, blue = (round(part * 255) for part in look.colour)
        assert f"38;2;{red};{green};{blue}m{look.mark}" in out.file.getvalue()


def test_adapters_have_a_column_if_a_request_has_one():
    snapshot = made()
    for adapter in (None, "sql"):
        running = (request("first", 3, adapter=adapter), *snapshot.running[1:])
        out = Console(file=io.StringIO(), width=150)
        block_map.show(dataclasses.replace(snapshot, running=running), out)
        assert ("sql" in out.file.getvalue()) == ("adapter" in out.file.getvalue()) == (adapter is not None)


def test_a_wrong_reference_count_is_reported(capsys: pytest.CaptureFixture[str]):
    right = made()
    blocks = (*right.blocks[:2], dataclasses.replace(right.blocks[2], ref_count=2), *right.blocks[3:])
    with answering(200, msgspec.json.encode(dataclasses.replace(right, blocks=blocks))) as (url, _):
        assert cli.main(["inspect", url, "--admin-key", "secret"]) == 0
    assert "state is inconsistent: block 2: reference count 2, but 1 block tables contain it" in capsys.readouterr().out


def test_an_idle_pool_is_one_line():
    empty = [BlockSnapshot(block, 0, (), None, None, 0) for block in range(1000)]
    snapshot = EngineSnapshot(0, PoolSnapshot(1000, 16, 1, 0, 0, 0, 1000, 0, 0), tuple(empty), (), (), *REST)
    assert [line.plain.strip() for line in block_map.block_lines(snapshot, {})] == ["0  0 cached, 1,000 empty"]


def test_the_picture(tmp_path: pathlib.Path):
    """Cells are at their places in the picture: 16 per row, 40 pixels each, from (64, 88) on."""
    path = tmp_path / "blocks.png"
    with answering(200, msgspec.json.encode(made())) as (url, _):
        assert cli.main(["inspect", url, "--admin-key", "secret", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    picture = np.round(matplotlib.image.imread(path)[:, :, :3] * 255).astype(int)
    height, width = picture.shape[:2]
    assert width == 800
    assert 88 + 8 * 40 < height < 700

    def cell(block: int) -> np.ndarray:
        row, column = divmod(block, 16)
        return picture[88 + row * 40 :, 64 + column * 40 :][:38, :38]

    def colours(pixels: np.ndarray) -> set[tuple[int, ...]]:
        return {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}

    (first,) = colours(cell(2))
    assert colours(cell(4)) == {first}
    half = cell(3)
    (second,), (pale,) = colours(half[:, :19]), colours(half[:, 19:])
    assert len({first, second, pale}) == 3
    assert sum(pale) > sum(second)
    shared = colours(cell(0)[:8, :8])  # a corner without the number
    assert shared == {first, second}
    samples = colours(cell(1)[:8, :8])
    assert second in samples
    assert len(samples) == 2
    (cached,) = colours(cell(5))
    assert colours(cell(6)[1:-1, 1:-1]) == colours(cell(127)[1:-1, 1:-1]) == {(255, 255, 255)}
    assert len({first, second, cached, (255, 255, 255)}) == 4
    assert (cell(0) < 40).all(axis=2).sum() > 15  # the count, in black
    assert not (cell(2) < 40).all(axis=2).any()
    legend = colours(picture[88 + 8 * 40 :])
    for colour in (first, second, cached):  # within one step per channel: the legend's patches are drawn, not copied
        assert any(max(abs(np.subtract(colour, other))) <= 1 for other in legend)
    assert len(colours(picture[:80, 64:])) > 2  # the text above


@pytest.mark.parametrize("num_blocks", [6, 129, 3000, 50_000])
def test_pools_of_all_sizes_are_drawn(tmp_path: pathlib.Path, num_blocks: int):
    path = tmp_path / "blocks.png"
    block_picture.draw(made(num_blocks), path)
    height, width = matplotlib.image.imread(path).shape[:2]
    assert 800 <= width <= 1300
    assert height < 1300
    grid = block_picture.Grid.of(num_blocks)
    x, y = grid.corner(num_blocks - 1)
    assert x + grid.cell <= grid.columns * grid.cell
    assert y + grid.cell == grid.rows * grid.cell


def test_many_requests_have_different_colours_and_a_legend_that_ends(tmp_path: pathlib.Path):
    owners = ["_hidden", "$\\frac{$", "line\nbreak", "x" * 300, *(f"request-{i}" for i in range(56))]
    blocks = tuple(used(i, (name, 0)) for i, name in enumerate(owners))
    running = tuple(request(name, 1) for name in owners)
    snapshot = EngineSnapshot(9, PoolSnapshot(60, 16, 1, 60, 0, 0, 0, 60, 960), blocks, running, (), *REST)
    known = block_map.looks(snapshot)
    assert len({look.colour for look in known.values()}) == 60
    block_picture.draw(snapshot, tmp_path / "blocks.png")
    assert matplotlib.image.imread(tmp_path / "blocks.png").shape[0] < 700


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, error_body("invalid_admin_key"), "does not accept this admin key"),
        (401, error_body("invalid_api_key"), "started without an admin key"),
        (404, error_body(None, "Not Found"), "started without an admin key"),
        (404, b"<html>nothing</html>", "no jpaged server"),
        (404, b'{"detail": "Not Found"}', "no jpaged server"),
        (401, b"\xff", "no jpaged server"),
        (503, error_body("stopping", "the server is stopping"), "503: the server is stopping"),
        (200, b"<html>hello</html>", "no jpaged server"),
        (200, b'{"step": 3}', "not a snapshot"),
        (302, b"", "no jpaged server"),
    ],
)
def test_answers_that_are_not_a_snapshot(status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str]):
    with answering(status, body, {"Location": "/elsewhere"}) as (url, seen):
        assert cli.main(["inspect", url, "--admin-key", "secret"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert url in error
    assert "secret" not in error
    assert len(error.splitlines()) == 1
    assert len(seen) == 1  # a redirect is not followed: the key stays here


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["127.0.0.1:8000", "--admin-key", "k"], "must begin with http://"),
        (["file:///etc/passwd", "--admin-key", "k"], "must begin with http://"),
        (["http://", "--admin-key", "k"], "must begin with http://"),
        (["http://127.0.0.1:port", "--admin-key", "k"], "no jpaged server"),
        (["http://127.0.0.1:1", "--admin-key", "k"], "Connection refused"),
        (["http://127.0.0.1:1", "--admin-key", ""], "admin_key"),
        (["http://127.0.0.1:1", "--admin-key", "schlüssel"], "admin_key"),
        (["http://127.0.0.1:1", "--admin-key", "a\nb"], "admin_key"),
        (["http://127.0.0.1:1", "--admin-key", "k", "--png", "/nowhere/x.png"], "jpaged: png"),
        (["http://127.0.0.1:1", "--admin-key", "k", "--output-json", "/nowhere/x"], "output_json"),
    ],
)
def test_errors_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["inspect", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("jpaged: ")
    assert len(error.splitlines()) == 1


def test_a_server_that_is_not_http(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RequestError, match="no jpaged server"):
            fetch(f"http://127.0.0.1:{listening.getsockname()[1]}", "k")
        thread.join()


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["inspect", "http://127.0.0.1:1", "--admin-key", "k", "--png", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not pathlib.Path("x.png").exists()


@pytest.mark.parametrize("flag", ["--admin-key", "--api-key"])
def test_a_server_takes_no_empty_key(flag: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "demo", flag, "good", ""]) == 2
    assert "must not be empty" in capsys.readouterr().err
    assert cli.main(["serve", "demo", f"{flag}="]) == 2
    assert "must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--admin-key", "--api-key"])
@pytest.mark.parametrize("words", [["FLAG"], ["FLAG", "--port", "0"], ["FLAG", "good", "FLAG"]], ids=" ".join)
def test_a_key_flag_without_a_key_is_an_error(flag: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    """Never a server without keys: `--api-key $KEY` with an unset variable ends here."""
    with pytest.raises(SystemExit) as ended:
        cli.parse(["serve", "demo", *(flag if word == "FLAG" else word for word in words)])
    assert ended.value.code == 2
    assert "at least one key" in capsys.readouterr().err


def test_the_word_none_is_a_key():
    assert cli.parse(["serve", "demo", "--api-key", "None"]).access.api_key == ("None",)
    assert cli.parse(["serve", "demo"]).access.api_key == ()
