"""Tokens of verify steps have the model's distribution, whatever the drafts are: chi-square over 50,000 draws.

The model is a table of random logits for each prefix of up to two tokens. Each row draws three tokens, with the drafts
of one drafter. Drafters know the row's distributions, and the perfect one the tokens that plain steps sample.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jpaged import SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.models.spec import WeightLayout
from jpaged.runtime.sampling.sampler import SamplerOptions
from jpaged.runtime.state import Field, row_values
from jpaged.runtime.step import output_programs
from tests.sampling.sampling_oracle import distribution
from tests.support.random_decoder import SPEC
from tests.support.row_inits import make_row

VOCAB, LENGTH, DRAFTS = 8, 3, 2
ROWS, CALLS = 10_000, 5  # 50,000 draws; the default tests make one call
NO_DRAFT = -1
LEAST_EXPECTED = 5  # draws of a cell of the chi-square test; rarer cells are counted together
LEAST_CHANCE = 1e-4  # of the test's result, if the distribution is right. Seeds are fixed: a test that passes stays so
LOGITS = [
    np.random.default_rng(n).standard_normal((VOCAB,) * (n + 1)).astype(np.float32) * 1.5 for n in range(LENGTH)
]  # LOGITS[n][tokens]: after n tokens
SAMPLING = [
    {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9},
]  # fmt: skip
DRAFTERS = ["perfect", "least likely", "most likely", "random", "other seed", "none"]


def probabilities(sampling):
    """float64 arrays as LOGITS, with the probabilities that the definitions of the parameters give."""
    params = SamplingParams(**sampling)
    return [
        np.array([distribution(row, params=params).probs for row in logits.reshape(-1, VOCAB)]).reshape(logits.shape)
        for logits in LOGITS
    ]


@functools.cache
def compiled(rule="equal"):
    """`sample_checked` for 3 tokens per row, over logits in place of hidden states.

    rule: "likely" replaces each sample by the draft after it if the draft has a probability above 0.1.
    """

    def step(table, logits, checked):
        def lm_head(spec, params, hidden, index, slots, layout, shards):
            return jnp.take(hidden, index, axis=0, mode="clip")

        def likely(logits, *others):
            sampled, (_, offsets, drafts) = choose(logits, *others), checked
            after = jnp.where(jnp.pad(offsets[1:], (0, 1)) > 0, jnp.pad(drafts[1:], (0, 1)), NO_DRAFT)
            chance = jnp.take_along_axis(jax.nn.softmax(logits), after[:, None], axis=1)[:, 0]
            return sampled.replace(token_ids=jnp.where((after >= 0) & (chance > 0.1), after, sampled.token_ids))

        with pytest.MonkeyPatch.context() as patch:
            choose = output_programs._choose
            patch.setattr(output_programs, "_lm_head", lm_head)
            if rule == "likely":
                patch.setattr(output_programs, "_choose", likely)
            table, _, packed = output_programs.sample_checked(
                {}, None, table, None, logits, checked, max_drafts=DRAFTS, spec=SPEC, layout=WeightLayout(),
                variant=SamplerVariant.RANDOM, options=SamplerOptions(0),
            )  # fmt: skip
        return table, packed

    return jax.jit(step, donate_argnums=0)


def draft(drafter, tokens, probs, plain, rng):
    """Drafts for the token after each prefix, int[rows]. tokens: int[rows, n]. plain: the plain tokens after them."""
    likely = probs[tokens.shape[1]][tuple(tokens.T)]
    likely = np.broadcast_to(likely, (len(tokens), VOCAB))
    match drafter:
        case "perfect":
            return plain
        case "least likely":
            return likely.argmin(axis=1)
        case "most likely":
            return likely.argmax(axis=1)
        case "random":
            return rng.integers(0, VOCAB, len(tokens))
        case "other seed":
            return np.minimum((rng.random((len(tokens), 1)) > np.cumsum(likely, axis=1)).sum(axis=1), VOCAB - 1)
        case "none":
            return np.full(len(tokens), NO_DRAFT)


def drawn(drafter, sampling, seed, plain=None, rule="equal"):
    """Draw three tokens for each of ROWS rows with verify steps. Returns int[ROWS, 3], and the mean of accepted drafts.

    plain: the tokens that the rows get without drafts.
    """
    rng, probs = np.random.default_rng(seed), probabilities(sampling)
    table = np.tile(row_values(make_row(0, 4, 5, np.zeros((0, 3), np.int32), **sampling)), (ROWS, 1))
    table[:, [Field.SEED_LOW, Field.SEED_HIGH]] = rng.integers(-(2**31), 2**31, (ROWS, 2))
    table, tokens, accepted = jnp.asarray(table), np.full((ROWS, 2 * LENGTH), -1), 0
    known = np.zeros(ROWS, int)
    while known.min() < LENGTH:
        # a row's prefix, and its drafts. Rows with three tokens go on, and their further tokens do not count
        drafts = np.full((ROWS, DRAFTS), NO_DRAFT)
        logits = np.zeros((ROWS, 1 + DRAFTS, VOCAB), np.float32)
        for count in range(LENGTH):
            prefix = np.where(known == count)[0]
            followed = tokens[prefix, :count]
            for place in range(LENGTH - count):
                logits[prefix, place] = LOGITS[count + place][tuple(followed.T)]
                if place < DRAFTS and count + place < LENGTH:
                    wanted = None if plain is None else plain[prefix, count + place]
                    drafts[prefix, place] = draft(drafter, followed, probs, wanted, rng)
                    followed = np.column_stack([followed, drafts[prefix, place].clip(0)])
        checked = np.stack([
            np.repeat(np.arange(ROWS), 1 + DRAFTS), np.tile(np.arange(1 + DRAFTS), ROWS),
            np.column_stack([np.full(ROWS, NO_DRAFT), drafts]).ravel(),
        ]).astype(np.int32)  # fmt: skip
        table, packed = compiled(rule)(table, jnp.asarray(logits.reshape(-1, VOCAB)), jnp.asarray(checked))
        sampled, kept = np.asarray(packed).reshape(ROWS, 1 + DRAFTS, 2).transpose(2, 0, 1)
        count, active = kept.sum(axis=1), known < LENGTH
        assert (kept == (np.arange(1 + DRAFTS) < count[:, None])).all()
        for place in range(1 + DRAFTS):
            rows = np.where(active & (place < count))[0]
            tokens[rows, known[rows] + place] = sampled[rows, place]
        known[active] += count[active]
        accepted += (count - 1)[active].sum()
    assert (np.asarray(table)[:, Field.LENGTH] >= 4 + LENGTH).all()
    return tokens[:, :LENGTH], accepted / ROWS


def chance_of(tokens, probs):
    """Chance of counts that deviate as much, for the first token, the first two and all three. tokens: int[N, 3]."""
    joint, chances = np.ones(()), []
    for count in range(1, LENGTH + 1):
        joint = joint[..., None] * probs[count - 1]
        found = np.bincount(np.ravel_multi_index(tuple(tokens[:, :count].T), joint.shape), minlength=joint.size)
        expected = joint.ravel() * len(tokens)
        assert not found[expected == 0].any()  # a filter has dropped them
        often = expected >= LEAST_EXPECTED
        found, expected = (np.append(x[often], x[~often].sum()) for x in (found, expected))
        found, expected = found[expected > 0], expected[expected > 0]
        chances.append(chi2.sf(((found - expected) ** 2 / expected).sum(), len(expected) - 1))
    return chances


def draws(drafter, sampling, calls=CALLS, rule="equal"):
    """Tokens, int[calls * ROWS, 3], and the mean number of accepted drafts."""
    parts = []
    for seed in range(calls):
        plain = drawn("none", sampling, seed)[0] if drafter == "perfect" else None
        parts.append(drawn(drafter, sampling, seed, plain, rule))
    return np.concatenate([tokens for tokens, _ in parts]), np.mean([accepted for _, accepted in parts])


def check(drafter, sampling, calls):
    tokens, accepted = draws(drafter, sampling, calls)
    assert min(chance_of(tokens, probabilities(sampling))) > LEAST_CHANCE
    assert (accepted == 0) == (drafter == "none" or (drafter == "least likely" and len(sampling) > 1))
    assert (accepted == DRAFTS) == (drafter == "perfect")


def test_three_tokens_have_the_distribution_of_the_model():
    check("most likely", SAMPLING[-1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_leaves_the_distribution_alone(drafter, sampling):
    check(drafter, sampling, CALLS)


def test_a_wrong_rule_is_found():
    """Drafts that are accepted because the model gives them a probability above 0.1."""
    tokens, _ = draws("most likely", SAMPLING[0], 1, rule="likely")
    assert max(chance_of(tokens, probabilities(SAMPLING[0]))) < 1e-100
