"""The dashboard: its file is up to date, its metrics exist, and a real Prometheus returns data for every expression."""

import json
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jpaged.engine.engine import EngineOptions, SchedulingOptions
from jpaged.serving.admin.routes_metrics import metrics_app
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving.served_runner import async_engine
from tests.support.http_server import running
from tests.support.slow_runner import SlowRunner
from tools.make_dashboard import TARGET, dashboard

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
TARGETS = [(panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_the_committed_dashboard_is_the_scripts():
    assert json.loads(TARGET.read_text()) == dashboard(), "run python tools/make_dashboard.py"


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.fixture(scope="module")
def served():
    """A server with load on it. Yields the URL of its metrics port."""
    options = EngineOptions(scheduling=SchedulingOptions(max_queued_requests=20))
    engine = async_engine(SlowRunner(max_num_seqs=4), options)
    app = create_app(Server(engine=engine, model_names=("fake",)), AppOptions(("talk",)))
    stop = threading.Event()
    with running(app) as base, running(metrics_app(app.state.metrics)) as own:

        def load(number: int) -> None:
            with httpx.Client(base_url=base, headers={"authorization": "bearer talk"}) as client:
                while not stop.is_set():
                    body = {"prompt": [number, *range(20)], "max_tokens": 20, "n": 1 + number % 2}
                    client.post("/v1/completions", json=body)
                    time.sleep(0.05)  # the test shares its cores with others

        threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        yield own
        stop.set()
        for thread in threads:
            thread.join()


def test_every_metric_of_an_expression_exists(served):
    wait_until(lambda: "http_requests_total{" in httpx.get(f"{served}/metrics").text)  # one was answered
    text = httpx.get(f"{served}/metrics").text
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    for title, expression in TARGETS:
        used = re.findall(r"[a-z0-9_:]+(?=\{|\[\$|\) /)", expression)
        assert used, expression
        assert set(used) <= names, (title, set(used) - names)


def wait_until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def prometheus(served, tmp_path):
    """A Prometheus that scrapes the server every second, with the committed configuration otherwise."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("NOT CHECKED: there is no `prometheus`. Install it to run this test: apt-get install prometheus")
    text = CONFIG.read_text()
    for before, after in (("localhost:9400", served.removeprefix("http://")), ("15s", "1s")):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "prometheus.yml").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path) as process:
        yield f"http://127.0.0.1:{port}/api/v1"
        process.terminate()
        process.wait(20)


@pytest.mark.slow
def test_a_real_prometheus_returns_data_for_every_expression(prometheus):
    client = httpx.Client(base_url=prometheus, timeout=20)  # one for all: making one takes 50 ms

    def query(expression: str) -> list[dict]:
        answer = client.get("/query", params={"query": expression})
        assert answer.status_code == 200, (expression, answer.text)
        return answer.json()["data"]["result"]

    def ready() -> bool:
        try:
            return client.get(f"{prometheus.removesuffix('/api/v1')}/-/ready").status_code == 200
        except httpx.TransportError:  # not listening yet
            return False

    def scraped() -> bool:
        counted = query("count_over_time(vllm:num_requests_running[1m])")
        return bool(counted) and float(counted[0]["value"][1]) >= 3

    wait_until(ready)
    wait_until(scraped)
    (target,) = client.get("/targets").json()["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    empty = []
    for title, expression in TARGETS:
        expression = expression.replace("$model_name", ".*").replace("$__rate_interval", "1m")
        values = [float(result["value"][1]) for result in query(expression)]
        print(f"{title}: {expression}\n    {values}")
        if not values or any(value != value for value in values):  # NaN: nothing was counted
            empty.append((title, expression))
    assert not empty
    types = client.get("/metadata").json()["data"]
    assert types["vllm:time_to_first_token_seconds"][0]["type"] == "histogram"
