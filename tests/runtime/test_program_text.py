"""Memory traffic of a program, counted from its text, compared with numbers worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

from jpaged.runtime.prediction.program_text import Program, array_bytes

TEXT = """HloModule jit_f

%cut (p.0: f32[1000,8], p.1: s32[4]) -> f32[4,8] {
  %p.0 = f32[1000,8]{1,0} parameter(0)
  %p.1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = f32[4,8]{1,0} gather(%p.0, %p.1), offset_dims={1}
}

%put (q.0: bf16[1000,8], q.1: bf16[1,8], q.2: s32[]) -> bf16[1000,8] {
  %q.0 = bf16[1000,8]{1,0} parameter(0)
  %q.1 = bf16[1,8]{1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  ROOT %dus.1 = bf16[1000,8]{1,0} dynamic-update-slice(%q.0, %q.1, %q.2, %q.2)
}

%product (r.0: bf16[16,32], r.1: bf16[64,32]) -> f32[16,64] {
  %r.0 = bf16[16,32]{1,0} parameter(0)
  %r.1 = bf16[64,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[16,64]{1,0} dot(%r.0, %r.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (t: f32[4,8]) -> f32[4,8] {
  %t = f32[4,8]{1,0} parameter(0)
  ROOT %copy.9 = f32[4,8]{1,0} copy(%t)
}

%test (u: f32[4,8]) -> pred[] {
  %u = f32[4,8]{1,0} parameter(0)
  ROOT %c = pred[] constant(true)
}

%small (v: f32[4,8]) -> f32[4,8] {
  ROOT %v = f32[4,8]{1,0} parameter(0)
}

%large (w: f32[4,8]) -> f32[4,8] {
  %w = f32[4,8]{1,0} parameter(0)
  ROOT %copy.8 = f32[4,8]{1,0} copy(%w)
}

ENTRY %main (a: f32[1000,8], b: s32[4], c: bf16[1000,8], d: bf16[16,32], e: bf16[64,32]) -> f32[4,8] {
  %a = f32[1000,8]{1,0} parameter(0), metadata={op_name="a"}
  %b = s32[4]{0} parameter(1)
  %c = bf16[1000,8]{1,0} parameter(2)
  %d = bf16[16,32]{1,0} parameter(3)
  %e = bf16[64,32]{1,0} parameter(4)
  %one = bf16[1,8]{1,0} slice(%c), slice={[0:1], [0:8]}
  %zero = s32[] constant(0)
  %fusion.1 = f32[4,8]{1,0} fusion(%a, %b), kind=kLoop, calls=%cut
  %fusion.2 = bf16[1000,8]{1,0} fusion(%c, %one, %zero), kind=kLoop, calls=%put
  %fusion.3 = f32[16,64]{1,0} fusion(%d, %e), kind=kCustom, calls=%product
  %kernel.1 = (f32[4,8]{1,0}, s32[4]{0}) custom-call(%fusion.1, %b), backend_config={name = "attend"}
  %part = f32[4,8]{1,0} get-tuple-element(%kernel.1), index=0
  %loop = f32[4,8]{1,0} while(%part), condition=%test, body=%body
  %fixed = f32[4,8]{1,0} while(%loop), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %which = pred[] compare(%zero, %zero), direction=EQ
  ROOT %branch = f32[4,8]{1,0} conditional(%which, %loop, %loop), true_computation=%small, false_computation=%large
}
"""


def test_traffic_by_hand():
    program = Program(TEXT)
    every = list(program.traffic())
    traffic = {one.operation.name: (one.read, one.written, one.flops) for one in every}
    assert traffic == {
        "one": (16, 16, 0),
        "fusion.1": (4 * 8 * 4 + 4 * 4, 4 * 8 * 4, 0),  # 4 rows of 1,000, and their indices
        "fusion.2": (16 + 4, 16, 0),                    # one row, in place
        "fusion.3": (2 * (16 + 64) * 32, 4 * 16 * 64, 2 * 16 * 64 * 32),
        "kernel.1": (128 + 16, 128 + 16, 0),
        "copy.9": (128, 128, 0),                        # in the loop of three turns; the other one is left out
        "which": (4 + 4, 1, 0),
        "copy.8": (128, 128, 0),                        # the larger branch
    }
    assert [one.operation.name for one in every].count("copy.9") == 3
    assert program.loops() == ["body"]
    assert [one.kernel for one in program.operations() if one.kernel] == ["attend"]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("f32[]", [4]), ("(s32[2,3]{1,0}, /*index=1*/pred[5]{0})", [24, 5]), ("f8e4m3fn[7]{0}", [7]), ("token[]", [1]),
     ("(bf16[2,4]{1,0:T(8,128)(2,1)S(1)}, bf16[2,4]{1,0:T(8,128)(2,1)})", [0, 16])],
)  # fmt: skip
def test_bytes_of_shapes(shape, sizes):
    assert array_bytes(shape) == sizes


def test_a_transfer_into_fast_memory_is_one_read():
    text = """
ENTRY %main (a: bf16[6,8]) -> bf16[2,8] {
  %a = bf16[6,8]{1,0} parameter(0)
  %cut = ((bf16[6,8]{1,0}), bf16[2,8]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:2], [0:8]}
  ROOT %done = bf16[2,8]{1,0:T(8,128)S(1)} slice-done(%cut)
}
"""
    (one,) = Program(text).traffic()
    assert (one.operation.is_transfer, one.read, one.written) == (True, 2 * 8 * 2, 0)


def test_a_convolution_is_a_product():
    """As XLA writes products on TPU: inside fusions, with axes that only the weights have, and with contracted axes."""
    text = """
%inner (x: bf16[5,6,1,1], w: bf16[3,2,7,6]) -> bf16[5,3,2,7] {
  %x = bf16[5,6,1,1]{1,0,3,2} parameter(0)
  %w = bf16[3,2,7,6]{3,2,1,0} parameter(1)
  ROOT %kept = bf16[5,3,2,7]{0,3,2,1} convolution(%x, %w), window={size=3x2 pad=2_2x1_1}, dim_labels=bf01_01oi->b01f
}

%outer (x.1: bf16[5,6,1,1], w.1: bf16[3,2,7,6]) -> bf16[5,3,2,7] {
  %x.1 = bf16[5,6,1,1]{1,0,3,2} parameter(0)
  %w.1 = bf16[3,2,7,6]{3,2,1,0} parameter(1)
  ROOT %call = bf16[5,3,2,7]{0,3,2,1} fusion(%x.1, %w.1), kind=kOutput, calls=%inner
}

ENTRY %main (a: bf16[5,6,1,1], b: bf16[3,2,7,6], c: bf16[5,3,6], d: bf16[3,6,4]) -> f32[5,1,4] {
  %a = bf16[5,6,1,1]{1,0,3,2} parameter(0)
  %b = bf16[3,2,7,6]{3,2,1,0} parameter(1)
  %c = bf16[5,3,6]{2,1,0} parameter(2)
  %d = bf16[3,6,4]{2,1,0} parameter(3)
  %nested = bf16[5,3,2,7]{0,3,2,1} fusion(%a, %b), kind=kOutput, calls=%outer
  ROOT %summed = f32[5,1,4]{2,1,0} convolution(%c, %d), window={size=3}, dim_labels=b0f_0io->b0f
}
"""
    flops = {one.operation.name: one.flops for one in Program(text).traffic()}
    assert flops == {"nested": 2 * 5 * (3 * 2 * 7) * 6, "summed": 2 * 5 * 4 * (3 * 6)}


def test_a_program_of_this_machine():
    """XLA's own text: one product, and a gather that reads 3 of 100 rows."""

    def f(table, ids, weights):
        return table[ids] @ weights

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in
              (((100, 64), jnp.float32), ((3,), jnp.int32), ((64, 256), jnp.float32))]  # fmt: skip
    traffic = list(Program(jax.jit(f).lower(*shapes).compile().as_text()).traffic())
    least = 4 * (3 * 64 + 64 * 256 + 3 * 256)
    assert least <= sum(one.read + one.written for one in traffic) < 1.5 * least
