"""Frequencies of rotary position embeddings, for every scaling of `spec.Rope`.

Fixed scalings are computed once on the host, in the same float32 steps as in Transformers, so that angles of large
positions are equal. Dynamic scaling and longrope depend on the sequence length, so the compiled step computes them.
Papers: rotary embedding, Su et al. 2021 (arXiv:2104.09864); YaRN, Peng et al. 2023 (arXiv:2309.00071);
LongRoPE, Ding et al. 2024 (arXiv:2402.13753).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.models.spec import DecoderSpec, Rope

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def inv_freq(rope: Rope, head_dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32[head_dim / 2], and the factor of cos and sin.

    Position p rotates pair i by p * inv_freq[i] radians. If `rope.original_max_position` is 0, `max_position` is used.
    Raises ValueError for scalings without fixed frequencies and for unknown scalings.
    """
    original = rope.original_max_position or max_position
    plain = _powers(rope.theta, head_dim)
    if rope.scaling == "default":
        return np.float32(1) / plain, 1.0
    if rope.scaling == "linear":
        return np.float32(1) / plain / np.float32(rope.factor), 1.0
    if rope.scaling == "proportional":  # pairs with frequency 0 do not rotate
        rotates = np.arange(len(plain)) < int(rope.partial * head_dim // 2)
        return np.where(rotates, np.float32(1) / plain, np.float32(0)) / np.float32(rope.factor), 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, np.float32(1) / plain, original), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, plain, original), _yarn_attention_factor(rope)
    raise ValueError(f"rope scaling {rope.scaling!r} has no fixed frequencies")


def rope_angles(
    spec: DecoderSpec, rope: Rope, positions: Int[Array, " tokens"], rope_lens: Int[Array, " tokens"] | None
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """float32 cos and sin of each token's angles, times the attention factor of the rope scaling."""
    seq_len = positions + 1 if rope_lens is None else rope_lens
    if rope.scaling == "dynamic":
        frequencies, factor = dynamic_inv_freq(rope, spec.rope_dim(rope), seq_len), 1.0
    elif rope.scaling == "longrope":
        frequencies, factor = longrope_inv_freq(rope, spec.rope_dim(rope), seq_len)
    else:
        fixed, factor = inv_freq(rope, spec.rope_dim(rope), spec.max_position)
        frequencies = jnp.asarray(fixed)[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def dynamic_inv_freq(rope: Rope, head_dim: int, seq_len: Int[Array, " tokens"]) -> Float[Array, "tokens half"]:
    """Inverse frequencies of each token with dynamic (NTK) scaling, float32[tokens, head_dim / 2].

    seq_len: sequence length when the token is computed, max(prompt length, position + 1). Up to
    `rope.original_max_position` there is no scaling. Above it, the base grows with the length.
    """
    stretch = rope.factor * seq_len.astype(jnp.float32) / rope.original_max_position - (rope.factor - 1)
    base = rope.theta * jnp.maximum(stretch, 1.0) ** (head_dim / (head_dim - 2))
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return 1.0 / base[:, None] ** exponents


def longrope_inv_freq(
    rope: Rope, head_dim: int, seq_len: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens half"], float]:
    """Inverse frequencies of each token with longrope, and the factor of cos and sin.

    seq_len: as in `dynamic_inv_freq`. Sequences longer than `rope.original_max_position` use the long factors.
    """
    plain = _powers(rope.theta, head_dim)
    short, long = (np.float32(1) / (np.array(f, np.float32) * plain) for f in (rope.short_factor, rope.long_factor))
    frequencies = jnp.where(seq_len[:, None] > rope.original_max_position, long, short)
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    grown = 0.0 if rope.factor <= 1 else math.log(rope.factor) / math.log(rope.original_max_position)
    return frequencies, math.sqrt(1 + grown)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2i / head_dim), float32[head_dim / 2], rounded once.

    numpy's float32 power is less exact than torch's. Of 4,446 inverse frequencies (13 bases, 10 sizes of heads), 793
    then differed from Transformers' by a rounding or two, and 38 differ with float64.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


def _llama3(rope: Rope, freq: np.ndarray, original: int) -> np.ndarray:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, and blend linearly in between."""
    wavelength = np.float32(2 * math.pi) / freq
    slowed = freq / np.float32(rope.factor)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    blend = (np.float32(original) / wavelength - low) / (high - low)
    between = (1 - blend) * slowed + blend * freq
    return np.select([wavelength < original / high, wavelength > original / low], [freq, slowed], between)


def _yarn(rope: Rope, plain: np.ndarray, original: int) -> np.ndarray:
    """YaRN, section 3.2: keep high frequencies, divide low ones by `factor`, with a linear ramp in between."""
    half = len(plain)

    def dimension(rotations: float) -> float:
        """Fractional index of the frequency with `rotations` full turns within the original length."""
        return half * math.log(original / (rotations * 2 * math.pi)) / math.log(rope.theta)

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first if last != first else 0.001  # an empty range: a step instead of a ramp
    ramp = np.clip((np.arange(half, dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1)
    keep = 1 - ramp
    kept, slowed = np.float32(1) / plain, np.float32(1) / (np.float32(rope.factor) * plain)
    return slowed * (1 - keep) + kept * keep


def _yarn_attention_factor(rope: Rope) -> float:
    """Factor of cos and sin. q.k is scaled by its square (YaRN, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
