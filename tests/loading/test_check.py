"""`python -m jpaged.loading.check` finds the first layer that differs from recorded answers, and from Transformers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.loading.check import Answers, fixed_token_ids, last_logits, main, output_after
from tests.golden.checkpoints import BY_NAME, VARIANTS, write_checkpoint, write_safetensors
from tests.golden.pooling import BARE_QWEN3, QWEN3_CLASSIFIER
from tests.support.checkpoint_files import change_config, tensors_of

HAS_TORCH = importlib.util.find_spec("torch") is not None
FIRST = "the first difference is in "


def own_answers(folder: Path, path: Path, runner: str = "auto") -> Path:
    """Record the model's present outputs in the format of --record."""
    model = load_model(EngineConfig(model=str(folder), dtype="float32", runner=runner))
    ids = fixed_token_ids(model.spec.vocab_size)
    outputs = [output_after(model, ids, layers) for layers in range(model.spec.num_layers + 1)]
    Answers(ids, outputs, last_logits(model, outputs[-1])).write(path)
    return path


def damage(folder: Path, name: str) -> None:
    """Make a tensor of the checkpoint a thousandth larger."""
    tensors = tensors_of(folder)
    tensors[name] *= np.float32(1.001)
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Of three layers."""
    write_checkpoint(BY_NAME["llama-yarn-mscale"], 0, tmp_path / "llama")
    return tmp_path / "llama"


DAMAGE = [
    ("model.embed_tokens.weight", "the embedding: no layer has run yet"),
    ("model.layers.0.mlp.down_proj.weight", "layer 0: its input agrees"),
    ("model.layers.1.input_layernorm.weight", "layer 1: its input agrees"),
    ("model.layers.2.self_attn.v_proj.weight", "layer 2: its input agrees"),
    ("model.norm.weight", "the logits: all layers agree"),
]


@pytest.mark.parametrize(
    ("tensor", "says"), [*DAMAGE[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in DAMAGE[2:])]
)
def test_the_damaged_layer_is_named(tensor: str, says: str, llama: Path, tmp_path: Path, capsys) -> None:
    answers = str(own_answers(llama, tmp_path / "answers.json"))
    assert main([str(llama), "--answers", answers]) == 0
    assert capsys.readouterr().out.endswith("\nall agree\n")
    damage(llama, tensor)
    assert main([str(llama), "--answers", answers]) == 1
    out = capsys.readouterr().out
    assert FIRST + says in out
    assert out.count("DIFFERS") == 1
    assert main([str(llama), "--answers", answers, "--tolerance", "0.1"]) == 0


@pytest.mark.parametrize(
    ("variant", "options", "name", "tensor"),
    [
        (QWEN3_CLASSIFIER, (), "scores", "score.weight"),
        (BARE_QWEN3, ("--runner", "pooling"), "last state", "norm.weight"),
    ],
    ids=["classifier", "bare"],
)
def test_models_that_pool(variant, options, name, tensor, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "model"
    write_checkpoint(variant, 0, folder)
    answers = own_answers(folder, tmp_path / "answers.json", runner="pooling")
    command = [str(folder), "--answers", str(answers), *options]
    assert main(command) == 0
    damage(folder, tensor)
    assert main(command) == 1
    assert FIRST + f"the {name}: all layers agree" in capsys.readouterr().out


def test_nan_is_a_difference(llama: Path, tmp_path: Path, capsys) -> None:
    answers = own_answers(llama, tmp_path / "answers.json")
    recorded = Answers.read(answers)
    outputs = [array.copy() for array in recorded.outputs]
    outputs[1][3, 4] = np.nan
    Answers(recorded.token_ids, outputs, recorded.logits).write(answers)
    assert main([str(llama), "--answers", str(answers)]) == 1
    assert FIRST + "layer 0" in capsys.readouterr().out


def test_refused(llama: Path, tmp_path: Path, capsys) -> None:
    answers = own_answers(llama, tmp_path / "answers.json")
    (tmp_path / "no.json").write_text(json.dumps({"token_ids": [1]}))
    write_checkpoint(BY_NAME["llama"], 0, tmp_path / "other")
    for words, says in (
        ([str(llama), "--answers", str(tmp_path / "no.json")], "must be a file that --record wrote"),
        ([str(llama), "--answers", str(tmp_path / "nowhere.json")], "must be a file that --record wrote"),
        ([str(llama), "--answers", str(answers), "--prompt", "x"], "--answers: leave one of them out, got 'x'"),
        ([str(llama), "--answers", str(answers), "--record", "y"], "does not go with --answers"),
        ([str(tmp_path / "other"), "--answers", str(answers)], "They are from another model"),
        (["/nowhere/model", "--answers", str(answers)], "/nowhere/model"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert says in error
        assert len(error.splitlines()) == 1


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
def test_without_torch_the_message_says_so(llama: Path, capsys) -> None:
    assert main([str(llama)]) == 2
    assert "torch is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_program(llama: Path, tmp_path: Path) -> None:
    answers = own_answers(llama, tmp_path / "answers.json")
    command = [sys.executable, "-m", "jpaged.loading.check", str(llama), "--answers", str(answers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 5


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch, which jpaged does not")
class TestAgainstTransformers:
    """The answers that --record writes are those of Transformers; --answers then needs no torch."""

    # Transformers 5.24 refuses matrices in fp8 whose last block is not full
    # Transformers' AutoModelForCausalLM knows Mistral 4 inside its wrapper only
    @pytest.mark.parametrize(
        "variant",
        [v for v in VARIANTS if not v.name.endswith("-fp8") and not v.name.startswith("mistral4")],
        ids=lambda v: v.name,
    )
    def test_every_family_agrees(self, variant, tmp_path: Path, capsys) -> None:
        write_checkpoint(variant, 5, tmp_path / "model")
        answers = str(tmp_path / "answers.json")
        assert main([str(tmp_path / "model"), "--record", answers]) == 0, capsys.readouterr().out
        assert main([str(tmp_path / "model"), "--answers", answers]) == 0

    @pytest.mark.parametrize(("tensor", "says"), DAMAGE)
    def test_the_damaged_layer_is_named(self, tensor: str, says: str, llama: Path, tmp_path: Path, capsys) -> None:
        answers = str(tmp_path / "answers.json")
        assert main([str(llama), "--record", answers]) == 0
        damage(llama, tensor)
        assert main([str(llama), "--answers", answers]) == 1
        assert FIRST + says in capsys.readouterr().out

    def test_an_epsilon_that_is_off(self, llama: Path, tmp_path: Path, capsys) -> None:
        answers = str(tmp_path / "answers.json")
        assert main([str(llama), "--record", answers]) == 0
        change_config(llama, rms_norm_eps=1e-3)
        assert main([str(llama), "--answers", answers]) == 1
        assert FIRST + "layer 0" in capsys.readouterr().out
