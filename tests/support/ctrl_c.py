"""Presses Ctrl-C while `LLM.generate` runs."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from jpaged import LLM, SamplingParams


def press_ctrl_c_during_generate(
    llm: LLM, prompts: list[Any], params: SamplingParams | list[SamplingParams], seconds: float
) -> None:
    """Press Ctrl-C after `seconds` of `llm.generate`. The call or a sleep after it must raise KeyboardInterrupt."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))

    def generate_and_wait() -> None:
        timer.start()
        llm.generate(prompts, params, use_tqdm=False)
        timer.join()
        time.sleep(1)  # the signal, if it is still pending, ends the sleep

    with pytest.raises(KeyboardInterrupt):
        generate_and_wait()
