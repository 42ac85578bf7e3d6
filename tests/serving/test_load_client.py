"""`jpaged bench serve`: arrivals, metrics of known answers, and whole runs against a server without a model."""

import asyncio
import dataclasses
import json
import math
import socketserver
import threading

import numpy as np
import pytest

from jpaged import cli
from jpaged.errors import RequestError
from jpaged.load_client.answer import Answer
from jpaged.load_client.arrivals import Arrivals
from jpaged.load_client.backends import BACKENDS, LoadRequest
from jpaged.load_client.connection import Endpoint
from jpaged.load_client.drafts import DraftCounts, fetch
from jpaged.load_client.metrics import details, parse_goodput, summarise
from jpaged.load_client.run import Run, Target, send_all
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server

METRICS = ("ttft", "tpot", "itl", "e2el")


def answer(start: float, first: float, gaps: list[float], tokens: int, **fields) -> Answer:
    """An answer whose events come at known times, and that ends with its last event."""
    return Answer(
        start, first=first, gaps=gaps, latency=first + sum(gaps), prompt_tokens=10, output_tokens=tokens, **fields
    )


def test_arrivals_have_the_rate_that_was_asked_for():
    times = Arrivals(rate=10).times(500, np.random.default_rng(0))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50, rel=0.02)  # 500 requests at 10 per second
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)  # a Poisson process
    assert Arrivals().times(3, np.random.default_rng(0)) == [0.0, 0.0, 0.0]
    assert Arrivals(rate=4, burstiness=math.inf).times(3, np.random.default_rng(0)) == [0.0, 0.25, 0.5]


def test_a_ramp_becomes_faster():
    ramp = Arrivals(ramp_up="linear", start_rate=1, end_rate=100, burstiness=math.inf)
    gaps = np.diff(ramp.times(100, np.random.default_rng(0)))
    assert (np.diff(gaps) < 0).all()
    assert gaps[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"rate": 0}, "request_rate"),
        ({"burstiness": 0}, "burstiness"),
        ({"start_rate": 1}, "ramp_up_start_rps"),
        ({"ramp_up": "linear", "start_rate": 1}, "ramp_up_end_rps"),
        ({"ramp_up": "linear", "start_rate": 1, "end_rate": 2, "rate": 3}, "request_rate"),
    ],
)
def test_contradicting_arrivals_are_refused(fields, parameter):
    with pytest.raises(RequestError) as error:
        Arrivals(**fields)
    assert error.value.parameter == parameter


def test_metrics_of_known_answers():
    slow = answer(0.0, 0.5, [0.1, 0.3], 3)
    fast = answer(0.2, 0.1, [0.1], 5)  # two events, five tokens
    failed = Answer(0.0, latency=9.0, error="status 503")
    run = Run([slow, fast, failed], seconds=2.0)
    metrics = summarise(run, metrics=METRICS, percentiles=[50, 99], goodput={"ttft": 200.0}, max_concurrency=3)
    assert (metrics.completed, metrics.failed, metrics.max_concurrent_requests) == (2, 1, 2)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (20, 8)
    assert metrics.output_throughput == 4.0
    assert metrics.total_token_throughput == 14.0
    assert metrics.goodput == 0.5  # one good request in 2 s
    assert metrics.max_output_tokens_per_s == pytest.approx(8)
    assert metrics.latencies["ttft"].mean == pytest.approx(300)
    assert metrics.latencies["tpot"].mean == pytest.approx((200 + 25) / 2)
    assert metrics.latencies["itl"].median == pytest.approx(100)
    assert metrics.latencies["e2el"].percentiles[50] == pytest.approx(550)
    assert metrics.fields()["p99_ttft_ms"] == pytest.approx(496)
    table = metrics.table().splitlines()
    assert table[0] == "============ Serving Benchmark Result ============"  # vLLM's first line
    assert "Output token throughput (tok/s):         4.00      " in table
    assert "P99 TTFT (ms):                           496.00    " in table
    assert details(run)["errors"] == ["", "", "status 503"]


def test_metrics_without_a_good_answer():
    metrics = summarise(Run([Answer(0.0, error="no")], 1.0), metrics=METRICS, percentiles=[99])
    assert metrics.completed == metrics.max_concurrent_requests == 0
    assert math.isnan(metrics.latencies["ttft"].mean)


