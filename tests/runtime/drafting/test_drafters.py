"""A draft model next to a real target: the programs read the target's state, and a store keeps them."""

import jax
import numpy as np

from jpaged.engine.speculation.model_drafts import DraftRow, ModelDrafts
from jpaged.engine.step_plan import StepPlan
from jpaged.models.spec import WeightLayout
from jpaged.runtime.drafting.draft_model import DraftModelOptions
from jpaged.runtime.drafting.draft_state import DraftSizes, TableColumns
from jpaged.runtime.drafting.drafters import DraftBuild, DraftModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.step.batch import block_updates
from jpaged.runtime.step.draft_shapes import AbsorbShape, ProposeShape
from jpaged.runtime.store.stored_programs import ProgramStore
from pallas_kernels.cpu_kernels import kernels_of_model
from tests.engine.speculation.fake_request import FakeRequest
from tests.support.random_decoder import BLOCK, CONFIG, SPEC, dense_continuation, random_params
from tests.support.row_inits import make_row

K = 3
NO_UPDATES = np.zeros((0, 4), np.int32)


def test_a_draft_model_that_is_the_target_proposes_the_next_tokens(tmp_path):
    params = random_params()
    runner = ModelRunner.create(SPEC, params, CONFIG)
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, SPEC.vocab_size, 30)]
    state = runner.state
    width = state.blocks.shape[1]
    store = ProgramStore.open(tmp_path, "cpu", kernels_of_model(quantized=False, experts=False))
    build = DraftBuild(
        DraftModelOptions(SPEC, WeightLayout(), TableColumns(0, width), "xla_loop", SPEC.vocab_size), params, params,
        state, DraftSizes(runner.num_blocks, BLOCK, 8, is_head=False), np.dtype(np.float32),
        Placement.single(jax.devices()[0]), store=store,
    )  # fmt: skip
    shapes = [AbsorbShape(32, 8, BLOCK), ProposeShape(K, 8, BLOCK)]
    drafter = DraftModel(build, params, {shape: build.compile(shape) for shape in shapes})
    assert len(list((tmp_path / "exported").glob("*_of_arrays-*"))) >= 2, "the programs are stored"

    blocks = [5, 2, 9]
    held = np.array([(0, index, block) for index, block in enumerate(blocks)], np.int32)
    prefill = StepPlan(
        np.array([4], np.int32), np.array([30], np.int32), 0, np.array([True]), np.array(prompt, np.int32),
        NO_UPDATES, row_inits=(make_row(4, 0, 30, held),),
    )  # fmt: skip
    handle = runner.dispatch(prefill)
    request = FakeRequest(prompt, 4)
    drafts = ModelDrafts(block_size=BLOCK, kv_group=1, absorb_tokens=32, absorb_rows=8, max_len=100)
    request.kv.block_tables[1].blocks = blocks
    # the first token is in flight
    plan = StepPlan(
        np.array([4], np.int32), np.array([1 + K], np.int32), 1, np.array([True]), np.zeros(0, np.int32), NO_UPDATES
    )
    draft_plan = drafts.plan([DraftRow(request, K, 1)])
    found = drafter.propose(plan, draft_plan, block_updates(plan, width), runner.state, 8)
    continuation = dense_continuation(SPEC, params)(prompt, 1 + K)
    assert int(runner.collect(handle).token_ids[0]) == continuation[0]
    assert np.asarray(found)[0].tolist() == continuation[1:]
    drafter.release()
    drafter.restore()
    assert not np.asarray(drafter.live.page_arrays[0][0]).any()
    runner.close()
