"""The server's log: a line per interval with work, and a line per refused request, without prompts."""

import asyncio
import dataclasses
import logging

import httpx

from jpaged.outputs import EngineStats, SpeculationStats
from jpaged.serving.admin.stats_log import StatsLog, log_stats


def test_an_interval_with_work_is_one_line(engine, caplog):
    log = StatsLog(engine.stats)
    assert log.line() is None
    engine.seen_prompts.append([1] * 40)
    engine.steps["a"] = 20
    engine.running.add("a")
    line = log.line()
    assert line.startswith("1 running, 0 waiting; ")
    assert " prompt tokens/s, " in line
    assert line.endswith(" generated tokens/s; KV cache 1.0% used")
    engine.running.clear()
    assert log.line() is None

    async def two_intervals() -> None:
        task = asyncio.create_task(log_stats(engine.stats, 0.01))
        await asyncio.sleep(0.05)
        assert not caplog.messages  # nothing ran
        engine.steps["a"] = 30
        await asyncio.sleep(0.05)
        engine.closed = True
        await asyncio.wait_for(task, 1)

    with caplog.at_level(logging.INFO, logger="jpaged"):
        asyncio.run(two_intervals())
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("0 running, 0 waiting; 0.0 prompt tokens/s, ")


def test_a_line_has_the_drafts_of_its_interval():
    running = EngineStats(100, 16, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)
    first, second = SpeculationStats(3, 5, 10, 8, (5, 2, 1), 2.8), SpeculationStats(3, 9, 30, 13, (8, 3, 2), 1.2)
    told = iter(dataclasses.replace(running, speculation=stats) for stats in (first, second, second))
    log = StatsLog(lambda: next(told))
    assert log.line().endswith("% used; 1.2 drafts per row, 25.0% of 20 accepted")
    assert log.line().endswith("% used; 1.2 drafts per row")


def test_a_refused_request_is_one_line_without_its_values(url, caplog):
    with caplog.at_level(logging.INFO, logger="jpaged"):
        for body in ({"prompt": "secret", "n": 0}, {"prompt": "secret", "forged\nline": "secret"}, {"prompt": "full"}):
            httpx.post(f"{url}/v1/completions", json=body)
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in levels] == ["INFO", "INFO", "WARNING"]
    assert levels[0][1] == "refused a request with status 400: n must be an integer from 1 to 64"
    assert levels[1][1] == "refused a request with status 400: forged line: unknown field"
    assert levels[2][1] == "refused a request with status 503: too many requests wait"