METRICS_TEXT = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a } b"}} {drafts}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a } b"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:spec_decode_num_draft_tokens_total{{engine="1",model_name="m"}} 10.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{{engine="0",model_name="m",position="1"}} 1.7e+09
vllm:num_requests_running{{engine="0"}} 3.0
"""


def metrics_text(drafts: int, tokens: int, second: int) -> str:
    text = METRICS_TEXT.replace("a } b", "a }} b")
    return text.format(drafts=drafts, tokens=tokens, second=second)


def test_drafts_of_a_run():
    assert DraftCounts.of_text("vllm:num_requests_running 3.0\n") is None
    before, after = DraftCounts.of_text(metrics_text(4, 20, 2)), DraftCounts.of_text(metrics_text(9, 40, 4))
    assert before == DraftCounts(4, 30, 7, (5, 2))
    seen = after.since(before)
    assert seen == DraftCounts(5, 20, 0, (0, 2))
    seen = dataclasses.replace(seen, accepted_tokens=5)
    metrics = summarise(Run([answer(0.0, 0.5, [0.1], 3)], 1.0), metrics=METRICS, percentiles=[99], drafts=seen)
    found = {name: value for name, value in metrics.fields().items() if name.startswith("spec_decode_")}
    assert found == {
        "spec_decode_acceptance_rate": 25.0, "spec_decode_acceptance_length": 2.0, "spec_decode_num_drafts": 5,
        "spec_decode_draft_tokens": 20, "spec_decode_accepted_tokens": 5,
        "spec_decode_per_position_acceptance_rates": [0.0, 0.4],
    }  # fmt: skip
    table = metrics.table().splitlines()
    assert "---------------Speculative Decoding---------------" in table
    assert "Acceptance rate (%):                     25.00     " in table
    assert "Draft tokens:                            20        " in table


@pytest.mark.usefixtures("ids_below_256")
def test_the_drafts_of_a_server_are_read_before_and_after_the_run(capsys, url, monkeypatch, tmp_path):
    told = iter([DraftCounts(4, 20, 7, (5, 2)), DraftCounts(9, 40, 17, (9, 8))])
    asked = []

    def counts(base: str, headers: dict[str, str], **options) -> DraftCounts:
        asked.append(base)
        return next(told)

    monkeypatch.setattr("jpaged.cli.bench.serve.fetch", counts)
    flags = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    status, out, err = serve(capsys, url, *flags)
    assert status == 0, err
    assert asked == [url, url]
    assert "Acceptance rate (%):                     50.00 " in out
    assert json.loads((tmp_path / "r.json").read_text())["spec_decode_num_drafts"] == 5


def test_a_server_without_readable_metrics(url):
    options = {"tls": None, "timeout": 5}
    assert fetch(url, {}, **options) is None  # the fake engine collects no metrics
    assert fetch(f"{url}/nowhere", {}, **options) is None
    assert fetch("http://127.0.0.1:1", {}, **options) is None


def test_goodput_limits():
    assert parse_goodput(["ttft:200", "e2el:5e3"]) == {"ttft": 200.0, "e2el": 5000.0}
    for bad in ("ttft", "itl:3", "ttft:x", "ttft:-1"):
        with pytest.raises(RequestError, match="METRIC:MILLISECONDS"):
            parse_goodput([bad])


def serve(capsys, url: str, *args: str) -> tuple[int, str, str]:
    """Run the command against a server with the demo model's tokenizer. Returns status, stdout and stderr."""
    sizes = ["--tokenizer", "demo", "--num-prompts", "6", "--input-len", "5", "--output-len", "4", "--ignore-eos"]
    status = cli.main(["bench", "serve", "--base-url", url, *sizes, *args])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def ids_below_256(monkeypatch):
    """The fake engine has 256 tokens, the demo model's tokenizer more."""
    random_ids = "jpaged.cli.bench.workloads.random_ids"
    monkeypatch.setattr(random_ids, lambda rng, count, _: rng.integers(97, 123, count).tolist())


