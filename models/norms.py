"""RMSNorm and LayerNorm over the last axis, computed in float32.

The stored scale is the factor itself: families whose files hold an offset from one (Gemma) have it
added, in float32, when they are loaded. Scales stay float32 whatever the model's dtype.
RMSNorm: Zhang and Sennrich 2019; LayerNorm: Ba et al. 2016.
"""

import jax
import jax.numpy as jnp
from flax import struct

from models.config import NormSpec
from models.params import Param


@struct.dataclass
class NormParams:
    scale: jax.Array | Param
    bias: jax.Array | Param | None = None


def declare_norm(spec: NormSpec, dims: str, shape: tuple[int, ...]) -> NormParams:
    return NormParams(
        scale=Param(dims, shape, "ones", "float32"),
        bias=Param(dims, shape, "zeros", "float32") if spec.bias else None,
    )


def apply_norm(spec: NormSpec, params: NormParams, x: jax.Array) -> jax.Array:
    """Normalise the trailing axes that `params.scale` spans; the result has x's dtype."""
    axes = tuple(range(-params.scale.ndim, 0))
    x_f32 = x.astype(jnp.float32)
    if spec.kind == "layer":
        x_f32 = x_f32 - jnp.mean(x_f32, axes, keepdims=True)
    variance = jnp.mean(jnp.square(x_f32), axes, keepdims=True)
    y = x_f32 * jax.lax.rsqrt(variance + spec.eps) * params.scale
    if params.bias is not None:
        y = y + params.bias
    return y.astype(x.dtype)
