"""The counters equal two event logs that do not use them, after random load with aborts, refusals and a failed step.

1. The clients' log: the status of every request, and finish reasons and token counts of the answers that were read.
2. The engine's log: every final output, the prompts that were accepted, and the requests that a failed step ended.
"""

import asyncio
import dataclasses
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import RequestOutputKind
from tests.serving.http_client import wait_for
from tests.serving.served_runner import async_engine, served
from tests.support.slow_runner import SlowRunner

ROUTE = "/v1/completions"


class Runner(SlowRunner):
    seconds = 0.0005


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a request in the engine."""

    prompt_tokens: int
    computed_tokens: int
    answers: list[tuple[str, int]]  # (finish reason, tokens)
    n: int
    metrics: RequestMetrics


class EngineLog:
    """Writes down the ends of all requests of an engine."""

    def __init__(self, engine: Engine):
        self.ended: list[Ended] = []
        self._engine = engine
        self._params: dict[str, Any] = {}
        self._answers: dict[str, dict[int, tuple[str | None, int]]] = {}  # reason and tokens, by index
        self._add, self._step, self._abort, self._fail = engine.add, engine.step, engine.abort, engine._fail_running
        engine.add, engine.step, engine.abort, engine._fail_running = self.add, self.step, self.abort, self.fail

    def add(self, group):
        self._add(group)
        self._params[group.request_id] = group.params

    def step(self):
        return self._noted(self._step())

    def abort(self, ids):
        return self._noted(self._abort(ids))

    def fail(self):
        """A failed step ends these requests without an output that a caller could see."""
        groups = dict(self._engine._outputs.request_groups)
        failed = self._fail()
        for name in failed:
            group = groups[name]
            # an answer of the group may have ended before the step that failed
            answers = [(r.schedule.status.value, len(r.token_ids) - r.prompt_len) for r in group.requests]
            self._note(name, group.prompt_token_ids, group.first.schedule.num_cached_tokens, answers, group.metrics)
        return failed

    def _noted(self, outputs):
        for output in outputs:
            seen = self._answers.setdefault(output.request_id, {})
            delta = self._params[output.request_id].output_kind is RequestOutputKind.DELTA
            for answer in output.outputs:
                before = seen[answer.index][1] if delta and answer.index in seen else 0
                seen[answer.index] = (answer.finish_reason, before + len(answer.token_ids))
            if output.finished:
                answers = list(seen.values())
                self._note(
                    output.request_id, output.prompt_token_ids, output.num_cached_tokens, answers, output.metrics
                )
        return outputs

    def _note(self, name, prompt, cached, answers, metrics):
        n = self._params[name].n
        self.ended.append(Ended(len(prompt), len(prompt) - cached, answers, n, metrics))


@dataclasses.dataclass
class ClientLog:
    """Answers that the clients got."""

    statuses: Counter = dataclasses.field(default_factory=Counter)
    reasons: Counter = dataclasses.field(default_factory=Counter)
    tokens: int = 0
    left: int = 0  # answers of requests whose client closed the connection, or whose stream ended with an error
    errors: int = 0  # streams that ended with an error


async def one_request(client: httpx.AsyncClient, rng: random.Random, log: ClientLog) -> None:
    prompt = [rng.choice([1, 2])] * rng.choice([0, 8, 13]) + [rng.randrange(97) for _ in range(rng.randint(1, 12))]
    body = {"prompt": prompt, "max_tokens": rng.randint(1, 25), "n": rng.choice([1, 1, 1, 2, 3])}
    kind = rng.choice(["whole", "whole", "stream", "stream", "leave", "leave", "bad", "several"])
    if kind == "bad":
        body |= rng.choice([{"temperature": -1}, {"prompt": [1000]}, {"max_tokens": 10_000}, {"model": "other"}])
    if kind == "several":
        body["prompt"] = [prompt, [*prompt[:1], 5]]
    if kind in ("whole", "bad", "several"):
        answer = await client.post(ROUTE, json=body)
        log.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            log.reasons.update(choice["finish_reason"] for choice in answer.json()["choices"])
            log.tokens += answer.json()["usage"]["completion_tokens"]
        return
    body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 1, "logprobs": 1}
    events = rng.randint(0, 6) if kind == "leave" else 10**6
    async with client.stream("POST", ROUTE, json=body) as answer:
        log.statuses[answer.status_code] += 1
        if answer.status_code != 200:
            return
        reasons, usage = [], None
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if events == 0:
                break
            events -= 1
            data = json.loads(line.removeprefix("data: "))
            if "error" in data:
                log.errors += 1
                log.left += body["n"]
                return
            reasons += [choice["finish_reason"] for choice in data["choices"] if choice["finish_reason"]]
            usage = data["usage"] or usage
        if usage is None:
            log.left += body["n"]
        else:
            log.reasons.update(reasons)
            log.tokens += usage["completion_tokens"]


async def load(base: str, seed: int, log: ClientLog) -> None:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=30)
    async with httpx.AsyncClient(base_url=base, timeout=60, limits=limits) as client:

        async def worker(count: int) -> None:
            for _ in range(count):
                await one_request(client, rng, log)
                await asyncio.sleep(rng.random() * 0.004)

        await asyncio.gather(*(worker(12) for _ in range(16)))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_counters_equal_the_event_logs(seed):
    runner = Runner(
        num_blocks=28, max_num_seqs=6, max_num_batched_tokens=24, fail_at=frozenset({("collect", 150)})
    )
    options = EngineOptions(scheduling=SchedulingOptions(max_queued_requests=8))
    llm, clients = async_engine(runner, options), ClientLog()
    engine = llm.engine
    log = EngineLog(engine)
    with served(llm) as base:
        asyncio.run(load(base, seed, clients))
        wait_for(lambda: not engine.has_work and not llm._streams)
        wait_for(lambda: requests_seen(base) == clients.statuses.total())
        text = httpx.get(f"{base}/metrics").text
    seen = Metrics(text)
    reasons = Counter(reason for end in log.ended for reason, _ in end.answers)
    lengths = [length for end in log.ended for _, length in end.answers]
    assert {"length", "abort", "error"} <= set(reasons), "the load must contain all of these"
    assert {200, 400, 404, 503} <= set(clients.statuses)
    # The failed step ran up to 6 requests. Chance decides whether their answers are whole (500), streams, or not read.
    failed = sum(any(reason == "error" for reason, _ in end.answers) for end in log.ended)
    assert clients.statuses[500] + clients.errors <= failed
    started = [end for end in log.ended if end.metrics.first_scheduled_time is not None]
    answered = [end for end in log.ended if end.metrics.first_token_time is not None]

    # against the engine's log
    assert {reason: seen.value("vllm:request_success_total", finished_reason=reason) for reason in reasons} == reasons
    assert seen.value("vllm:generation_tokens_total") == sum(lengths)
    assert seen.histogram("vllm:request_generation_tokens") == (len(lengths), sum(lengths))
    longest = [max(length for _, length in end.answers) for end in log.ended]
    assert seen.histogram("vllm:request_max_num_generation_tokens") == (len(longest), sum(longest))
    assert seen.histogram("vllm:request_prompt_tokens") == totals(end.prompt_tokens for end in log.ended)
    assert seen.histogram("vllm:request_params_n") == totals(end.n for end in log.ended)
    assert seen.histogram("vllm:request_num_preemptions") == totals(end.metrics.preemptions for end in log.ended)
    assert seen.value("vllm:num_preemptions_total") == sum(end.metrics.preemptions for end in log.ended) > 0
    assert seen.histogram("vllm:request_prefill_kv_computed_tokens") == totals(e.computed_tokens for e in started)
    assert seen.value("vllm:prompt_tokens_total") == sum(end.prompt_tokens for end in started)
    assert seen.value("vllm:prefix_cache_queries_total") == sum(end.prompt_tokens for end in started)
    cached = sum(end.prompt_tokens - end.computed_tokens for end in started)
    assert seen.value("vllm:prefix_cache_hits_total") == seen.value("vllm:prompt_tokens_cached_total") == cached > 0
    times = {
        "vllm:e2e_request_latency_seconds": [e.metrics.finished_time - e.metrics.arrival_time for e in log.ended],
        "vllm:request_queue_time_seconds": [e.metrics.first_scheduled_time - e.metrics.arrival_time for e in started],
        "vllm:time_to_first_token_seconds": [e.metrics.first_token_time - e.metrics.arrival_time for e in answered],
        "vllm:request_decode_time_seconds": [e.metrics.last_token_time - e.metrics.first_token_time for e in answered],
    }
    for name, values in times.items():
        assert seen.histogram(name) == (len(values), pytest.approx(sum(values))), name
    assert seen.histogram("vllm:inter_token_latency_seconds")[0] == sum(max(length - 1, 0) for length in lengths)

    # against the runner's plans: all steps but the failed one were collected, and a dropped one
    plans = runner.plans
    assert seen.value("jpaged:steps_total") == len(plans)
    count, tokens = seen.histogram("vllm:iteration_tokens_total")
    assert 1 <= len(plans) - count <= 2
    assert tokens == sum(plan.total_tokens for number, plan in enumerate(plans) if number not in (150, 151))

    # against the clients' log
    for status in (2, 4, 5):
        wanted = sum(count for code, count in clients.statuses.items() if code // 100 == status)
        assert seen.value("http_requests_total", handler=ROUTE, method="POST", status=f"{status}xx") == wanted
    assert seen.value("vllm:admission_rejections_total", reason="max_queued_requests") >= clients.statuses[503]
    assert clients.reasons["length"] <= reasons["length"]
    assert clients.tokens <= sum(lengths)
    assert clients.reasons["length"] + clients.left >= reasons["length"]


def totals(values) -> tuple[int, int]:
    values = list(values)
    return len(values), sum(values)


def requests_seen(base: str) -> float:
    seen = Metrics(httpx.get(f"{base}/metrics").text)
    return sum(value for labels, value in seen.of("http_requests_total") if labels["handler"] == ROUTE)


class Metrics:
    """Samples of the text of /metrics."""

    def __init__(self, text: str):
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def of(self, name: str):
        return [(sample.labels, sample.value) for sample in self._samples if sample.name == name]

    def value(self, name: str, **labels: str) -> float:
        values = [value for of, value in self.of(name) if labels.items() <= of.items()]
        assert len(values) == 1, (name, labels)
        return values[0]

    def histogram(self, name: str) -> tuple[float, float]:
        """(observations, their sum)"""
        return self.value(f"{name}_count"), self.value(f"{name}_sum")