@pytest.mark.usefixtures("ids_below_256")
def test_runs_for_each_concurrency(capsys, url, engine, tmp_path):
    results, plot = tmp_path / "results.json", tmp_path / "serve.png"
    flags = ["--max-concurrency", "1", "3", "--num-warmups", "2", "--metric-percentiles", "50,99", "--plot", str(plot)]
    flags += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", results.name]
    status, out, err = serve(capsys, url, *flags, "--temperature", "0", "--metadata", "version=7", "--top-k", "3")
    assert status == 0, err
    assert out.count("Successful requests:                     6 ") == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    one, three = map(json.loads, results.read_text().splitlines())
    assert (one["max_concurrency"], three["max_concurrency"]) == (1, 3)
    assert one["max_concurrent_requests"] == 1
    assert 2 <= three["max_concurrent_requests"] <= 3
    assert (one["completed"], one["total_input_tokens"], one["total_output_tokens"]) == (6, 30, 24)
    assert (one["version"], one["request_rate"], one["model_id"]) == ("7", "inf", "echo")
    assert [len(gaps) for gaps in one["itls"]] == [3] * 6
    assert all(first > 0 for first in one["ttfts"])
    assert len(engine.seen_prompts) == 2 * (1 + 2 + 6)  # a first request, two warm-ups, and the run
    measured = [tuple(prompt) for prompt in engine.seen_prompts[3:9] + engine.seen_prompts[12:]]
    assert len(set(measured)) == 12  # the second run finds nothing in the prefix cache
    assert {params.top_k for params in engine.seen_params} == {3}
    assert all(params.ignore_eos and params.max_tokens == 4 for params in engine.seen_params)


@pytest.mark.parametrize("backend", ["openai-chat", "openai-embeddings"])
def test_other_backends(capsys, url, engine, backend, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(6)))
    flags = ["--backend", backend, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    if backend == "openai-embeddings":
        status = cli.main(["bench", "serve", "--base-url", url, "--tokenizer", "demo", "--num-prompts", "6", *flags])
        out = capsys.readouterr().out
        assert "End-to-end Latency" in out
        assert "generated" not in out
    else:
        status, out, _ = serve(capsys, url, *flags)
        assert "Total generated tokens:                  24 " in out
    assert status == 0
    assert "Failed requests:                         0 " in out
    seen = engine.seen_pooling if backend == "openai-embeddings" else engine.seen_prompts
    assert len(seen) == 1 + 6  # a first request, and the run


def test_a_failed_request_is_counted(capsys, url, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("good", "full", "fine")))
    flags = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", "3"]
    status, out, err = serve(capsys, url, *flags)
    assert status == 1
    assert "Failed requests:                         1 " in out
    assert "failed: status 503" in err
    assert "too many requests wait" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--header", "x"], "must be NAME=VALUE"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--max-concurrency", "0"], "must be at least 1"),
        (["--metric-percentiles", "101"], "0 to 100"),
        (["--percentile-metrics", "tfft"], "ttft, tpot, itl"),
        (["--backend", "openai-embeddings"], "does not go with openai-embeddings"),
        (["--input-len", "4094"], "4096 tokens"),
        (["--top-p", "7"], "the first request failed: status 400"),
    ],
)
@pytest.mark.usefixtures("ids_below_256")
def test_mistakes_are_named(capsys, url, engine, flags, said):
    status, _, err = serve(capsys, url, *flags)
    assert status == 2
    assert said in err
    assert not engine.seen_prompts


def test_a_server_with_keys_says_where_the_key_goes(capsys, host, engine, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(("talk",)))
    status, _, err = serve(capsys, host[1])
    assert status == 2
    assert "status 401: set OPENAI_API_KEY" in err


def test_no_server(capsys):
    status, _, err = serve(capsys, "http://127.0.0.1:9")
    assert status == 2
    assert "no OpenAI-compatible server answers there" in err


class Scripted(socketserver.StreamRequestHandler):
    """Answers each connection's first request, and closes the connection without a word when the second arrives."""

    def handle(self):
        for number in range(2):
            length = 0
            while (line := self.rfile.readline().strip().lower()) != b"":
                length = int(line.split(b":")[1]) if line.startswith(b"content-length") else length
            self.rfile.read(length)
            if number:
                return
            event = b'data: {"choices": [{"text": "x"}]}\n\n'
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(event)
            for part in (head, event[:9], event[9:]):  # an event arrives in pieces
                self.wfile.write(part)
                self.wfile.flush()


def test_a_request_over_a_connection_that_the_server_closes_is_sent_again():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = Endpoint.parse(f"http://127.0.0.1:{server.server_address[1]}/v1/completions")
        target = Target(endpoint=endpoint, backend=BACKENDS["openai"], model="m")
        run = asyncio.run(send_all(target, [LoadRequest("a", 1)] * 3, [0.0] * 3, max_concurrency=1))
        server.shutdown()
    assert [one.error for one in run.answers] == [None] * 3
    assert [one.num_output_tokens for one in run.answers] == [1] * 3  # without usage: an event is a token
