"""`jpaged plan`: its output, its file, and its exit status."""

import json
import re

import pytest

from jpaged import cli
from jpaged.cli.flags.engine import field_docs
from jpaged.cli.plan import Plan, _roofline_lines
from jpaged.runtime import targets
from jpaged.runtime.prediction.roofline import CollectiveCost, Load, ProgramCost, Roofline, StepCost
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


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_the_pool_is_sized_with_the_drafter(config, tmp_path, capsys, method):
    """The drafter's bytes are in the table. Its pages have as many blocks as the pool, which is smaller for it."""
    layer = LLAMA | {"num_hidden_layers": 1, "draft_vocab_size": 32000}
    layer |= {"architectures": ["LlamaForCausalLMEagle3"]} if method == "eagle3" else {}
    draft = tmp_path / "draft" / "config.json"
    draft.parent.mkdir()
    draft.write_text(json.dumps(layer))
    out = tmp_path / "plan.json"
    words = ["plan", str(config), "--device-memory", "40GiB", "--max-model-len", "4096", "--output-json", str(out)]
    assert cli.main(words) == 0
    before = json.loads(out.read_text())
    option = json.dumps({"method": method, "model": str(draft), "num_speculative_tokens": 3})
    capsys.readouterr()
    assert cli.main([*words, "--speculative-config", option]) == 0
    printed, after = bytes_of(capsys.readouterr().out), json.loads(out.read_text())
    layers = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096  # matrices and norms of a layer
    weights = layers + 2 * 128256 * 4096 + 4096
    if method == "eagle3":  # q, k and v are twice as wide. No embedding, and a smaller lm_head. d2t is int32
        weights = layers + 4096 * (4096 + 2 * 1024) + 3 * 4096 * 4096 + 2 * 4096 + 32000 * 4096 + 2 * 32000
    assert printed["draft weights"] == 2 * weights
    assert printed["draft pages"] == after["num_blocks"] * 16 * 2 * 8 * 128 * 2
    assert printed["drafter"] == sum(printed[f"draft {part}"] for part in ("weights", "pages", "state"))
    assert printed["drafter"] == after["drafter_bytes"]
    assert printed["in all"] == 40 * 2**30
    assert sum(row["num_bytes"] for row in after["rows"]) == 40 * 2**30
    freed = (before["num_blocks"] - after["num_blocks"]) * before["block_bytes"]
    assert freed > 0.8 * printed["drafter"]
    assert after["rows"][-2]["num_bytes"] >= 0  # left over


def test_adapters_have_a_row_and_take_blocks(config, tmp_path, capsys):
    """Rank 16 of every matrix of Llama 3.1 8B, with embedding and lm_head."""
    out = tmp_path / "plan.json"
    words = ["plan", str(config), "--device-memory", "40GiB", "--max-model-len", "4096", "--output-json", str(out)]
    assert cli.main(words) == 0
    before = json.loads(out.read_text())
    assert before["adapters"] is None
    capsys.readouterr()
    assert cli.main([*words, "--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"]) == 0
    text, after = capsys.readouterr().out, json.loads(out.read_text())
    attention = (3 * 4096 + 4096 + 2 * 1024) + (4096 + 4096)  # A of q, k and v, B of all; o
    feed_forward = (2 * 4096 + 2 * 14336) + (14336 + 4096)
    numbers = 16 * (32 * (attention + feed_forward) + 2 * (128256 + 4096))
    parts = 32 * (3 + 1 + 2 + 1) + 2
    slot = 2 * numbers + 8 * parts  # bfloat16, with a rank and a scale for each part
    assert bytes_of(text)["LoRA adapters"] == 4 * slot == after["adapters"]["num_bytes"]
    assert after["adapters"]["slot_bytes"] == slot
    assert f"host memory of LoRA adapters (max_cpu_loras): 16 adapters, {16 * slot / 2**20:,.1f} MiB" in text
    assert sum(row["num_bytes"] for row in after["rows"]) == 40 * 2**30
    assert (before["num_blocks"] - after["num_blocks"]) * before["block_bytes"] > 0.8 * 4 * slot


def test_the_host_tier_of_a_model_with_recurrent_layers(config, tmp_path, capsys):
    """LFM2 1.2B: blocks and snapshots share the bytes of swap_space."""
    layers = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]
    config.write_text(json.dumps({
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "torch_dtype": "bfloat16", "vocab_size": 65536,
        "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5, "layer_types": layers,
        "conv_L_cache": 3, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    }))  # fmt: skip
    out = tmp_path / "plan.json"
    words = ["plan", str(config), "--device-memory", "24GiB", "--swap-space", "4", "--output-json", str(out)]
    assert cli.main(words) == 0
    text, figures = capsys.readouterr().out, json.loads(out.read_text())
    block, snapshot = 16 * 12288, 10 * 2 * 2048 * 2
    assert (figures["block_bytes"], figures["host_blocks"]) == (block, 2**32 // block)
    assert figures["host_snapshots"] == 2**32 // block * block // (block + snapshot)
    assert f"or {figures['host_snapshots']:,} snapshots of {snapshot:,} bytes, with the KV between them" in text
    assert cli.main([*words, "--no-enable-prefix-caching"]) == 0
    assert json.loads(out.read_text())["host_snapshots"] == 0


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


def test_a_verify_step_is_printed_next_to_its_decode_step():
    """The rate counts all drafts as accepted, and a line says so."""
    steps = (StepCost(Load(8, 1024), 1e-3, 2e-3, 3e-3), StepCost(Load(8, 1024, 4), 1e-3, 4e-3, 5e-3))
    plain, verify, _, note = _roofline_lines(Roofline("NVIDIA H200", (), steps))[-4:]
    assert plain.split()[-4:] == ["1.00", "2.00", "3.00", "4,000"]
    assert re.sub(" +", " ", verify) == "8 rows of 1,024 tokens with 4 drafts 1.00 4.00 5.00 10,000"
    assert "accepts all" in note
    assert not any("accepts" in line for line in _roofline_lines(Roofline("NVIDIA H200", (), steps[:1])))


def test_collectives_are_printed_apart():
    cost = ProgramCost("decode", 9, 1, 0, 0, 2 * 10**9, 10**9, 0.003, 0.002, None,
                       (CollectiveCost("all-reduce", 161, 168_820_736, 0.0029),))  # fmt: skip
    lines = _roofline_lines(Roofline("NVIDIA H200", (cost,), (), 8, targets.TARGETS["h200"].link))
    assert "collectives between 8 devices, at 450 GB/s and 1.9 us a step. They are part of the ms above," in lines
    (line,) = (line for line in lines if "all-reduce" in line)
    assert line.split() == ["decode", "all-reduce", "161", "168.82", "2.90"]
    alone = _roofline_lines(Roofline("NVIDIA H200", (cost,), ()))
    assert not any("collectives" in line for line in alone)
