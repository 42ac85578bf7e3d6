"""Tokenizers of folders, and the masks of their ids."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import jpaged
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.frontend.engine_config import engine_config
from jpaged.loading import load_model, load_tokenizer, valid_token_mask
from tests.golden.checkpoints import BY_NAME, write_checkpoint


def write_tokenizer(folder: Path, words: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def test_mask_of_known_ids(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<unk>", "a", "b"])
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    np.testing.assert_array_equal(valid_token_mask(tokenizer, 5), [True, True, True, False, False])
    assert valid_token_mask(tokenizer, 3) is None
    assert valid_token_mask(tokenizer, 2) is None
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    np.testing.assert_array_equal(valid_token_mask(tokenizer, 5), [True, True, True, True, False])
    assert valid_token_mask(None, 5) is None


def test_the_models_own_tokenizer_and_another(tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["llama"], 0, tmp_path / "model")
    write_tokenizer(tmp_path / "model", ["<unk>", "own"])
    write_tokenizer(tmp_path / "other", ["<unk>", "x", "other"])
    own = load_model(EngineConfig(model=str(tmp_path / "model")))
    assert own.tokenizer.encode("own") == [1]
    other = load_model(EngineConfig(model=str(tmp_path / "model"), tokenizer=str(tmp_path / "other")))
    assert other.tokenizer.encode("other") == [2]
    assert load_model(EngineConfig(model=str(tmp_path / "model"), skip_tokenizer_init=True)).tokenizer is None
    with pytest.raises(RequestError, match="does not go with tokenizer"):
        engine_config("m", {"skip_tokenizer_init": True, "tokenizer": "t"})


def test_damaged(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<unk>"])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_tokenizers_with_their_own_code_are_refused(tmp_path: Path) -> None:
    """The checkpoint's code is not run, and no question is asked at the terminal."""
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('the code was run')")
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"needs code in the checkpoint \(auto_map\), which jpaged does not run"):
        load_tokenizer(tmp_path)


def test_larger_than_the_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(BY_NAME["llama"], 0, tmp_path)  # 320 rows
    write_tokenizer(tmp_path, [f"w{i}" for i in range(321)])
    with pytest.raises(ModelLoadError, match=r"token 'w320' has id 320, but the embedding has 320 rows"):
        load_model(EngineConfig(model=str(tmp_path)))
    write_tokenizer(tmp_path, [f"w{i}" for i in range(320)])
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(str(tmp_path))
    model = load_model(EngineConfig(model=str(tmp_path)))
    assert model.tokenizer.encode("<image>") == [320]
    assert "1 added tokens have no row in the embedding and are refused in prompts: <image>" in caplog.text


THREADS = """
import sys, threading
from pathlib import Path
from jpaged.loading import load_tokenizer
loaded = []
threads = [threading.Thread(target=lambda: loaded.append(load_tokenizer(Path(sys.argv[1])))) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(loaded) == 2
"""


@pytest.mark.slow  # a new process imports transformers in 3 s
def test_two_threads_load_tokenizers_in_a_new_process() -> None:
    subprocess.run([sys.executable, "-c", THREADS, str(Path(jpaged.__file__).parent / "demo_model")], check=True)
