"""Engine options are checked by name and type, and a layout reaches the loader, in LLM, AsyncLLM and generate."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import LLM, AsyncLLM, EngineConfig, ModelLoadError, RequestError
from jpaged.frontend.engine_config import engine_config
from jpaged.models.spec import DecoderSpec, WeightLayout

SPEC = DecoderSpec(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8,
    max_position=16,
)  # fmt: skip
LAYOUT = WeightLayout(split_qkv=True)

FRONT_DOORS: list[Callable[..., Any]] = [
    LLM,
    AsyncLLM,
    lambda config, *, params=None, **options: jpaged.generate((config, params), [1], **options),
]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("row_buckets", [8, "8", (), ("a",), (0,), (8.0,), (True,)]),
        ("enable_prefix_caching", ["no", 1, None]),
        ("mask_unknown_tokens", [None, 0]),
        ("trust_remote_code", [1]),
        ("seed", [None, "a", 1.5, True]),
        ("gpu_memory_utilization", ["x", None, True]),
        ("max_num_seqs", [True, 8.0, "8"]),
        ("max_logprobs", [None, "20", 2.5]),
        ("kv_cache_memory_bytes", [1e6]),
        ("dtype", [None, np.float32]),
        ("tokenizer", [3]),
        ("compilation_cache_dir", [3]),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(option: str, values: list[Any]):
    for value in values:
        with pytest.raises(RequestError, match=rf"^{option} must be .*, got ") as caught:
            engine_config("model", {option: value})
        assert caught.value.parameter == option


def test_numpy_scalars_and_lists_are_converted():
    config = engine_config(
        "model",
        {"max_num_seqs": np.int64(4), "gpu_memory_utilization": np.float32(0.5), "row_buckets": [8, np.int32(16)],
         "enable_prefix_caching": np.bool_(False), "token_buckets": None},
    )  # fmt: skip
    assert config == EngineConfig(
        model="model", max_num_seqs=4, gpu_memory_utilization=0.5, row_buckets=(8, 16), enable_prefix_caching=False
    )
    assert type(config.max_num_seqs) is int
    assert engine_config("model", {"gpu_memory_utilization": 1}).gpu_memory_utilization == 1


def test_runner_and_its_old_name_task():
    assert engine_config("model", {}).runner == "auto"
    assert engine_config("model", {"runner": "pooling"}).runner == "pooling"
    assert engine_config("model", {"task": "generate", "runner": "generate"}).runner == "generate"
    for task in ("embed", "classify"):
        assert engine_config("model", {"task": task, "runner": "auto"}).runner == "pooling"
        with pytest.raises(RequestError, match=rf"^task goes with runner='pooling', got '{task}'"):
            engine_config("model", {"task": task, "runner": "generate"})
    with pytest.raises(RequestError, match=r"^task: not supported yet.*, got 'score'"):
        engine_config("model", {"task": "score"})
    with pytest.raises(RequestError, match=r"^runner must be auto, generate, pooling, got 'draft'"):
        engine_config("model", {"runner": "draft"})


@pytest.mark.parametrize("front_door", FRONT_DOORS, ids=["LLM", "AsyncLLM", "generate"])
def test_a_layout_reaches_the_loader(front_door: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    seen = []

    def load(*args: Any, layout: WeightLayout | None, **how: Any) -> None:
        seen.append(layout)
        raise ModelLoadError("far enough")

    monkeypatch.setattr("jpaged.loading.load_model", load)
    with pytest.raises(ModelLoadError, match="far enough"):
        front_door(SPEC, params={}, layout=LAYOUT)
    assert seen == [LAYOUT]


def test_a_bad_layout_and_a_layout_without_params():
    with pytest.raises(RequestError, match=r"^layout must be a jpaged\.models\.spec\.WeightLayout.*, got 'in, out'"):
        LLM(SPEC, params={}, layout="in, out")
    with pytest.raises(RequestError, match="goes together with params"):
        LLM("demo", layout=LAYOUT)


@pytest.mark.parametrize(
    "options",
    [{"num_scheduler_steps": 1, "quantization": None, "enforce_eager": True}, {"enable_chunked_prefill": True}],
)
def test_neutral_values_of_unsupported_options_are_accepted(options: dict[str, Any]):
    assert engine_config("model", options) == EngineConfig(model="model")


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [("num_scheduler_steps", 2, "or 1"), ("kv_transfer_config", {}, "leave it out")],
)
def test_other_values_of_unsupported_options_are_refused(name: str, value: Any, instead: str):
    with pytest.raises(RequestError, match=rf"^{name}: not supported yet: .*{instead}.*, got "):
        engine_config("model", {name: value})
