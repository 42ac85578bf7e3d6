"""`ModelRunner.update_params`: new weights in a running engine, by reference or copied, and weights that do not fit."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jpaged import SamplingParams
from jpaged.engine.engine import Engine, StepError
from jpaged.errors import EngineError, ModelLoadError
from jpaged.loading import LoadedModel
from jpaged.loading.updates import EngineWeights, prepare
from jpaged.models.spec import WeightLayout
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


def leaves_of(runner, params):
    loaded = LoadedModel(SPEC, {}, WeightLayout(), np.dtype(np.float32), {}, {}, None, "live arrays")
    return prepare(params, EngineWeights.of(loaded, CONFIG, runner.weight_slots, runner.first_device))()


def update(runner, params):
    return runner.update_params(leaves_of(runner, params))


def answers(engine):
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
    done = {}
    while engine.has_work:
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    return [(done[str(i)].token_ids, done[str(i)].logprobs) for i in range(len(PROMPTS))]


def pointers(params):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]


def test_answers_are_those_of_a_fresh_engine_on_the_new_weights(runner, old, new):
    fresh = ModelRunner.create(SPEC, new, CONFIG)
    expected = answers(Engine(fresh))
    fresh.close()
    engine = Engine(runner)
    before = answers(engine)
    result = engine.update_weights(leaves_of(runner, new))
    assert answers(engine) == expected != before
    assert pointers(runner.params) == pointers(new)
    assert (result.version, result.num_by_reference, result.copied_bytes) == (1, result.num_leaves, 0)
    assert result.num_leaves == len(jax.tree.leaves(new))
    engine.update_weights(leaves_of(runner, old))
    assert answers(engine) == before
    assert engine.stats().compiles_after_ready == 0


def with_leaf(params, name, leaf):
    return params | {name: leaf}


def on(leaf, kind="device", device=0):
    return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(jax.devices()[device], memory_kind=kind))


def column_major(leaf):
    return jax.device_put(leaf, Format(Layout(major_to_minor=(1, 0)), leaf.sharding))


def in_bfloat16(leaf):
    return jax.device_put(np.asarray(leaf).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "change",
    [
        lambda leaf: on(leaf, "pinned_host"), lambda leaf: on(leaf, device=1), column_major, in_bfloat16,
    ],
    ids=["memory", "device", "layout", "dtype"],
)  # fmt: skip
def test_an_array_that_the_programs_do_not_accept_is_copied(runner, old, new, change):
    tree = with_leaf(new, "embed", change(new["embed"]))
    if tree["embed"].dtype != np.float32:
        tree = jax.tree.map(in_bfloat16, new)
    result = update(runner, tree)
    copied = len(jax.tree.leaves(tree)) if tree["embed"].dtype != np.float32 else 1
    assert result.num_leaves - result.num_by_reference == copied
    expected = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)
    jax.tree.map(np.testing.assert_array_equal, dict(runner.params), expected)
    update(runner, old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {name: leaf for name, leaf in p.items() if name != "embed"}, r"params\.embed is missing"),
        (lambda p: with_leaf(p, "lm_head", p["embed"]), r"params\.lm_head .* is not a parameter of a model"),
        (lambda p: with_leaf(p, "final_norm", jnp.ones(65)), r"params\.final_norm has shape \[65\], the config calls"),
        (lambda p: with_leaf(p, "final_norm", np.ones(64, np.float32)), "is a ndarray, not a JAX array"),
        (lambda p: with_leaf(p, "layers", p["layers"][:1]), "has 1 layers, the config calls for 2"),
    ],
    ids=["missing", "unknown", "shape", "host array", "layers"],
)
def test_weights_that_do_not_fit_are_refused(runner, old, new, change, message):
    held = runner.params
    with pytest.raises(ModelLoadError, match=message):
        update(runner, change(new))
    assert runner.params is held
    assert runner.weights_problem() is None


def donated(tree):
    """The tree after an optimiser's step, which deletes the arrays of the tree before."""
    return jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5, tree), donate_argnums=0)(tree)


