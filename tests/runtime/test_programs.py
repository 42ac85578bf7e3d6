"""The table of programs: finite, small, and a program for every plan an engine may make."""

import dataclasses
import os
import time

import numpy as np
import pytest

from jpaged.engine.step_plan import SamplerVariant, StepPlan
from jpaged.models.spec import DecoderSpec, QKNorm
from jpaged.runtime.programs import (
    MAX_PROGRAMS,
    MAX_STEP_PROGRAMS,
    Program,
    ProgramTable,
    bucket_shapes,
    smallest_bucket,
)
from jpaged.runtime.step import ProgramShape


def table(max_num_seqs, max_tokens, **options):
    shapes = bucket_shapes(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, block_size=16, **options
    )
    return ProgramTable([Program(shape, lambda: None, 0.0, 0) for shape in shapes])


def make_plan(decodes, chunk, variant):
    rows = decodes + (1 if chunk else 0)
    return StepPlan(
        rows=np.arange(rows, dtype=np.int32),
        num_tokens=np.asarray([1] * decodes + ([chunk] if chunk else []), np.int32),
        num_decodes=decodes,
        samples=np.ones(rows, bool),
        prompt_tokens=np.zeros(chunk, np.int32),
        block_updates=np.zeros((0, 4), np.int32),
        sampler=variant,
    )


@pytest.mark.parametrize(
    ("seqs", "tokens"), [(1, 1), (1, 64), (3, 100), (8, 8), (32, 512), (100, 777), (256, 2048), (1024, 8192)]
)
def test_at_most_24_programs_and_one_for_every_plan(seqs, tokens):
    programs = table(seqs, tokens)
    shapes = [p.shape for p in programs.programs]
    assert len(set(shapes)) == len(shapes) <= MAX_STEP_PROGRAMS < MAX_PROGRAMS
    assert all(shape.rows >= 8 and shape.tokens >= 8 for shape in shapes)
    for variant in SamplerVariant:
        for decodes in {1, seqs // 2, seqs} - {0}:
            program = programs.choose(make_plan(decodes, 0, variant))
            assert program.shape.is_decode
            assert program.shape.variant >= variant
        for decodes, chunk in ((0, 1), (0, tokens), (min(seqs, tokens) - 1, 1), (seqs - 1, tokens - seqs + 1)):
            if chunk >= 1:
                shape = programs.choose(make_plan(decodes, chunk, variant)).shape
                assert not shape.is_decode
                assert shape.tokens >= decodes + chunk
                assert shape.variant >= variant


def test_the_smallest_program_that_fits_is_chosen():
    programs = table(32, 512)
    assert programs.choose(make_plan(8, 0, SamplerVariant.GREEDY)).shape == ProgramShape(
        True, 8, 8, 16, SamplerVariant.GREEDY
    )
    assert programs.choose(make_plan(9, 0, SamplerVariant.FULL)).shape.rows == 16
    for tokens in (64, 128, 256, 512):
        assert programs.choose(make_plan(3, tokens - 3, SamplerVariant.GREEDY)).shape.tokens == tokens


def test_tiny_models_get_larger_buckets_on_cpu():
    """Norms over fewer than 4,096 elements give other bits: hidden 64 needs 64 rows, 512 and more need 8."""
    spec = DecoderSpec(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position=64,
    )  # fmt: skip
    assert smallest_bucket(spec, "cpu") == 64
    assert smallest_bucket(spec, "gpu") == 8
    assert smallest_bucket(dataclasses.replace(spec, hidden_size=320), "cpu") == 16
    assert smallest_bucket(dataclasses.replace(spec, hidden_size=512), "cpu") == 8
    assert smallest_bucket(dataclasses.replace(spec, hidden_size=512, qk_norm=QKNorm.HEAD), "cpu") == 128
    assert {p.shape.rows for p in table(3, 64, smallest=64).programs} == {64}


def test_buckets_that_a_caller_names():
    shapes = [p.shape for p in table(8, 64, row_buckets=(8,), token_buckets=(64,)).programs]
    assert {(s.is_decode, s.tokens, s.variant) for s in shapes} == {
        (decode, tokens, variant)
        for decode, tokens in ((True, 8), (False, 64))
        for variant in (SamplerVariant.GREEDY, SamplerVariant.FULL)
    }
    with pytest.raises(ValueError, match="no program"):
        table(8, 64).choose(make_plan(0, 65, SamplerVariant.GREEDY))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_has_not_begun_is_not_compiled_after_an_error(error):
    """Ctrl-C while compiling must not wait for the whole table."""
    shapes = table(256, 2048)._by_need
    begun = []

    def compile_one(shape: ProgramShape):
        begun.append(shape)
        if len(begun) == 1:
            raise error
        time.sleep(0.2)
        raise AssertionError("not reached: the first one ends it")

    with pytest.raises(error):
        ProgramTable.compile([program.shape for program in shapes], compile_one, progress=False)
    assert len(begun) <= 2 * (os.cpu_count() or 1) < len(shapes)
