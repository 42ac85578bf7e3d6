"""The other half of a step: from the hidden states that the forward pass left to what the host is given.

A head takes the tokens that somebody wants something of, a place for each: their logits, and a token sampled from
them, which goes into the request table for the next step. A model that pools gives `decoder.lm_head` of the token.

It is a program of its own, because a forward program costs seconds to compile and a head little: each is compiled once
a shape, not once a pair. A step whose prompts go on samples nothing, and then has no head; and where what may be
sampled follows from the token before (a grammar), the host finds out while the forward pass runs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.models import decoder
from jpaged.models.spec import DecoderSpec, WeightLayout
from jpaged.runtime.sampler import Sampled, SamplerOptions, describe, sample
from jpaged.runtime.state import DeviceState, Field, SamplingState

# Leaves of the parameter tree that `decoder.lm_head` reads.
HEAD_PARAMS = ("final_norm", "final_norm_bias", "project_out", "score", "lm_head", "embed")


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Shapes of one compiled head: a key of the program table."""

    rows: int                       # places
    variant: SamplerVariant | None  # None: it pools, or scores
    scores: bool = False            # it says how likely known tokens are

    def __str__(self) -> str:
        if self.variant is not None:
            return f"sample {self.variant.name.lower()} {self.rows} rows"
        return f"{'score' if self.scores else 'pool'} {self.rows} {'tokens' if self.scores else 'rows'}"


def head_params(spec: DecoderSpec, params: Any) -> Any:
    """The part of a parameter tree that a head reads: fewer arguments a call."""
    tied = spec.tie_embeddings and not spec.pools
    return {name: params[name] for name in HEAD_PARAMS if name in params and (name != "embed" or tied)}


def pack_places(plan: StepPlan, shape: HeadShape) -> np.ndarray:
    """int32[2, shape.rows]: for each row that samples its row of the table (-1: padding), and whose hidden state."""
    ends = np.cumsum(plan.num_tokens, dtype=np.int32) - 1
    first_fork = len(plan.rows) - len(plan.forked_from)
    ends[first_fork:] = ends[plan.forked_from]
    packed = np.full((2, shape.rows), -1, np.int32)
    count = np.count_nonzero(plan.samples)
    packed[0, :count] = plan.rows[plan.samples]
    packed[1, :count] = ends[plan.samples]
    return packed


def apply_head(
    params: Any,
    allowed: Bool[Array, " vocab"] | None,
    table: Int[Array, "table_rows num_fields"],
    sampling: SamplingState,
    hidden: Float[Array, "tokens hidden"],
    packed: Int[Array, "2 rows"],
    *,
    spec: DecoderSpec,
    layout: WeightLayout,
    shape: HeadShape,
    options: SamplerOptions,
) -> tuple[Int[Array, "table_rows num_fields"], SamplingState, Sampled | Float[Array, "rows output"]]:
    """The request table and the sampling state with the sampled tokens, and what was sampled; or what was pooled.

    Donate `table` and `sampling`. params: of `head_params`. Places that are padding get something, too, which goes
    nowhere. A shape that scores finds the tokens that are scored where others have rows.
    """
    output = decoder.lm_head(spec, params, jnp.take(hidden, packed[1], axis=0, mode="clip"), layout=layout)
    if shape.scores:
        return table, sampling, describe(output, packed[0], options=options)
    if shape.variant is None:
        return table, sampling, output
    # a negative index would count from the end
    rows = jnp.where(packed[0] < 0, table.shape[0], packed[0])
    fields = jnp.take(table, rows, axis=0, mode="clip")
    extras = None
    if shape.variant is SamplerVariant.FULL:
        extras = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), sampling)
    sampled = sample(
        output, fields, fields[:, Field.LENGTH], allowed, extras, variant=shape.variant, options=options
    )
    if shape.variant is SamplerVariant.FULL:
        sampling = sampling.replace(counts=sampling.counts.at[rows, sampled.token_ids].add(2, mode="drop"))
    return table.at[rows, Field.LAST_TOKEN].set(sampled.token_ids, mode="drop"), sampling, sampled


def compile_head(
    params: Any,
    allowed: Any,
    state: DeviceState,
    *,
    spec: DecoderSpec,
    layout: WeightLayout,
    shape: HeadShape,
    options: SamplerOptions,
    sharding: Any = None,
) -> Any:
    """Compile one program from ShapeDtypeStructs (or arrays).

    It is called with the head's part of the parameters, allowed, the state's table, sampling and hidden, and packed
    places. params: the whole tree.
    """
    call = functools.partial(apply_head, spec=spec, layout=layout, shape=shape, options=options)
    packed = jax.ShapeDtypeStruct((2, shape.rows), np.dtype(np.int32), sharding=sharding)
    # keep_unused: every program of the table takes the same arguments
    jitted = jax.jit(call, donate_argnums=(2, 3), keep_unused=True)
    arguments = (head_params(spec, params), allowed, state.table, state.sampling, state.hidden, packed)
    return jitted.lower(*arguments).compile()
