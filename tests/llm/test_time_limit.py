"""Time limits of blocks of Python code, and of chat templates."""

import threading
import time

import pytest

from jpaged.chat.prompt import chat_prompt
from jpaged.chat.time_limit import TimeLimitError, time_limit
from jpaged.errors import RequestError
from jpaged.loading import load_tokenizer
from tests.text.corpus import DEMO

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"


def spin(seconds: float) -> None:
    """Use processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.slow
def test_an_endless_block_ends_and_others_go_on():
    ended = []

    def limited(seconds: float) -> None:
        try:
            with time_limit(0.1):
                spin(seconds)
        except TimeLimitError:
            ended.append(seconds)
        spin(0.15)  # nothing is raised after the block

    threads = [threading.Thread(target=limited, args=(seconds,)) for seconds in (60, 0.01, 61, 0.02)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(ended) == [60, 61]


def test_the_limit_counts_processor_time():
    with time_limit(0.05):
        time.sleep(0.15)


def test_a_block_that_ends_at_its_limit_leaves_no_exception():
    for _ in range(100):
        try:
            with time_limit(0.002):
                spin(0.0019 + 0.01 * (_ % 2))
        except TimeLimitError:
            pass
        spin(0.001)


def test_an_endless_template_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jpaged.chat.prompt.RENDER_SECONDS", 0.2)
    tokenizer, messages = load_tokenizer(DEMO), [{"role": "user", "content": "a"}]
    chat_prompt(tokenizer, messages, "{{ messages[0].content }}")
    began = time.thread_time()
    with pytest.raises(RequestError, match=r"more than 0\.2 s to render them") as caught:
        chat_prompt(tokenizer, messages, ENDLESS)
    assert caught.value.parameter == "messages"
    assert time.thread_time() - began < 2
