"""Step plans of given sizes, and the shapes of programs that run them."""

import numpy as np

from jpaged.engine.step_plan import StepPlan
from jpaged.runtime.step.program_shapes import bucket_shapes


def shapes_of(max_num_seqs, max_tokens, **options):
    """Return the program shapes of an engine with blocks of 16 tokens."""
    return bucket_shapes(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, block_size=16, **options)


def make_plan(decodes, chunk):
    """Return a plan with `decodes` decode rows and, unless it is 0, a prompt chunk of `chunk` tokens."""
    rows = decodes + (1 if chunk else 0)
    return StepPlan(
        rows=np.arange(rows, dtype=np.int32),
        num_tokens=np.asarray([1] * decodes + ([chunk] if chunk else []), np.int32),
        num_decodes=decodes,
        samples=np.ones(rows, bool),
        prompt_tokens=np.zeros(chunk, np.int32),
        block_updates=np.zeros((0, 4), np.int32),
    )
