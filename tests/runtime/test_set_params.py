"""`ModelRunner.set_params`: new weights in a running engine, and errors for weights that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jpaged import SamplingParams
from jpaged.engine.engine import Engine
from jpaged.errors import EngineError, ModelLoadError
from jpaged.runtime.runner import ModelRunner
from tests.support.random_decoder import CONFIG, SPEC, random_params

# Two prompts begin with the same 20 tokens, so that the second engine call has a prefix hit. Blocks have 16 tokens.
PROMPTS = [[*range(20), *range(40, 40 + length)] for length in (3, 9)] + [[7, 8, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def old():
    return random_params(seed=0)


@pytest.fixture(scope="module")
def new():
    return random_params(seed=1)


@pytest.fixture(scope="module")
def runner(old):
    runner = ModelRunner.create(SPEC, old, CONFIG)
    yield runner
    assert runner.compiles_after_ready == 0
    runner.close()


def answers(engine):
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
    done = {}
    while engine.has_work:
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    return [(done[str(i)].token_ids, done[str(i)].logprobs) for i in range(len(PROMPTS))]


def test_answers_are_those_of_a_fresh_engine_on_the_new_weights(runner, old, new):
    fresh = ModelRunner.create(SPEC, new, CONFIG)
    expected = answers(Engine(fresh))
    fresh.close()
    engine = Engine(runner)
    before = answers(engine)
    runner.set_params(new)
    engine.note_new_weights()
    assert answers(engine) == expected != before
    assert all(a is b for a, b in zip(jax.tree.leaves(runner.params), jax.tree.leaves(new), strict=True))
    runner.set_params(old)
    engine.note_new_weights()
    assert answers(engine) == before
    assert engine.stats().compiles_after_ready == 0


def with_leaf(params, name, leaf):
    return params | {name: leaf}


def in_memory(leaf, kind="pinned_host"):
    (device,) = leaf.devices()
    return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def column_major(leaf):
    return jax.device_put(leaf, Format(Layout(major_to_minor=(1, 0)), leaf.sharding))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {name: leaf for name, leaf in p.items() if name != "embed"}, r"params\['embed'\] is missing: pass"),
        (lambda p: with_leaf(p, "lm_head", p["embed"]), r"params\['lm_head'\] is not a parameter of the model: pass"),
        (
            lambda p: with_leaf(p, "final_norm", jnp.ones(65)),
            r"params\['final_norm'\] is float32\[65\] on .*: must be float32\[64\] on",
        ),
        (
            lambda p: with_leaf(p, "final_norm", p["final_norm"].astype(jnp.bfloat16)),
            r"params\['final_norm'\] is bfloat16\[64\] on .*: must be float32\[64\] on",
        ),
        (
            lambda p: with_leaf(p, "final_norm", np.ones(64, np.float32)),
            r"params\['final_norm'\] is a ndarray: must be a concrete jax.Array, float32\[64\] on",
        ),
        (lambda p: with_leaf(p, "layers", list(p["layers"])), "params has another structure"),
        (lambda p: with_leaf(p, "final_norm", in_memory(p["final_norm"])), "pinned_host memory: must be .* device mem"),
        (lambda p: with_leaf(p, "embed", column_major(p["embed"])), r"params\['embed'\] has the layout .*: must be"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "host array", "structure", "memory", "layout"],
)
def test_weights_that_do_not_fit_are_refused(runner, old, new, change, message):
    held = runner.params
    with pytest.raises(ModelLoadError, match=message):
        runner.set_params(change(new))
    assert runner.params is held


def test_deleted_weights_are_refused(runner, new):
    gone = new["final_norm"].copy()
    gone.delete()
    with pytest.raises(ModelLoadError, match=r"params\['final_norm'\] has been deleted"):
        runner.set_params(with_leaf(new, "final_norm", gone))


def test_traced_weights_are_refused(runner, new):
    with pytest.raises(ModelLoadError, match=r"is a \w*Tracer: must be a concrete jax.Array"):
        jax.jit(runner.set_params)(new)


def test_a_closed_runner_takes_no_weights(old):
    runner = ModelRunner.create(SPEC, old, CONFIG)
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.set_params(old)
