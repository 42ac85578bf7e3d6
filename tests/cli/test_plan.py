"""`jpaged plan`: its output, its file, and its exit status."""

import json
import re

import pytest

from jpaged import cli
from jpaged.cli.flags.engine import field_docs
from jpaged.cli.plan import Plan, _roofline_lines
from jpaged.runtime import targets
from jpaged.runtime.prediction.roofline import CollectiveCost, ProgramCost, Roofline
from tests.support.published_configs import LLAMA, LLAMA_WEIGHTS


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Llama 3.1 8B as a config.json alone, on a machine without a compiler for other devices."""
    monkeypatch.setattr(targets, "_installed", lambda module: False)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return file


def bytes_of(text):
    """The table that was printed."""
    rows = re.findall(r"^(.{16}) +([\d,]+) .*MiB", text, re.MULTILINE)
    return {name.strip(): int(size.replace(",", "")) for name, size in rows}


def test_the_table_and_the_file_say_the_same(config, tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["plan", str(config), "--device-memory", "24GiB", "--request-len", "2000", "--output-json", str(out)]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    printed, figures = bytes_of(text), json.loads(out.read_text())
    for row in figures["rows"]:
        assert printed.pop(row["name"]) == row["num_bytes"]
        for part in row["parts"]:
            assert printed.pop(part["name"]) == part["num_bytes"]
    assert printed.pop("in all") == figures["device_bytes"] == 24 * 2**30
    assert not printed
    assert figures["weight_bytes"] == LLAMA_WEIGHTS
    assert figures["kv_tokens"] == 16 * figures["num_blocks"]
    assert figures["requests"] == [{"tokens": 2000, "at_once": figures["num_blocks"] // 125}]
    assert "temporaries are ESTIMATED, and probably too high: jax[cuda13]" in text
    assert f"the largest max_model_len that fits: {figures['largest_max_model_len']:,}" in text
    assert f"KV cache: {figures['kv_tokens']:,} tokens" in text


def test_a_plan_that_does_not_fit_fails(config, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert cli.main(["plan", str(config), "--target", "v5e", "--output-json", str(out)]) == 2
    text = capsys.readouterr().out
    assert "it does not fit: " in text
    assert "KV pool" not in text
    figures = json.loads(out.read_text())
    assert (figures["fits"], figures["largest_max_model_len"]) == (False, None)
    # more memory fits the model, but not requests of that length
    words = ["plan", str(config), "--device-memory", "24GiB", "--max-model-len"]
    assert cli.main([*words, "131072"]) == 2
    text = capsys.readouterr().out
    longest = re.search(r"lower max_model_len to at most (\d+)", text)[1]
    assert f"fits: {int(longest):,}" in text
    assert cli.main([*words, longest]) == 0


def test_the_help_names_every_target():
    help_text = field_docs(Plan)["target"]
    for name in targets.TARGETS:
        assert re.search(rf"\b{name}\b", help_text), name


def test_collectives_are_printed_apart():
    cost = ProgramCost("decode", 9, 1, 0, 0, 2 * 10**9, 10**9, 0.003, 0.002, None,
                       (CollectiveCost("all-reduce", 161, 168_820_736, 0.0029),))  # fmt: skip
    lines = _roofline_lines(Roofline("NVIDIA H200", (cost,), (), 8, targets.TARGETS["h200"].link))
    assert "collectives between 8 devices, at 450 GB/s and 1.9 us a step. They are part of the ms above," in lines
    (line,) = (line for line in lines if "all-reduce" in line)
    assert line.split() == ["decode", "all-reduce", "161", "168.82", "2.90"]
    alone = _roofline_lines(Roofline("NVIDIA H200", (cost,), ()))
    assert not any("collectives" in line for line in alone)
