"""The finite table of programs: their shapes, compiling them all before ready, and choosing one for a plan."""

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
import numpy as np
from tqdm import tqdm

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.errors import EngineError, ModelLoadError
from jpaged.lifetime import stop_if_ending
from jpaged.models.spec import DecoderSpec
from jpaged.phases import PATIENCE_SECONDS, tell
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.output_programs import OutputShape, PoolShape, SampleShape, ScoreShape
from jpaged.runtime.store.cache import cache_hits

# Largest number of programs with default options. Five of them are not in the table: upload_row, copying blocks in two
# sizes, and the two of ExtrasUploader. A host tier adds two.
MAX_PROGRAMS = 24
MAX_STEP_PROGRAMS = MAX_PROGRAMS - 5
MAX_ROW_BUCKETS = 4
MAX_FORWARD_PROGRAMS = 8
MAX_FULL_BUCKETS = 2  # of `sample` programs with SamplerVariant.FULL
# Below 8 rows XLA's CPU products give other bits, and bf16 is 5 to 18 times slower; 8 rows cost what 2 do.
MIN_BUCKET = 8
# XLA's CPU reductions over fewer elements than this, in all rows together, give other bits.
MIN_REDUCTION = 4096


def smallest_bucket(spec: DecoderSpec, platform: str) -> int:
    """Fewest rows and tokens of a program. On CPU, a row's bits are then the same in every program.

    It is 8 for every model of use. Tiny models need more, so that their norms reduce over MIN_REDUCTION elements.
    """
    if platform != "cpu":
        return MIN_BUCKET
    widths = [spec.hidden_size, spec.vocab_size]  # of normalised vectors
    if spec.qk_norm is not None:
        widths.append(spec.num_kv_heads * spec.head_dim)
    if spec.latent is not None:
        widths += [spec.latent.kv_rank, spec.latent.q_rank or spec.hidden_size]
    narrowest = min(widths)
    return max(MIN_BUCKET, 1 << (-(-MIN_REDUCTION // narrowest) - 1).bit_length())


Shape = ForwardShape | OutputShape
logger = logging.getLogger(__name__)

Kind = str  # see `kind_of`
DECODE, MIXED, SCORE, POOL = "decode", "mixed", "score", "pool"  # kinds; a `sample` program has its variant's name
ShapeT = TypeVar("ShapeT", bound=Shape, covariant=True)


def bucket_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    num_kv_groups: int = 1,
    smallest: int = MIN_BUCKET,
    row_buckets: Sequence[int] | None = None,
    token_buckets: Sequence[int] | None = None,
    pools: bool = False,
    context: int = 1,
) -> list[Shape]:
    """Shapes of the program table, at most MAX_STEP_PROGRAMS unless the caller names the buckets.

    Forward programs: one per row bucket for steps of decodes only; one per token bucket, with rows at the maximum, for
    all other steps. `sample` programs: one per row bucket for each sampler variant, fewer for FULL. One `score`
    program. A model that pools has no decodes: it has a forward program per token bucket, a `pool` program per row
    bucket.

    context: devices that the tokens of a program are spread over, if each has `smallest` tokens or more. Decodes are
    not spread: reading the weights takes most of their time, and each device must read them all. Raises ModelLoadError
    if no program can be spread.
    """
    max_rows = max(max_num_seqs, smallest)
    max_tokens = max(max_num_batched_tokens, smallest)
    if row_buckets:
        rows = _checked(row_buckets, smallest, max_rows)
    else:
        rows = _thin(_powers(smallest, max_rows), MAX_ROW_BUCKETS)
    if token_buckets:
        tokens = _checked(token_buckets, smallest, max_tokens)
    else:
        # Small buckets are dropped first: a chunk of 16 tokens costs about what 32 do, one of 128 half of what 256 do.
        tokens = _powers(2 * smallest, max_tokens)[-(MAX_FORWARD_PROGRAMS - (0 if pools else len(rows))) :]
    parts = [1 if n % context or n // context < smallest else context for n in tokens]
    if context not in parts:
        raise ModelLoadError(
            f"prefill_context_parallel_size={context}: no program can be split into {context} parts of {smallest} "
            f"tokens or more (token_buckets {', '.join(map(str, tokens))}): use a power of two, or token_buckets and "
            f"max_num_batched_tokens with a multiple of {context * smallest}"
        )
    mixed = [
        ForwardShape(False, n, max_rows, block_size, num_kv_groups, count)
        for n, count in zip(tokens, parts, strict=True)
    ]
    if pools:
        return [*mixed, *(PoolShape(n) for n in rows)]
    decodes = [ForwardShape(True, n, n, block_size, num_kv_groups) for n in rows]
    samplers = [SampleShape(n, variant) for variant in (SamplerVariant.GREEDY, SamplerVariant.RANDOM) for n in rows]
    full = rows if row_buckets else _thin(rows, MAX_FULL_BUCKETS)
    samplers += [SampleShape(n, SamplerVariant.FULL) for n in full]
    return [*decodes, *mixed, *samplers, ScoreShape(rows[-1])]


def _powers(low: int, high: int) -> list[int]:
    """Powers of two from low, then high itself."""
    values = [low << i for i in range(32) if low << i < high]
    return [*values, high]


def _thin(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spread, the largest included."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _checked(values: Sequence[int], smallest: int, largest: int) -> list[int]:
    """Buckets that the caller named, sorted, raised to the smallest where below it, and the largest added."""
    return sorted({max(smallest, min(int(v), largest)) for v in values} | {largest})


@runtime_checkable
class CompiledProgram(Protocol):
    """A `jax.stages.Compiled`, called with the arguments that its compile function lists."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        ...


@dataclasses.dataclass(frozen=True)
class Program(Generic[ShapeT]):
    """A compiled program, and the cost of making it."""

    shape: ShapeT
    run: CompiledProgram
    seconds: float   # to trace, lower and compile, or to read from the disk cache
    temp_bytes: int  # device memory that it allocates while it runs; arguments and results not included
    from_cache: bool = False  # read from the disk cache


def compiled(shape: Shape, compile_one: Callable[[Shape], jax.stages.Compiled]) -> Program[Any]:
    """Compile a program, and measure the cost."""
    start, hits = time.perf_counter(), cache_hits()
    run = compile_one(shape)
    return Program(shape, run, time.perf_counter() - start, temp_bytes(run), cache_hits() > hits)


class ProgramTable:
    """The programs of an engine. Those that are missing at first come from another thread."""

    forwards: list[Program[ForwardShape]]  # decodes first, then by tokens
    samplers: list[Program[SampleShape]]   # by variant, then by rows
    poolers: list[Program[PoolShape]]      # by rows
    scorer: Program[ScoreShape] | None

    def __init__(self, programs: Sequence[Program[Any]], missing: Iterable[Shape] = ()):
        """missing: shapes whose programs `add` will bring."""
        self.missing = frozenset(missing)
        self._failure: Exception | None = None  # of the thread that brings programs
        self._awaited: set[Kind] = set()
        self._change = threading.Condition()
        self._arrange(programs)

    def _arrange(self, programs: Sequence[Program[Any]]) -> None:
        """Replace the lists. A thread that reads them sees an old or a new one, whole."""

        def of(kind: type) -> list[Program[Any]]:
            return [program for program in programs if isinstance(program.shape, kind)]

        scorers: list[Program[ScoreShape]] = of(ScoreShape)
        self.forwards = sorted(of(ForwardShape), key=lambda p: (not p.shape.is_decode, p.shape.tokens))
        self.samplers = sorted(of(SampleShape), key=lambda p: (p.shape.variant, p.shape.rows))
        self.poolers = sorted(of(PoolShape), key=lambda p: p.shape.rows)
        self.scorer = scorers[0] if scorers else None

    @property
    def programs(self) -> list[Program[Any]]:
        """All programs of the table."""
        return [*self.forwards, *self.samplers, *self.poolers, *([] if self.scorer is None else [self.scorer])]

    @classmethod
    def compile(
        cls,
        shapes: Sequence[Shape],
        compile_one: Callable[[Shape], jax.stages.Compiled],
        *,
        progress: bool,
        missing: Sequence[Shape] = (),
    ) -> "ProgramTable":
        """Compile every shape, in one thread per core: XLA compiles outside Python's lock. missing: see `__init__`."""

        # The largest programs take longest. They start first, so that none of them runs alone at the end.
        order = sorted(shapes, key=lambda shape: (not isinstance(shape, ForwardShape), -size(shape)))
        hidden = None if progress else True  # None: hidden where stderr is not a terminal, as in a log of JSON lines
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
                    bar.write("stopping when the programs that are being compiled are done", file=sys.stderr)
                raise
            return cls([future.result() for future in futures], missing)

    def add(self, program: Program[Any]) -> bool:
        """Add a missing program. Any thread may call it. Returns True if it was the last one."""
        with self._change:
            self._arrange([*self.programs, program])
            self.missing -= {program.shape}
            self._change.notify_all()
            return not self.missing

    def fail(self, error: Exception) -> None:
        """Say that missing programs will not come."""
        with self._change:
            self._failure = self._failure or error
            self._change.notify_all()

    def wait_for_all(self) -> None:
        """Wait until no program is missing. Raises EngineError if that cannot happen."""
        with self._change:
            while self.missing:
                self._check()
                self._change.wait()

    def await_kind(self, kind: Kind) -> bool:
        """Whether a program of this kind exists. If not, it is compiled next. Raises EngineError as `wait_for_all`."""
        if any(kind_of(program.shape) == kind for program in self.programs):
            return True
        with self._change:
            self._check()
            if kind not in self._awaited:
                logger.debug("a request waits for a program that is being compiled, or read from the cache: %s", kind)
            self._awaited.add(kind)
        return not any(kind_of(shape) == kind for shape in self.missing)  # then `_wait` raises

    def is_awaited(self, shape: Shape) -> bool:
        """Whether a step waits for a program of this shape's kind."""
        return kind_of(shape) in self._awaited

    def forward(self, plan: StepPlan) -> Program[ForwardShape]:
        """The smallest forward program that can run the plan."""
        decode_only, tokens, rows = plan.decodes_only, plan.total_tokens, len(plan.rows)

        def find() -> Program[ForwardShape] | None:
            for program in self.forwards:
                shape = program.shape
                if shape.is_decode == decode_only and shape.tokens >= tokens and shape.rows >= rows:
                    return program
            return None

        kind = DECODE if decode_only else MIXED
        return find() or self._wait(find, kind, f"no program takes {tokens} tokens in {rows} rows")

    def sampler(self, num_rows: int, variant: SamplerVariant) -> Program[SampleShape]:
        """The smallest `sample` program of a variant for `num_rows` rows."""

        def find() -> Program[SampleShape] | None:
            for program in self.samplers:
                if program.shape.rows >= num_rows and program.shape.variant is variant:
                    return program
            return None

        return find() or self._wait(find, variant.name, f"no {variant.name} sample program takes {num_rows} rows")

    def pooler(self, num_rows: int) -> Program[PoolShape]:
        """The smallest `pool` program for `num_rows` rows."""

        def find() -> Program[PoolShape] | None:
            return next((program for program in self.poolers if program.shape.rows >= num_rows), None)

        return find() or self._wait(find, POOL, f"no pool program takes {num_rows} rows")

    def score(self) -> Program[ScoreShape]:
        """The `score` program."""
        return self.scorer or self._wait(lambda: self.scorer, SCORE, "there is no score program")

    def _wait(self, find: Callable[[], Program[ShapeT] | None], kind: Kind, nothing: str) -> Program[ShapeT]:
        """Wait for a program of a kind. Raises ValueError if none is missing, EngineError if it cannot come."""
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
        """Temporary memory of the program with the most, in bytes."""
        return max(program.temp_bytes for program in self.programs)

    def __str__(self) -> str:
        lines = [f"{'program':32} {'seconds':>8} {'temporaries':>12}"]
        lines += [
            f"{p.shape!s:32} {p.seconds:8.2f} {p.temp_bytes / 1e6:9.1f} MB{'  read from the cache' * p.from_cache}"
            for p in self.programs
        ]
        return "\n".join(lines)


def kind_of(shape: Shape) -> Kind:
    """The purpose of a program. The largest program of a kind can do the work of all others."""
    match shape:
        case ForwardShape():
            return DECODE if shape.is_decode else MIXED
        case SampleShape():
            return shape.variant.name
        case ScoreShape():
            return SCORE
        case PoolShape():
            return POOL


def size(shape: Shape) -> int:
    """Rows or tokens of a program: the larger its number, the longer it takes to compile."""
    return shape.tokens if isinstance(shape, ForwardShape | ScoreShape) else shape.rows


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Temporary device memory of a compiled program, in bytes; 0 if the back end does not report it."""
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
