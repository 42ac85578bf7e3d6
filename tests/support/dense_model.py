"""Log-probabilities of whole sequences, computed by a model without pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.loading import LoadedModel
from jpaged.models.decoder import decode, dense_causal_attend, lm_head
from jpaged.models.spec import WeightLayout
from tests.golden.checkpoints import NUM_TOKENS, PROMPT_LENGTHS

LENGTH = max(PROMPT_LENGTHS) + NUM_TOKENS


# A program runs only once or twice: without optimisation it compiles in half the time.
@functools.partial(
    jax.jit, static_argnames=("spec", "layout"), compiler_options={"xla_backend_optimization_level": 0}
)
def padded_log_probabilities(params, ids, positions, rope_lens, *, spec, layout):
    """float32[batch, length, vocab] of sequences padded on the right."""
    shape = jnp.zeros(ids.shape, jnp.int32)
    hidden, *_ = decode(
        spec, params, ids.ravel(), positions.ravel(), [None] * spec.num_layers, shape, dense_causal_attend,
        layout=layout, rope_lens=rope_lens.ravel(),
    )  # fmt: skip
    return jax.nn.log_softmax(lm_head(spec, params, hidden, layout=layout)).reshape(*ids.shape, -1)


def log_probabilities(spec, params, ids: np.ndarray) -> np.ndarray:
    """float32[batch, length, vocab] of token ids int[batch, length]. params: in the default layout."""
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return np.asarray(
        padded_log_probabilities(params, ids, positions, positions + 1, spec=spec, layout=WeightLayout())
    )


def answer_log_probabilities(model: LoadedModel, answers: list[dict]) -> list[np.ndarray]:
    """For each answer float32[NUM_TOKENS, vocab]: log-probabilities of the vocabulary before each of its tokens."""
    ids = np.zeros((len(answers), LENGTH), np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
    starts = np.array([len(answer["prompt"]) for answer in answers])
    for row, answer in zip(ids, answers, strict=True):
        sequence = answer["prompt"] + answer["tokens"]
        row[: len(sequence)] = sequence

    def run(rope_lens):
        return np.asarray(
            padded_log_probabilities(model.params, ids, positions, rope_lens, spec=model.spec, layout=model.layout)
        )

    rope = model.spec.rope
    if rope is not None and rope.scaling == "longrope":
        # Transformers recomputes a sequence when it outgrows the trained length
        grown = positions[..., None] >= rope.original_max_position
        logprobs = np.where(grown, run(np.full_like(ids, LENGTH)), run(np.ones_like(ids)))
    else:
        logprobs = run(np.maximum(starts[:, None], positions + 1))
    return [row[start - 1 : start - 1 + NUM_TOKENS] for row, start in zip(logprobs, starts, strict=True)]
