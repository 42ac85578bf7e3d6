"""Live arrays of a trainer's mesh: used by reference where they are placed like the engine's, otherwise moved."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged import LLM, LoRARequest, SamplingParams
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, RequestError
from jpaged.loading import load_model
from jpaged.models.resharding import resharded
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.loading.recorded_adapters import recorded
from tests.support.live_trees import IN, OUT, RULES, buffers, on_mesh, split
from tests.support.random_requests import OPTIONS, answers, workload

SHORT = OPTIONS | {"max_model_len": 256}
# Rules of another trainer, under which no matrix of a layer is where the engine wants it
OTHER = {name: IN if rule == OUT else OUT for name, rule in RULES.items()} | {"qkv": PartitionSpec(None, None, "model")}


def mesh_of(count, first=0):
    return jax.make_mesh((count,), ("model",), devices=jax.devices()[first : first + count])


def live(params, spec, devices=None, **options):
    return load_model(EngineConfig(model="live", **options), params, spec, devices=devices)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(EngineConfig(model=checkpoint, dtype="float32"))


@pytest.mark.parametrize("turn", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["out_in", "in_out"])
def test_arrays_that_are_split_like_the_engines_are_used_without_a_copy(model, turn):
    params = on_mesh(split(model.spec, model.params, turn), mesh_of(2), RULES, turn)
    found = live(params, model.spec, tensor_parallel_size=2)
    for mine, engine in zip(jax.tree.leaves(params), jax.tree.leaves(found.params), strict=True):
        assert buffers(mine) == buffers(engine)
        assert engine.sharding.mesh.axis_names == ("context", "tensor")


def assert_equal_trees(found, wanted):
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == other.sharding
        np.testing.assert_array_equal(leaf, other)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)


SIZES = [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}]
COMBINED = [
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 4}, {"prefill_context_parallel_size": 2},
    {"deterministic": True, "tensor_parallel_size": 4},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*(("llama", sizes) for sizes in (*SIZES[1:], *COMBINED)), ("gpt-oss", SIZES[1]), ("deepseek-v3", SIZES[0])],
    ids=str,
)
def test_moved_arrays_are_those_of_the_checkpoint(name, sizes, tmp_path):
    """From one device, from two trainers' meshes, and from other devices. Heads, columns and vocabulary are padded."""
    write_checkpoint(BY_NAME[name], 0, tmp_path)
    on_one = load_model(EngineConfig(model=str(tmp_path), dtype="float32"))
    config = EngineConfig(model=str(tmp_path), dtype="float32", **sizes)
    wanted, count = load_model(config), config.devices_per_engine

    trees = [on_one.params, *(on_mesh(on_one.params, mesh_of(count), rules) for rules in (RULES, OTHER))]
    for params in trees:
        found = live(params, on_one.spec, **sizes)
        assert found.spec == wanted.spec
        assert_equal_trees(found.params, wanted.params)
    there = on_mesh(on_one.params, mesh_of(2, first=6), OTHER)
    assert_equal_trees(live(there, on_one.spec, jax.devices()[:count], **sizes).params, wanted.params)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_answers_are_those_of_the_checkpoint_to_the_bit(checkpoint, model, sizes):
    prompts, params = workload(12, seed=1)
    with LLM(checkpoint, **SHORT, **sizes) as llm:
        wanted = answers(llm.generate(prompts, params, use_tqdm=False))
        count = llm.config.devices_per_engine
    with LLM(model.spec, params=on_mesh(model.params, mesh_of(count), RULES), **SHORT, **sizes) as llm:
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == wanted
        assert llm.stats().compiles_after_ready == 0


@pytest.mark.slow
@pytest.mark.parametrize(("count", "turn"), [(2, True), (4, False)], ids=["2-in_out", "4-out_in"])
def test_separate_matrices_on_several_devices(checkpoint, model, count, turn):
    """By reference with 2 devices. With 4, the 2 KV heads are repeated. Answers have the bits of arrays on one."""
    prompts, params = workload(12, seed=3)
    with LLM(checkpoint, **SHORT, tensor_parallel_size=count) as llm:
        tokens = [answer[0] for answer in answers(llm.generate(prompts, params, use_tqdm=False))]
    found, on_one = [], split(model.spec, model.params, turn)
    for tree in (on_one, on_mesh(on_one, mesh_of(count), RULES, turn)):
        with LLM(model.spec, params=tree, **SHORT, tensor_parallel_size=count) as llm:
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert found[1] == found[0]
    assert [answer[0] for answer in found[0]] == tokens


