"""Every variant of the kernels compiles for an H200, without the card: shared memory fits, pages stay in place."""

import re

import jax
import pytest

from tests.deviceless import H200, marks
from tests.kernels import lowered

pytestmark = marks(H200)


def compile_for_h200(call, arguments, **options):
    sharding = H200.sharding()
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with H200.tracing():
        return jax.jit(call, **options).trace(*placed).lower().compile()


def kernels(program):
    """Names of the kernels in a compiled program."""
    return re.findall(r'name = "(\w+)", num_stages', program.as_text())


@pytest.mark.parametrize("max_query_len", [1, 32], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", lowered.ATTENTION)
def test_attention_compiles(name, max_query_len):
    program = compile_for_h200(*lowered.attention(name, max_query_len, "triton"))
    assert len(kernels(program)) == (2 if max_query_len == 1 else 3)


@pytest.mark.parametrize("name", [*lowered.QKV, *range(len(lowered.WRITES))])
def test_writes_compile_and_stay_in_place(name):
    """The write is one kernel. Input and output pages are the same buffer, and no other operation uses it."""
    if name in lowered.QKV:
        call, arguments = lowered.writing_qkv(name, "triton")
    else:
        call, arguments = lowered.writing(*lowered.WRITES[name], "triton")
    program = compile_for_h200(call, arguments, donate_argnums=0)
    pages = arguments[0]
    memory = program.memory_analysis()
    assert len(kernels(program)) == 1
    changed = pages.num_bytes - (0 if pages.dtype != "float8_e4m3fn" else pages.scales.size * 4)
    assert memory.alias_size_in_bytes >= changed
    assert memory.temp_size_in_bytes < changed // 100
