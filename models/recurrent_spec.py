"""Kinds of recurrent layers: layers with a state of fixed size per request. A part of `DecoderSpec`.

Each kind names its layers, the arrays of its state, and its parameters. `recurrent.py` computes the layers.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

from jpaged.errors import ModelLoadError

MakeLeaf: TypeAlias = Callable[..., jax.ShapeDtypeStruct]  # from a shape, in the model's dtype


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Base class of the kinds. The first array of a state, if it has any, has the last inputs of a layer."""

    layers: tuple[bool, ...]     # per layer: True = it keeps a state
    scans: ClassVar[bool]        # it has float32 matrices as well, which `pallas_kernels.state_scan` updates
    state_leaves: ClassVar[tuple[str, ...]]  # parameters that `recurrent.advance` reads, if the model has them

    @property
    def inner_size(self) -> int:
        """Inputs of the output matrix."""
        raise NotImplementedError

    def state_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Arrays of a request's state in one layer. dtype: of the model."""
        raise NotImplementedError

    def input_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Arrays that one token adds to the state: `recurrent.Inputs` without the axis of tokens."""
        raise NotImplementedError

    def of_layer(self, layer: int) -> Self:
        """One layer's kind; itself if all layers are alike."""
        return self

    def split(self, count: int) -> Self:
        """One device's part of the layers, if `count` devices share their heads. Raises ModelLoadError if they cannot.

        The base class has no heads to share: every device computes the whole layer.
        """
        return self

    @property
    def state_axes(self) -> tuple[int | None, ...]:
        """Axis of each array of `state_shapes` that devices share; None: it is whole on every device."""
        return (None,)

    @property
    def input_axes(self) -> tuple[int | None, ...]:
        """The same for `input_shapes`."""
        return (None,)

    def leaves(self, hidden: int, leaf: MakeLeaf) -> dict[str, Any]:
        """Parameters of one layer. hidden: width of a hidden state."""
        raise NotImplementedError

    def matrices(self, hidden: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Inputs and shape of outputs of each leaf that LoRA adapters may change."""
        return {}


@dataclasses.dataclass(frozen=True)
class GatedDelta(Recurrence):
    """Gated DeltaNet (arXiv:2412.06464), in Qwen3-Next and Qwen3.5."""

    scans: ClassVar[bool] = True
    state_leaves: ClassVar[tuple[str, ...]] = ("delta_conv",)
    k_heads: int                 # heads of queries and of keys
    v_heads: int                 # a multiple of k_heads; neighbouring value heads share a key head
    head_dim: int                # of queries, keys and values
    conv_width: int              # tokens that the convolution over q, k and v sees, its own included

    @property
    def v_per_k(self) -> int:
        """Value heads per key head."""
        return self.v_heads // self.k_heads

    @property
    def channels(self) -> int:
        """Width of q, k and v together."""
        return (2 * self.k_heads + self.v_heads) * self.head_dim

    @property
    def inner_size(self) -> int:
        """Width of all value heads."""
        return self.v_heads * self.head_dim

    def split(self, count: int) -> Self:
        """A share of the key heads, each with its value heads."""
        if self.k_heads % count:
            raise ModelLoadError(
                f"the recurrent layers have {self.k_heads} key heads, which cannot be split into {count} equal parts: "
                f"use tensor_parallel_size={math.gcd(self.k_heads, count)} without deterministic"
            )
        return dataclasses.replace(self, k_heads=self.k_heads // count, v_heads=self.v_heads // count)

    @property
    def state_axes(self) -> tuple[int | None, ...]:
        """Channels, and value heads."""
        return 1, 0

    @property
    def input_axes(self) -> tuple[int | None, ...]:
        """Channels, and value heads."""
        return 0, 0, 0

    def state_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Last inputs of the convolution over q, k and v, and a float32 matrix for each value head."""
        inputs = (self.conv_width - 1, self.channels)
        matrices = (self.v_heads, self.head_dim, self.head_dim)
        return jax.ShapeDtypeStruct(inputs, np.dtype(dtype)), jax.ShapeDtypeStruct(matrices, np.dtype(np.float32))

    def input_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Input of the convolution, decay and beta."""
        number = jax.ShapeDtypeStruct((self.v_heads,), np.dtype(np.float32))
        return jax.ShapeDtypeStruct((self.channels,), np.dtype(dtype)), number, number

    def leaves(self, hidden: int, leaf: MakeLeaf) -> dict[str, Any]:
        """Parameters of one layer. Heads are in the order of the key heads, each followed by its value heads."""
        vector = jax.ShapeDtypeStruct((self.v_heads,), np.dtype(np.float32))  # also in `spec.FLOAT32_LEAVES`
        return {
            # query, key, values, gates of the output
            "delta_qkvz": leaf(self.k_heads, 2 + 2 * self.v_per_k, self.head_dim, hidden),
            "delta_ba": leaf(self.k_heads, 2, self.v_per_k, hidden),  # beta, then the decay
            "delta_conv": leaf(self.conv_width, self.k_heads, 2 + self.v_per_k, self.head_dim),  # oldest token first
            "delta_a_log": vector,
            "delta_dt_bias": vector,
            "delta_norm": leaf(self.head_dim),
            "delta_o": leaf(hidden, self.inner_size),
        }

    def matrices(self, hidden: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """All matrices."""
        return {
            "delta_qkvz": (hidden, (self.k_heads, 2 + 2 * self.v_per_k, self.head_dim)),
            "delta_ba": (hidden, (self.k_heads, 2, self.v_per_k)),
            "delta_o": (self.inner_size, (hidden,)),
        }


@dataclasses.dataclass(frozen=True)
class KimiDelta(GatedDelta):
    """Kimi Delta Attention (arXiv:2510.26692), in Kimi Linear: gated DeltaNet with a decay for each channel of a key.

    Decays and output gates come from hidden states that are compressed to head_dim numbers. `k_heads` is `v_heads`.
    """

    def input_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Input of the convolution, decays and beta."""
        mixed, beta, _ = super().input_shapes(dtype)
        return mixed, jax.ShapeDtypeStruct((self.v_heads, self.head_dim), np.dtype(np.float32)), beta

    def leaves(self, hidden: int, leaf: MakeLeaf) -> dict[str, Any]:
        """Parameters of one layer."""
        heads, head_dim = self.v_heads, self.head_dim
        kept = ("delta_conv", "delta_a_log", "delta_norm", "delta_o")
        shared = {name: shape for name, shape in super().leaves(hidden, leaf).items() if name in kept}
        return shared | {
            "delta_qkv": leaf(heads, 3, head_dim, hidden),
            "delta_low": leaf(2, head_dim, hidden),  # compresses the input of the decays, and of the gates
            "delta_forget": leaf(heads, head_dim, head_dim),
            "delta_gate": leaf(heads, head_dim, head_dim),
            "delta_beta": leaf(heads, hidden),
            "delta_dt_bias": jax.ShapeDtypeStruct((heads, head_dim), np.dtype(np.float32)),
        }

    def matrices(self, hidden: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """None: adapters are refused for models with latent attention."""
        return {}


@dataclasses.dataclass(frozen=True)
class ShortConv(Recurrence):
    """Gated short convolution of LFM2: c * conv(b * x), with b, c and x from the hidden state."""

    scans: ClassVar[bool] = False
    state_leaves: ClassVar[tuple[str, ...]] = ("conv_kernel", "conv_kernel_bias")
    width: int                   # of b, c and x
    conv_width: int              # tokens that the convolution sees, its own included
    bias: bool = False           # of both matrices and of the convolution

    @property
    def inner_size(self) -> int:
        """Width of the convolution."""
        return self.width

    def state_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Last inputs of the convolution."""
        return (jax.ShapeDtypeStruct((self.conv_width - 1, self.width), np.dtype(dtype)),)

    def input_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Input of the convolution."""
        return (jax.ShapeDtypeStruct((self.width,), np.dtype(dtype)),)

    def leaves(self, hidden: int, leaf: MakeLeaf) -> dict[str, Any]:
        """Parameters of one layer."""
        tree = {
            "conv_in": leaf(3 * self.width, hidden),  # b, c, x
            "conv_kernel": leaf(self.conv_width, self.width),  # oldest token first
            "conv_out": leaf(hidden, self.width),
        }
        if self.bias:
            tree |= {"conv_in_bias": leaf(3 * self.width), "conv_kernel_bias": leaf(self.width)}
            tree["conv_out_bias"] = leaf(hidden)
        return tree

    def matrices(self, hidden: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Both matrices."""
        return {"conv_in": (hidden, (3 * self.width,)), "conv_out": (self.width, (hidden,))}

class GateNorm(enum.Enum):
    """RMS norm over each group of a Mamba-2 layer's output y, before its gate z or after it."""

    NONE = "none"      # y * silu(z)
    BEFORE = "before"  # norm(y) * silu(z)
    AFTER = "after"    # norm(y * silu(z))


@dataclasses.dataclass(frozen=True)
class Mamba2(Recurrence):
    """Mamba-2 (arXiv:2405.21060), in Granite 4, Nemotron-H and Falcon-H1."""

    scans: ClassVar[bool] = True
    state_leaves: ClassVar[tuple[str, ...]] = ("mamba_conv", "mamba_conv_bias", "mamba_a_log", "mamba_d")
    heads: int
    head_dim: int
    groups: int                  # neighbouring heads of a group have the same b and c
    state_dim: int               # a head's state is [state_dim, head_dim]
    conv_width: int              # tokens that the convolution over x, b and c sees, its own included
    gate_norm: GateNorm = GateNorm.AFTER
    conv_bias: bool = True
    in_bias: bool = False        # of the input projection
    out_bias: bool = False
    in_scale: float = 1.0        # factor of the layer's input (Falcon-H1, as the two below)
    part_scales: tuple[float, ...] = (1.0,) * 5  # of the projected z, x, b, c and dt
    out_scale: float = 1.0       # of the layer's output

    @property
    def inner_size(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Width of x, b and c together."""
        return self.inner_size + 2 * self.groups * self.state_dim

    @property
    def state_axes(self) -> tuple[int | None, ...]:
        """Every device has all heads."""
        return None, None

    @property
    def input_axes(self) -> tuple[int | None, ...]:
        """Every device has all heads."""
        return None, None

    def state_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Last inputs of the convolution, and a float32 matrix for each head."""
        inputs, matrices = (self.conv_width - 1, self.channels), (self.heads, self.state_dim, self.head_dim)
        return jax.ShapeDtypeStruct(inputs, np.dtype(dtype)), jax.ShapeDtypeStruct(matrices, np.dtype(np.float32))

    def input_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Input of the convolution, and time steps."""
        steps = jax.ShapeDtypeStruct((self.heads,), np.dtype(np.float32))
        return jax.ShapeDtypeStruct((self.channels,), np.dtype(dtype)), steps

    @property
    def in_size(self) -> int:
        """Outputs of the input matrix: z, x, b, c and dt."""
        return self.inner_size + self.channels + self.heads

    def leaves(self, hidden: int, leaf: MakeLeaf) -> dict[str, Any]:
        """Parameters of one layer."""
        vector = jax.ShapeDtypeStruct((self.heads,), np.dtype(np.float32))  # also in `spec.FLOAT32_LEAVES`
        tree = {
            "mamba_in": leaf(self.in_size, hidden),
            "mamba_conv": leaf(self.conv_width, self.channels),  # oldest token first
            "mamba_a_log": vector,
            "mamba_dt_bias": vector,
            "mamba_d": vector,
            "mamba_o": leaf(hidden, self.inner_size),
        }
        if self.gate_norm is not GateNorm.NONE:
            tree["mamba_norm"] = leaf(self.inner_size)
        if self.conv_bias:
            tree["mamba_conv_bias"] = leaf(self.channels)
        if self.in_bias:
            tree["mamba_in_bias"] = leaf(self.in_size)
        if self.out_bias:
            tree["mamba_o_bias"] = leaf(hidden)
        return tree

    def matrices(self, hidden: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Both matrices."""
        return {"mamba_in": (hidden, (self.in_size,)), "mamba_o": (self.inner_size, (hidden,))}
