"""GET /metrics: formats, names, keys, and its own port."""

import pathlib
import re
import subprocess
import sys

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from jpaged.engine.engine import EngineOptions
from jpaged.errors import RequestError
from jpaged.serving.admin.metrics import METHODS
from jpaged.serving.admin.routes_metrics import metrics_app
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.engine.fake_runner import FakeRunner
from tests.serving.served_runner import async_engine, served
from tests.support.http_server import running

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "metrics.md"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"

# Names on the wire, without the suffixes of histograms, as vLLM's dashboards and the routers for it use them.
VLLM = {
    "gauge": (
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
        "cache_config_info", "engine_sleep_state",
    ),
    "counter": (
        "prompt_tokens", "prompt_tokens_by_source", "prompt_tokens_cached", "generation_tokens",
        "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success", "corrupted_requests",
        "admission_rejections",
    ),
    "histogram": (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_prefill_kv_computed_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
        "request_params_n", "request_params_max_tokens", "request_num_preemptions", "iteration_tokens_total",
        "rl_weight_update_operation_duration_seconds",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base():
    with served(async_engine(FakeRunner())) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2, 3, 4, 5], "max_tokens": 5, "n": 2})
        yield url


def families(text: str, parse=parse_plain) -> dict:
    return {family.name: family for family in parse(text)}


def test_names_and_types_are_vllms(base):
    answer = httpx.get(f"{base}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = families(answer.text)
    wanted = {f"vllm:{name}": kind for kind, names in VLLM.items() for name in names}
    assert {name: family.type for name, family in found.items() if name.startswith("vllm:")} == wanted
    for name in wanted:
        labels = set.union(*(set(sample.labels) for sample in found[name].samples))
        assert labels >= ({"engine"} if name == "vllm:cache_config_info" else {"engine", "model_name"}), name
    assert "vllm:prompt_tokens_total{" in answer.text
    assert not [name for name in found if name.endswith("_created") and not name.startswith("http_")]
    for name in ("process_resident_memory_bytes", "python_info", "jpaged:build_info"):
        assert name in found


def test_values_after_one_request(base):
    found = families(httpx.get(f"{base}/metrics").text)
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in found.values() for s in family.samples}
    own = (("engine", "0"), ("model_name", "fake"))
    assert samples["vllm:generation_tokens_total", *own] == 10
    assert samples["vllm:prompt_tokens_total", *own] == 5
    assert samples["vllm:request_success_total", own[0], ("finished_reason", "length"), own[1]] == 2
    assert samples["vllm:request_params_n_bucket", own[0], ("le", "1.0"), own[1]] == 0
    assert samples["vllm:request_params_n_bucket", own[0], ("le", "2.0"), own[1]] == 1
    assert samples["jpaged:programs", own[0], own[1], ("state", "ready")] == 3
    assert samples["jpaged:steps_total", *own] >= 5
    [info] = [dict(labels) for name, *labels in samples if name == "vllm:cache_config_info"]
    tokens = int(info["num_gpu_blocks"]) * int(info["block_size"])
    assert int(info["kv_cache_size_tokens"]) == tokens
    assert float(info["kv_cache_max_concurrency"]) == tokens / FakeRunner().max_model_len


def test_openmetrics_when_asked(base):
    answer = httpx.get(f"{base}/metrics", headers={"accept": OPENMETRICS})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.text.endswith("# EOF\n")
    found = families(answer.text, parse_openmetrics)
    plain = families(httpx.get(f"{base}/metrics").text)
    assert set(found) == {name for name in plain if not name.endswith("_created")}
    assert found["vllm:time_to_first_token_seconds"].type == "histogram"
    for accept in ("text/plain;version=zzz", "application/json", "", "\u00e9"):
        assert httpx.get(f"{base}/metrics", headers={"accept": accept.encode()}).status_code == 200


