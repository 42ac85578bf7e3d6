"""KVPages: the keys and values of one layer, cut into pages. The one place that knows their physical layout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KVPages:
    """Pages of one layer, keys and values together in one array.

    A page is one block: `block_size` tokens of all KV heads, lying together (keys, then values; head by head), so
    that fetching it is one contiguous read, and a product takes a head's keys as they lie.
    """

    data: Any  # [num_blocks, 2, kv_heads, block_size, head_dim]

    @classmethod
    def create(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, *, device: Any = None
    ) -> "KVPages":
        """Empty pages. dtype: bfloat16, float16 or float32. device: a jax Device or Sharding; the default otherwise."""
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise ValueError(f"dtype={jnp.dtype(dtype)}: KV pages hold bfloat16, float16 or float32")
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        return cls(jnp.zeros((num_blocks, 2, num_kv_heads, block_size, head_dim), dtype, device=device))

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
        """Width of a head."""
        return self.data.shape[4]

    @property
    def num_bytes(self) -> int:
        """Bytes that the pages take on the device."""
        return self.data.size * self.data.dtype.itemsize

    def gather(
        self, blocks: Int[Array, "rows n"]
    ) -> tuple[Shaped[Array, "rows kv_heads keys head_dim"], Shaped[Array, "rows kv_heads keys head_dim"]]:
        """Keys and values of the named blocks, n * block_size keys a row, head-major.

        Two gathers, of keys and of values: slices of one gather would be copies.
        """
        _, _, heads, size, dim = self.data.shape
        halves = self.data.reshape(-1, heads, size, dim)  # a bitcast: keys of block b at 2b, its values at 2b + 1
        rows, n = blocks.shape

        def take(index: Array) -> Array:
            pages = jnp.take(halves, index, axis=0, mode="clip")  # [rows, n, heads, size, dim]
            return pages.transpose(0, 2, 1, 3, 4).reshape(rows, heads, n * size, dim)

        return take(2 * blocks), take(2 * blocks + 1)

    def scatter(
        self,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slots: Int[Array, " tokens"],
    ) -> "KVPages":
        """Pages with token t at slot slots[t] (block * block_size + offset); negative slots are dropped."""
        # A negative index would count from the end: padding must point past the end instead, to be dropped.
        blocks = jnp.where(slots < 0, self.num_blocks, slots // self.block_size)
        both = jnp.stack([k, v], axis=1).astype(self.data.dtype)  # [tokens, 2, kv_heads, head_dim]
        data = self.data.at[blocks, :, :, slots % self.block_size].set(both, mode="drop", unique_indices=False)
        return KVPages(data)

    def copy_blocks(self, from_to: Int[Array, "copies 2"]) -> "KVPages":
        """Pages with block from_to[i, 0] copied to from_to[i, 1], all read first; a negative target is dropped."""
        source = jnp.take(self.data, from_to[:, 0], axis=0, mode="clip")
        target = jnp.where(from_to[:, 1] < 0, self.num_blocks, from_to[:, 1])
        return KVPages(self.data.at[target].set(source, mode="drop"))

    def to_host(self, blocks: np.ndarray) -> np.ndarray:
        """The named blocks (int32[n]) as a host array [n, 2, kv_heads, block_size, head_dim]."""
        return np.asarray(jnp.take(self.data, jnp.asarray(blocks), axis=0, mode="clip"))

    def from_host(self, blocks: np.ndarray, data: np.ndarray) -> "KVPages":
        """Pages with the named blocks (int32[n]) filled from what `to_host` gave."""
        return KVPages(self.data.at[jnp.asarray(blocks)].set(jnp.asarray(data, self.data.dtype), mode="drop"))
