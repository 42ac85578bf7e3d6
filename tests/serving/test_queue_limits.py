"""A limited queue, over HTTP and a real engine: accepted requests are answered, others are refused with 503."""

import asyncio
import concurrent.futures
import threading

import httpx
import pytest

import jpaged
from jpaged import RequestError, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.serving.http_client import wait_for
from tests.support.http_server import running
from tests.support.tiny_engine import sampling_programs

SIZES = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32, "row_buckets": (8,),
    "token_buckets": (32,), "kv_cache_memory_bytes": 2_000_000,
}  # fmt: skip
LONG = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(autouse=True, scope="module")
def _programs():
    """All requests here are greedy."""
    with sampling_programs(SamplerVariant.GREEDY):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(BY_NAME["llama"], 0, folder)
    return str(folder)


def at_once(url: str, bodies: list[dict]) -> list[httpx.Response]:
    """Send requests at the same moment and return their answers."""
    barrier = threading.Barrier(len(bodies))

    def ask(body: dict) -> httpx.Response:
        with httpx.Client(base_url=url, timeout=60) as http:
            http.get("/health")  # connected
            barrier.wait()
            return http.post("/v1/completions", json=body)

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", [{"max_queued_requests": 1}, pytest.param({"max_queued_tokens": 5}, marks=pytest.mark.slow)]
)
def test_some_requests_are_served_and_others_refused(checkpoint, limit):
    engine = jpaged.AsyncLLM(checkpoint, **SIZES, **limit)
    with running(create_app(Server(engine=engine, model_names=("tiny",)))) as url:
        answers = at_once(url, [LONG | {"stream": i % 2 == 1} for i in range(6)])
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 0 < len(refused) <= 4  # two rows
        for answer in refused:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "engine_full"
            assert next(iter(limit)) in answer.json()["error"]["message"]
        for answer in answers:
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
                assert '"error"' not in answer.text
            elif answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == 200
        again = httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 2}, timeout=60)
        assert again.status_code == 200
        assert again.json()["usage"]["completion_tokens"] == 2
        assert (engine.stats().num_waiting, engine.stats().used_blocks) == (0, 0)


def test_free_rows_do_not_count_as_queue(checkpoint):
    """An idle engine accepts one prompt per row, and one that waits, even if all arrive at once."""
    engine = jpaged.AsyncLLM(checkpoint, **SIZES, max_queued_requests=1)
    with running(create_app(Server(engine=engine, model_names=("tiny",)))) as url:
        for count, status in ((3, 200), (20, 503), (3, 200)):
            body = {"prompt": [[i + 1] for i in range(count)], "max_tokens": 100, "ignore_eos": True, "temperature": 0}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == status
            # Part of the refused prompts may still be on their way to the engine. It takes them before it answers this.
            asyncio.run(engine.inspect())
            wait_for(lambda: not (engine.stats().num_running or engine.stats().num_waiting))
            assert engine.stats().used_blocks == 0


@pytest.mark.slow
def test_a_batch_of_llm_has_no_limit(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=4)
    with jpaged.LLM(checkpoint, **SIZES, max_queued_requests=1, max_queued_tokens=1) as llm:
        assert len(llm.generate([[i] for i in range(1, 21)], params, use_tqdm=False)) == 20


@pytest.mark.parametrize("limit", [{"max_queued_requests": 0}, {"max_queued_tokens": -1}, {"max_queued_requests": 1.5}])
def test_limits_that_are_none(checkpoint, limit):
    with pytest.raises(RequestError, match=next(iter(limit))):
        jpaged.LLM(checkpoint, **limit)
