"""Fields that clients always send: accepted if they change nothing, otherwise refused by name."""

import httpx
import pytest

from jpaged.serving.openai_api import generation

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/embeddings": {"input": "ab"},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
GENERATING = ("/v1/completions", "/v1/chat/completions")
CHAT = ("/v1/chat/completions",)
REST = (*GENERATING, "/v1/embeddings")
HARMLESS = [
    (GENERATING, {"store": False}),
    ((*GENERATING, "/v1/responses"), {"vllm_xargs": {"a": [1, "b"]}}),
    (GENERATING, {"kv_transfer_params": {}, "logprob_token_ids": [], "watermarking": False, "session_id": "s"}),
    (GENERATING, {"return_token_offsets": False, "return_weight_versions": False, "routed_experts_prompt_start": 0}),
    (GENERATING, {"prompt_cache_retention": "in_memory", "service_tier": "auto"}),
    (GENERATING, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}),
    (REST, {"request_id": "mine-1"}),
    (REST, {"add_special_tokens": True}),
    (CHAT, {"add_special_tokens": False}),
    (CHAT, {"verbosity": "low"}),
    (CHAT, {"reasoning_effort": "high"}),
    (("/v1/messages",), {"output_config": {"effort": "high"}, "vllm_xargs": {"a": 1}}),
    (("/v1/responses",), {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}),
    ((*CHAT, "/v1/responses", "/v1/messages"), {"chat_template_kwargs": {"preserve_thinking": True}}),
    (CHAT, {"messages": [*MESSAGES, {"role": "critic", "content": "Why?"}]}),
    (CHAT, {"functions": [], "function_call": "auto"}),
    (CHAT, {"tools": [], "functions": [], "function_call": "none"}),
    (("/v1/completions",), {"suffix": ""}),
    (CHAT, {"prediction": {"type": "content", "content": "a guess"}}),
    (CHAT, {"include_reasoning": True, "mm_processor_kwargs": {}, "media_io_kwargs": {}, "return_prompt_text": False}),
]
ASKING = [
    (GENERATING, {"store": True}, "store"),
    (GENERATING, {"store": 0}, "store"),
    (GENERATING, {"watermarking": True}, "watermarking"),
    ((*GENERATING, "/v1/responses"), {"logprob_token_ids": [3]}, "logprob_token_ids"),  # without logprobs
    (GENERATING, {"return_token_offsets": True}, "return_token_offsets"),
    (GENERATING, {"prompt_logprobs": 1, "stream": True}, "stream"),
    (GENERATING, {"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    (("/v1/completions",), {"suffix": "x"}, "suffix"),
    (GENERATING, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    (REST, {"request_id": "x" * 300}, "request_id"),
    (CHAT, {"prediction": "a guess"}, "prediction"),
]  # fmt: skip


@pytest.mark.parametrize(("paths", "fields"), HARMLESS, ids=[" ".join(fields) for _, fields in HARMLESS])
def test_a_field_that_asks_for_nothing_is_accepted(url, paths, fields):
    for path in paths:
        answer = httpx.post(url + path, json=PATHS[path] | fields)
        assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize(("paths", "fields", "param"), ASKING, ids=[f"{param}" for *_, param in ASKING])
def test_a_field_that_asks_for_more_is_refused_by_name(url, paths, fields, param):
    for path in paths:
        answer = httpx.post(url + path, json=PATHS[path] | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_field_without_effect_is_logged_once(url, caplog):
    generation._log_unused.cache_clear()
    for _ in range(2):
        httpx.post(f"{url}/v1/completions", json=PATHS["/v1/completions"] | {"vllm_xargs": {"a": 1}})
    assert caplog.messages.count("vllm_xargs has no effect on this server (logged once)") == 1


def test_special_tokens_that_the_chat_template_writes_already(url, engine, monkeypatch):
    encode = engine.tokenizer.encode
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text: [1, *encode(text)])
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, "add_special_tokens": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "add_special_tokens")


@pytest.mark.parametrize("path", GENERATING)
def test_the_answer_has_the_id_that_the_request_gives(url, path):
    for _ in range(2):
        answer = httpx.post(url + path, json=PATHS[path] | {"request_id": "mine"})
        assert answer.json()["id"] in ("cmpl-mine", "chatcmpl-mine")


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar", "whitespace_pattern"])
@pytest.mark.parametrize("path", GENERATING)
def test_old_names_of_structured_outputs(url, path, name):
    answer = httpx.post(url + path, json=PATHS[path] | {f"guided_{name}": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"guided_{name}")
    assert f'send structured_outputs: {{"{name}": ...}}' in error["message"]
