"""Drafts of random rows agree with what the target's sampler draws from the same logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.step_plan import SamplerVariant
from jpaged.runtime.drafting.choose import choose_drafts, draft_uniforms
from jpaged.runtime.sampling.sampler import SamplerOptions, sample_tokens
from jpaged.runtime.state import row_values
from tests.support.row_inits import make_row

ROWS, VOCAB = 400, 600
# share of the drafts that agree: rows without limits are exact, and with limits nearly
LEAST = [
    ({}, 1.0), ({"top_p": 0.9}, 0.9), ({"top_k": 5}, 0.99), ({"min_p": 0.05}, 0.95),
    ({"top_k": 40, "top_p": 0.95}, 0.9), ({"top_k": 6, "top_p": 0.8}, 0.9),
    ({"temperature": 0.0}, 1.0), ({"temperature": 1e4, "top_k": 1}, 1.0),
]  # fmt: skip


@functools.cache
def compiled():
    def both(logits, fields, positions):
        expected = sample_tokens(
            logits, fields, positions, None, variant=SamplerVariant.RANDOM, options=SamplerOptions(0)
        )
        uniforms = draft_uniforms(fields, positions - 1, 2, SamplerVariant.RANDOM)[:, 1]
        drafts = choose_drafts(
            logits, fields, positions, uniforms, vocab=VOCAB - 10, variant=SamplerVariant.RANDOM,
            options=SamplerOptions(0),
        )  # fmt: skip
        return expected.token_ids, drafts

    return jax.jit(both)


@pytest.mark.parametrize(("limits", "least"), LEAST)
def test_drafts_agree_with_the_sampler(limits, least):
    logits = np.random.default_rng(0).standard_normal((ROWS, VOCAB)) * 4
    logits[:, VOCAB - 10 :] = -np.inf  # ids that only the drafter has
    sampling = {"temperature": 0.8, "seed": 5} | limits
    fields = np.tile(row_values(make_row(0, 0, 1, np.zeros((0, 3), np.int32), **sampling)), (ROWS, 1))
    expected, drafts = compiled()(jnp.asarray(logits, jnp.float32), jnp.asarray(fields), jnp.arange(ROWS))
    assert np.mean(np.asarray(expected) == np.asarray(drafts)) >= least


def test_broken_logits_still_give_an_id():
    logits = np.full((ROWS, VOCAB), np.nan)
    fields = np.tile(row_values(make_row(0, 0, 1, np.zeros((0, 3), np.int32), temperature=1.0)), (ROWS, 1))
    drafts = np.asarray(compiled()(jnp.asarray(logits, jnp.float32), jnp.asarray(fields), jnp.arange(ROWS))[1])
    assert ((drafts >= 0) & (drafts < VOCAB)).all()
