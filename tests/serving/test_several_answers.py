"""Several answers to one prompt over HTTP: indices, finish reasons, usage, best_of, beam search, priority, salt."""

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jpaged import SamplingParams
from tests.serving.http_client import CHAT, error_of, events, post, strict, strict_chunk

# Answers of 6 tokens to "abc". Answers with an odd index stop after 3 tokens (see fake_engine).
ANSWERS = ["abcabc", "bca", "cabcab"]
REASONS = ["length", "stop", "length"]
BEAMS = {"prompt": "abc", "max_tokens": 6, "n": 2, "use_beam_search": True}


def test_completion(client, url):
    answer = client.completions.create(model="echo", prompt=["abc", "xyz"], n=3, max_tokens=6)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [*ANSWERS, "xyzxyz", "yzx", "zxyzxy"]
    assert [choice.finish_reason for choice in answer.choices] == REASONS * 2
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 30, 36)
    assert usage.prompt_tokens_details.cached_tokens == 4  # two per prompt, for every n
    strict(Completion, post(url, "/v1/completions", {"prompt": "abc", "n": 3}).text)


def test_completion_stream(client, url):
    body = {"prompt": ["abc", "xyz"], "n": 3, "max_tokens": 6, "stream": True, "logprobs": 0}
    chunks = [
        strict_chunk(event)
        for event in events(post(url, "/v1/completions", body | {"stream_options": {"include_usage": True}}))
    ]
    usage = chunks.pop().usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (6, 30, 4)
    told = [(chunk.choices[0].index, chunk.choices[0]) for chunk in chunks]
    for index, text in enumerate([*ANSWERS, "xyzxyz", "yzx", "zxyzxy"]):
        mine = [choice for i, choice in told if i == index]
        assert "".join(choice.text for choice in mine) == text
        assert [choice.finish_reason for choice in mine] == [None] * (len(text) - 1) + [REASONS[index % 3]]
        assert [offset for choice in mine for offset in choice.logprobs.text_offset] == list(range(len(text)))
    order = [index for index, _ in told]
    assert order != sorted(order)  # they take turns
    del body["logprobs"]
    got = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(model="echo", **body):
        got[chunk.choices[0].index] += chunk.choices[0].text
    assert list(got.values()) == [*ANSWERS, "xyzxyz", "yzx", "zxyzxy"]


def test_chat(client, url):
    answer = strict(ChatCompletion, post(url, "/v1/chat/completions", CHAT | {"n": 2, "max_tokens": 8}).text)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "<user>hi", "length"), (1, "user", "stop"),
    ]  # fmt: skip
    assert answer.usage.completion_tokens == 12
    body = CHAT | {"n": 2, "max_tokens": 8, "stream": True}
    for event in events(post(url, "/v1/chat/completions", body)):
        strict(ChatCompletionChunk, event)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body)]
    for choice in answer.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.delta.content or "" for chunk in mine) == choice.message.content
        assert [chunk.delta.role for chunk in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_best_of(client, engine):
    answer = client.completions.create(model="echo", prompt="abc", n=3, best_of=4, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == ["abc", "cabcab", "bca"]  # the best first
    assert (engine.seen_params[-1].n, engine.seen_params[-1].best_of) == (3, 4)
    assert answer.usage.completion_tokens == 12  # only of the returned answers


def test_beam_search(client, engine):
    extra = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0, "early_stopping": "never"}
    answer = client.completions.create(model="echo", prompt="abc", n=2, max_tokens=6, extra_body=extra)
    assert len(answer.choices) == 2
    params = engine.seen_params[-1]
    assert (params.use_beam_search, params.beam_width, params.num_sequences) == (True, 4, 4)
    assert (params.length_penalty, params.early_stopping) == (0.0, "never")
    chat = client.chat.completions.create(**CHAT, n=3, max_tokens=4, extra_body={"use_beam_search": True})
    assert len(chat.choices) == 3
    assert engine.seen_params[-1].num_sequences == 3  # as in vLLM: n beams
    client.completions.create(model="echo", prompt="abc", best_of=1, extra_body={"length_penalty": 1})
    assert not engine.seen_params[-1].chooses  # neutral values


def test_a_beam_search_leaves_out_the_models_repetition_penalty(client, engine):
    """As in vLLM. The client did not send the penalty, so its request must not be refused for it."""
    engine.default_sampling_params = SamplingParams(repetition_penalty=1.05, temperature=0.7)
    client.completions.create(model="echo", prompt="abc", n=2, extra_body={"use_beam_search": True})
    assert (engine.seen_params[-1].repetition_penalty, engine.seen_params[-1].temperature) == (1.0, 0.7)
    client.completions.create(model="echo", prompt="abc", n=2)
    assert engine.seen_params[-1].repetition_penalty == 1.05
    extra = {"use_beam_search": True, "repetition_penalty": 1.2}
    with pytest.raises(openai.BadRequestError, match=r"repetition_penalty .*, got 1\.2"):
        client.completions.create(model="echo", prompt="abc", n=2, extra_body=extra)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", BEAMS | {"stream": True}, "stream"),
        ("/v1/completions", {"prompt": "abc", "best_of": 2, "stream": True}, "stream"),
        ("/v1/chat/completions", CHAT | {"n": 2, "use_beam_search": True, "stream": True}, "stream"),
        ("/v1/completions", {"prompt": "abc", "n": 3, "best_of": 2}, "best_of"),
        ("/v1/completions", BEAMS | {"best_of": 3, "beam_width": 4}, "best_of"),
        ("/v1/completions", BEAMS | {"n": 1}, "beam_width"),
        ("/v1/completions", BEAMS | {"beam_width": 65}, "beam_width"),
        ("/v1/completions", BEAMS | {"use_beam_search": 1}, "use_beam_search"),
        ("/v1/completions", BEAMS | {"early_stopping": "soon"}, "early_stopping"),
        ("/v1/completions", BEAMS | {"length_penalty": "long"}, "length_penalty"),
        ("/v1/completions", {"prompt": "abc", "beam_width": 4}, "beam_width"),
        ("/v1/completions", {"prompt": "abc", "n": 0}, "n"),
        ("/v1/completions", {"prompt": "abc", "n": True}, "n"),
        ("/v1/completions", {"prompt": "abc", "priority": "high"}, "priority"),
        ("/v1/completions", {"prompt": "abc", "cache_salt": ""}, "cache_salt"),
        ("/v1/chat/completions", CHAT | {"cache_salt": 7}, "cache_salt"),
        ("/v1/chat/completions", CHAT | {"best_of": 2}, "best_of"),
        ("/v1/embeddings", {"input": "abc", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_refused(url, engine, path, body, param):
    assert error_of(post(url, path, body), 400)["param"] == param
    assert not engine.seen_params


def test_priority_and_salt_reach_the_engine(client, url, engine):
    extra = {"priority": -3, "cache_salt": "mine"}
    client.completions.create(model="echo", prompt=["abc", "de"], max_tokens=1, extra_body=extra)
    client.completions.create(model="echo", prompt=[97, 98], max_tokens=1, extra_body=extra)
    client.chat.completions.create(**CHAT, max_tokens=1, extra_body=extra)
    client.embeddings.create(model="echo", input="abc", extra_body=extra)
    assert engine.seen_priorities == [-3] * 5
    assert engine.seen_salts == ["mine"] * 5
    assert engine.seen_prompts[:3] == [list(b"abc"), list(b"de"), [97, 98]]
    client.completions.create(model="echo", prompt="abc", max_tokens=1)
    assert (engine.seen_priorities[-1], engine.seen_salts[-1]) == (0, None)
