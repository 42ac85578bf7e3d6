"""The compiled programs of an engine: until all exist, and what they cost.

Called by: `ModelRunner`, which is an `EnginePrograms`; any thread asks whether the programs of a request exist.
Owns: the program table, the threads that compile the rest of it, and the counters of compiles.
Never: runs a program.
"""

import dataclasses
import logging
import time
from collections.abc import Sequence

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.metrics import ProgramMetrics
from jpaged.phases import phase
from jpaged.runtime.compile.background import BackgroundCompiler
from jpaged.runtime.compile.blueprint import FittedBuild
from jpaged.runtime.compile.program_table import Program
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.program_shapes import SCORE
from jpaged.runtime.store.cache import CacheCounter, CompileCounter

logger = logging.getLogger(__name__)


class EnginePrograms:
    """The part of `engine.step_plan.Runner` about programs."""

    def __init__(self, build: FittedBuild, *, progress: bool, background: bool, cache_counter: CacheCounter):
        """Compile the program table, or its first programs if the others are compiled in the background."""
        self._build, self._start = build, time.perf_counter()
        self._cache_counter, self._counter = cache_counter, CompileCounter()
        self._background: BackgroundCompiler | None = None
        self._other_programs: Sequence[Program[ForwardShape]] = ()  # of pipeline stages before the last
        self.memory_plan = build.memory_plan
        later = background and build.store is not None and build.store.platform == "cpu"  # the workers have no GPU
        with phase("step programs"):
            self.programs = build.compile_table(progress=progress, first_only=later)

    def compile_rest(self) -> None:
        """Compile missing programs in the background."""
        store, table = self._build.store, self.programs
        if store is None or not table.missing:
            self._note_ready()
            return
        seconds = time.perf_counter() - self._start
        count, missing = len(table.programs), len(table.missing)
        logger.info("%d programs exist after %.1f s; %d are compiled in the background", count, seconds, missing)
        self._background = BackgroundCompiler(self._build, store, table, self._note_ready)

    def _note_ready(self) -> None:
        """Log that all programs exist, and update the memory plan."""
        # Counts as the progress bar and the table do: without the few programs that only copy.
        programs, seconds = self.programs.programs, time.perf_counter() - self._start
        read = sum(program.from_cache for program in programs)
        logger.info(
            "all %d programs exist after %.1f s: %d compiled, %d read from the cache",
            len(programs), seconds, len(programs) - read, read,
        )  # fmt: skip
        self.memory_plan = plan = dataclasses.replace(self.memory_plan, temp_bytes=self.programs.temp_bytes)
        kv, weights = memory.size_text(plan.kv_bytes), memory.size_text(plan.weight_bytes)
        logger.info("the KV cache has %s for %d tokens, and the weights have %s", kv, plan.kv_tokens, weights)
        logger.debug("programs:\n%s", self.programs)
        logger.debug("device memory:\n%s", self.memory_plan)

    @property
    def is_ready(self) -> bool:
        """True if all programs exist."""
        return not self.programs.missing

    def wait_until_ready(self) -> None:
        """Wait until all programs exist. Raises EngineError if one cannot be compiled."""
        self.programs.wait_for_all()

    def can_run(self, sampler: SamplerVariant, *, scores: bool) -> bool:
        """True if the programs of a request exist. Else they are compiled next. Raises as `wait_until_ready`."""
        if self._build.blueprint.model.spec.pools:
            return True
        return self.programs.await_kind(sampler.name) and (not scores or self.programs.await_kind(SCORE))

    @property
    def verify_sizes(self) -> Sequence[int]:
        """Capacity of each verify program that exists, in tokens, smallest first."""
        return self.programs.verify_sizes

    @property
    def compiles_after_ready(self) -> int:
        """Number of programs that steps compiled: 0, unless the table lacks a program."""
        return self._counter.count

    def describe(self, plan: StepPlan) -> str:
        """Name the program of a plan, for a log. Any thread may call it."""
        return str(self.programs.forward(plan).shape)

    def program_metrics(self) -> ProgramMetrics:
        """Number and cost of the programs of all pipeline stages."""
        table, cache = self.programs, self._cache_counter
        programs = [*self._other_programs, *table.programs]
        seconds = sum(program.seconds for program in programs)
        return ProgramMetrics(len(programs), len(table.missing), seconds, cache.hits, cache.misses)

    def stop_compiling(self) -> None:
        """Stop compiling and counting."""
        if self._background is not None:
            self._background.close()
        self._counter.close()
        self._cache_counter.close()
