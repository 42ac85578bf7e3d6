"""POST /v1/embeddings with OpenAI's client: on an engine without a model, and on a tiny model."""

import base64

import httpx
import numpy as np
import openai
import pytest

from jpaged import LLM, PoolingParams, RequestError
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import LogitsError
from jpaged.serving.openai_api import pooled, routes_embeddings
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.golden.pooling import BARE_QWEN3, QWEN3_CLASSIFIER, SEED
from tests.serving.pooling_server import OPTIONS, served, third
from tests.support.tiny_engine import sampling_programs


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_client_gets_the_numbers_back(client, engine, encoding):
    """The client asks for base64 by default, and decodes it."""
    given = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="echo", input="ab", **given)
    [data] = answer.data
    values = data.embedding
    if encoding == "base64":
        values = np.frombuffer(base64.b64decode(values), "<f4").tolist()
    assert values == third(97, 98)
    assert (data.index, data.object, answer.object, answer.model) == (0, "embedding", "list", "echo")
    assert answer.usage.to_dict() == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
    assert answer.id.startswith("embd-")
    assert engine.seen_pooling == [PoolingParams(task="embed")]


def test_all_kinds_of_input_in_their_order(client, engine):
    for given, wanted in (
        (["a", "bcd"], [(97,), (98, 99, 100)]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5], [6, 7, 8]], [(5,), (6, 7, 8)]),
    ):
        answer = client.embeddings.create(model="alias", input=given)
        assert [data.embedding for data in answer.data] == [third(*ids) for ids in wanted]
        assert [data.index for data in answer.data] == list(range(len(wanted)))
        assert answer.usage.prompt_tokens == sum(map(len, wanted))
    assert client.embeddings.create(model="echo", input="abc", dimensions=2).data[0].embedding == third(97, 98)
    assert not engine.running


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", 1]}, "input", "mixes text and token ids"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 in one request"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side", "needs truncate_prompt_tokens"),
        ({"input": "a", "messages": [{"role": "user", "content": "x"}]}, "input", "exclude each other"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "encoding_format base64"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt", "is for messages"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "another name of use_activation"),
    ],
)
def test_a_bad_body_is_refused_by_name(url, body, param, says):
    answer = httpx.post(f"{url}/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


def test_vllms_names_of_the_activation(url, engine):
    httpx.post(f"{url}/v1/embeddings", json={"input": "a", "normalize": False}).raise_for_status()
    assert engine.seen_pooling == [PoolingParams(task="embed", normalize=False)]
    with pytest.raises(RequestError, match="use_activation"):
        PoolingParams(use_activation="no")


def test_an_engine_that_stops_or_fails_and_an_unknown_model(client, engine):
    engine.aborts = True
    with pytest.raises(openai.InternalServerError, match="the request was aborted") as caught:
        client.embeddings.create(model="echo", input="ab")
    assert caught.value.status_code == 503
    engine.aborts, engine.fails = False, LogitsError.message
    with pytest.raises(openai.InternalServerError, match="logits are not finite") as caught:
        client.embeddings.create(model="echo", input=["ab", "c"])
    assert caught.value.status_code == 500
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.embeddings.create(model="other", input="ab")


def test_an_embedding_model_is_served(tmp_path, monkeypatch):
    """The numbers are those of LLM.embed. Generating requests are refused."""
    write_checkpoint(BARE_QWEN3, SEED, tmp_path)
    ids = [[5, 6, 7], [8] * 100]
    with LLM(str(tmp_path), runner="pooling", **OPTIONS) as llm:
        asked = [{"prompt_token_ids": i} for i in ids]
        wanted = [o.outputs.embedding for o in llm.embed(asked, use_tqdm=False)]
        of_tokens = [o.outputs.data for o in llm.encode(asked, pooling_task="token_embed", use_tqdm=False)]
    with served(tmp_path, runner="pooling") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="tiny", input=ids)
        assert [data.embedding for data in answer.data] == wanted
        short = client.embeddings.create(model="tiny", input=ids[0], dimensions=8).data[0].embedding
        assert np.allclose(short, np.array(wanted[0][:8]) / np.linalg.norm(wanted[0][:8]), atol=1e-6)
        salted = client.embeddings.create(model="tiny", input=ids, extra_body={"cache_salt": "mine"})
        assert [data.embedding for data in salted.data] == wanted
        with pytest.raises(openai.BadRequestError, match="scheduling_policy='priority'"):
            client.embeddings.create(model="tiny", input=ids, extra_body={"priority": 1})
        with pytest.raises(openai.BadRequestError, match="the model's embeddings have 64"):
            client.embeddings.create(model="tiny", input=ids[0], dimensions=65)
        with pytest.raises(openai.BadRequestError, match="the engine does not generate"):
            client.completions.create(model="tiny", prompt=ids[0])
        monkeypatch.setattr(routes_embeddings, "NUMBERS", 500)  # several pieces
        body = {"input": ids, "task": "token_embed"}
        answer = httpx.post(f"{url}/pooling", json=body).json()
        assert [one["data"] for one in answer["data"]] == [data.tolist() for data in of_tokens]
        answer = httpx.post(f"{url}/pooling", json=body | {"encoding_format": "base64"}).json()
        assert [base64.b64decode(one["data"]) for one in answer["data"]] == [data.tobytes() for data in of_tokens]
        monkeypatch.setattr(pooled, "MAX_NUMBERS", 6_000)  # 103 tokens have 6,592
        answer = httpx.post(f"{url}/pooling", json=body)
        assert answer.status_code == 400
        assert "more than 6,000 numbers" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        pytest.param(BY_NAME["qwen3"], "the engine generates", id="generates", marks=pytest.mark.slow),
        pytest.param(QWEN3_CLASSIFIER, "the model is a sequence classifier", id="classifies"),
    ],
)
def test_other_engines_refuse(variant, says, tmp_path):
    write_checkpoint(variant, SEED, tmp_path)
    buckets = {} if variant is QWEN3_CLASSIFIER else {"row_buckets": (8,)}
    with sampling_programs(SamplerVariant.GREEDY), served(tmp_path, **buckets) as url:
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": [5, 6]})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
