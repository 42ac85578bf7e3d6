"""Writes the Grafana dashboard, deploy/grafana/jpaged.json.

    python tools/make_dashboard.py

`ROWS` is the table of panels. Tests check that the committed file equals this script's output, that every metric in an
expression exists, and that a real Prometheus returns data for every expression.
"""

import dataclasses
import json
import pathlib
from typing import Any

TARGET = pathlib.Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "jpaged.json"

WIDTH, HEIGHT = 8, 8  # of a panel; a dashboard is 24 wide
MODEL = 'model_name=~"$model_name"'
RATE = "[$__rate_interval]"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One graph. queries: (expression in PromQL, legend)."""

    title: str
    unit: str  # a unit of Grafana: "s", "short", "percentunit", "reqps"
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def rate(metric: str, by: str = "") -> str:
    """Return the query for the rate of a counter, summed over servers. by: label to keep."""
    kept = f" by ({by})" if by else ""
    return f"sum{kept} (rate({metric}{{{MODEL}}}{RATE}))"


def gauge(metric: str, by: str = "", how: str = "sum") -> str:
    """Return the query for a gauge over all servers. by: label to keep. how: aggregation."""
    kept = f" by ({by})" if by else ""
    return f"{how}{kept} ({metric}{{{MODEL}}})"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Return queries for the median, the 90th and the 99th percentile of a histogram."""
    buckets = f"sum by (le) (rate({metric}_bucket{{{MODEL}}}{RATE}))"
    return tuple((f"histogram_quantile({share}, {buckets})", name) for share, name in SHARES)


SHARES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


def mean(metric: str) -> str:
    """Return the query for the mean of a histogram over the last interval."""
    return f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Requests", (
        Panel("Running and waiting", "short", (
            (gauge("vllm:num_requests_running"), "running"), (gauge("vllm:num_requests_waiting"), "waiting"),
        )),
        Panel("Answers by finish reason", "reqps", (
            (rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
        )),
        Panel("Refused by the queue's limits", "reqps", (
            (rate("vllm:admission_rejections_total", "reason"), "{{reason}}"),
        )),
        Panel("HTTP requests", "reqps", (
            ("sum by (handler, status) (rate(http_requests_total[$__rate_interval]))", "{{handler}} {{status}}"),
        ), "Without the label model_name: all routes of all servers."),
        Panel("Tokens per second", "short", (
            (rate("vllm:prompt_tokens_total"), "prompt"), (rate("vllm:generation_tokens_total"), "generated"),
        )),
        Panel("Lengths", "short", (
            (mean("vllm:request_prompt_tokens"), "prompt, mean"),
            (mean("vllm:request_generation_tokens"), "answer, mean"),
        )),
    )),
    ("Latency", (
        Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", quantiles("vllm:inter_token_latency_seconds")),
        Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
        Panel("Queue", "s", quantiles("vllm:request_queue_time_seconds")),
        Panel("Where the time goes, mean", "s", (
            (mean("vllm:request_queue_time_seconds"), "queue"), (mean("vllm:request_prefill_time_seconds"), "prefill"),
            (mean("vllm:request_decode_time_seconds"), "decode"),
        )),
        Panel("Time per output token", "s", quantiles("vllm:request_time_per_output_token_seconds")),
    )),
    ("KV cache", (
        Panel("KV cache in use", "percentunit", (
            (gauge("vllm:kv_cache_usage_perc", how="max"), "used, fullest server"),
        )),
        Panel("Prefix cache hit rate", "percentunit", (
            (f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}", "hit rate"),
        )),
        Panel("Preemptions", "short", (
            (rate("vllm:num_preemptions_total"), "preemptions/s"),
            (rate("jpaged:preemption_recomputed_tokens_total"), "tokens recomputed/s"),
        )),
        Panel("Blocks", "short", ((gauge("jpaged:kv_blocks", "state"), "{{state}}"),)),
        Panel("Shared blocks", "short", (
            (gauge("jpaged:kv_blocks_shared"), "shared"), (gauge("jpaged:kv_blocks_saved"), "saved by sharing"),
            (rate("jpaged:kv_blocks_copied_total"), "copied on write/s"),
        )),
        Panel("Empty slots in blocks in use", "percentunit", ((gauge("jpaged:kv_waste_ratio", how="max"), "waste"),)),
        Panel("Host tier", "short", (
            (gauge("jpaged:host_tier_blocks", "state"), "{{state}}"),
            (rate("jpaged:host_tier_moves_total", "direction"), "{{direction}}/s"),
        )),
    )),
    ("Engine", (
        Panel("Step time by kind, p50", "s", (
            (f"histogram_quantile(0.5, {rate('jpaged:step_seconds_bucket', 'le, kind')})", "{{kind}}"),
        )),
        Panel("Steps per second by kind", "short", ((rate("jpaged:step_seconds_count", "kind"), "{{kind}}"),)),
        Panel("Time of the engine's thread", "percentunit", (
            (rate("jpaged:step_phase_seconds_total", "phase"), "{{phase}}"),
        ), "`collect` is the wait for the device; the rest is work of the host."),
        Panel("Tokens per step, mean", "short", ((mean("vllm:iteration_tokens_total"), "tokens"),)),
        Panel("Programs", "short", (
            (gauge("jpaged:programs", "state"), "{{state}}"),
            (gauge("jpaged:recompiles_after_ready_total"), "compiled after ready: must be 0"),
        )),
        Panel("Process", "short", (
            ("sum (rate(process_cpu_seconds_total[$__rate_interval]))", "CPU cores"),
            ("sum (process_resident_memory_bytes) / 2^30", "resident GiB"),
        ), "Of all scraped processes."),
    )),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
             "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}}
        )  # fmt: skip
        top += 1
        for index, panel in enumerate(row):
            x, y = index % 3 * WIDTH, top + index // 3 * HEIGHT
            panels.append(_graph(len(panels) + 1, panel, {"h": HEIGHT, "w": WIDTH, "x": x, "y": y}))
        top += -(-len(row) // 3) * HEIGHT
    return {
        "uid": "jpaged",
        "title": "jpaged",
        "tags": ["jpaged", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), _model_name()]},
        "panels": panels,
    }


def _graph(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _model_name() -> dict[str, Any]:
    return {
        "name": "model_name", "label": "Model", "type": "query", "datasource": SOURCE, "refresh": 2,
        "query": {"query": "label_values(vllm:num_requests_running, model_name)", "refId": "models"},
        "includeAll": True, "allValue": ".*", "multi": True, "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def main() -> None:
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
