"""The finite table of programs: their shapes, compiling them all before ready, and choosing one for a plan."""

import concurrent.futures
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from tqdm import tqdm

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.models.spec import DecoderSpec
from jpaged.runtime.output_programs import OutputShape, PoolShape, SampleShape, ScoreShape
from jpaged.runtime.step import ForwardShape

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
) -> list[Shape]:
    """Shapes of the program table, at most MAX_STEP_PROGRAMS unless the caller names the buckets.

    Forward programs: one per row bucket for steps of decodes only; one per token bucket, with rows at the maximum, for
    all other steps. `sample` programs: one per row bucket for each sampler variant, fewer for FULL. One `score`
    program. A model that pools has no decodes: it has a forward program per token bucket, a `pool` program per row
    bucket.
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
    mixed = [ForwardShape(False, n, max_rows, block_size, num_kv_groups) for n in tokens]
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


class ProgramTable:
    """All programs of an engine, compiled."""

    def __init__(self, programs: Sequence[Program[Any]]):
        def of(kind: type) -> list[Program[Any]]:
            return [program for program in programs if isinstance(program.shape, kind)]

        forwards: list[Program[ForwardShape]] = of(ForwardShape)
        samplers: list[Program[SampleShape]] = of(SampleShape)
        poolers: list[Program[PoolShape]] = of(PoolShape)
        scorers: list[Program[ScoreShape]] = of(ScoreShape)
        self.forwards = sorted(forwards, key=lambda p: (not p.shape.is_decode, p.shape.tokens))
        self.samplers = sorted(samplers, key=lambda p: (p.shape.variant, p.shape.rows))
        self.poolers = sorted(poolers, key=lambda p: p.shape.rows)
        self.scorer = scorers[0] if scorers else None

    @property
    def programs(self) -> list[Program[Any]]:
        """All programs of the table."""
        return [*self.forwards, *self.samplers, *self.poolers, *([] if self.scorer is None else [self.scorer])]

    @classmethod
    def compile(
        cls, shapes: Sequence[Shape], compile_one: Callable[[Shape], jax.stages.Compiled], *, progress: bool
    ) -> "ProgramTable":
        """Compile every shape, in one thread per core: XLA compiles outside Python's lock."""

        def make(shape: Shape) -> Program[Any]:
            start = time.perf_counter()
            run = compile_one(shape)
            return Program(shape, run, time.perf_counter() - start, temp_bytes(run))

        # The largest programs take longest. They start first, so that none of them runs alone at the end.
        order = sorted(shapes, key=lambda shape: (not isinstance(shape, ForwardShape), -_size(shape)))
        with (
            concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
            tqdm(total=len(shapes), desc="Compiling", unit="program", disable=not progress, leave=False) as bar,
        ):
            futures = [pool.submit(make, shape) for shape in order]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
                    bar.update()
            except BaseException as error:  # a failed program, or Ctrl-C: do not start the remaining programs
                pool.shutdown(wait=False, cancel_futures=True)
                if isinstance(error, KeyboardInterrupt) and progress:
                    bar.write("stopping when the programs that are being compiled are done", file=sys.stderr)
                raise
            return cls([future.result() for future in futures])

    def forward(self, plan: StepPlan) -> Program[ForwardShape]:
        """The smallest forward program that can run the plan."""
        decode_only = plan.num_decodes == len(plan.rows)
        tokens, rows = plan.total_tokens, len(plan.rows)
        for program in self.forwards:
            shape = program.shape
            if shape.is_decode == decode_only and shape.tokens >= tokens and shape.rows >= rows:
                return program
        raise ValueError(f"no program takes {tokens} tokens in {rows} rows")

    def sampler(self, num_rows: int, variant: SamplerVariant) -> Program[SampleShape]:
        """The smallest `sample` program of a variant for `num_rows` rows."""
        for program in self.samplers:
            if program.shape.rows >= num_rows and program.shape.variant is variant:
                return program
        raise ValueError(f"no {variant.name} sample program takes {num_rows} rows")

    def pooler(self, num_rows: int) -> Program[PoolShape]:
        """The smallest `pool` program for `num_rows` rows."""
        for program in self.poolers:
            if program.shape.rows >= num_rows:
                return program
        raise ValueError(f"no pool program takes {num_rows} rows")

    @property
    def temp_bytes(self) -> int:
        """Temporary memory of the program with the most, in bytes."""
        return max(program.temp_bytes for program in self.programs)

    def __str__(self) -> str:
        lines = [f"{'program':32} {'seconds':>8} {'temporaries':>12}"]
        lines += [f"{p.shape!s:32} {p.seconds:8.2f} {p.temp_bytes / 1e6:9.1f} MB" for p in self.programs]
        return "\n".join(lines)


def _size(shape: Shape) -> int:
    """Rows or tokens of a program: the larger its number, the longer it takes to compile."""
    return shape.tokens if isinstance(shape, ForwardShape | ScoreShape) else shape.rows


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Temporary device memory of a compiled program, in bytes; 0 if the back end does not report it."""
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
