"""The program table: finite, small, and with a program for every plan that an engine can make."""

import dataclasses
import os
import time
from unittest import mock

import jax
import pytest

from jpaged.engine.step_plan import SamplerVariant
from jpaged.models.spec import DecoderSpec, QKNorm
from jpaged.runtime.compile.program_table import Program, ProgramTable
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.output_programs import PoolShape, SampleShape, ScoreShape
from jpaged.runtime.step.program_shapes import DECODE, MAX_PROGRAMS, MAX_STEP_PROGRAMS, kind_of, smallest_bucket
from tests.runtime.plans import make_plan, shapes_of


def rows_of(shape):
    """Rows of a program; tokens of a `score` program."""
    return shape.tokens if isinstance(shape, ScoreShape) else shape.rows


def table(*sizes, **options):
    nothing = jax.jit(lambda: 0).lower().compile()
    return ProgramTable.compile(shapes_of(*sizes, **options), lambda shape: nothing, progress=False)


@pytest.mark.parametrize(
    ("seqs", "tokens"), [(1, 1), (1, 64), (3, 100), (8, 8), (32, 512), (100, 777), (256, 2048), (1024, 8192)]
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_at_most_24_programs_and_one_for_every_plan(seqs, tokens, on_gpu):
    programs = table(seqs, tokens, on_gpu=on_gpu)
    shapes = [p.shape for p in programs.programs]
    assert len(set(shapes)) == len(shapes) <= MAX_STEP_PROGRAMS + 2 * on_gpu < MAX_PROGRAMS
    assert all(rows_of(shape) >= 8 for shape in shapes)
    for decodes in {1, seqs // 2, seqs} - {0}:
        assert programs.forward(make_plan(decodes, 0)).shape.is_decode
        for variant in SamplerVariant:
            sampler = programs.sampler(decodes, variant).shape
            assert sampler.variant is variant
            assert sampler.rows >= decodes
    for decodes, chunk in ((0, 1), (0, tokens), (min(seqs, tokens) - 1, 1), (seqs - 1, tokens - seqs + 1)):
        if chunk >= 1:
            shape = programs.forward(make_plan(decodes, chunk)).shape
            assert not shape.is_decode
            assert shape.tokens >= decodes + chunk
            assert shape.rows >= decodes + 1


def test_the_smallest_sufficient_program_is_chosen():
    programs = table(32, 512)
    assert programs.forward(make_plan(8, 0)).shape == ForwardShape(True, 8, 8, 16)
    for tokens in (32, 64, 128, 256, 512):
        assert programs.forward(make_plan(3, tokens - 3)).shape.tokens == tokens
    assert programs.sampler(8, SamplerVariant.GREEDY).shape == SampleShape(8, SamplerVariant.GREEDY)
    assert programs.sampler(9, SamplerVariant.RANDOM).shape.rows == 16
    assert programs.sampler(9, SamplerVariant.FULL).shape.rows == 32


def test_a_gpu_has_more_programs_for_many_decodes():
    """And no more of other kinds."""
    ours, others = shapes_of(256, 2048, on_gpu=True), shapes_of(256, 2048)
    assert [shape.rows for shape in ours if kind_of(shape) == DECODE] == [8, 32, 64, 128, 192, 256]
    assert [shape for shape in ours if shape in others] == others
    for same in ((100, 2048, {}), (256, 2048, {"row_buckets": [16]}), (256, 2048, {"pools": True})):
        assert shapes_of(*same[:2], on_gpu=True, **same[2]) == shapes_of(*same[:2], **same[2])
    odd = [shape.rows for shape in shapes_of(200, 2048, on_gpu=True) if kind_of(shape) == DECODE]
    assert odd == [8, 32, 64, 128, 160, 200]


def test_a_model_that_pools_has_no_decodes():
    programs = table(32, 512, pools=True)
    assert not any(program.shape.is_decode for program in programs.forwards)
    assert programs.samplers == []
    assert programs.scorer is None
    assert programs.pooler(3).shape == PoolShape(8)


def test_tiny_models_get_larger_buckets_on_cpu():
    """Norms over fewer than 4,096 elements give other bits. Hidden size 64 needs 64 rows, 512 and more need 8."""
    spec = DecoderSpec(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position=64,
    )  # fmt: skip
    assert smallest_bucket(spec, "cpu") == 64
    assert smallest_bucket(spec, "gpu") == 8
    assert smallest_bucket(dataclasses.replace(spec, hidden_size=320), "cpu") == 16
    assert smallest_bucket(dataclasses.replace(spec, hidden_size=512), "cpu") == 8
    assert smallest_bucket(dataclasses.replace(spec, hidden_size=512, qk_norm=QKNorm.HEAD), "cpu") == 128
    assert {rows_of(shape) for shape in shapes_of(3, 64, smallest=64)} == {64}


def test_buckets_named_by_the_caller():
    assert set(shapes_of(8, 64, row_buckets=(8,), token_buckets=(64,))) == {
        ForwardShape(True, 8, 8, 16), ForwardShape(False, 64, 8, 16), *(SampleShape(8, v) for v in SamplerVariant),
        ScoreShape(8),
    }  # fmt: skip
    with pytest.raises(ValueError, match="no program"):
        table(8, 64).forward(make_plan(0, 65))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_stops_compiling_of_the_remaining_programs(error):
    """Ctrl-C while compiling must not wait for the whole table."""
    shapes = shapes_of(256, 2048)
    started = []

    def compile_one(shape):
        started.append(shape)
        if len(started) == 1:
            raise error
        time.sleep(0.2)
        raise AssertionError("not reached: the first one raises")

    with pytest.raises(error):
        ProgramTable.compile(shapes, compile_one, progress=False)
    assert len(started) <= 2 * (os.cpu_count() or 1) < len(shapes)


def test_a_verify_program_runs_only_with_its_sample_programs():
    """While programs are added, a step takes the larger verify program that is complete, not the smaller one."""
    nothing = jax.jit(lambda: 0).lower().compile()
    shapes = shapes_of(32, 512, drafts=3)
    checks = [shape for shape in shapes if isinstance(shape, SampleShape) and shape.checks]
    missing = [shape for shape in checks if shape.rows == min(map(rows_of, checks))]
    compiled = [shape for shape in shapes if shape not in missing]
    programs = ProgramTable.compile(compiled, lambda shape: nothing, progress=False, missing=missing)
    plan = dataclasses.replace(make_plan(2, 0), drafts=mock.Mock())
    sizes = []
    for shape in [None, *missing]:
        if shape is not None:
            programs.add(Program(shape, nothing, 0, 0))
        tokens = programs.forward(plan).shape.tokens
        assert tokens == programs.sampler(tokens, SamplerVariant.FULL, checks=True).shape.rows
        sizes.append(tokens)
    assert sizes[-1] == min(sizes) < sizes[0]
