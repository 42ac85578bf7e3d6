"""write_kv for CPUs: calls the kernel of `write_qkv/cpu_kernel.py`, as write_qkv does, through XLA's FFI."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import FLOATS, KVPages
from pallas_kernels.native import library
from pallas_kernels.native.kinds import KINDS
from pallas_kernels.raw_qkv import RawQKV

# indices of the int32 options; EPS has the bits of a float32
KIND, PAGE_KIND, FLAGS, EPS = range(4)
BIAS, NORM, ROPE = 1, 2, 4  # bits of FLAGS
KERNEL = "pallas_kernels.write_qkv.cpu_kernel"


def kernel() -> library.Native:
    """The kernel in this process. Compiled or loaded at the first call."""
    return library.native(KERNEL, _check)


def write_kv(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    slot_mapping: Int[Array, " tokens"],
) -> KVPages:
    """See `pallas_kernels.write_kv`. Latent pages, 8-bit pages, and processors without the kernel use a scatter."""
    name = kernel().name
    if name is None or v is None or pages.dtype not in FLOATS:
        # in JAX 0.10, a scatter into 16-bit pages converts all pages to float32 and back
        return pages.scatter(k, v, slot_mapping)
    with_queries = jnp.stack([k, k, v], axis=2)  # the kernel needs a query head; its result is unused
    return call_kernel(name, pages, RawQKV(with_queries), slot_mapping)[1]


def _check(name: str) -> None:
    """Compare the kernel with float64 in numpy, at trace time. Raises ValueError. XLA would take 2.5 s to compile."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(32)[:11].astype(np.int32)
    slots[4] = -1  # padding
    with jax.ensure_compile_time_eval():
        for dtype, limit in ((jnp.float32, 1e-5), (jnp.bfloat16, 4e-2)):
            qkv, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((11, 2, 5, 48), (2, 5, 48)))
            angles, weights = rng.uniform(0, 6, (11, 16)).astype(np.float32), np.full(48, 1.5, dtype)
            pages = KVPages(jnp.zeros((4, 2, 2, 8, 48), dtype))
            arrays = (qkv, bias, np.cos(angles), np.sin(angles), weights, weights)
            raw = RawQKV(*map(jnp.asarray, arrays), norm_eps=1e-6)
            q, pages = call_kernel(name, pages, raw, jnp.asarray(slots))
            expected = _in_float64(qkv, bias, angles, 1.5)
            stored = np.zeros((32, 2, 2, 48))  # slot, KV head, key or value
            stored[slots[slots >= 0]] = expected[slots >= 0, :, 3:]
            expected[4] = 0
            data = np.asarray(pages.data, np.float64).transpose(0, 3, 2, 1, 4).reshape(stored.shape)
            pairs = ((np.asarray(q, np.float64), expected[:, :, :3].reshape(q.shape)), (data, stored))
            error = max(float((np.abs(own - wanted) / np.maximum(1, np.abs(wanted))).max()) for own, wanted in pairs)
            if not error <= limit:  # also if it is NaN
                raise ValueError(f"queries, keys and values of {jnp.dtype(dtype)} differ from float64 by {error:.2g}")


def _in_float64(qkv: np.ndarray, bias: np.ndarray, angles: np.ndarray, weight: float) -> np.ndarray:
    """qkv plus bias. Queries and keys have norm, and rotation of the first 2 * half numbers."""
    out = qkv.astype(np.float64) + bias.astype(np.float64)
    x, half = out[:, :, :-1], angles.shape[1]
    x *= weight / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    cos, sin = (f(angles.astype(np.float64))[:, None, None] for f in (np.cos, np.sin))
    first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
    x[..., :half], x[..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
    return out


def call_kernel(
    name: str, pages: KVPages, raw: RawQKV, slot_mapping: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens q_heads head_dim"], KVPages]:
    """Call the kernel. name: of `kernel`. Other arguments and results are those of `write_qkv`."""
    qkv = raw.qkv
    tokens, kv_heads, lanes, head_dim = qkv.shape
    options = np.zeros(4, np.int32)
    options[KIND], options[PAGE_KIND] = KINDS[qkv.dtype], KINDS[pages.dtype]
    options[FLAGS] = BIAS * (raw.bias is not None) + NORM * (raw.q_norm is not None) + ROPE * (raw.cos is not None)
    options[EPS : EPS + 1] = np.array([raw.norm_eps], np.float32).view(np.int32)
    whole = pages.data if pages.whole is None else pages.whole
    shapes = [
        jax.ShapeDtypeStruct((tokens, kv_heads * (lanes - 2), head_dim), qkv.dtype),
        jax.ShapeDtypeStruct(whole.shape, pages.dtype),
    ]
    call = jax.ffi.ffi_call(name, shapes, input_output_aliases={8: 1})
    arrays = [
        (raw.bias, jnp.float32), (raw.cos, jnp.float32), (raw.sin, jnp.float32),
        (raw.q_norm, qkv.dtype), (raw.k_norm, qkv.dtype),
    ]  # fmt: skip
    given = [np.zeros((1, 1), np.float32) if array is None else array.astype(dtype) for array, dtype in arrays]
    q, data = call(options, qkv, slot_mapping, *given, whole)
    return q, pages.with_data(data)
