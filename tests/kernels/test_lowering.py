"""Every variant of the kernels lowers for its platform, on a machine that has none: what interpret mode accepts and
Triton refuses is found here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import KVPages, paged_attention, write_kv

ROWS, TOKENS, WIDTH, NUM_BLOCKS = 4, 64, 128, 1024
HEADS = {"gqa": (32, 8), "mha": (4, 4), "group-7": (14, 2), "mqa": (8, 1)}


def shapes(heads, head_dim, dtype, block_size, tokens):
    """The arguments of a call, without data."""
    q_heads, kv_heads = HEADS[heads]

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return {
        "q": array((tokens, q_heads, head_dim), dtype),
        "pages": KVPages(array((NUM_BLOCKS, 2, kv_heads, block_size, head_dim), dtype)),
        "block_tables": array((ROWS, WIDTH), np.int32),
        "context_lens": array((ROWS,), np.int32),
        "query_start_loc": array((ROWS + 1,), np.int32),
    }


def lower_for_cuda(call, arguments):
    """The StableHLO of `call` for NVIDIA."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        return jax.jit(call).trace(*arguments.values()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("max_query_len", [1, 32], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(("gqa", 128, "bfloat16", 16), {}, id="llama-3-8b"),
        pytest.param(("gqa", 128, "float32", 16), {"sliding_window": 100}, id="float32-window"),
        pytest.param(("mha", 80, "float16", 32), {"logit_softcap": 30.0}, id="mha-80-float16-softcap"),
        pytest.param(("group-7", 64, "bfloat16", 64), {"sinks": (14,)}, id="group-7-64-sinks"),
        pytest.param(("mqa", 96, "bfloat16", 128), {"alibi_slopes": (8,)}, id="mqa-96-alibi"),
        pytest.param(("mha", 256, "bfloat16", 16), {}, id="mha-256"),
    ],
)
def test_triton_kernels_lower(shape, options, max_query_len):
    tokens = ROWS if max_query_len == 1 else TOKENS
    given = {name: jnp.zeros(value) if isinstance(value, tuple) else value for name, value in options.items()}
    call = functools.partial(
        paged_attention, scale=0.1, max_query_len=max_query_len, implementation="triton", **given
    )
    text = lower_for_cuda(call, shapes(*shape, tokens))
    names = [name for name in ("paged_prefill", "paged_decode_splits", "paged_decode_merge") if name in text]
    expected = {"paged_decode_splits", "paged_decode_merge"} | ({"paged_prefill"} if max_query_len > 1 else set())
    assert set(names) == expected
    assert text.count("custom_call @__gpu$xla.gpu.triton") == len(expected)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [("gqa", 128, "bfloat16"), ("mha", 80, "float32")])
def test_triton_write_lowers(heads, head_dim, dtype):
    given = shapes(heads, head_dim, dtype, 16, TOKENS)
    new = jax.ShapeDtypeStruct((TOKENS, HEADS[heads][1], head_dim), jnp.dtype(dtype))
    slots = jax.ShapeDtypeStruct((TOKENS,), np.int32)
    arguments = {"pages": given["pages"], "k": new, "v": new, "slots": slots}
    text = lower_for_cuda(functools.partial(write_kv, implementation="triton"), arguments)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
