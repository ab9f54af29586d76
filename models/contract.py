"""The one function through which activations meet weights."""

from typing import Any

import jax
import jax.numpy as jnp


def contract(spec: str, x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """`einsum(spec, x, w)` with float32 accumulation, for specs like "TD,NHD->TNH".

    The letters, those of `models.dims`, must be (rows + contracted), (outputs + contracted) ->
    (rows + outputs) with one contracted axis: what every weight here is. `dtype` is the result's
    dtype, x's by default; ask for float32 where the caller goes on in float32 (logits), so that
    nothing is rounded in between.
    """
    operands, result = spec.split("->")
    x_dims, w_dims = operands.split(",")
    rows, outputs, contracted = x_dims[:-1], w_dims[:-1], x_dims[-1]
    assert (w_dims, result) == (outputs + contracted, rows + outputs)
    # As one plain matrix product: with several output axes XLA's CPU backend copies the transposed
    # weight in every step. The reshapes move nothing; on a TPU one of two contracted axes would.
    product = jnp.einsum(
        "ti,oi->to",
        x.reshape(-1, x.shape[-1]),
        w.reshape(-1, w.shape[-1]),
        preferred_element_type=dtype or x.dtype,
    )
    return product.reshape(x.shape[:-1] + w.shape[:-1])
