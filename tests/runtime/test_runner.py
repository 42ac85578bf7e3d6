"""The runner on a small random model, compared with a dense forward pass, and at the limits of the packed plan."""

import dataclasses
import re
import sys
import types

import jax
import numpy as np
import pytest

from jpaged.engine.step_plan import RowInit, SamplerVariant, StepPlan
from jpaged.errors import EngineError, ModelLoadError
from jpaged.models.spec import Rope
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.step import result as result_module
from jpaged.runtime.step.batch import ForwardShape, block_updates
from jpaged.runtime.step.output_programs import SampleShape
from jpaged.runtime.store import cache as compile_cache
from tests.support.random_decoder import BLOCK, CONFIG, SPEC, dense_continuation, random_params
from tests.support.row_inits import make_row


@pytest.fixture(scope="module")
def params():
    return random_params()


@pytest.fixture(scope="module")
def runner(params):
    runner = ModelRunner.create(SPEC, params, CONFIG)
    yield runner
    assert runner.compiles_after_ready == 0
    runner.close()


@pytest.fixture(scope="module")
def dense_greedy(params):
    return dense_continuation(SPEC, params)


def with_kv_group(entries):
    """int32[n, 4] of (row, KV group, index, block). Triples without a KV group are in KV group 0."""
    held = [(row, *entry) if len(entry) == 3 else (row, 0, *entry) for row, *entry in entries]
    return np.array(held, np.int32).reshape(-1, 4)


def plan(rows, num_tokens, *, decodes=0, samples=None, prompt=(), updates=(), inits=(), sampler=SamplerVariant.GREEDY):
    return StepPlan(
        rows=np.asarray(rows, np.int32),
        num_tokens=np.asarray(num_tokens, np.int32),
        num_decodes=decodes,
        samples=np.ones(len(rows), bool) if samples is None else np.asarray(samples),
        prompt_tokens=np.asarray(prompt, np.int32),
        block_updates=with_kv_group(updates),
        row_inits=tuple(inits),
        sampler=sampler,
    )


def start(row, blocks, *, computed=0, rope_len=1, **sampling):
    held = np.array([(0, index, block) for index, block in enumerate(blocks)], np.int32)
    return make_row(row, computed, rope_len, held, **sampling)


def tokens_of(runner, handles, index=0):
    return [int(runner.collect(handle).token_ids[index]) for handle in handles]


def test_chunks_and_decodes_agree_with_a_dense_forward_pass(runner, dense_greedy):
    prompt = np.random.default_rng(1).integers(0, SPEC.vocab_size, 41)
    blocks = [9, 3, 30, 7]
    runner.dispatch(plan([5], [20], samples=[False], prompt=prompt[:20], inits=[start(5, blocks[:2], rope_len=41)]))
    handles = [runner.dispatch(plan([5], [21], prompt=prompt[20:], updates=[(5, 2, blocks[2])]))]
    updates = {7: [(5, 3, blocks[3])]}  # position 48 starts the fourth block
    handles += [runner.dispatch(plan([5], [1], decodes=1, updates=updates.get(i, ()))) for i in range(15)]
    assert tokens_of(runner, handles) == dense_greedy(prompt, 16)


def test_a_mixed_step_of_a_decode_and_a_prompt(runner, dense_greedy):
    rng = np.random.default_rng(2)
    first, second = rng.integers(0, SPEC.vocab_size, (2, 17))
    runner.dispatch(plan([0], [16], samples=[False], prompt=first[:16], inits=[start(0, [1, 2])]))
    # one known token, which the host sends instead of the device reading it from the table
    handles = [runner.dispatch(plan([0], [1], prompt=first[16:]))]
    both = runner.dispatch(plan([0, 7], [1, 17], decodes=1, prompt=second, inits=[start(7, [4, 5])]))
    later = runner.dispatch(plan([7, 0], [1, 1], decodes=2))
    assert [*tokens_of(runner, [*handles, both]), tokens_of(runner, [later], 1)[0]] == dense_greedy(first, 3)
    assert [tokens_of(runner, [both], 1)[0], tokens_of(runner, [later])[0]] == dense_greedy(second, 2)