def test_donated_weights_are_never_used(runner, old, new):
    """Not by waiting, running or new requests. The next update repairs it."""
    engine = Engine(runner)
    expected = answers(engine)
    trained = jax.tree.map(jnp.copy, new)
    engine.update_weights(leaves_of(runner, trained))
    for number in range(CONFIG.max_num_seqs + 2):  # the last two wait
        engine.add_request(str(number), {"prompt_token_ids": [*PROMPTS[0], number]}, GREEDY)
    engine.step()
    engine.step()
    after = donated(trained)
    with pytest.raises(StepError, match=r"the weights were deleted, .* call update_weights") as caught:
        engine.step()
    assert len(caught.value.request_ids) == CONFIG.max_num_seqs + 2
    assert not engine.has_work
    engine.check_integrity()
    with pytest.raises(EngineError, match="the weights were deleted"):
        engine.add_request("new", {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    with pytest.raises(ModelLoadError, match="has been deleted"):
        engine.update_weights(leaves_of(runner, trained))
    engine.update_weights(leaves_of(runner, after))
    assert answers(engine) != expected
    engine.update_weights(leaves_of(runner, old))
    assert answers(engine) == expected


def test_half_an_update_is_never_served(runner, old, new):
    engine = Engine(runner)
    expected = answers(engine)
    engine.add_request("runs", {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    engine.step()
    engine.flush()
    leaves = leaves_of(runner, new)

    def fails():
        raise RuntimeError("the last leaf")

    with pytest.raises(RuntimeError, match="the last leaf"):
        engine.update_weights([*leaves[:-1], dataclasses.replace(leaves[-1], make=fails)])
    for _ in range(2):
        with pytest.raises(EngineError, match="only a part of them was replaced"):
            engine.add_request("new", {"prompt_token_ids": PROMPTS[0]}, GREEDY)
        with pytest.raises(ModelLoadError, match="1 arrays of the model are missing"):
            engine.update_weights(leaves[:-1])
    with pytest.raises(StepError, match="only a part of them was replaced"):
        engine.step()
    engine.update_weights(leaves_of(runner, old))
    assert answers(engine) == expected


def test_old_weights_are_freed_before_new_ones_are_made(runner, old, new):
    """Leaf by leaf: at most one leaf more than the model has is alive."""
    update(runner, jax.tree.map(jnp.copy, old))
    alive = [weakref.ref(leaf) for leaf in jax.tree.leaves(runner.params)]
    counts = []

    def counting(leaf):
        def make():
            counts.append(sum(ref() is not None for ref in alive))
            return leaf.make()

        return dataclasses.replace(leaf, make=make)

    gc.collect()
    runner.update_params([counting(leaf) for leaf in leaves_of(runner, new)])
    assert counts == list(range(len(alive) - 1, -1, -1))
    update(runner, old)


def test_a_closed_runner_takes_no_weights(old):
    runner = ModelRunner.create(SPEC, old, CONFIG)
    leaves = leaves_of(runner, old)
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.update_params(leaves)


def test_discarded_live_arrays_stay_and_the_runner_holds_no_reference(runner, old, new):
    """The trainer frees its arrays by dropping them. Arrays of another shape are refused all the same."""
    update(runner, old)
    expected = answers(Engine(runner))
    lent = jax.tree.map(jnp.copy, new)
    refs = [weakref.ref(leaf) for leaf in jax.tree.leaves(lent)]
    update(runner, lent)
    runner.release(discard=True)
    assert "discarded" in runner.weights_problem()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(lent))
    del lent
    gc.collect()
    assert not any(ref() for ref in refs)
    with pytest.raises(ModelLoadError, match=r"final_norm"):
        update(runner, with_leaf(old, "final_norm", jnp.ones(2)))
    runner.restore(weights=True, kv_cache=True)
    assert "discarded" in runner.weights_problem()
    update(runner, old)
    assert answers(Engine(runner)) == expected
