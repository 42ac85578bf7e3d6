"""Two real processes serve one model over HTTP. `benchmarks/process_chaos.py` does this many times."""

import random
import signal
import sys

import pytest

from benchmarks.process_chaos import Pair, attempt
from jpaged import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's signals and sockets")]


def test_two_processes_give_the_answers_of_one_and_drain(tmp_path):
    """Two devices in each process: four in all. One command, as Slurm starts it. Then SIGTERM to both: status 0."""
    prompts = ["Once upon a time", "The little dog", "def main(", "1 2 3 4"]
    pair = Pair(tmp_path, tensor=4, slurm=True)
    try:
        pair.wait_until_ready()
        for rank, log in enumerate(pair.logs):
            assert f"Slurm: node {rank} of 2, the first one is 127.0.0.1" in log.read_text()
        answers = [pair.complete(prompt, max_tokens=20, logprobs=2)["choices"][0] for prompt in prompts]
        for process in pair.processes:
            process.send_signal(signal.SIGTERM)
        assert pair.statuses() == [0, 0]
    finally:
        pair.end()
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2)
    with LLM("demo", dtype="float32", max_model_len=256, max_num_seqs=8) as llm:
        for answer, output in zip(answers, llm.generate(prompts, params, use_tqdm=False), strict=True):
            one = output.outputs[0]
            assert answer["text"] == one.text
            expected = [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            assert answer["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("event", ["follower killed", "leader killed"])
def test_a_lost_process_ends_the_other_with_status_1(event, tmp_path):
    row = attempt(event, random.Random(0), tmp_path)
    assert row["right"], row
