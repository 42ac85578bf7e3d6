"""Measures the steps of a real engine with a designed set of loads, to fit a cost model.

On the host, a step lasts from the end of the step before to its own end: the longer of device time and host time. The
first step after a pause is not counted, because no step ends just before it. Nor is the first decode after prompts,
because its program may not have run for a while.

The result is the median over repeats: steps of one load, or decodes of a case with equal rows (and similar contexts).
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jpaged.engine.engine import Engine
from jpaged.engine.step_plan import StepPlan, StepResult
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.simulator.cost import MeasuredStep
from jpaged.simulator.step_load import FEATURES, EngineShape, LoadMeter, StepLoad

DECODES = 10            # decode-only steps of each case
MOST_PROMPT_STEPS = 20  # maximum steps for a case's prompts


@dataclasses.dataclass(frozen=True, slots=True)
class StepCase:
    """Requests that run together: some decode, and optionally one more prompt is sent while they decode."""

    rows: int                # requests that decode
    context: int             # prompt tokens of each of them
    prompt: int = 0          # tokens of the additional prompt; 0: none

    def __str__(self) -> str:
        decodes = f"{self.rows} rows of {self.context} tokens"
        return decodes if not self.prompt else f"{decodes}, then a prompt of {self.prompt}"


def designed_cases(shape: EngineShape) -> list[StepCase]:
    """Choose cases that separate the coefficients: rows x contexts, prompts by length, prompts with decodes."""
    chunk, rows = shape.max_num_batched_tokens, shape.max_num_seqs
    room = shape.max_model_len - 2 * DECODES
    contexts = sorted({max(1, min(room, length)) for length in (16, chunk // 2, 4 * chunk)})
    cases = [StepCase(max(rows // part, 1), context) for part in (4, 2, 1) for context in contexts]
    prompts = sorted({max(1, min(room, length)) for length in (chunk // 8, chunk // 4, chunk // 2, chunk, 4 * chunk)})
    cases += [StepCase(1, contexts[0], prompt) for prompt in prompts]
    cases += [StepCase(max(rows // 2, 1), contexts[0], prompt) for prompt in prompts[:3]]
    # Limits the time of prompts. Contexts must also fit into the pool.
    most = min(MOST_PROMPT_STEPS * chunk, (shape.num_blocks - rows) * shape.block_size // len(shape.windows))
    return [
        case
        for case in dict.fromkeys(cases)
        if case.rows * (case.context + 2 * DECODES) + case.prompt <= most and case.rows + bool(case.prompt) <= rows
    ]


class StepTimer:
    """Wraps a runner. Records the load and the seconds of each step."""

    def __init__(self, runner: Any, shape: EngineShape, clock: Callable[[], float] = time.perf_counter):
        self._runner = runner
        self._meter = LoadMeter(shape)
        self._clock = clock
        self._pending: list[StepLoad] = []
        self._last_end: float | None = None
        self.steps: list[tuple[StepLoad, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def dispatch(self, plan: StepPlan) -> Any:
        """Start a step and measure its load."""
        self._pending.append(self._meter.measure(plan, plan.rows.astype(np.intp)))
        return self._runner.dispatch(plan)

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step. Record its seconds since the end of the step before."""
        result = self._runner.collect(handle)
        now, load = self._clock(), self._pending.pop(0)
        if self._last_end is not None:
            self.steps.append((load, now - self._last_end))
        self._last_end = now if self._pending else None  # None: nothing runs, so the next step follows a pause
        return result


def measure_steps(
    engine: Engine,
    shape: EngineShape,
    *,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[StepCase], object] | None = None,
) -> Iterator[MeasuredStep]:
    """Run every designed case `repeats` times and yield its measured steps.

    The engine must be idle and have no prefix cache, because a prefix hit would leave nothing to measure. Repeats of a
    case are spread over the whole run, so a slow minute of the machine does not affect only one case. progress: called
    after each run of a case. Raises RequestError if `repeats` is below 1.
    """
    if repeats < 1:
        raise RequestError("repeats", repeats, "must be at least 1")
    rng = np.random.default_rng(seed)
    cases = designed_cases(shape)
    taken: dict[tuple[str, Any], list[tuple[StepLoad, float]]] = {}
    real = engine.runner
    numbers = itertools.count()
    try:
        for case in (case for _ in range(repeats) for case in cases):
            timer: Any = StepTimer(real, shape)
            engine.pipeline.runner = timer
            _run(engine, case, rng, numbers)
            previous_decodes = False
            for load, seconds in timer.steps:
                decodes = load.prompt_pairs == 0
                if not decodes or previous_decodes:
                    taken.setdefault((str(case), load.rows if decodes else load), []).append((load, seconds))
                previous_decodes = decodes
            if progress is not None:
                progress(case)
    finally:
        engine.pipeline.runner = real
    for (name, key), steps in taken.items():
        kind = f"{name}: chunk" if isinstance(key, StepLoad) else f"{name}: decode"
        yield MeasuredStep(_mean([load for load, _ in steps]), statistics.median(s for _, s in steps), len(steps), kind)


def _run(engine: Engine, case: StepCase, rng: np.random.Generator, numbers: Iterator[int]) -> None:
    """Send the requests of a case, and step until they end."""
    last = DECODES if not case.prompt else 2 * DECODES

    def add(length: int, tokens: int) -> None:
        prompt = rng.integers(0, engine.runner.vocab_size, length).tolist()
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        engine.add_request(f"steps-{next(numbers)}", {"prompt_token_ids": prompt}, params)

    for _ in range(case.rows):
        add(case.context, last)
    if case.prompt:
        while engine.stats().generated_tokens < case.rows * 2:
            engine.step()
        add(case.prompt, 1)
    while engine.has_work:
        engine.step()
    engine.reset_stats()


def _mean(loads: Sequence[StepLoad]) -> StepLoad:
    return StepLoad(*(statistics.fmean(getattr(load, name) for load in loads) for name in FEATURES))