@pytest.mark.parametrize("excess", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_packed_plan_at_its_capacity_and_one_past_it(runner, dense_greedy, excess):
    """If a resume of long rows has more block-table entries than fit, upload_row uploads them first."""
    shape = next(p.shape for p in runner.programs.forwards if not p.shape.is_decode)
    prompt = np.random.default_rng(3).integers(0, SPEC.vocab_size, 30)
    runner.dispatch(plan([0], [30], samples=[False], prompt=prompt[:30], inits=[start(0, [2, 6])]))
    # row 0 again, with its first 16 tokens computed; rows 1 and 2 have block tables that fill the plan
    count = shape.max_updates - 2 + excess
    tables = {1: np.arange(count // 2) % runner.num_blocks, 2: np.arange(count - count // 2) % runner.num_blocks}
    inits = [start(0, [2, 6], computed=16, rope_len=30), *(start(row, table) for row, table in tables.items())]
    step = plan([0, 1, 2], [14, 1, 1], prompt=[*prompt[16:], 7, 7], inits=inits)
    assert len(block_updates(step, runner.memory_plan.limits.width)) == shape.max_updates + excess
    assert tokens_of(runner, [runner.dispatch(step)]) == dense_greedy(prompt, 1)
    held = np.asarray(runner.state.blocks)
    for row, table in tables.items():
        np.testing.assert_array_equal(held[row][: len(table)], table)


@pytest.mark.slow
@pytest.mark.parametrize("excess", [0, 1])
def test_rows_with_block_tables_in_several_kv_groups(excess):
    """Layers with a window of 20, of 9 and without, over one page array. A row starts from blocks in its windows."""
    spec = dataclasses.replace(SPEC, num_layers=3, sliding_window=(20, 9, None))
    params = random_params(spec)
    config = dataclasses.replace(CONFIG, kv_cache_memory_bytes=64 * 2 * BLOCK * 2 * 16 * 4, max_model_len=256)
    runner = ModelRunner.create(spec, params, config)
    assert (runner.windows, runner.num_blocks, len(runner.state.pages)) == ((20, 9, None), 64, 1)
    dense = dense_continuation(spec, params)
    prompt = np.random.default_rng(5).integers(0, spec.vocab_size, 70)
    tables = np.arange(15).reshape(3, 5)[:, ::-1] * 3 + 1  # no two KV groups share a block
    blocks = np.array([(g, i, tables[g, i]) for g in range(3) for i in range(3)], np.int32)
    first = RowInit(5, 0, 70, blocks, 0.0, 0)
    runner.dispatch(plan([5], [40], samples=[False], prompt=prompt[:40], inits=[first]))
    updates = [(5, g, i, tables[g, i]) for g in range(3) for i in (3, 4)]
    handles = [runner.dispatch(plan([5], [30], prompt=prompt[40:], updates=updates))]
    handles += [runner.dispatch(plan([5], [1], decodes=1)) for _ in range(3)]
    assert tokens_of(runner, handles) == dense(prompt, 4)
    # Row 6 shares 64 tokens. Token 64 sees the 19 tokens before it in KV group 0 (blocks 2 and 3), and 8 in KV group 1
    # (block 3). Other rows fill the plan, or exceed it by one entry.
    held = [(g, i, tables[g, i]) for g in range(3) for i in range((2, 3, 0)[g], 4)]
    held += [(g, 4, 50 + g) for g in range(3)]
    shape = next(p.shape for p in runner.programs.forwards if not p.shape.is_decode)
    assert shape.max_updates == 3 * (64 // 16 + shape.rows) + 64
    count = shape.max_updates - len(held) + excess
    others = {
        row: np.array([(k // 16, k % 16, 53 + (row + k) % 11) for k in range(min(48, count - 48 * row))], np.int32)
        for row in range(-(-count // 48))
    }
    assert len(others) <= 6  # rows 0 to 5; row 5 restarts
    inits = [RowInit(row, 0, 1, blocks, 0.0, 0) for row, blocks in others.items()]
    inits.append(RowInit(6, 64, 70, np.array(held, np.int32), 0.0, 0))
    rows = [init.row for init in inits]
    step = plan(rows, [1] * len(others) + [6], prompt=[7] * len(others) + prompt[64:].tolist(), inits=inits)
    assert len(block_updates(step, 16)) == shape.max_updates + excess
    tables_before = np.asarray(runner.state.blocks)[6].copy()
    assert [tokens_of(runner, [runner.dispatch(step)], len(others))[0]] == dense(prompt, 1)
    now = np.asarray(runner.state.blocks)
    for row, blocks in others.items():
        np.testing.assert_array_equal(now[row][blocks[:, 0] * 16 + blocks[:, 1]], blocks[:, 2])
    assert now[6][0] == now[6][1] == tables_before[0] == 0  # entries outside the windows have not changed
    assert runner.compiles_after_ready == 0
    runner.close()


def test_a_rows_samples_do_not_depend_on_other_rows(runner):
    rng = np.random.default_rng(4)
    prompts = rng.integers(0, SPEC.vocab_size, (4, 12))
    sampling = {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 99}

    def run(row, company):
        ids = [row, *company]
        inits = [start(r, [10 + r], rope_len=12, **(sampling if r == row else {})) for r in ids]
        order = prompts[[0, *range(1, len(ids))]].ravel()
        handles = [
            runner.dispatch(plan(ids, [12] * len(ids), prompt=order, inits=inits, sampler=SamplerVariant.FULL)),
            *(runner.dispatch(plan(ids, [1] * len(ids), decodes=len(ids), sampler=SamplerVariant.FULL)) for _ in "abc"),
        ]
        results = [runner.collect(handle) for handle in handles]
        return [int(r.token_ids[0]) for r in results], [float(r.logprobs[0]) for r in results]

    alone = run(0, [])
    assert run(0, [1, 2, 3]) == alone
    assert run(6, [3, 4]) == alone


def test_a_runner_serves_after_a_failed_step(runner, dense_greedy, monkeypatch):
    prompt = [1, 2, 3]
    program = runner.programs.forward(plan([0], [3], prompt=prompt, inits=[start(0, [1])]))

    def fail(params, state, packed):
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # as after a failure of a program with donated state
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.programs, "forward", lambda _: dataclasses.replace(program, run=fail))
        with pytest.raises(EngineError, match="out of memory"):
            runner.dispatch(plan([0], [3], prompt=prompt, inits=[start(0, [1])]))
    handle = runner.dispatch(plan([0], [3], prompt=prompt, inits=[start(0, [1])]))
    assert tokens_of(runner, [handle]) == dense_greedy(prompt, 1)


def test_with_dynamic_rope_only_short_prompts_share_kv(params):
    runner = object.__new__(ModelRunner)
    runner.spec = dataclasses.replace(SPEC, rope=Rope(scaling="dynamic", factor=2.0, original_max_position=64))
    assert runner.prefix_cacheable(64)
    assert not runner.prefix_cacheable(65)
    runner.spec = SPEC
    assert runner.prefix_cacheable(2000)


def test_a_start_reports_one_count_of_programs_and_a_closed_runner_raises(params, caplog, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # the bar is for terminals
    with caplog.at_level("DEBUG", logger="jpaged"):
        runner = ModelRunner.create(SPEC, params, CONFIG, progress=True)
    count = len(runner.programs.programs)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if " programs exist " in record.msg]
    ((level, line),) = said
    read = sum(program.from_cache for program in runner.programs.programs)
    assert level == "INFO"
    counts = f"{count - read} compiled, {read} read from the cache"
    assert re.fullmatch(rf"all {count} programs exist after .* s: {counts}", line)
    (table,) = [record for record in caplog.records if record.getMessage().startswith("programs:\n")]
    assert table.levelname == "DEBUG"
    assert len(table.getMessage().splitlines()) == 2 + count  # a line before, the table's head, each program
    assert table.getMessage().count("read from the cache") == read
    assert f"0/{count} " in capsys.readouterr().err  # the progress bar
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.dispatch(plan([0], [1], prompt=[1], inits=[start(0, [1])]))
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(params))  # the weights are the caller's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_implementation": "cuda"}, "attention_implementation='cuda'"),
        ({"attention_implementation": "mosaic_prefill"}, "for NVIDIA's Hopper .*, not for a CPU; leave it out"),
        ({"max_logprobs": -2}, "max_logprobs=-2"),
        ({"max_model_len": 4096}, "at most 2048"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"block_size": 24}, "block_size=24"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 80}, "max_num_batched_tokens=64"),
        ({"kv_cache_memory_bytes": 200_000, "max_model_len": 2048}, "lower max_model_len to at most 384"),
        ({"kv_cache_memory_bytes": 100}, "not one block"),
    ],
)
def test_impossible_options_are_refused(params, options, message):
    with pytest.raises(ModelLoadError, match=message):
        ModelRunner.create(SPEC, params, dataclasses.replace(CONFIG, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
def test_a_callers_jax_settings_change_nothing(params, dense_greedy):
    """With a trainer's settings the tokens are the same, and the settings stay as they were."""
    prompt = [3, 1, 4, 1, 5]
    sampled = {}
    for threefry in (True, False):
        with (
            jax.enable_x64(True),
            jax.numpy_rank_promotion("raise"),
            jax.numpy_dtype_promotion("strict"),
            jax.threefry_partitionable(threefry),
            jax.debug_nans(True),
            jax.transfer_guard("disallow"),
        ):
            before = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_compilation_cache_dir")}
            runner = ModelRunner.create(SPEC, params, CONFIG)
            greedy = runner.dispatch(plan([0], [5], prompt=prompt, inits=[start(0, [1])]))
            random = start(1, [2], temperature=2.0, seed=8)
            drawn = runner.dispatch(plan([1], [5], prompt=prompt, inits=[random], sampler=SamplerVariant.FULL))
            tokens, sampled[threefry] = tokens_of(runner, [greedy]), tokens_of(runner, [drawn])
            runner.close()
            assert before == {name: getattr(jax.config, name) for name in before}
        assert tokens == dense_greedy(prompt, 1)
    assert sampled[True] == sampled[False]


def test_a_cache_folder_that_cannot_be_written(params, tmp_path, monkeypatch, caplog):
    file = tmp_path / "file"
    file.write_text("")
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(ModelLoadError, match=r"compilation_cache_dir=.*cannot be written"):
        ModelRunner.create(SPEC, params, dataclasses.replace(CONFIG, compilation_cache_dir=str(file / "inside")))
    assert jax.config.jax_compilation_cache_dir == before
    # The default folder is optional: without it, every start compiles its programs.
    monkeypatch.setattr(compile_cache, "default_folder", lambda: file / "inside")
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with compile_cache.persistent_cache(None) as folder:
            assert folder is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "not kept for the next start" in caplog.text


@pytest.mark.parametrize("variant", SamplerVariant, ids=lambda variant: variant.name)
def test_a_step_uploads_one_array_and_downloads_one(runner, monkeypatch, variant):
    """Counted at the calls of programs, and where results become numpy arrays. Mixed steps and decodes.

    A step calls two programs. The forward program takes plain tuples: dicts and dataclasses cost 38 us in every step.
    """
    uploads, downloads, calls = [], [], []

    def counted(program):
        def run(*arguments):
            calls.append(type(program.shape))
            if isinstance(program.shape, ForwardShape):
                weights, state, _ = arguments
                assert type(weights) is type(state) is tuple
                assert all(isinstance(leaf, jax.Array) for leaf in weights)
            uploads.extend(leaf for leaf in jax.tree.leaves(arguments) if not isinstance(leaf, jax.Array))
            return program.run(*arguments)

        return dataclasses.replace(program, run=run)

    def as_array(value, *arguments):
        if isinstance(value, jax.Array):
            downloads.append(value)
        return np.asarray(value, *arguments)

    monkeypatch.setattr(runner.programs, "forwards", [counted(each) for each in runner.programs.forwards])
    monkeypatch.setattr(runner.programs, "samplers", [counted(each) for each in runner.programs.samplers])
    monkeypatch.setattr(result_module, "np", types.SimpleNamespace(**vars(np) | {"asarray": as_array}))
    monkeypatch.setattr(runner, "_start_download", downloads.append)
    sampling = {"temperature": 1.0, "logprobs": variant is SamplerVariant.FULL}
    for step in (
        plan([2, 5], [3, 4], prompt=range(7), inits=[start(2, [1], **sampling), start(5, [2])], sampler=variant),
        plan([2, 5], [1, 1], decodes=2, sampler=variant),
    ):
        uploads.clear()
        downloads.clear()
        calls.clear()
        result = runner.collect(runner.dispatch(step))
        assert calls == [ForwardShape, SampleShape]
        assert len(uploads) == 1
        started, *read = downloads
        assert len(jax.tree.leaves(started)) == len(read) == 1
        assert read[0] is jax.tree.leaves(started)[0]
        assert (result.logprobs is not None) == (variant is SamplerVariant.FULL)
