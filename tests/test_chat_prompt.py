"""Conversations as prompts: what is taken, and what is refused by name."""

import pathlib

import pytest
from transformers import AutoTokenizer

import jpaged
from jpaged.chat_prompt import chat_prompt
from jpaged.errors import RequestError

FOLDER = pathlib.Path(jpaged.__file__).parent / "demo_model"
USER = {"role": "user", "content": "def f(x):"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_developer_is_system_and_text_parts_are_one_text(tokenizer):
    parts = {"role": "user", "content": [{"type": "text", "text": "a = 1"}, {"type": "text", "text": "b = 2"}]}
    token_ids = chat_prompt(tokenizer, [{"role": "developer", "content": "Be brief."}, parts])["prompt_token_ids"]
    assert tokenizer.decode(token_ids) == "# Be brief.\na = 1\nb = 2\n"


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (USER, "messages"),
        ([USER, "hi"], "messages[1]"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0]"),
    ],
)
def test_wrong_messages_are_refused_by_name(tokenizer, messages, parameter):
    with pytest.raises(RequestError) as caught:
        chat_prompt(tokenizer, messages)
    assert caught.value.parameter == parameter
