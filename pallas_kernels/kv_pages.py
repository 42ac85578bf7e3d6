"""KVPages: the keys and values of one layer, in pages. Only this module knows their physical layout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, Float, Int

from pallas_kernels.set_rows import set_rows

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
INT8, FP8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)
FP8_LARGEST = 448.0  # of e4m3fn, which has no infinity: larger numbers would become NaN


def page_format(sharding: Any, dimensions: int) -> Any:
    """Memory layout of a page array on the devices of a Sharding: row-major, as the kernels read it.

    TPUs need an explicit layout. For heads narrower than 128, XLA would make the blocks the innermost axis, which needs
    no padding. It would then copy all pages before and after every kernel. Row-major costs the padding: heads of
    64 take the memory of heads of 128.
    """
    device = next(iter(sharding.device_set))
    return Format(Layout(tuple(range(dimensions))), sharding) if device.platform == "tpu" else sharding


def _of_scales(sharding: Any) -> Any:
    """Sharding of fp8 scales [2, kv_heads]: the pages' sharding without the axis of blocks."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "scales", "whole"], meta_fields=["v_dim"])
@dataclasses.dataclass(frozen=True)
class KVPages:
    """KV cache pages of one layer. One array holds keys and values.

    A page is one block: `block_size` tokens of all KV heads, first all keys, then all values, head by head. A page is
    one contiguous read, with a head's keys in the order that a matmul needs.

    int8 pages have one scale per token and KV head, computed when they are written: 1.6% more bytes for heads of 128,
    3.1% for heads of 64. fp8 pages have one static scale per KV head. Latent pages (multi-head latent attention,
    arXiv:2405.04434) have one vector per token; its first `v_dim` numbers are the values as well.
    """

    data: Any                # [num_blocks, 2, kv_heads, block_size, head_dim]; latent pages: 1 instead of 2
    scales: Any = None       # int8: bfloat16[num_blocks, 2, kv_heads, block_size]; fp8: float32[2, kv_heads]
    v_dim: int | None = None # static; latent pages only
    # the array whose numbers `data` shows in another shape (`in_shape`); None: data itself. Native CPU kernels read and
    # write it, because XLA for CPU copies an array that is reshaped for them
    whole: Any = None

    @classmethod
    def shapes(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, *,
        v_dim: int | None = None, sharding: Any = None,
    ) -> "KVPages":  # fmt: skip
        """`create` with ShapeDtypeStructs, to plan and compile without memory. sharding: of the arrays."""
        kind = jnp.dtype(dtype)
        if kind not in (*FLOATS, INT8, FP8):
            raise ValueError(f"dtype={kind}: KV pages hold bfloat16, float16, float32, int8 or float8_e4m3fn")
        for name, value in (
            ("num_blocks", num_blocks), ("block_size", block_size), ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
        ):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if v_dim is not None and not (1 <= v_dim <= head_dim and kind in FLOATS):
            raise ValueError(f"v_dim={v_dim}: must be 1 to head_dim={head_dim}, in pages of 16 or 32 bits, not {kind}")
        shape = (num_blocks, 2 if v_dim is None else 1, num_kv_heads, block_size, head_dim)
        usable = _addressable(num_blocks, int(np.prod(shape[1:])), kind)
        if usable != num_blocks:
            raise ValueError(
                f"num_blocks={num_blocks}: 8-bit pages of {np.prod(shape, dtype=np.int64):,} bytes cannot be addressed "
                f"correctly; use at most {usable:,} blocks, or more than twice as many"
            )

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            layout = None if sharding is None else page_format(sharding, len(shape))
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=layout)

        scales = None
        if kind == INT8:
            scales = array(shape[:-1], jnp.bfloat16)
        elif kind == FP8:
            scales = jax.ShapeDtypeStruct((2, num_kv_heads), jnp.float32, sharding=_of_scales(sharding))
        return cls(array(shape, kind), scales, v_dim)

    @classmethod
    def create(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, *,
        v_dim: int | None = None, fp8_scales: Any = None, device: Any = None,
    ) -> "KVPages":  # fmt: skip
        """Empty pages.

        dtype:      bfloat16, float16, float32, int8 or float8_e4m3fn.
        v_dim:      latent pages only: how many of a token's head_dim numbers are its values.
        fp8_scales: [2, kv_heads], factors of stored keys and values; None: 1.0. The values are copied through the host,
                    so that donating the pages does not donate the caller's array.
        device:     a jax Device or Sharding; None: JAX's default. Required on TPU for heads narrower than 128, because
                    only then the pages have the layout that the kernels read (`page_format`).
        Raises ValueError, which names the argument.
        """
        if isinstance(device, jax.Device):
            device = jax.sharding.SingleDeviceSharding(device)
        shapes = cls.shapes(num_blocks, block_size, num_kv_heads, head_dim, dtype, v_dim=v_dim, sharding=device)
        if fp8_scales is not None and shapes.data.dtype != FP8:
            raise ValueError(f"fp8_scales: only pages of float8_e4m3fn have scales, not {shapes.data.dtype}")
        pages = jax.tree.map(zeros_of, shapes)
        if shapes.data.dtype == FP8:
            scales = np.ones((2, num_kv_heads), np.float32) if fp8_scales is None else fp8_scales
            if np.shape(scales) != (2, num_kv_heads):
                raise ValueError(f"fp8_scales {np.shape(scales)}: must be [2, {num_kv_heads}], of keys and of values")
            scales = np.asarray(scales, np.float32)
            if not (np.isfinite(scales) & (scales > 0)).all():
                raise ValueError(f"fp8_scales={scales.tolist()}: must be above 0, and finite")
            placed = jnp.array(scales)  # a new array, because pages are donated
            pages = dataclasses.replace(
                pages, scales=placed if device is None else jax.device_put(placed, _of_scales(device))
            )
        return pages

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.data.shape[3]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.data.shape[2]

    @property
    def head_dim(self) -> int:
        """Width of a head's keys."""
        return self.data.shape[4]

    @property
    def dtype(self) -> Any:
        """Dtype of the stored keys and values."""
        return self.data.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes, with the scales, and without padding."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))

    def in_shape(self, num_kv_heads: int, head_dim: int) -> "KVPages":
        """The same memory as pages of layers with other heads: a page becomes one page, or several whole ones.

        Only for pages of floats. Raises ValueError if a page is not a whole number of pages of the new shape.
        """
        blocks, parts, heads, size, width = self.data.shape
        mine, other = heads * width, num_kv_heads * head_dim
        if self.scales is not None or mine % other:
            raise ValueError(
                f"pages {self.dtype}{list(self.data.shape)}: cannot be read as pages of {num_kv_heads} heads of "
                f"{head_dim}"
            )
        shape = (blocks * mine // other, parts, num_kv_heads, size, head_dim)
        return self if self.data.shape == shape else KVPages(self.data.reshape(shape), whole=self.data)

    def in_whole(self) -> "KVPages":
        """The pages that `in_shape` was called on, with the numbers of these."""
        return self if self.whole is None else KVPages(self.whole)

    def with_data(self, data: Any) -> "KVPages":
        """These pages with other numbers. data: in the shape of `data` or of `whole`."""
        if self.whole is None:
            return dataclasses.replace(self, data=data)
        return dataclasses.replace(self, data=data.reshape(self.data.shape), whole=data.reshape(self.whole.shape))

    def addressable(self, num_blocks: int) -> int:
        """The largest number of blocks, at most `num_blocks`, that pages of this shape and dtype can have."""
        return _addressable(num_blocks, int(np.prod(self.data.shape[1:])), self.dtype)

    def bytes_on(self, platform: str) -> int:
        """Size in bytes on a platform. TPUs pad the last axis of an array to a multiple of 128."""
        if platform != "tpu":
            return self.num_bytes
        scales = self.num_bytes - self.data.size * self.dtype.itemsize
        if self.dtype == INT8:  # TPUs also pad the KV heads of scales, to 2, 4 or a multiple of 8
            heads = next((n for n in (2, 4) if self.num_kv_heads <= n), -(-self.num_kv_heads // 8) * 8)
            blocks_and_parts = self.data.shape[0] * self.data.shape[1]
            scales = blocks_and_parts * heads * _lanes(self.block_size) * self.scales.dtype.itemsize
        return self.data.size // self.head_dim * _lanes(self.head_dim) * self.dtype.itemsize + scales

    def by_token(self) -> "TokenPages":
        """The same pages with a block for each token. Raises ValueError unless they are latent, with one KV head."""
        if self.v_dim is None or self.num_kv_heads != 1:
            raise ValueError(f"pages with {self.num_kv_heads} KV heads, v_dim={self.v_dim}: must be latent, with one")
        return TokenPages(self.data, None, self.v_dim)

    def gather(
        self, blocks: Int[Array, "rows n"], dtype: Any
    ) -> tuple[Float[Array, "rows kv_heads keys head_dim"], Float[Array, "rows kv_heads keys v_dim"]]:
        """Keys and values of these blocks as `dtype`, n * block_size keys per row, head-major."""
        parts, heads = self.data.shape[1:3]
        rows, n = blocks.shape

        def take(which: int) -> Array:
            def flat(pool: Array) -> Array:
                """[rows, heads, n * size, ...] out of [blocks, parts, heads, size, ...]."""
                halves = pool.reshape(-1, *pool.shape[2:])  # a bitcast: keys of block b are at 2b, its values at 2b + 1
                pages = jnp.take(halves, parts * blocks + which, axis=0, mode="clip")  # [rows, n, heads, size, ...]
                return jnp.moveaxis(pages, 2, 1).reshape(rows, heads, n * pool.shape[3], *pool.shape[4:])

            taken = flat(self.data)
            if self.scales is None:
                return taken.astype(dtype)
            scale = flat(self.scales) if self.dtype == INT8 else self.scales[which, None, :, None]
            return (taken.astype(jnp.float32) * scale[..., None]).astype(dtype)

        keys = take(0)  # two gathers, because slices of one gather would be copies
        return keys, take(1) if self.v_dim is None else keys[..., : self.v_dim]

    def scatter(
        self,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"] | None,
        slots: Int[Array, " tokens"],
    ) -> "KVPages":
        """Pages with token t stored in slot slots[t] (block * block_size + offset). Negative slots are dropped."""
        # a negative index would count from the end, so padding points past the end and is dropped
        blocks = jnp.where(slots < 0, self.num_blocks, slots // self.block_size)
        both = jnp.stack([k] if v is None else [k, v], axis=1)  # [tokens, 2, kv_heads, head_dim]
        scales = self.scales

        def put(pool: Array, new: Array) -> Array:
            """The pool with new[tokens, 2, kv_heads, ...] stored in the tokens' slots."""

            def scatter(pool: Array) -> Array:
                return pool.at[blocks, :, :, slots % size].set(new, mode="drop", unique_indices=False)

            parts, heads, size = pool.shape[1:4]
            rows = (slots // size)[:, None, None] * parts + jnp.arange(parts)[:, None]
            rows = (rows * heads + jnp.arange(heads)) * size + (slots % size)[:, None, None]
            rows = jnp.where(slots[:, None, None] < 0, -1, rows).reshape(-1)
            return set_rows(pool, rows, new.reshape(len(rows), -1), plain=scatter)

        if self.dtype == INT8:
            new = int8_scale(jnp.abs(both.astype(jnp.float32)).max(-1))
            both = to_int8(both, new[..., None])
            scales = put(scales, new.astype(scales.dtype))
        elif self.dtype == FP8:
            both = to_fp8(both, self.scales[..., None])
        return dataclasses.replace(self, data=put(self.data, both.astype(self.dtype)), scales=scales)

    def copy_blocks(self, from_to: Int[Array, "copies 2"]) -> "KVPages":
        """Copy blocks from_to[i, 0] to from_to[i, 1], reading all first. Pairs with a negative block are padding."""
        target = jnp.where((from_to < 0).any(axis=1), self.num_blocks, from_to[:, 1])
        return self._each_block(
            lambda pool: _set_blocks(pool, target, jnp.take(pool, from_to[:, 0], axis=0, mode="clip"))
        )

    def take_blocks(self, blocks: Int[Array, " n"]) -> "KVPages":
        """These blocks as pages of n blocks, inside a program. Unlike `to_host` it does not check the blocks."""
        return self._each_block(lambda pool: jnp.take(pool, blocks, axis=0, mode="clip"))

    def put_blocks(self, blocks: Int[Array, " n"], held: "KVPages") -> "KVPages":
        """Pages with these blocks replaced by `held`, the result of `take_blocks`. A negative block is padding."""
        target = jnp.where(blocks < 0, self.num_blocks, blocks)
        return self._each_block(lambda pool, own: _set_blocks(pool, target, own), held)

    def to_host(self, blocks: np.ndarray) -> "KVPages":
        """These blocks (int32[n]) as pages of n blocks, in host arrays. Raises ValueError for invalid blocks."""
        index = self._host_index(blocks)
        return jax.tree.map(np.asarray, self._each_block(lambda pool: jnp.take(pool, index, axis=0)))

    def from_host(self, blocks: np.ndarray, held: "KVPages") -> "KVPages":
        """Pages with these blocks (int32[n]) replaced by `held`, the result of `to_host`.

        Raises ValueError for invalid blocks, and if `held` has another dtype, shape or v_dim.
        """
        index = self._host_index(blocks)
        expected = (len(index), *self.data.shape[1:])
        if held.data.shape != expected or held.dtype != self.dtype or held.v_dim != self.v_dim:
            raise ValueError(
                f"held {held.dtype}{list(held.data.shape)}: must be {self.dtype}{list(expected)}, as these pages are"
            )
        return self._each_block(lambda pool, own: pool.at[index].set(jnp.asarray(own)), held)

    def _host_index(self, blocks: np.ndarray) -> np.ndarray:
        index = np.asarray(blocks)
        if index.ndim != 1 or (index.size and (index.dtype.kind not in "iu" or index.min() < 0)):
            raise ValueError(f"blocks={index}: must be a one-dimensional array of block numbers")
        if index.size and index.max() >= self.num_blocks:
            raise ValueError(f"blocks={index}: must be 0 to {self.num_blocks - 1}")
        return index.astype(np.int32)

    def _each_block(self, change: Any, *others: "KVPages") -> "KVPages":
        """`change` applied to the arrays whose first axis is the block: data, and the scales of int8 pages."""
        data = change(self.data, *(other.data for other in others))
        scales = self.scales
        if self.dtype == INT8:
            scales = change(scales, *(other.scales for other in others))
        return dataclasses.replace(self, data=data, scales=scales)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "scales", "whole"], meta_fields=["v_dim"])
@dataclasses.dataclass(frozen=True)
class TokenPages(KVPages):
    """Latent pages, read as if each token were a block: a block number is a slot. Made by `KVPages.by_token`.

    A reshape of the array would be the same, but XLA for CPU copied it for native kernels, to move its axes of size 1.
    """

    @property
    def num_blocks(self) -> int:
        """Tokens in the pool."""
        return self.data.shape[0] * self.data.shape[3]

    @property
    def block_size(self) -> int:
        """Tokens in a block: 1."""
        return 1

    def gather(
        self, blocks: Int[Array, "rows n"], dtype: Any
    ) -> tuple[Float[Array, "rows heads keys head_dim"], Float[Array, "rows heads keys v_dim"]]:
        """Keys and values of these slots as `dtype`."""
        size = self.data.shape[3]
        taken = self.data.at[blocks // size, 0, 0, blocks % size].get(mode="clip").astype(dtype)[:, None]
        return taken, taken[..., : self.v_dim]


def _set_blocks(pool: Array, blocks: Int[Array, " n"], own: Array) -> Array:
    """The pool with these blocks replaced. Numbers from num_blocks on are padding."""

    def scatter(pool: Array) -> Array:
        return pool.at[blocks].set(own, mode="drop")

    return set_rows(pool, blocks, own.reshape(own.shape[0], -1), plain=scatter)


def _addressable(num_blocks: int, page_size: int, dtype: Any) -> int:
    """The largest number of blocks, at most `num_blocks`, that kernels can address. page_size: elements of a page.

    Triton uses signed 32-bit offsets for arrays of up to 2^32 bytes. Larger arrays have offsets of 64 bits.
    """
    if dtype.itemsize == 1 and 2**31 < num_blocks * page_size <= 2**32:
        return 2**31 // page_size
    return num_blocks


def _lanes(size: int) -> int:
    """Size of a last axis on a TPU, padded to whole registers of 128 lanes."""
    return -(-size // 128) * 128


def zeros_of(shape: jax.ShapeDtypeStruct) -> Array:
    """An array of zeros, with the sharding and layout of `shape`."""
    if shape.sharding is None or shape.format.layout is None:
        return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
    # jnp.zeros takes no layout
    return jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.format)()


# --- 8-bit numbers: arithmetic that kernels use as well -------------------------------------------------------------


def int8_scale(largest: Array) -> Array:
    """bfloat16 scale of int8 numbers: number = code * scale. largest: the numbers' largest absolute value."""
    return (largest.astype(jnp.float32) / 127.0).astype(jnp.bfloat16)


def to_int8(x: Array, scale: Array) -> Array:
    """x / scale as int8. scale: the stored scale, already rounded, so that rounding is to the nearest stored value."""
    scale = scale.astype(jnp.float32)
    y = x.astype(jnp.float32) / jnp.where(scale == 0, 1.0, scale)
    # halves are rounded up, because kernels have no round-half-to-even
    return jnp.clip(jnp.floor(y + 0.5), -127.0, 127.0).astype(jnp.int8)


def to_fp8(x: Array, scale: Array) -> Array:
    """x / scale as float8_e4m3fn. Numbers that are too large become the largest number, not NaN."""
    return jnp.clip(x.astype(jnp.float32) / scale, -FP8_LARGEST, FP8_LARGEST).astype(FP8)
