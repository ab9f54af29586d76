"""The one function through which activations meet weights."""

from typing import Any

import jax
import jax.numpy as jnp


def contract(spec: str, x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """`einsum(spec, x, w)` with float32 accumulation.

    `spec` is in the letters of `models.dims`, the weight's contracted axes last ("TD,NHD->TNH").
    `dtype` is the result's dtype, x's by default; ask for float32 where the caller goes on in
    float32 (logits), so that nothing is rounded in between.
    """
    return jnp.einsum(spec, x, w, preferred_element_type=dtype or x.dtype)