@pytest.mark.slow
def test_the_devices_of_a_mesh(checkpoint, model):
    """Those of the arrays, in the order of their mesh; and those of `mesh`, for live arrays and for a checkpoint."""
    prompts, params = workload(4, seed=5)
    mesh = Mesh(np.array(jax.devices()[7:3:-1]).reshape(2, 2), ("data", "model"))
    found = []
    for source, options in (
        ({"params": on_mesh(model.params, mesh, RULES)}, {}),
        ({"params": model.params}, {"mesh": mesh}),
        ({}, {"mesh": mesh}),
    ):
        config = model.spec if source else checkpoint
        with LLM(config, **source, **options, **SHORT, tensor_parallel_size=4) as llm:
            devices = [leaf.sharding.mesh.devices.flat for leaf in jax.tree.leaves(llm.engine.runner.params)]
            assert all(list(each) == jax.devices()[7:3:-1] for each in devices)
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert found[1] == found[0]
    assert found[2] == found[0]
    one = mesh_of(1, first=5)
    with LLM(model.spec, params=on_mesh(model.params, mesh, RULES), mesh=one, **SHORT) as llm:
        assert {leaf.device for leaf in jax.tree.leaves(llm.engine.runner.params)} == {jax.devices()[5]}
        llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.runner.state.page_arrays[0][0].device == jax.devices()[5]


@pytest.mark.slow
def test_adapters_of_separate_matrices_are_split(tmp_path):
    record = recorded("llama-patterns")
    write_checkpoint(BY_NAME[record.variant.base], record.values["base_seed"], tmp_path / "model")
    on_one = load_model(EngineConfig(model=str(tmp_path / "model"), dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    adapter = LoRARequest("a", 1, str(record.write(tmp_path / "adapter")))
    tree = on_mesh(split(on_one.spec, on_one.params), mesh_of(4), RULES)  # repeats the KV heads
    options = SHORT | {"max_model_len": 64, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with LLM(on_one.config, params=tree, **options, tensor_parallel_size=4) as llm:
        prompts = [record.values["prompt"]] * 2
        adapted, base = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapter, None])
    assert list(adapted.outputs[0].token_ids) == record.values["tokens"]
    assert list(base.outputs[0].token_ids) == record.values["base_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (16, 24), (8, 64, 512)])
def test_every_way_to_move_an_array(shape):
    """The same devices, the same in another order, some of them, others, and one; each to each. 1 MiB: in slabs."""
    devices = np.array(jax.devices())
    meshes = [Mesh(devices.reshape(4, 2), ("a", "b")), Mesh(devices[::-1].reshape(2, 4), ("a", "b")),
              Mesh(devices[:4].reshape(2, 2), ("a", "b")), Mesh(devices[4:].reshape(4, 1), ("a", "b"))]  # fmt: skip
    specs = [PartitionSpec(*("a", "b")[: len(shape)]), PartitionSpec(), PartitionSpec(*[None, "a"][: len(shape)])]
    shardings = [NamedSharding(mesh, spec) for mesh in meshes for spec in specs]
    shardings += [jax.sharding.SingleDeviceSharding(devices[i]) for i in (0, 6)]
    if len(shape) == 3:
        del shardings[2:3], shardings[5:]
    leaf = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for before in shardings:
        array = jax.device_put(leaf, before)
        for after in shardings:
            moved = resharded(array, after)
            assert moved.sharding == after
            np.testing.assert_array_equal(moved, leaf)
            assert (buffers(moved) == buffers(array)) == before.is_equivalent_to(after, leaf.ndim)


def test_arrays_and_sizes_that_do_not_fit_are_refused(model):
    split_over_4 = on_mesh({"embed": model.params["embed"]}, mesh_of(4), RULES)
    for options, message in [
        ({}, r"on 4 devices, but tensor_parallel_size=1 needs 1: use tensor_parallel_size=4, or pass mesh= with .*"),
        ({"tensor_parallel_size": 2}, "but tensor_parallel_size=2 needs 2: use tensor_parallel_size=4, or pass mesh="),
        ({"pipeline_parallel_size": 2}, "but pipeline_parallel_size=2 needs 2"),
    ]:
        with pytest.raises(ModelLoadError, match=message):
            live(model.params | split_over_4, model.spec, **options)
    apart = model.params | {"embed": jax.device_put(model.params["embed"], jax.devices()[3])}
    with pytest.raises(ModelLoadError, match="on 2 devices, and each is on one: put them on one device, or split them"):
        live(apart, model.spec)
    with pytest.raises(ModelLoadError, match="needs 16 devices, there are 8"):
        live(model.params, model.spec, tensor_parallel_size=16)
    with pytest.raises(ModelLoadError, match="needs live arrays with qkv and gate_up fused"):
        live(split(model.spec, model.params), model.spec, deterministic=True)
    for mesh, options, message in [
        (mesh_of(4), {}, r"has 4 devices, but tensor_parallel_size=1 needs 1: use tensor_parallel_size=4, or pass"),
        (mesh_of(1), {"tensor_parallel_size": 2}, r"has 1 devices, but tensor_parallel_size=2 needs 2: leave it out"),
        ("model", {}, "must be a jax.sharding.Mesh"),
        (mesh_of(2), {"data_parallel_size": 2}, "must be 1 with mesh"),
    ]:
        with pytest.raises(RequestError, match=message):
            LLM(model.spec, params=model.params, mesh=mesh, **options)
