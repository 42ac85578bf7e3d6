"""The comparison of two models' predictions, against a computation in numpy with float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import cli
from jpaged.config import EngineConfig
from jpaged.divergence import ROWS, divergence
from jpaged.errors import RequestError
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.check import output_after
from jpaged.models.decoder import lm_head
from tests.golden.checkpoints import BY_NAME, write_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[LoadedModel, LoadedModel]:
    """A tiny model, and the same with slightly changed weights."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(BY_NAME["llama"], 0, folder)
    other = load_model(EngineConfig(model=str(folder), dtype="float32"))
    params = dict(other.params)
    params["layers"] = jax.tree.map(lambda leaf: leaf + 0.02 * leaf[..., ::-1], params["layers"])
    return dataclasses.replace(other, params=params), other


def log_probabilities(model: LoadedModel, window: list[int]) -> np.ndarray:
    hidden = output_after(model, window, model.spec.num_layers)
    logits = np.asarray(lm_head(model.spec, model.params, jnp.asarray(hidden)), np.float64)[:-1]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.slow
def test_the_same_as_in_float64(models):
    model, other = models
    vocabulary = model.spec.vocab_size
    windows = [[(3 + 17 * i * i) % vocabulary for i in range(n)] for n in (ROWS + 20, 2, 7)]
    found = divergence(model, other, windows)
    assert len(found.per_token) == ROWS + 19 + 1 + 6
    ours, theirs = (np.concatenate([log_probabilities(one, w) for w in windows]) for one in models)
    expected = (np.exp(theirs) * (theirs - ours)).sum(-1)
    np.testing.assert_allclose(found.per_token, expected, rtol=2e-3, atol=2e-7)
    assert found.mean == pytest.approx(expected.mean(), rel=1e-4)
    assert found.p99 == pytest.approx(np.percentile(expected, 99), rel=1e-3)
    assert found.mean > 1e-4
    assert found.top1_agreement == (ours.argmax(-1) == theirs.argmax(-1)).mean()
    same = divergence(other, other, windows)
    assert same.mean == 0
    assert same.top1_agreement == 1


def test_vocabularies_of_different_sizes(models):
    model, other = models
    smaller = dataclasses.replace(other, spec=dataclasses.replace(other.spec, vocab_size=7))
    with pytest.raises(RequestError, match=r"has a vocabulary of 7 tokens, and .* has .*: name a model with the same"):
        divergence(model, smaller, [[1, 2]])


def test_a_plot_needs_a_second_model(tmp_path, capsys):
    assert cli.main(["bench", "quality", "demo", "--plot", str(tmp_path / "kl.png")]) == 2
    assert "draws a comparison: name a second model with --against" in capsys.readouterr().err
