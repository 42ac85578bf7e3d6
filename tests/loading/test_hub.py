"""Hub ids, with a hub served on loopback. Uses child processes, because the client reads its settings on import."""

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jpaged.errors import ModelLoadError
from jpaged.loading.hub import find_model
from tests.loading.hub_server import Hub, serve

_ROOT = Path(__file__).parents[2]
_SCRIPT = """
import os, sys
from jpaged.errors import ModelLoadError
from jpaged.loading.hub import find_model
try:
    folder = find_model(sys.argv[1])
    print(folder, *sorted(os.listdir(folder)))
except ModelLoadError as error:
    print("ModelLoadError:", error)
"""
_BIG = 22_000_000  # bytes; the client writes a download to disk in pieces of 10 MiB


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "config.json": b"{}",
        "generation_config.json": b'{"temperature": 0.5}',
        "model.safetensors": b"weights",
        "tokenizer.json": b'{"version": "1.0"}',
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"the same weights again",
        "onnx/model.safetensors": b"the same weights again",
        "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
        "1_Pooling/model.safetensors": b"of another module",
        "modeling_tiny.py": b"raise SystemExit",
    }
    with serve(Hub("acme/tiny", files)) as served:
        yield served


def find(hub: Hub, home: Path, **environment: str) -> str:
    """Run find_model in a new process. Returns the folder and its files, or the error, as printed."""
    env = os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": "", "PYTHONPATH": str(_ROOT), "no_proxy": "*", **environment,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, hub.repo], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_only_needed_files_are_fetched_and_the_cache_serves_without_network(hub: Hub, tmp_path: Path) -> None:
    wanted = "1_Pooling config.json generation_config.json model.safetensors tokenizer.json"
    first = find(hub, tmp_path)
    assert first.startswith(str(tmp_path))
    assert first.split(" ", 1)[1] == wanted
    fetched = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    files = wanted.replace("1_Pooling", "1_Pooling/config.json").split()
    assert sorted(path.split("/resolve/")[1].split("/", 1)[1] for path in fetched) == files

    hub.requests.clear()
    assert find(hub, tmp_path, HF_HUB_OFFLINE="1") == first
    assert not hub.requests
    assert find(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == first  # a closed port


@pytest.mark.slow
def test_an_interrupted_download_continues_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    weights = os.urandom(_BIG)
    hub.files["model.safetensors"] = weights
    hub.cut_after["model.safetensors"], hub.cuts_left = 12_000_000, 1
    folder = find(hub, tmp_path).split()[0]
    assert (Path(folder) / "model.safetensors").read_bytes() == weights
    assert hub.downloads("model.safetensors") == ["", f"bytes={10 * 1024 * 1024}-"]


@pytest.mark.slow
def test_after_a_failed_download_only_missing_files_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.broken.add("model.safetensors")
    message = find(hub, tmp_path)
    assert message.startswith("ModelLoadError: acme/tiny: cannot be fetched")
    assert "try again" in message
    assert hub.downloads("generation_config.json") == [""]
    hub.broken.clear()
    hub.requests.clear()
    assert "model.safetensors" in find(hub, tmp_path)
    assert hub.downloads("model.safetensors") == [""]
    assert hub.downloads("generation_config.json") == []


@pytest.mark.slow
def test_token(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    assert "if it is private, set HF_TOKEN" in find(hub, tmp_path)
    assert "model.safetensors" in find(hub, tmp_path, HF_TOKEN="hf_secret")


@pytest.mark.slow
def test_not_cached_and_not_reachable(hub: Hub, tmp_path: Path) -> None:
    hub.repo = "acme/other"
    assert "hub cannot be reached" in find(hub, tmp_path, HF_HUB_OFFLINE="1")


def test_the_error_comes_without_the_tracebacks_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("offline") from OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelLoadError, match="hub cannot be reached") as caught:
        find_model("acme/other")
    assert "offline" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder', and the name is not a hub id"),
        ("./missing", "there is no folder"),
        ("a/b/c", "not a hub id"),
        ("", "not a hub id"),
    ],
)
def test_names_that_are_neither_folder_nor_hub_id_are_refused(name: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        find_model(name)


def test_a_single_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="is a file: give the folder"):
        find_model(str(tmp_path / "model.safetensors"))
