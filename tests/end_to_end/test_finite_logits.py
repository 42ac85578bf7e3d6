"""NaN and infinite logits: refused at the start. Later, only the request that has them ends."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, ModelLoadError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import LogitsError
from jpaged.loading.updates import copies
from jpaged.models.spec import param_shapes
from tests.support.tiny_engine import FULL, make_runner, sampling_programs

BAD = 7  # the token whose embedding is NaN
SPEC = dataclasses.replace(FULL, tie_embeddings=False)


@pytest.mark.parametrize("value", [pytest.param(np.nan, marks=pytest.mark.slow), np.inf])
@pytest.mark.parametrize("runner", ["generate", pytest.param("pooling", marks=pytest.mark.slow)])
def test_weights_that_are_not_finite_are_refused_at_the_start(runner: str, value: float):
    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(shape.shape, value if "norm" in str(path[-1]) else 0.1, shape.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, param_shapes(FULL, jnp.float32))
    options = {"max_num_seqs": 1, "max_model_len": 32, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1 << 20}
    refused = pytest.raises(ModelLoadError, match="live arrays: the model's logits are not finite")
    with sampling_programs(SamplerVariant.GREEDY), refused:
        LLM(FULL, params=params, runner=runner, **options)


@pytest.fixture(scope="module")
def runner() -> Any:
    runner = make_runner(SPEC, swap_space=0.0)
    embed = runner.params["embed"]
    runner.update_params(copies([runner.params | {"embed": embed.at[BAD].set(jnp.nan)}], runner.weight_slots))
    yield runner
    runner.close()


def run(runner: Any, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Any]:
    engine = Engine(runner)
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    finals = {}
    while engine.has_work:
        finals |= {output.request_id: output for output in engine.step()}
    assert engine.stats().used_blocks == 0
    assert engine.stats().compiles_after_ready == 0
    return finals


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 0, "logprobs": 2}, {"beam_width": 2}],
    ids=["greedy", "random", "full", "beam"],
)
def test_only_the_request_with_such_logits_ends(runner: Any, params: dict[str, Any]):
    beam = "beam_width" in params
    asked = SamplingParams(**({"use_beam_search": True, "n": 2, "temperature": 0} if beam else params), max_tokens=8)
    good = {f"good {i}": ([i + 20, i + 30, 3], dataclasses.replace(asked, ignore_eos=True)) for i in range(2)}
    bad = {f"bad {i}": ([5, BAD, i], asked) for i in range(2)}
    alone = run(runner, good)
    outputs = run(runner, bad | good)
    again = run(runner, good)  # in blocks that held NaN
    for name in good:
        tokens = [each.token_ids for each in alone[name].outputs]
        assert [each.token_ids for each in outputs[name].outputs] == tokens
        assert [each.token_ids for each in again[name].outputs] == tokens
    for name in bad:
        for answer in outputs[name].outputs:
            assert (answer.finish_reason, answer.token_ids) == ("error", [])
            assert beam or answer.stop_reason == LogitsError.message
