"""Engines with pipeline stages: the answers of one device, several steps in flight, and no program after ready."""

import jax
import pytest

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.errors import EngineError, ModelLoadError, RequestError
from jpaged.models.spec import Stage
from jpaged.models.stages import stages_of
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.parallel.sameness import check_a_batch_and_the_prefix_cache, check_each_request_alone
from tests.support.random_requests import OPTIONS, answers, workload

CACHED = OPTIONS | {"enable_prefix_caching": True, "max_model_len": 256}


@pytest.fixture(scope="module")
def one(checkpoint):
    with LLM(checkpoint, **CACHED) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(checkpoint):
    with LLM(checkpoint, **CACHED, pipeline_parallel_size=2) as llm:
        yield llm


def test_a_batch_on_two_stages_gives_the_bits_of_one(one, two):
    check_a_batch_and_the_prefix_cache(one, two)


@pytest.mark.codegen
def test_each_request_alone_has_the_bits_of_the_batch(two):
    check_each_request_alone(two)


def front_stage(llm):
    """The first of two stages."""
    (stage,) = llm.engine.runner._front.stages
    return stage


def test_all_stages_have_a_step(two, monkeypatch):
    """A step is collected when two later ones are dispatched, and each has half of the requests."""
    runner, dispatched, rows, depth = two.engine.runner, [], [], []
    dispatch, collect = runner.dispatch, runner.collect

    def count_dispatch(plan):
        dispatched.append(plan)
        rows.append(len(plan.rows))
        return dispatch(plan)

    def count_collect(handle):
        depth.append(len(dispatched) - next(i for i, plan in enumerate(dispatched) if plan is handle.plan))
        return collect(handle)

    monkeypatch.setattr(runner, "dispatch", count_dispatch)
    monkeypatch.setattr(runner, "collect", count_collect)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    two.generate([{"prompt_token_ids": [5, 6, 7 + i]} for i in range(8)], params, use_tqdm=False)
    middle = slice(len(rows) // 4, 3 * len(rows) // 4)
    assert set(depth[middle]) == {3}
    assert set(rows[middle]) == {4}


@pytest.mark.slow
def test_preemption_and_swap_give_the_same_bits(checkpoint, one):
    prompts, params = workload(16, seed=2)
    calm = answers(one.generate(prompts, params, use_tqdm=False))
    block = 2 * 16 * one.spec.num_kv_heads * one.spec.head_dim * 4 * one.spec.num_layers
    # the pool's bytes are of one device, which has half of the layers
    tight = {"kv_cache_memory_bytes": 14 * block // 2, "max_model_len": 200, "swap_space": 64 * block / 2**30}
    with LLM(checkpoint, **OPTIONS | tight, pipeline_parallel_size=2) as small:
        assert answers(small.generate(prompts, params, use_tqdm=False)) == calm
        assert small.stats().preemptions > 0
        assert small.stats().used_blocks == 0
        assert small.engine.runner.host_slots == 64


def test_beams_grammars_penalties_and_prompt_logprobs(one, two):
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 9}
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    of_beams = [[s.tokens for s in llm.beam_search([prompt], beams)[0].sequences] for llm in (one, two)]
    assert of_beams[0] == of_beams[1]
    extras = [
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, logit_bias={9: 20.0}, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=[3, 4, 300], ignore_eos=True),
        SamplingParams(temperature=0.8, n=3, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2),
    ]
    outputs = [llm.generate([prompt] * len(extras), extras, use_tqdm=False) for llm in (one, two)]
    assert answers(outputs[1]) == answers(outputs[0])
    assert outputs[1][-1].prompt_logprobs == outputs[0][-1].prompt_logprobs


@pytest.mark.slow
def test_a_json_schema_on_two_stages_of_two_devices():
    """Masks of a grammar, and forced tokens that are jumped over, on the demo model, which has a tokenizer."""
    schema = {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}
    params = SamplingParams(temperature=0, max_tokens=24, structured_outputs={"json": schema})
    texts = []
    for options in ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}):
        with LLM("demo", **OPTIONS, max_model_len=128, **options) as llm:
            outputs = llm.generate(["Answer:", "Now:", "A"], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert '"name": ' in texts[0][0]


def test_a_stage_that_fails_does_not_end_the_engine(one, two):
    prompts, params = workload(4, seed=3)
    wanted = answers(one.generate(prompts, params, use_tqdm=False))
    for leaf in jax.tree.leaves(front_stage(two).state):
        leaf.delete()
    with pytest.raises(EngineError, match="the device failed a step"):
        two.generate(prompts, params, use_tqdm=False)
    assert answers(two.generate(prompts, params, use_tqdm=False)) == wanted


def test_sleep_and_wake_up(one, two):
    prompts, params = workload(4, seed=4)
    two.sleep()
    assert front_stage(two).state is None
    two.wake_up()
    wanted = answers(one.generate(prompts, params, use_tqdm=False))
    assert answers(two.generate(prompts, params, use_tqdm=False)) == wanted


@pytest.mark.codegen
def test_each_stage_has_its_own_layers_and_sends_one_array(two):
    runner, front = two.engine.runner, front_stage(two)
    layers, hidden = two.spec.num_layers, two.spec.hidden_size
    assert len(front.params["layers"]) == len(front.state.page_arrays) == layers - layers // 2
    assert len(runner.params["layers"]) == len(runner.state.page_arrays) == layers // 2
    assert {"embed"} <= front.params.keys()
    assert not {"final_norm", "lm_head"} & front.params.keys()
    devices = [leaf.devices() for leaf in (front.params["embed"], runner.params["final_norm"])]
    assert not devices[0] & devices[1]
    for program in front.programs.programs:
        results = jax.tree.leaves(program.run.output_shardings)
        assert len(results) == len(jax.tree.leaves(front.state.replace(sampling=None))) + 1
        assert front.state.hidden.size == 0
        assert f"f32[{program.shape.tokens},{hidden}]" in program.run.as_text()


@pytest.mark.slow
def test_windows_and_tied_embeddings_on_three_stages(tmp_path):
    """All families on two stages: benchmarks/parallel_matrix.py."""
    write_checkpoint(next(v for v in VARIANTS if v.name == "gemma3"), 0, tmp_path)
    prompts, params = workload(10, seed=6, longest=60)
    found = []
    for count in (1, 3):
        with LLM(str(tmp_path), **OPTIONS, max_model_len=128, pipeline_parallel_size=count) as llm:
            found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert found[1] == found[0]


@pytest.mark.slow
def test_two_engines_of_two_stages(checkpoint, one):
    prompts, params = workload(12, seed=7)
    with LLM(checkpoint, **CACHED, pipeline_parallel_size=2, data_parallel_size=2) as llm:
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == answers(
            one.generate(prompts, params, use_tqdm=False)
        )


def test_layers_are_divided():
    class Model:
        num_layers = 7

    assert [list(stage.layers) for stage in stages_of(Model, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert stages_of(Model, 1) == (Stage(),)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"pipeline_parallel_size": 0}, RequestError, "must be a number of stages, from 1"),
        ({"pipeline_parallel_size": 8}, ModelLoadError, r"the model has \d layers: use \d or less"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 8}, ModelLoadError, "needs 16 devices, there are 8"),
        ({"pipeline_parallel_size": 2, "kv_handover": True}, RequestError, "is not supported with pipeline"),
        ({"pipeline_parallel_size": 2, "nnodes": 2}, RequestError, "all stages are in one process"),
    ],
)
def test_bad_options_are_refused_before_weights_are_read(options, error, says, checkpoint):
    with pytest.raises(error, match=says):
        LLM(checkpoint, **options)
