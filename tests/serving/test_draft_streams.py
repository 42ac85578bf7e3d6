"""32 streams at once from a server that drafts: each is the answer of an engine without drafts, and metrics agree."""

import asyncio
import json
import pathlib

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving.demo_options import SIZES
from tests.serving.http_client import wait_for
from tests.support.drafting import Recorded, always_drafting
from tests.support.http_server import running

pytestmark = pytest.mark.slow

STREAMS, DRAFTS = 32, 4
FOLDER = pathlib.Path(jpaged.__file__).parent
MODELS = {"draft_model": "demo_draft", "eagle3": "demo_eagle3"}
STARTS = ["def add(a, b):\n    return", "import os\nimport", "class A:\n    def __init__", "for i in range(10):\n"]
BODIES = [
    {"prompt": STARTS[i % 4] + " " * (i // 8), "max_tokens": 40 + i % 7, "seed": i}
    | {"temperature": (0, 0.8)[i % 2], "repetition_penalty": (1.0, 1.1)[i // 2 % 2]}
    | ({"stop": ["\n\n"]} if i % 5 == 0 else {"ignore_eos": True})
    for i in range(STREAMS)
]


@pytest.fixture(scope="module")
def expected():
    prompts = [body["prompt"] for body in BODIES]
    fields = [{name: value for name, value in body.items() if name != "prompt"} for body in BODIES]
    with LLM("demo", **SIZES) as llm:
        return llm.generate(prompts, [SamplingParams(**each) for each in fields], use_tqdm=False)


async def stream(client, body):
    """Text, finish reason and usage of a stream."""
    text, reason, usage = "", None, None
    asked = body | {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            piece = json.loads(line[6:])
            usage = piece.get("usage") or usage
            for choice in piece["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason, usage


async def all_streams(base):
    async with httpx.AsyncClient(base_url=base, timeout=120) as client:
        answers = await asyncio.gather(*(stream(client, body) for body in BODIES))
        return answers, (await client.get("/metrics")).text


def counters(text):
    """Values of the counters of drafts by name. By position: a list."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name.startswith("vllm:spec_decode_") and sample.name.endswith("_total"):
                name = family.name.removeprefix("vllm:spec_decode_num_")
                if "position" in sample.labels:
                    found.setdefault(name, {})[int(sample.labels["position"])] = sample.value
                else:
                    found[name] = sample.value
    return found


@pytest.mark.parametrize("method", ["ngram", "suffix", "custom", "draft_model", "eagle3"])
def test_streams_are_the_offline_answers(expected, method):
    fields = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "custom":
        fields["function"] = Recorded([
            [*output.prompt_token_ids, *output.outputs[0].token_ids] for output in expected
        ])  # fmt: skip
    if method in MODELS:
        fields["model"] = str(FOLDER / MODELS[method])
    with always_drafting():
        engine = jpaged.AsyncLLM("demo", speculative_config=fields, **SIZES)
    wait_for(lambda: engine.is_ready, seconds=120)  # all verify programs exist
    with running(create_app(Server(engine=engine, model_names=("demo",)))) as base:
        for _ in range(2):
            answers, metrics = asyncio.run(all_streams(base))
            for (text, reason, usage), output in zip(answers, expected, strict=True):
                wanted = output.outputs[0]
                assert (text, reason, usage["completion_tokens"]) == (
                    wanted.text, wanted.finish_reason, len(wanted.token_ids)
                )  # fmt: skip
    found = counters(metrics)
    accepted, drafted = found["accepted_tokens"], found["draft_tokens"]
    assert 0 < accepted < drafted <= DRAFTS * found["drafts"]
    per_position = [found["accepted_tokens_per_pos"][position] for position in range(DRAFTS)]
    assert sum(per_position) == accepted
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[0] <= found["drafts"]
    assert accepted < 2 * sum(len(output.outputs[0].token_ids) for output in expected)
    details = [usage.get("completion_tokens_details") for _, _, usage in answers]
    assert sum(each["accepted_prediction_tokens"] for each in details if each) <= accepted
