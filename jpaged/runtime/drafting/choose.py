"""Logits of a drafter to drafts: the most likely id of each row.

Called by: the programs that propose.
Owns: the choice of a draft.
Never: draws. A draft is accepted if it equals the target's own sample, so the most likely id is the best draft in rows
of any temperature. At temperature 1 the demo model accepts 36% of the first drafts of its draft model so, and 29% if
the draft model draws with the random number of the target's sampler (docs/decisions.md).
"""

from jaxtyping import Array, Float, Int

from jpaged.runtime.sampling.vocab_search import BLOCK, CANDIDATE_BLOCK, argmax
from pallas_kernels import argmax_rows


def choose_drafts(
    logits: Float[Array, "rows vocab"], vocab: int, num_rows: Int[Array, ""]
) -> Int[Array, " rows"]:
    """One draft for each of the first `num_rows` rows: int32 ids in [0, vocab). All rows have an id in this range.

    vocab: ids of the target; the drafter may have more.
    """

    def by_xla(logits: Array) -> Array:
        return argmax(logits, CANDIDATE_BLOCK if vocab <= 2**14 else BLOCK)[1]

    return argmax_rows(logits, num_rows, width=min(vocab, logits.shape[1]), plain=by_xla)
