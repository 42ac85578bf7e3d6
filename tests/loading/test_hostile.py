"""Hostile checkpoints: each is refused with a ModelLoadError within a second, and its message is short."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401 -- importing it takes seconds, which the tests do not measure

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.gguf_file import GgufFile
from jpaged.loading.model_description import describe
from tests.golden.checkpoints import BY_NAME, write_checkpoint

INDEX = "model.safetensors.index.json"
DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


def within_a_second(call: Callable[[], Any], seconds: float = 1.0) -> str:
    """Return the message of the ModelLoadError that a call raises. A call that hangs fails the test.

    seconds: of CPU time, which does not depend on the machine's other work.
    """
    raised: list[BaseException | None] = []
    used: list[float] = []

    def run() -> None:
        began = time.thread_time()
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)
        used.append(time.thread_time() - began)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert used, "it hangs"
    assert isinstance(raised[0], ModelLoadError), raised[0]
    assert used[0] < seconds
    assert len(str(raised[0])) < 3000
    return str(raised[0])


def header_of(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        data = text.encode()
        (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)

    return write


def text_of(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if name == INDEX:
            (folder / "model.safetensors").unlink()
        (folder / name).write_text(text)

    return write


def fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for found in (folder / name, *folder.glob("*.safetensors")):
            found.unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        if name == INDEX:
            (folder / "model.safetensors").unlink()
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return make


def shard(name: str) -> Callable[[Path], None]:
    return text_of(INDEX, json.dumps({"weight_map": {"lm_head.weight": name}}))


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def entry(shape: str, name: str = "a") -> str:
    return f'{{"{name}": {{"dtype": "F32", "shape": [{shape}], "data_offsets": [0, 4]}}}}'


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "deep-config": text_of("config.json", DEEP),
    "deep-index": text_of(INDEX, DEEP),
    "deep-header": header_of(DEEP),
    "deep-generation-config": text_of("generation_config.json", DEEP),
    "deep-tokenizer": text_of("tokenizer.json", DEEP),
    "deep-tokenizer-config": lambda folder: [
        text_of("tokenizer.json", "{}")(folder), text_of("tokenizer_config.json", DEEP)(folder)
    ],
    "long-shard-name": shard("x" * 5000),
    "shard-of-zero-byte": shard("a\0b"),
    "shard-of-surrogate": shard("\ud800.safetensors"),
    "shard-is-the-folder": shard("."),
    "fifo": fifo("model.safetensors"),
    "fifo-of-another-name": fifo("weights.safetensors"),
    "fifo-as-config": fifo("config.json"),
    "fifo-as-gguf": lambda folder: [fifo("a.gguf")(folder), (folder / "config.json").unlink()],
    "zeros-config": sparse("config.json", 2**32),
    "zeros-index": sparse(INDEX, 2**32),
    "zeros-tokenizer": sparse("tokenizer.json", 2**32),
    "zeros-tokenizer-config": lambda folder: [
        text_of("tokenizer.json", "{}")(folder), sparse("tokenizer_config.json", 2**32)(folder)
    ],
    "header-of-many-dimensions": header_of(entry(",".join(["9223372036854775807"] * 1_000_000))),
    "header-of-large-dimensions": header_of(entry(",".join(["9" * 4000] * 3000))),
    "header-of-a-long-name": header_of(entry("2", "x" * 9_000_000)),
    "header-of-many-tensors": header_of("{" + ",".join(f'"{i}":{{}}' for i in range(1_000_000)) + "}"),
    "header-of-many-lists": header_of('{"a":[' + ",".join(["[]"] * 5_000_000) + "]}"),
    "long-architecture": config(architectures=["x" * 1_000_000]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["llama"], 0, tmp_path)
    HOSTILE[name](tmp_path)
    within_a_second(lambda: load_model(EngineConfig(model=str(tmp_path), dtype="float32")))


@pytest.mark.parametrize(
    ("variant", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("gpt2", "n_layer"),
        ("mixtral", "num_local_experts"),
        ("qwen3-moe", "num_experts"),
        ("deepseek-v3", "n_routed_experts"),
        ("gpt-oss", "num_local_experts"),
    ],
)
@pytest.mark.parametrize("weights", [True, False], ids=["load", "plan"])
def test_a_config_with_giant_counts_is_refused(variant: str, key: str, weights: bool, tmp_path: Path) -> None:
    write_checkpoint(BY_NAME[variant], 0, tmp_path)
    config(**{key: 10**9})(tmp_path)
    options = EngineConfig(model=str(tmp_path), dtype="float32")
    if not weights:
        (tmp_path / "model.safetensors").unlink()
    message = within_a_second(lambda: load_model(options) if weights else describe(options, "cpu"))
    assert key in message


def test_a_gguf_header_of_countless_strings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        count = 50_000_000
        header = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
        key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
        file.write(header + key + count.to_bytes(8, "little"))
        file.truncate(10**9)  # zeros: every string is empty
    within_a_second(lambda: GgufFile(path))
