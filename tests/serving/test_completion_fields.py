"""Fields of /v1/completions about the prompt: echo, log-probabilities, tokens and usage."""

import json

import numpy as np
import openai
import pytest
from openai.types import Completion

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.golden.checkpoints import BY_NAME, GOLDEN, write_checkpoint
from tests.serving.http_client import events, post, strict, strict_chunk
from tests.support.http_server import running
from tests.support.tiny_engine import sampling_programs

OPTIONS = {
    "dtype": "float32", "token_buckets": (64,), "row_buckets": (8,), "max_num_seqs": 8, "max_num_batched_tokens": 64,
}  # fmt: skip


def complete(url: str, **fields) -> dict:
    answer = post(url, "/v1/completions", fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def whole_logprobs(raw: str) -> Completion:
    """Validate an answer whose first token has no log-probability, which OpenAI's type does not show."""
    document = json.loads(raw)
    for choice in document["choices"]:
        assert choice["logprobs"]["token_logprobs"][0] is choice["logprobs"]["top_logprobs"][0] is None
        choice["logprobs"]["token_logprobs"][0], choice["logprobs"]["top_logprobs"][0] = 0.0, {}
    return strict(Completion, json.dumps(document))


def test_echo_writes_the_prompt_before_the_answer(client, url):
    answer = client.completions.create(model="echo", prompt=["ab", "xyz"], max_tokens=3, n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["ab" + "aba", "ab" + "b", "xyz" + "xyz", "xyz" + "y"]
    assert client.completions.create(model="echo", prompt=[104, 105], max_tokens=1, echo=True).choices[0].text == "hih"
    stream = client.completions.create(model="echo", prompt=["ab", "xyz"], max_tokens=3, echo=True, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ababa", "xyzxyz"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_an_answer(url, engine, stream):
    """max_tokens 0 returns the prompt alone, with its log-probabilities: lm-eval reads them."""
    fields = {"prompt": "héy", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = post(url, "/v1/completions", fields | {"stream": stream})
    if stream:
        [event] = events(answer)
        choice = json.loads(event)["choices"][0]
    else:
        choice = answer.json()["choices"][0]
        assert whole_logprobs(answer.text).usage.completion_tokens == 0
    assert (choice["text"], choice["finish_reason"]) == ("héy", "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == 4
    assert (logprobs["tokens"][0], logprobs["text_offset"][:2]) == ("h", [0, 1])
    assert (engine.seen_params[-1].max_tokens, engine.seen_params[-1].prompt_logprobs) == (1, 1)


def test_echo_joins_the_log_probabilities_of_prompt_and_answer(url):
    answer = post(url, "/v1/completions", {"prompt": "zy", "max_tokens": 3, "echo": True, "logprobs": 2})
    made = whole_logprobs(answer.text).choices[0]
    assert "".join(made.logprobs.tokens) == made.text == "zyzyz"
    assert made.logprobs.text_offset == [0, 1, 2, 3, 4]
    streamed = [json.loads(event)["choices"][0]["logprobs"] for event in events(
        post(url, "/v1/completions", {"prompt": "zy", "max_tokens": 3, "echo": True, "logprobs": 2, "stream": True})
    )]  # fmt: skip
    wanted = answer.json()["choices"][0]["logprobs"]
    for name in wanted:
        assert [entry for part in streamed for entry in part[name]] == wanted[name]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"echo": True, "suffix": "x"}, "echo"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": -2}, "logprobs"),
    ],
)
def test_what_is_refused(url, fields, param):
    answer = post(url, "/v1/completions", {"prompt": "ab"} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_prompt_logprobs_have_vllms_format(url):
    made = complete(url, prompt="ab", max_tokens=1, prompt_logprobs=1)["choices"][0]
    assert made["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
         "97": {"logprob": -0.4, "rank": 1, "decoded_token": "a"}},
    ]  # fmt: skip
    assert made["logprobs"] is None
    assert made["text"] == "a"
    assert complete(url, prompt="ab", max_tokens=1)["choices"][0]["prompt_logprobs"] is None


def test_token_ids(url):
    fields = {"prompt": ["ab", "x"], "max_tokens": 3, "return_token_ids": True}
    made = complete(url, **fields)["choices"]
    assert [choice["prompt_token_ids"] for choice in made] == [[97, 98], [120]]
    assert [choice["token_ids"] for choice in made] == [[97, 98, 97], [120] * 3]
    parts = {0: [], 1: []}
    asked = fields | {"stream": True, "logprobs": 1, "echo": True}
    for event in events(post(url, "/v1/completions", asked)):
        [choice] = json.loads(event)["choices"]
        count = len(choice["token_ids"]) + len(choice.get("prompt_token_ids", []))
        assert len(choice["logprobs"]["tokens"]) == len(choice["text"]) == count
        parts[choice["index"]].append((choice.get("prompt_token_ids"), choice["token_ids"]))
    assert parts == {
        0: [([97, 98], [97]), (None, [98]), (None, [97])], 1: [([120], [120]), (None, [120]), (None, [120])],
    }  # fmt: skip
    assert "token_ids" not in complete(url, prompt="ab", max_tokens=1)["choices"][0]


def test_token_ids_in_and_out(url, engine):
    path, body = "/inference/v1/generate", {"token_ids": [97, 98], "request_id": "r"}
    made = post(url, path, body | {"sampling_params": {"max_tokens": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 0}})
    answer = made.json()
    assert answer["request_id"] == "generate-tokens-r"
    assert [(one["token_ids"], one["finish_reason"]) for one in answer["choices"]] == [
        ([97, 98, 97], "length"), ([98], "stop"),
    ]  # fmt: skip
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], [one["token"] for one in first["top_logprobs"]]) == ("token_id:97", ["token_id:98"])
    assert answer["prompt_logprobs"][1]["98"]["logprob"] == -0.5
    assert answer["usage"]["completion_tokens"] == 4
    asked = body | {"sampling_params": {"max_tokens": 2}, "stream": True, "stream_options": {"include_usage": True}}
    *parts, last = (json.loads(event) for event in events(post(url, path, asked)))
    assert [part["choices"][0]["token_ids"] for part in parts] == [[97], [98]]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)
    engine.max_model_len = 5
    assert len(post(url, path, body | {"sampling_params": {}}).json()["choices"][0]["token_ids"]) == 3
    for wrong, name in (
        ({"token_ids": []}, "token_ids"), ({"token_ids": [300]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_k": "x"}}, "sampling_params.top_k"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"sampling_params": {"max_tokens": 9}}, "sampling_params.max_tokens"),
        ({"features": {"mm_hashes": {}}}, "features"),
    ):  # fmt: skip
        refused = post(url, path, body | {"sampling_params": {}} | wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text


def test_tokens_as_token_ids(url):
    made = complete(url, prompt="z", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True, echo=True)
    logprobs = made["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:122"] * 3
    assert logprobs["top_logprobs"][1] == {"token_id:97": -0.4, "token_id:122": -0.5}


def test_stop_reason_fingerprint_and_tier(url, engine):
    answer = complete(url, prompt="ab", max_tokens=2, service_tier="auto")
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["system_fingerprint"].startswith("jpaged-")
    assert answer["service_tier"] == "default"  # the tier that answered
    assert "service_tier" not in complete(url, prompt="ab", max_tokens=2)
    *_, last = events(post(url, "/v1/completions", {"prompt": "ab", "max_tokens": 2, "stream": True}))
    assert json.loads(last)["choices"][0]["stop_reason"] is None


def test_usage_in_every_event(url):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    chunks = [strict_chunk(event) for event in events(post(url, "/v1/completions", body))]
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {3}
    assert chunks[-1].choices == []
    body["stream_options"] = {"continuous_usage_stats": True}
    chunks = [json.loads(event) for event in events(post(url, "/v1/completions", body))]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_padded_events_hide_the_length_of_their_text(url):
    body = {"prompt": "ab", "max_tokens": 5, "stream": True, "echo": True, "logprobs": 1}
    sizes = []
    for padded in (True, False):
        answer = post(url, "/v1/completions", body | {"stream_options": {"include_obfuscation": padded}})
        found = events(answer)
        assert all(("obfuscation" in json.loads(event)) == padded for event in found)
        sizes.append({len(event) for event in found})
    assert len({size % 64 for size in sizes[0]}) == 1 < len({size % 64 for size in sizes[1]})


def test_special_tokens_are_left_out_when_asked(url, engine):
    seen = []
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, **options: seen.append(options) or encode(text, **options)
    complete(url, prompt=["ab", "c"], max_tokens=1, add_special_tokens=False)
    assert [options.get("add_special_tokens") for options in seen[:2]] == [False, False]
    assert engine.seen_prompts[-2:] == [[97, 98], [99]]


def test_a_suffix_uses_the_models_tokens_for_it(url, engine):
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    engine.tokenizer.added_tokens_decoder = dict(enumerate(names))
    complete(url, prompt="def f(", suffix="): pass", max_tokens=1)
    assert bytes(engine.seen_prompts[-1]) == b"<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
    refused = post(url, "/v1/completions", {"prompt": [1, 2], "suffix": "x"})
    assert refused.json()["error"]["param"] == "suffix"


def test_a_long_echo_does_not_stop_other_requests(url, engine):
    """The log-probabilities of 4,000 tokens are converted in pieces: another request is answered in between."""
    engine.step_seconds = 0
    answer = complete(url, prompt="ab" * 2000, max_tokens=0, echo=True, logprobs=20)["choices"][0]
    assert len(answer["logprobs"]["tokens"]) == 4000
    assert answer["logprobs"]["text_offset"] == list(range(4000))
    assert answer["logprobs"]["top_logprobs"][-1]["b"] == -0.5


@pytest.mark.slow
def test_echo_is_what_the_model_says_of_its_prompt(tmp_path):
    """Log-probabilities equal those of `LLM`, and those that Transformers recorded for the same tokens."""
    write_checkpoint(BY_NAME["qwen3"], 0, tmp_path)
    recorded = json.loads((GOLDEN / "qwen3.json").read_text())["answers"]
    prompts = [one["prompt"] + one["tokens"] for one in recorded]
    with sampling_programs(SamplerVariant.GREEDY):
        with LLM(str(tmp_path), **OPTIONS) as llm:
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        engine = AsyncLLM(str(tmp_path), **OPTIONS)
        with (
            running(create_app(Server(engine=engine, model_names=("tiny",)))) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client,
        ):
            answer = client.completions.create(
                model="tiny", prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0
            )
    for choice, output, one in zip(answer.choices, outputs, recorded, strict=True):
        told = choice.logprobs.token_logprobs
        entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        assert told == [None, *(entry[token].logprob for token, entry in entries)]
        generated = slice(len(one["prompt"]), None)
        np.testing.assert_allclose(told[generated], one["logprobs"], atol=2e-4)
        for value, top in zip(told[generated], choice.logprobs.top_logprobs[generated], strict=True):
            assert value == max(top.values())  # Transformers chose the most likely token: lm-eval's `is_greedy`
