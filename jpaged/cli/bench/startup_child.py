"""One start of an engine, for `jpaged bench startup`: prints its phases as JSON.

The program: `python -m jpaged.cli.bench.startup_child OPTIONS`, with the engine's options as JSON.

Imported late: all that a start imports, because the child measures it.
"""

import collections
import json
import logging
import sys
import time
from typing import Any

TRACE, LOWER, COMPILE, READ = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
    "/jax/compilation_cache/cache_retrieval_time_sec",
)


class Phases(logging.Handler):
    """Collects the phases that `jpaged.phases` logs, in order of their ends: (name, seconds, CPU seconds)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, float, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            name, wall, cpu = record.args
            self.rows.append((str(name), float(str(wall)), float(str(cpu))))


def main(options: dict[str, Any]) -> None:
    """Start an engine, generate a token, and wait until all programs exist."""
    phases, sums = Phases(), collections.defaultdict[str, float](float)
    log = logging.getLogger("jpaged.phases")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(phases)

    import jax

    from jpaged import LLM, SamplingParams

    def add(event: str, duration_secs: float, **kwargs: str | int) -> None:
        sums[event] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    with LLM(**options) as llm:
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        _say(event="first token", cpu=time.process_time())
        llm.wait_until_ready()
        _say(event="all programs", cpu=time.process_time())
    work = {"trace": sums[TRACE], "lower": sums[LOWER], "compile": sums[COMPILE] - sums[READ], "read": sums[READ]}
    _say(event="end", phases=phases.rows, work=work)


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
