"""`jpaged plan` of a model on several devices: bytes of one device, from config.json alone."""

import json

import pytest

from jpaged.cli import main
from jpaged.cli.plan import text_of
from jpaged.errors import ModelLoadError, RequestError
from jpaged.planning import plan
from jpaged.runtime.targets import Target

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,)}


@pytest.fixture(autouse=True)
def _estimates(monkeypatch):
    """Compile nothing, also where the target's compiler is installed."""
    monkeypatch.setattr(Target, "missing", "a compiler")


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def test_bytes_of_one_of_four_devices(config):
    one, four = (plan(config, SMALL | {"tensor_parallel_size": n}, target="l4") for n in (1, 4))
    # q, k and v of 2 KV heads: each is repeated, with 2 of its 4 query heads
    assert four.weight_parts["attention"] == 2 * 2 * 512 * 64 * (1 * (2 + 2) + 2)
    for part in ("embedding", "output matrix", "feed-forward"):
        assert four.weight_parts[part] * 4 == one.weight_parts[part]
    assert four.whole_bytes == four.weight_parts["norms"] == one.weight_parts["norms"]
    assert four.memory.block_bytes * 2 == one.memory.block_bytes  # 1 of 4 KV heads instead of both of 2


def test_the_least_number_of_devices(config, capsys):
    parts = plan(config, target="l4").weight_parts
    memory = int(sum(parts.values()) / 2.5)
    short = plan(config, {"gpu_memory_utilization": 1.0}, target="l4", device_memory=memory)
    assert (short.memory, short.least_devices) == (None, 3)
    assert main(["plan", config, "--target", "l4", "--device-memory", str(memory)]) == 2
    assert "need at least 3 such devices (--tensor-parallel-size)" in capsys.readouterr().out


def test_the_printed_table(config, capsys):
    assert main(["plan", config, "--target", "l4", "-tp", "2"]) == 0
    out = capsys.readouterr().out
    assert "on each of 2 devices: NVIDIA L4" in out
    assert "MiB on every device, the rest split over 2" in out


@pytest.mark.parametrize(
    ("options", "target", "error", "says"),
    [
        ({"deterministic": True, "dtype": "float32"}, "h200", ModelLoadError, "the model is float32 on gpu"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "cpu", RequestError, "must be a multiple of nnodes=2"),
    ],
)
def test_refused(options, target, error, says, config):
    with pytest.raises(error, match=says):
        plan(config, options, target=target)


def test_a_plan_of_stages_is_of_the_fullest(config):
    """The embedding and the output matrix are on different stages, and each stage has the pages of its layer."""
    options = SMALL | {"max_model_len": 256, "swap_space": 0.1}
    one, two = (
        plan(config, options | {"pipeline_parallel_size": count}, target="h200", device_memory=2**30)
        for count in (1, 2)
    )
    assert (one.stage, two.stage, two.num_layers) == ((0, 1), (1, 2), 1)  # logits are larger than hidden states
    assert two.memory.block_bytes * 2 == one.memory.block_bytes
    assert two.memory.num_blocks > 1.9 * one.memory.num_blocks
    assert two.host_blocks == one.host_blocks
    assert two.weight_parts["attention"] * 2 == one.weight_parts["attention"]
    assert ("embedding" in two.weight_parts, "output matrix" in two.weight_parts) == (False, True)
    assert "stage 2 of 2 (1 layers), the fullest, on " in text_of(two)


def test_a_prediction_of_stages_is_refused(config):
    with pytest.raises(RequestError, match="leave --roofline out"):
        plan(config, SMALL | {"pipeline_parallel_size": 2}, target="h200", roofline_context=64)


def test_context_parallelism_saves_no_memory(config):
    """Four devices for the tokens of prompts: each has the bytes of one. With two parts, each has the bytes of two."""
    options = SMALL | {"max_model_len": 256}
    one, four = (
        plan(config, options | {"prefill_context_parallel_size": size}, target="h200", device_memory=2**30)
        for size in (1, 4)
    )
    assert (four.weight_bytes, four.memory.block_bytes) == (one.weight_bytes, one.memory.block_bytes)
    assert (one.num_devices, four.num_devices, four.num_parts) == (1, 4, 1)
    assert "on each of 4 devices: " in text_of(four)
    assert "the rest split over" not in text_of(four)
    two = plan(
        config, options | {"prefill_context_parallel_size": 4, "tensor_parallel_size": 2}, target="h200",
        device_memory=2**30,
    )  # fmt: skip
    assert (two.num_devices, two.num_parts) == (8, 2)
    assert two.memory.block_bytes * 2 == one.memory.block_bytes
    assert "the rest split over 2" in text_of(two)
