"""Rotary position embedding with every scaling kind that current models use.

In: positions [T], the length that each row's request counts as [T] and a `RopeSpec`. Out: cos and
sin, float32 [T, R/2], times the kind's attention factor; `apply_rope` turns the pairs (i, i + R/2)
of the first R channels of every head by them.

Invariant: a row's rotation depends on nothing but its spec, its position and its length. The length
matters to two kinds only, dynamic and longrope; it is max(prompt length, position + 1), which is
what a whole prefill and then each decode step see. Chunked prefill and batching change nothing.

Frequencies follow the float32 rounding of the implementations that models are trained with: the
float32 product position * frequency alone is off by up to position * 2^-24 radians (0.0012 at
position 20,000, 0.004 at 131,071), so a model keeps to its rounded angles, not to the exact ones.

RoPE: Su et al. 2021. Dynamic NTK and YaRN: Peng et al. 2023. LongRoPE: Ding et al. 2024.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from models.config import RopeSpec


def inv_freq(spec: RopeSpec, long: bool = False) -> np.ndarray:
    """Radians per position of each pair, float32 [R/2].

    `long` chooses longrope's second set, for lengths above `original_max_position`. Dynamic scaling
    starts from these values, see `rotation`.
    """
    exponent_R = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    # numpy's float32 power is off by up to 2 ulp; rounding the float64 one is not.
    base = np.float64(np.float32(spec.theta))
    period_R = np.power(base, exponent_R.astype(np.float64)).astype(np.float32)
    freq_R = np.float32(1) / period_R
    match spec.kind:
        case "default" | "dynamic":
            return freq_R
        case "linear":
            return freq_R / np.float32(spec.factor)
        case "llama3":
            return _llama3(spec, freq_R)
        case "yarn":
            return _yarn(spec, period_R)
        case "longrope":
            factor_R = spec.long_factor if long else spec.short_factor
            return np.float32(1) / (np.asarray(factor_R, np.float32) * period_R)


def _llama3(spec: RopeSpec, freq_R: np.ndarray) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, those between blended."""
    # Reciprocals first: near the ends of the blend the rounding of a plain quotient would show.
    wavelength_R = np.float32(1) / freq_R * np.float32(2 * math.pi)
    turns_R = np.float32(1) / wavelength_R * np.float32(spec.original_max_position)
    low, high = spec.low_freq_factor, spec.high_freq_factor
    keep_R = (turns_R - np.float32(low)) / np.float32(high - low)
    blend_R = (1 - keep_R) * freq_R / np.float32(spec.factor) + keep_R * freq_R
    longest, shortest = spec.original_max_position / low, spec.original_max_position / high
    return np.where(
        wavelength_R > longest,
        freq_R / np.float32(spec.factor),
        np.where(wavelength_R < shortest, freq_R, blend_R),
    ).astype(np.float32)


def _yarn(spec: RopeSpec, period_R: np.ndarray) -> np.ndarray:
    """Pairs that turn more than `beta_fast` times in the original length are kept, those below
    `beta_slow` times divided by the factor, a linear ramp over the pair's index between."""

    def pair_turning(times: float) -> float:
        wavelength = spec.original_max_position / (times * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    first, last = pair_turning(spec.beta_fast), pair_turning(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    if first == last:
        last += 0.001
    index_R = np.arange(len(period_R), dtype=np.float32)
    ramp_R = np.clip((index_R - np.float32(first)) / np.float32(last - first), 0, 1)
    keep_R = 1 - ramp_R
    divided_R = np.float32(1) / (np.float32(spec.factor) * period_R)
    return divided_R * (1 - keep_R) + np.float32(1) / period_R * keep_R


def attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by; attention scores grow by its square."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1:
        return 1.0
    if spec.kind == "longrope":
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(spec.factor) + 1

    if spec.mscale and spec.mscale_all_dim:
        return magnitude(spec.mscale) / magnitude(spec.mscale_all_dim)
    return magnitude(1.0)


def rotation(
    spec: RopeSpec, positions_T: jax.Array, length_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(cos_TR, sin_TR), float32 with one column per pair."""
    freq_R = jnp.asarray(inv_freq(spec))
    if spec.kind == "dynamic":
        # theta grows by scale^(R/(R-2)); pair i turns scale^(-2i/(R-2)) times as fast.
        grown_T = jnp.maximum(length_T, spec.max_position).astype(jnp.float32) / spec.max_position
        scale_T = spec.factor * grown_T - (spec.factor - 1)
        exponent_R = -np.arange(0, spec.rotary_dim, 2) / (spec.rotary_dim - 2)
        freq_TR = freq_R * scale_T[:, None] ** exponent_R.astype(np.float32)
    elif spec.kind == "longrope":
        is_long_T = length_T > spec.original_max_position
        freq_TR = jnp.where(is_long_T[:, None], jnp.asarray(inv_freq(spec, long=True)), freq_R)
    else:
        freq_TR = freq_R[None]
    angle_TR = positions_T.astype(jnp.float32)[:, None] * freq_TR
    factor = attention_factor(spec)
    return jnp.cos(angle_TR) * factor, jnp.sin(angle_TR) * factor


def apply_rope(x_TNH: jax.Array, cos_TR: jax.Array, sin_TR: jax.Array) -> jax.Array:
    """Turn the first 2 * R channels of every head in float32; the others stay as they are."""
    half = cos_TR.shape[-1]
    cos_T1R, sin_T1R = cos_TR[:, None, :], sin_TR[:, None, :]
    first = x_TNH[..., :half].astype(jnp.float32)
    second = x_TNH[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate(
        [first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R], axis=-1
    )
    return jnp.concatenate([turned.astype(x_TNH.dtype), x_TNH[..., 2 * half :]], axis=-1)
