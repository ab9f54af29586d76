"""The one function through which activations meet weights."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def contract(spec: str, x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """`einsum(spec, x, w)` with float32 accumulation, for specs like "TD,NHD->TNH".

    The letters, those of `models.dims`, must be (rows + contracted), (outputs + contracted) ->
    (rows + outputs): what every weight here is. `dtype` is the result's dtype, x's by default; ask
    for float32 where the caller goes on in float32 (logits), so that nothing is rounded in between.
    """
    operands, result = spec.split("->")
    x_dims, w_dims = operands.split(",")
    rows = "".join(d for d in x_dims if d in result)
    outputs, contracted = w_dims[: len(result) - len(rows)], x_dims[len(rows) :]
    assert (x_dims, w_dims, result) == (rows + contracted, outputs + contracted, rows + outputs)
    # As one plain matrix product: with several output or contracted axes XLA's CPU backend copies
    # the transposed weight in every step. The reshapes move nothing.
    inner = math.prod(w.shape[len(outputs) :])
    product = jnp.einsum(
        "ti,oi->to",
        x.reshape(-1, inner),
        w.reshape(-1, inner),
        preferred_element_type=dtype or x.dtype,
    )
    return product.reshape(x.shape[: len(rows)] + w.shape[: len(outputs)])
