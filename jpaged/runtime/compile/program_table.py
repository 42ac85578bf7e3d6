"""The finite table of programs: compiles them, and finds the program for a plan."""

import concurrent.futures
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import jax
from tqdm import tqdm

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.errors import EngineError
from jpaged.lifetime import stop_if_ending
from jpaged.phases import PATIENCE_SECONDS, tell
from jpaged.runtime.step.advance_states import AdvanceShape
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.draft_shapes import DraftShape
from jpaged.runtime.step.output_programs import PoolShape, SampleShape, ScoreShape
from jpaged.runtime.step.program_shapes import (
    ADVANCE,
    CHECKS,
    DECODE,
    DRAFT,
    FOLLOWED,
    MIXED,
    POOL,
    SCORE,
    VERIFY,
    Kind,
    Shape,
    kind_of,
    size,
)
from jpaged.runtime.store.cache import cache_hits

logger = logging.getLogger(__name__)

_FORWARD_ORDER = (DECODE, FOLLOWED, VERIFY, MIXED)

ShapeT = TypeVar("ShapeT", bound=Shape, covariant=True)


@runtime_checkable
class CompiledProgram(Protocol):
    """A `jax.stages.Compiled`. Takes the arguments that its compile function lists."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        ...


def _forward_order(program: "Program[ForwardShape]") -> tuple[int, int, int]:
    """Decodes first, then verify programs, then by tokens. Programs of an encoder: by length, then by tokens."""
    shape = program.shape
    return _FORWARD_ORDER.index(kind_of(shape)), shape.row_len, shape.tokens


@dataclasses.dataclass(frozen=True)
class Program(Generic[ShapeT]):
    """A compiled program and its cost."""

    shape: ShapeT
    run: CompiledProgram
    seconds: float   # to trace, lower and compile, or to read from the disk cache
    temp_bytes: int  # device memory while it runs, without arguments and results
    from_cache: bool = False  # read from the disk cache


def compiled(shape: Shape, compile_one: Callable[[Shape], jax.stages.Compiled]) -> Program[Any]:
    """Compile a program and measure its cost."""
    start, hits = time.perf_counter(), cache_hits()
    run = compile_one(shape)
    return Program(shape, run, time.perf_counter() - start, temp_bytes(run), cache_hits() > hits)


class ProgramTable:
    """The programs of an engine. Other threads may `add` programs that are missing at first."""

    forwards: list[Program[ForwardShape]]  # decodes first, then verify programs, then by tokens
    samplers: list[Program[SampleShape]]   # by variant, then by rows
    verify_sizes: tuple[int, ...]  # tokens of the verify programs that exist with all their samplers, smallest first
    poolers: list[Program[PoolShape]]      # by rows
    scorer: Program[ScoreShape] | None
    advances: dict[int, Program[AdvanceShape]]  # by tokens of the verify program

    def __init__(self, programs: Sequence[Program[Any]], missing: Iterable[Shape] = ()):
        """missing: shapes of programs that `add` will deliver."""
        self.missing = frozenset(missing)
        self.drafters: dict[Shape, CompiledProgram] = {}  # programs of a drafter on the device
        self._failure: Exception | None = None  # of a thread that adds programs
        self._awaited: set[Kind] = set()
        self._change = threading.Condition()
        self._arrange(programs)

    def _arrange(self, programs: Sequence[Program[Any]]) -> None:
        """Replace the lists. Each is replaced atomically, because other threads read them without a lock."""

        def of(kind: Any) -> list[Program[Any]]:
            return [program for program in programs if isinstance(program.shape, kind)]

        scorers: list[Program[ScoreShape]] = of(ScoreShape)
        self.forwards = sorted(of(ForwardShape), key=_forward_order)
        self.samplers = sorted(of(SampleShape), key=lambda p: (p.shape.variant, p.shape.checks, p.shape.rows))
        drafters: list[Program[DraftShape]] = of(DraftShape)
        self._drafters = drafters
        self.drafters.update({program.shape: program.run for program in drafters})
        checks = [p.shape.rows for p in self.samplers if p.shape.checks]
        sizes = [p.shape.tokens for p in self.forwards if p.shape.drafts]
        missing = self.missing - {program.shape for program in programs}
        advances: list[Program[AdvanceShape]] = of(AdvanceShape)
        self.advances = {program.shape.tokens: program for program in advances}
        lacks_some = any(kind_of(shape) in (DRAFT, FOLLOWED, ADVANCE) for shape in missing)
        self.verify_sizes = () if lacks_some else tuple(
            n for n in sizes if checks.count(n) == len(SamplerVariant)
        )  # fmt: skip
        self.poolers = sorted(of(PoolShape), key=lambda p: p.shape.rows)
        self.scorer = scorers[0] if scorers else None

    @property
    def programs(self) -> list[Program[Any]]:
        """All programs of the table."""
        scorers = [] if self.scorer is None else [self.scorer]
        return [
            *self.forwards, *self.samplers, *self.poolers, *scorers, *self._drafters, *self.advances.values()
        ]  # fmt: skip

    @classmethod
    def compile(
        cls,
        shapes: Sequence[Shape],
        compile_one: Callable[[Shape], jax.stages.Compiled],
        *,
        progress: bool,
        missing: Sequence[Shape] = (),
    ) -> "ProgramTable":
        """Compile every shape, in one thread per core: XLA releases Python's GIL. missing: see `__init__`."""

        # The largest programs compile longest, so they start first. Otherwise one of them compiles alone at the end.
        order = sorted(shapes, key=lambda shape: (not isinstance(shape, ForwardShape), -size(shape)))
        hidden = None if progress else True  # None: hidden if stderr is not a terminal, as in JSON logs
        with (
            concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
            tqdm(total=len(shapes), desc="Compiling", unit="program", disable=hidden, leave=False) as bar,
        ):
            futures = [pool.submit(compiled, shape, compile_one) for shape in order]
            try:
                for future in concurrent.futures.as_completed(futures):
                    stop_if_ending()
                    future.result()
                    bar.update()
            except BaseException as error:  # a failed program, or Ctrl-C: do not start the remaining programs
                pool.shutdown(wait=False, cancel_futures=True)
                if isinstance(error, KeyboardInterrupt) and progress:
                    bar.write("stopping after the programs that are now being compiled", file=sys.stderr)
                raise
            return cls([future.result() for future in futures], missing)

    def add(self, program: Program[Any]) -> bool:
        """Add a missing program, from any thread. Returns True if it was the last missing one."""
        with self._change:
            self._arrange([*self.programs, program])
            self.missing -= {program.shape}
            self._change.notify_all()
            return not self.missing

    def fail(self, error: Exception) -> None:
        """Note that missing programs cannot be compiled: calls that wait for them raise EngineError."""
        with self._change:
            self._failure = self._failure or error
            self._change.notify_all()

    def wait_for_all(self) -> None:
        """Wait until no program is missing. Raises EngineError if one cannot be compiled."""
        with (
            self._change,
            tqdm(total=len(self.missing), desc="Compiling", unit="program", delay=PATIENCE_SECONDS, disable=None,
                 leave=False) as bar,
        ):  # fmt: skip
            while self.missing:
                self._check()
                before = len(self.missing)
                self._change.wait()
                bar.update(before - len(self.missing))

    def await_kind(self, kind: Kind) -> bool:
        """True if a program of this kind exists. Else it is compiled next. Raises EngineError as `wait_for_all`."""
        if any(kind_of(program.shape) == kind for program in self.programs):
            return True
        with self._change:
            self._check()
            if kind not in self._awaited:
                logger.debug("a request waits for a program that is being compiled, or read from the cache: %s", kind)
            self._awaited.add(kind)
        return not any(kind_of(shape) == kind for shape in self.missing)  # then `_wait` raises

    def is_awaited(self, shape: Shape) -> bool:
        """True if a request or a step has asked for a program of this shape's kind."""
        return kind_of(shape) in self._awaited

    def forward(self, plan: StepPlan) -> Program[ForwardShape]:
        """Smallest forward program that can run the plan."""
        verifies, tokens, rows = plan.drafts is not None, plan.total_tokens, len(plan.rows)
        is_decode = plan.decodes_only and not verifies
        follows = is_decode and plan.head is not None
        length = int(plan.num_tokens.max()) if len(plan.type_1_from) else 0

        def find() -> Program[ForwardShape] | None:
            for program in self.forwards:
                shape = program.shape
                is_kind = shape.is_decode == is_decode and bool(shape.drafts) == verifies
                is_kind = is_kind and (not is_decode or shape.captures == follows)
                # a sample program of a larger size does not take its result
                is_kind = is_kind and (not verifies or shape.tokens in self.verify_sizes)
                if is_kind and shape.tokens >= tokens and shape.rows >= rows and shape.row_len >= length:
                    return program
            return None

        kind = FOLLOWED if follows else DECODE if is_decode else VERIFY if verifies else MIXED
        return find() or self._wait(find, kind, f"no program takes {tokens} tokens in {rows} rows")

    def sampler(self, num_rows: int, variant: SamplerVariant, *, checks: bool = False) -> Program[SampleShape]:
        """Smallest `sample` program of a variant for `num_rows` rows. checks: for that many tokens of a verify step."""

        def find() -> Program[SampleShape] | None:
            for program in self.samplers:
                shape = program.shape
                if shape.rows >= num_rows and shape.variant is variant and shape.checks == checks:
                    return program
            return None

        kind = CHECKS * checks + variant.name
        return find() or self._wait(find, kind, f"no {kind} sample program takes {num_rows} rows")

    def pooler(self, num_rows: int) -> Program[PoolShape]:
        """Smallest `pool` program for `num_rows` rows."""

        def find() -> Program[PoolShape] | None:
            return next((program for program in self.poolers if program.shape.rows >= num_rows), None)

        return find() or self._wait(find, POOL, f"no pool program takes {num_rows} rows")

    def score(self) -> Program[ScoreShape]:
        """The `score` program."""
        return self.scorer or self._wait(lambda: self.scorer, SCORE, "there is no score program")

    def _wait(self, find: Callable[[], Program[ShapeT] | None], kind: Kind, nothing: str) -> Program[ShapeT]:
        """Wait for a program of a kind. Raises ValueError if none is missing, EngineError if it cannot be compiled."""
        began, told = time.monotonic(), False
        with self._change:
            self._awaited.add(kind)
            while (found := find()) is None:
                if not any(kind_of(shape) == kind for shape in self.missing):
                    raise ValueError(nothing)
                self._check()
                left = began + PATIENCE_SECONDS - time.monotonic()
                if left <= 0 and not told:
                    told = True
                    tell(f"a request waits for a program that is being compiled ({kind.lower()})")
                self._change.wait(left if left > 0 else None)
        return found

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(f"a program could not be compiled: {self._failure}") from self._failure

    @property
    def temp_bytes(self) -> int:
        """Largest temporary device memory of a program, in bytes."""
        return max(program.temp_bytes for program in self.programs)

    def __str__(self) -> str:
        lines = [f"{'program':32} {'seconds':>8} {'temporaries':>12}"]
        lines += [
            f"{p.shape!s:32} {p.seconds:8.2f} {p.temp_bytes / 1e6:9.1f} MB{'  read from the cache' * p.from_cache}"
            for p in self.programs
        ]
        return "\n".join(lines)


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Temporary device memory of a compiled program, in bytes; 0 if the backend does not report it."""
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
