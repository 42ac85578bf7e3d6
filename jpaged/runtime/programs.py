"""The finite table of programs: which shapes, compiled before ready, and which of them runs a plan."""

import concurrent.futures
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from tqdm import tqdm

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.models.spec import DecoderSpec
from jpaged.runtime.heads import HeadShape
from jpaged.runtime.step import ForwardShape

# All programs of an engine by default. Three are not steps: upload_row, and copying blocks in two sizes. A host tier
# has two more.
MAX_PROGRAMS = 24
MAX_STEP_PROGRAMS = MAX_PROGRAMS - 3
MAX_ROW_BUCKETS = 4
MAX_FORWARD_PROGRAMS = 8
MAX_FULL_BUCKETS = 2  # of the head that can do everything
# Below 8 rows XLA's CPU products give other bits, and bf16 is 5 to 18 times slower; 8 rows cost what 2 do.
MIN_BUCKET = 8
# XLA's CPU reductions over fewer elements than this, in all rows together, give other bits.
MIN_REDUCTION = 4096


def smallest_bucket(spec: DecoderSpec, platform: str) -> int:
    """The fewest rows and tokens of a program: on CPU as many as keep a row's bits the same in every program.

    8 for every model of use; tiny ones need more, so that their norms reduce over MIN_REDUCTION elements.
    """
    if platform != "cpu":
        return MIN_BUCKET
    widths = [spec.hidden_size, spec.vocab_size]  # of what is normalised
    if spec.qk_norm is not None:
        widths.append(spec.num_kv_heads * spec.head_dim)
    if spec.latent is not None:
        widths += [spec.latent.kv_rank, spec.latent.q_rank or spec.hidden_size]
    narrowest = min(widths)
    return max(MIN_BUCKET, 1 << (-(-MIN_REDUCTION // narrowest) - 1).bit_length())


Shape = ForwardShape | HeadShape
ShapeT = TypeVar("ShapeT", ForwardShape, HeadShape, covariant=True)


def bucket_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    num_groups: int = 1,
    smallest: int = MIN_BUCKET,
    row_buckets: Sequence[int] | None = None,
    token_buckets: Sequence[int] | None = None,
    pools: bool = False,
) -> list[Shape]:
    """The programs of an engine's steps, at most MAX_STEP_PROGRAMS unless the caller names the buckets.

    Forward programs: one for decodes alone a row bucket, one for everything else a token bucket with rows at the
    maximum. Heads: one a row bucket and kind of sampling, few of the one that can do everything, and one for prompts'
    log-probabilities. A model that pools has no decodes.
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
        # The small ones go first: a chunk of 16 tokens costs about what 32 do, one of 128 half of what 256 do.
        tokens = _powers(2 * smallest, max_tokens)[-(MAX_FORWARD_PROGRAMS - (0 if pools else len(rows))) :]
    mixed = [ForwardShape(False, n, max_rows, block_size, num_groups) for n in tokens]
    if pools:
        return [*mixed, *(HeadShape(n, None) for n in rows)]
    decodes = [ForwardShape(True, n, n, block_size, num_groups) for n in rows]
    heads = [HeadShape(n, variant) for variant in (SamplerVariant.GREEDY, SamplerVariant.RANDOM) for n in rows]
    full = rows if row_buckets else _thin(rows, MAX_FULL_BUCKETS)
    score = HeadShape(rows[-1], None, scores=True)
    return [*decodes, *mixed, *heads, *(HeadShape(n, SamplerVariant.FULL) for n in full), score]


def _powers(low: int, high: int) -> list[int]:
    """Powers of two from low, ending with high itself."""
    values = [low << i for i in range(32) if low << i < high]
    return [*values, high]


def _thin(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread; the largest is always among them."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _checked(values: Sequence[int], smallest: int, largest: int) -> list[int]:
    """Buckets that a caller named: none below the smallest, sorted, the largest added where it is missing."""
    return sorted({max(smallest, min(int(v), largest)) for v in values} | {largest})


@dataclasses.dataclass(frozen=True)
class Program(Generic[ShapeT]):
    """One compiled program and what making it took."""

    shape: ShapeT
    run: Callable[..., Any]  # the compiled program
    seconds: float           # to trace, lower and compile, or to read it from the disk cache
    temp_bytes: int          # device memory that it takes while it runs, beside arguments and results


class ProgramTable:
    """All programs of an engine, compiled."""

    def __init__(self, forwards: Sequence[Program[ForwardShape]], heads: Sequence[Program[HeadShape]]):
        self.forwards = sorted(forwards, key=lambda p: (not p.shape.is_decode, p.shape.tokens))
        sampling = [program for program in heads if not program.shape.scores]
        self.heads = sorted(sampling, key=lambda p: (p.shape.variant or 0, p.shape.rows))
        self.scoring = next((p for p in heads if p.shape.scores), None)

    @property
    def programs(self) -> list[Program[Any]]:
        """All of them."""
        return [*self.forwards, *self.heads, *([] if self.scoring is None else [self.scoring])]

    @classmethod
    def compile(
        cls, shapes: Sequence[Shape], compile_one: Callable[[Shape], Any], *, progress: bool
    ) -> "ProgramTable":
        """Compile every shape, in as many threads as there are cores: XLA compiles outside Python's lock."""

        def make(shape: Any) -> Program[Any]:
            start = time.perf_counter()
            run = compile_one(shape)
            return Program(shape, run, time.perf_counter() - start, temp_bytes(run))

        # The largest programs take longest: begun first, so that none is left running alone at the end.
        order = sorted(shapes, key=lambda s: (isinstance(s, HeadShape), -_places(s)))
        with (
            concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
            tqdm(total=len(shapes), desc="Compiling", unit="program", disable=not progress, leave=False) as bar,
        ):
            futures = [pool.submit(make, shape) for shape in order]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
                    bar.update()
            except BaseException as error:  # a failed program, or Ctrl-C: what has not begun is not begun any more
                pool.shutdown(wait=False, cancel_futures=True)
                if isinstance(error, KeyboardInterrupt) and progress:
                    bar.write("stopping when the programs that are being compiled are done", file=sys.stderr)
                raise
            programs = [future.result() for future in futures]
        return cls(
            [program for program in programs if isinstance(program.shape, ForwardShape)],
            [program for program in programs if isinstance(program.shape, HeadShape)],
        )

    def forward(self, plan: StepPlan) -> Program[ForwardShape]:
        """The smallest forward program that can run the plan."""
        decode_only = plan.num_decodes == len(plan.rows)
        tokens, rows = plan.total_tokens, len(plan.rows)
        for program in self.forwards:
            shape = program.shape
            if shape.is_decode == decode_only and shape.tokens >= tokens and shape.rows >= rows:
                return program
        raise ValueError(f"no program takes {tokens} tokens in {rows} rows")

    def head(self, num_places: int, variant: SamplerVariant) -> Program[HeadShape]:
        """The smallest head for so many places that samples as `variant` does, or of a model that pools."""
        for program in self.heads:
            if program.shape.rows >= num_places and program.shape.variant in (variant, None):
                return program
        raise ValueError(f"no head takes {num_places} rows")

    @property
    def temp_bytes(self) -> int:
        """The most temporary memory that any program takes."""
        return max(program.temp_bytes for program in self.programs)

    def __str__(self) -> str:
        lines = [f"{'program':32} {'seconds':>8} {'temporaries':>12}"]
        lines += [f"{p.shape!s:32} {p.seconds:8.2f} {p.temp_bytes / 1e6:9.1f} MB" for p in self.programs]
        return "\n".join(lines)


def _places(shape: Shape) -> int:
    return shape.tokens if isinstance(shape, ForwardShape) else shape.rows


def temp_bytes(compiled: Any) -> int:
    """Temporary device memory of a compiled program; 0 where the back end does not tell."""
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
