"""--lora-modules, --lora-dirs, --weights-dirs: their forms, and mistakes found before the model is loaded."""

import json

import pytest

from jpaged import cli


def test_modules_are_names_and_folders_or_json():
    one = json.dumps({"name": "sql", "path": "adapters/sql", "base_model_name": "base"})
    many = json.dumps([{"name": "a", "path": "x=y"}, {"name": "b", "path": "z"}])
    words = ["--enable-lora", "--lora-modules", "code=adapters/code=1", one, many, "--lora-dirs", "p", "q"]
    command = cli.parse(["serve", "demo", *words])
    assert command.lora_modules == (
        ("code", "adapters/code=1", None), ("sql", "adapters/sql", "base"), ("a", "x=y", None), ("b", "z", None),
    )  # fmt: skip
    assert [str(folder) for folder in command.lora_dirs] == ["p", "q"]
    assert cli.parse(["serve", "demo"]).lora_modules == ()


@pytest.mark.parametrize("word", ["sql", "=x", "sql=", '{"name": "sql"}', '{"name": 1, "path": "x"}', "[1]", "{"])
def test_other_forms_are_refused(word, capsys):
    with pytest.raises(SystemExit):
        cli.parse(["serve", "demo", "--lora-modules", word])
    assert "lora-modules" in capsys.readouterr().err


def test_adapters_need_the_option_a_key_and_folders(tmp_path, capsys):
    for words, said in (
        (["--lora-modules", "sql=x"], "lora_modules needs --enable-lora"),
        (["--lora-dirs", str(tmp_path)], "lora_dirs needs --enable-lora"),
        (["--enable-lora", "--lora-dirs", str(tmp_path / "no")], "lora_dirs is not a folder"),
        (["--enable-lora", "--lora-modules", f"sql={tmp_path / 'no'}"], "the adapter 'sql' is not a folder"),
        (["--enable-lora", "--lora-dirs", str(tmp_path)], "lora_dirs needs an admin key"),
        (["--weights-dirs", str(tmp_path)], "weights_dirs needs an admin key"),
        (["--weights-dirs", str(tmp_path / "no"), "--admin-key", "look"], "weights_dirs is not a folder"),
    ):
        assert cli.main(["serve", "demo", "--port", "0", *words]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["generate", "demo", "--lora", str(tmp_path)]) == 2
    assert "lora needs --enable-lora" in capsys.readouterr().err
    assert cli.main(["generate", "demo", "--enable-lora", "--lora", str(tmp_path / "no")]) == 2
    assert "lora is not a folder" in capsys.readouterr().err