def test_http_requests_are_counted_by_route(base):
    for path in ("/v1/models", "/v1/models/fake", "/v1/models/fake", "/nowhere/1", "/nowhere/2"):
        httpx.get(f"{base}{path}")
    httpx.post(f"{base}/v1/completions", json={})
    httpx.request("BREW", f"{base}/v1/models")
    found = families(httpx.get(f"{base}/metrics").text)
    seen = {tuple(s.labels.values()): s.value for s in found["http_requests"].samples if s.name.endswith("_total")}
    assert seen["/v1/models/{model:path}", "GET", "2xx"] == 2
    assert seen["none", "GET", "4xx"] == 2
    assert seen["/v1/completions", "POST", "4xx"] == 1
    assert {method for _, method, _ in seen} <= METHODS | {"other"}


def test_the_docs_list_every_metric(base):
    """docs/metrics.md has a row for each metric: its name on the wire, its type, its labels."""
    listed = dict(re.findall(r"^\| `([\w:]+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE))
    found = {}
    for family in families(httpx.get(f"{base}/metrics").text).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not name.startswith(("process_", "python_")) and not name.endswith("_created"):
            found[name] = family.type
    assert listed == found


def test_keys_guard_the_main_port_but_not_the_metrics_port():
    engine = async_engine(FakeRunner())
    app = create_app(Server(engine=engine, model_names=("fake",)), AppOptions(("talk",), ("look",)))
    with running(app) as base, running(metrics_app(app.state.metrics)) as own:
        assert httpx.get(f"{base}/metrics").status_code == 401
        assert httpx.get(f"{base}/metrics", headers={"authorization": "bearer look"}).status_code == 401
        with_key = httpx.get(f"{base}/metrics", headers={"authorization": "bearer talk"})
        assert "vllm:num_requests_running" in with_key.text
        assert "vllm:num_requests_running" in httpx.get(f"{own}/metrics").text
        assert httpx.get(f"{own}/v1/models").status_code == 404
        assert httpx.post(f"{own}/metrics").status_code == 405


def test_disable_log_stats_leaves_the_metrics_of_process_and_http():
    engine = async_engine(FakeRunner(), EngineOptions(disable_log_stats=True))
    with pytest.raises(RequestError, match="disable_log_stats"):
        engine.get_metrics()
    with served(engine, disable_log_stats=True) as base:
        httpx.get(f"{base}/health")
        text = httpx.get(f"{base}/metrics").text
    assert "vllm:" not in text
    assert "jpaged:" not in text
    assert 'http_requests_total{handler="/health",method="GET",status="2xx"} 1.0' in text
    assert "process_cpu_seconds_total" in text


def test_a_closed_engine_has_no_metrics(engine):
    app = create_app(Server(engine=engine, model_names=("fake",)))
    with running(metrics_app(app.state.metrics)) as base:
        engine.closed = True
        answer = httpx.get(f"{base}/metrics")
    assert answer.status_code == 200
    assert "vllm:" not in answer.text


SCRIPT = """
import sys
sys.path[:0] = [sys.argv[1]]
import fake_engine
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.process import SidePort, serve, take_address
from jpaged.serving.admin.routes_metrics import metrics_app

app = create_app(Server(engine=fake_engine.FakeEngine(), model_names=("echo",)))
own = SidePort(metrics_app(app.state.metrics), take_address("127.0.0.1", 0, "--metrics-port"))
serve(app, take_address("127.0.0.1", 0), shutdown_timeout=1, metrics=own, has_page=True)
"""


def test_the_process_serves_both_ports_and_stops_both():
    command = [sys.executable, "-c", SCRIPT, str(pathlib.Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        own, page, ready = (line.split(": ", 1)[1].strip() for line in lines)
        assert lines[0].startswith("metrics: ")
        assert lines[1].startswith("page: ")
        assert lines[2].startswith("ready: ")
        assert "<title>" in httpx.get(page, follow_redirects=True).text
        assert httpx.get(own).status_code == 200
        assert httpx.get(ready + "/models").status_code == 200
        assert 'http_requests_total{handler="/v1/models"' in httpx.get(own).text
        process.terminate()
        assert process.wait(10) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(own)
