"""Updates with the arrays of a trainer's mesh: by reference, or moved with at most one leaf of extra memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.errors import EngineError
from jpaged.loading import load_model
from tests.support.live_trees import IN, OUT, RULES, buffers, on_mesh, split, update_and_count
from tests.support.random_requests import OPTIONS, answers, workload

SHORT = OPTIONS | {"max_model_len": 256}
# Rules of another trainer, under which no matrix of a layer is where the engine wants it
OTHER = {name: IN if rule == OUT else OUT for name, rule in RULES.items()} | {"qkv": PartitionSpec(None, None, "model")}


def mesh_of(count):
    return jax.make_mesh((count,), ("model",), devices=jax.devices()[:count])


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(EngineConfig(model=checkpoint, dtype="float32"))


@pytest.fixture(scope="module")
def new(model):
    """The weights after a step of a trainer."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: leaf + 0.02 * rng.standard_normal(leaf.shape, np.float32), model.params)


def engine_buffers(llm):
    return [buffers(leaf) for tree in llm.engine.runner.stage_params for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_arrays_of_the_mesh_are_swapped_by_reference(model, new):
    mesh, (prompts, params) = mesh_of(2), workload(8, seed=1)
    first, second = (on_mesh(split(model.spec, tree), mesh, RULES) for tree in (model.params, new))
    with LLM(model.spec, params=second, **SHORT, tensor_parallel_size=2) as llm:
        wanted = answers(llm.generate(prompts, params, use_tqdm=False))
    with LLM(model.spec, params=first, **SHORT, tensor_parallel_size=2) as llm:
        before = answers(llm.generate(prompts, params, use_tqdm=False))
        assert before != wanted
        for version, tree, answer in (("new", second, wanted), ("old", first, before)):
            update = llm.update_weights(tree, version=version)
            assert (update.num_by_reference, update.copied_bytes) == (update.num_leaves, 0)
            assert sorted(engine_buffers(llm)) == sorted(buffers(leaf) for leaf in jax.tree.leaves(tree))
            assert answers(llm.generate(prompts, params, use_tqdm=False)) == answer
        assert llm.stats().compiles_after_ready == 0


@pytest.mark.slow
def test_an_optimiser_donates_the_arrays_of_its_mesh(model, new):
    """The engine has other array objects for the same buffers, and notices that they are gone."""
    mesh, greedy = mesh_of(2), SamplingParams(temperature=0, max_tokens=4)
    own = jax.tree.map(jnp.copy, model.params)  # `device_put` shares buffers of replicated arrays
    params = on_mesh(split(model.spec, own), mesh, RULES)
    step = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0.5, params), donate_argnums=0)
    with LLM(model.spec, params=params, **SHORT, tensor_parallel_size=2) as llm:
        for _ in range(2):
            llm.generate([[5, 6, 7]], greedy, use_tqdm=False)
            params = step(params)
            with pytest.raises(EngineError, match="the weights were deleted"):
                llm.generate([[5, 6, 7]], greedy, use_tqdm=False)
            update = llm.update_weights(params)
            assert update.num_by_reference == update.num_leaves


@pytest.mark.slow
def test_moved_arrays_need_the_memory_of_one_leaf(model, new, checkpoint):
    """On 8 devices, from a trainer that splits every matrix along its other axis; with repeated KV heads."""
    prompts, params = workload(6, seed=2)
    mesh, sizes = mesh_of(8), {"tensor_parallel_size": 8}
    trees = [on_mesh(tree, mesh, OTHER) for tree in (model.params, new, model.params)]
    with LLM(checkpoint, **SHORT, **sizes) as llm:
        wanted = answers(llm.generate(prompts, params, use_tqdm=False))
    with LLM(model.spec, params=trees[0], **SHORT, **sizes) as llm:
        found = [answers(llm.generate(prompts, params, use_tqdm=False))]
        arrays = [leaf for tree in llm.engine.runner.stage_params for leaf in jax.tree.leaves(tree)]
        largest = max(sum(shard.data.nbytes for shard in leaf.addressable_shards) for leaf in arrays)
        del arrays
        for tree in trees[1:]:
            update, counted = update_and_count(llm, tree)
            assert len(counted) == update.num_leaves
            assert max(counted)[0] <= largest, max(counted)
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == wanted
    assert found[1] != wanted
    assert found[2] == wanted


@pytest.mark.slow
def test_a_checkpoint_on_two_stages_takes_a_trainers_arrays(checkpoint, model, new):
    """The embedding and the lm_head by reference: each is needed by one stage, which has the devices of the arrays."""
    prompts, params = workload(6, seed=4)
    mesh = mesh_of(2)
    with LLM(model.spec, params=new, **SHORT) as llm:
        wanted = answers(llm.generate(prompts, params, use_tqdm=False))
    with LLM(checkpoint, mesh=mesh, **SHORT, pipeline_parallel_size=2) as llm:
        for tree in (on_mesh(new, mesh, {}), new):
            llm.update_weights(tree)
            assert answers(llm.generate(prompts, params, use_tqdm=False)) == wanted
        stages = [jax.device_put(new["embed"], jax.devices()[0]), jax.device_put(new["lm_head"], jax.devices()[1])]
        update = llm.update_weights(new | dict(zip(("embed", "lm_head"), stages, strict=True)))
        first, last = llm.engine.runner.stage_params
        assert buffers(first["embed"]) == buffers(stages[0])
        assert buffers(last["lm_head"]) == buffers(stages[1])
        assert update.num_by_reference >= 2
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == wanted


@pytest.mark.slow
def test_an_update_of_another_layout_and_mesh(checkpoint, model, new):
    """An engine with fused matrices gets separate ones of a mesh with Explicit axes, and those of other devices."""
    prompts, params = workload(6, seed=5)
    with LLM(checkpoint, **SHORT, tensor_parallel_size=4) as llm:
        llm.update_weights(new)
        wanted = answers(llm.generate(prompts, params, use_tqdm=False))
        elsewhere = jax.make_mesh((2,), ("model",), devices=jax.devices()[5:7])
        for tree in (
            on_mesh(new, elsewhere, OTHER),
            on_mesh(split(model.spec, new), mesh_of(4), RULES),
            on_mesh(split(model.spec, new, turn=True), elsewhere, RULES, turn=True),
        ):
            llm.update_weights(jax.tree.map(jnp.zeros_like, model.params))
            llm.update_weights(tree)
            assert answers(llm.generate(prompts, params, use_tqdm=False)) == wanted
