"""A dispatched step, and the download of its result.

Called by: `ModelRunner.collect`.
Owns: nothing. A `StepHandle` has arrays on the device.
Never: starts a program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jpaged.engine.step_plan import ExpertLoad, StepPlan, StepResult
from jpaged.runtime.sampling.sampler import unpack
from jpaged.runtime.step.batch import ForwardShape


@dataclasses.dataclass(frozen=True)
class StepHandle:
    """A dispatched step. Its arrays are on the device, and may still be computed."""

    plan: StepPlan
    counted: jax.Array             # see `step.forward`; ready when the forward pass is done
    # Chunks of the plan's `scored` tokens: `Sampled.packed`, or float32[N, size] if the model pools.
    scores: tuple[jax.Array, ...]
    # Rows that sample or pool, then padding: `Sampled.packed`, or float32[rows, size] if the model pools. None: no row
    # samples, or the plan waits for masks. A verify step has an entry for each token: see `sample_checked`.
    output: jax.Array | None
    checked: jax.Array | None = None  # of a verify step: `Batch.checked`
    # For a draft head: the step's tokens (`StepTokens`) and the captured hidden states. Empty after they were absorbed.
    captured: tuple[()] | tuple[jax.Array, jax.Array] = ()
    max_query_len: int = 1  # of the forward program
    proposed: jax.Array | None = None  # int32[rows of the program, max_drafts]  drafts of a drafter on the device
    routed: jax.Array | None = None    # int16[tokens of the program, layers, top_k]  see `StepResult.routed_experts`

    @classmethod
    def of(
        cls, plan: StepPlan, shape: ForwardShape, result: Any, scores: tuple[jax.Array, ...],
        proposed: jax.Array | None = None, *, routes: bool = False,
    ) -> "StepHandle":  # fmt: skip
        """The handle of a step that has not sampled. result: of its forward program. routes: see `step.forward`."""
        counted, *more = result if isinstance(result, tuple) else (result,)
        checked = more.pop(0) if plan.drafts is not None else None
        routed = more.pop() if routes else None
        return cls(plan, counted, scores, None, checked, tuple(more), shape.max_query_len, proposed, routed)


def download(handle: StepHandle, *, pools: bool, pairs_of_token: int, mask_words: int = 0) -> StepResult:
    """Wait for a step and download its result.

    pools: the model pools. pairs_of_token: (token, expert) pairs per token that are counted; 0: none.
    mask_words: see `unpack`.
    """
    plan, load = handle.plan, None
    routed = None if handle.routed is None else np.asarray(handle.routed)[: plan.total_tokens]
    scored, num_accepted = _joined(handle.scores, plan.scored.shape[1]), None
    host = None if handle.output is None else np.asarray(handle.output)
    if host is not None and plan.drafts is not None:
        host, kept = host[: plan.total_tokens, :-1], host[: plan.total_tokens, -1]
        num_accepted = np.add.reduceat(kept, np.cumsum(plan.num_tokens) - plan.num_tokens) - 1
    elif host is not None:
        host = _spread(host, plan)
    if host is None or pairs_of_token:
        counted = np.asarray(handle.counted)
        if pairs_of_token:
            tokens, busiest = counted.tolist()
            load = ExpertLoad(tokens * pairs_of_token, busiest)
    if pools:
        return StepResult(np.zeros(0, np.int32), pooled=host, pooled_tokens=scored, expert_load=load)
    scores = None if scored is None else unpack(scored)[1]
    if host is None:
        return StepResult(
            np.zeros(len(plan.rows), np.int32), scores=scores, expert_load=load, routed_experts=routed
        )
    token_ids, of, kept_ids = unpack(host, mask_words)
    if of is None:
        return StepResult(
            token_ids, scores=scores, expert_load=load, num_accepted=num_accepted, routed_experts=routed
        )
    return StepResult(
        token_ids, of.logprobs, of.ranks, of.top_ids, of.top_logprobs, kept_ids, scores, expert_load=load,
        num_accepted=num_accepted, routed_experts=routed,
    )  # fmt: skip


def _joined(chunks: Sequence[jax.Array], count: int) -> np.ndarray | None:
    """All chunks, in the order of the plan, without padding. None if there are no chunks."""
    return np.concatenate([np.asarray(chunk) for chunk in chunks])[:count] if chunks else None


def _spread(output: np.ndarray, plan: StepPlan) -> np.ndarray:
    """Outputs of the rows that sample, at their indices in the plan's rows; 0 elsewhere."""
    rows, count = len(plan.rows), plan.num_samples
    if count == rows:
        return output[:rows]
    spread = np.zeros((rows, *output.shape[1:]), output.dtype)
    spread[plan.samples] = output[:count]
    return spread
