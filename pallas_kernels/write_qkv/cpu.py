"""write_qkv for CPUs: calls the kernel of `cpu_kernel.py` through XLA's foreign function interface."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import FLOATS, KVPages
from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.write_qkv import xla

# indices of the int32 options; EPS has the bits of a float32
KIND, PAGE_KIND, FLAGS, EPS = range(4)
BIAS, NORM, ROPE = 1, 2, 4  # bits of FLAGS
KERNEL = "pallas_kernels.write_qkv.cpu_kernel"


def write_qkv(
    pages: KVPages,
    qkv: Float[Array, "tokens kv_heads q_per_kv_plus_2 head_dim"],
    slot_mapping: Int[Array, " tokens"],
    bias: Float[Array, "kv_heads q_per_kv_plus_2 head_dim"] | None,
    cos: Float[Array, "tokens half"] | None,
    sin: Float[Array, "tokens half"] | None,
    q_norm: Float[Array, " head_dim"] | None,
    k_norm: Float[Array, " head_dim"] | None,
    *,
    norm_eps: float,
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """See `pallas_kernels.write_qkv`. Pages of 8 bits, and processors without the kernel, take XLA operations.

    The queries of padding tokens are zero.
    """
    name = library.native(KERNEL).name
    if name is None or pages.dtype not in FLOATS:
        return xla.write_qkv(
            pages, qkv, slot_mapping, bias, cos, sin, q_norm, k_norm, norm_eps=norm_eps, write=KVPages.scatter
        )
    tokens, kv_heads, lanes, head_dim = qkv.shape
    options = np.zeros(4, np.int32)
    options[KIND], options[PAGE_KIND] = KINDS[qkv.dtype], KINDS[pages.dtype]
    options[FLAGS] = BIAS * (bias is not None) + NORM * (q_norm is not None) + ROPE * (cos is not None)
    options[EPS : EPS + 1] = np.array([norm_eps], np.float32).view(np.int32)
    shapes = [
        jax.ShapeDtypeStruct((tokens, kv_heads * (lanes - 2), head_dim), qkv.dtype),
        jax.ShapeDtypeStruct(pages.data.shape, pages.dtype),
    ]
    call = jax.ffi.ffi_call(name, shapes, input_output_aliases={8: 1})
    arrays = [(bias, jnp.float32), (cos, jnp.float32), (sin, jnp.float32), (q_norm, qkv.dtype), (k_norm, qkv.dtype)]
    given = [np.zeros((1, 1), np.float32) if array is None else array.astype(dtype) for array, dtype in arrays]
    q, data = call(options, qkv, slot_mapping, *given, pages.data)
    return q, dataclasses.replace(pages, data=data)
