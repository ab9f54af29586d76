"""Choosing the next token of each row, on device, in float32.

A row with temperature 0 takes the largest logit, the lowest id among equals. Otherwise one uniform
number per row is drawn and inverted through the cumulative distribution, which costs one pass over
the vocabulary instead of one random number per entry. Keys depend only on the request's seed and
the position of the output token, so a row's draws do not change with its neighbours.
"""

import jax
import jax.numpy as jnp

# Vocabulary entries per partial sum of the two-level search; the last block is padded.
_BLOCK = 256


def argmax_rows(logits_SV: jax.Array) -> jax.Array:
    """Lowest index of each row's maximum, as two plain reductions: XLA's CPU argmax is slow."""
    top_S1 = jnp.max(logits_SV, axis=-1, keepdims=True)
    ids_V = jnp.arange(logits_SV.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(logits_SV == top_S1, ids_V, logits_SV.shape[-1] - 1), axis=-1)


def sample_rows(
    logits_SV: jax.Array, temperature_S: jax.Array, seed_S: jax.Array, output_index_S: jax.Array
) -> jax.Array:
    """One token id per row, int32 [S]. `seed_S` uint32; `output_index_S` counts from 0.

    Rows without temperature cost nothing beyond the maximum; when no row has one, the random part
    does not run.
    """
    logits_SV = logits_SV.astype(jnp.float32)
    greedy_S = argmax_rows(logits_SV)

    def draw() -> jax.Array:
        safe_S = jnp.where(temperature_S > 0, temperature_S, 1.0)
        u_S = jax.vmap(_uniform)(seed_S, output_index_S)
        return jnp.where(temperature_S > 0, _invert(logits_SV / safe_S[:, None], u_S), greedy_S)

    return jax.lax.cond(jnp.any(temperature_S > 0), draw, lambda: greedy_S)


def _uniform(seed: jax.Array, output_index: jax.Array) -> jax.Array:
    choice_key = jax.random.fold_in(jax.random.key(seed), 0)  # choice index: one choice per request
    return jax.random.uniform(jax.random.fold_in(choice_key, output_index), dtype=jnp.float32)


def _invert(logits_SV: jax.Array, u_S: jax.Array) -> jax.Array:
    """The id at which the cumulative softmax first exceeds u: the block, then inside the block."""
    num_rows, vocab = logits_SV.shape
    p_SV = jnp.exp(logits_SV - jnp.max(logits_SV, axis=-1, keepdims=True))
    p_SV = jnp.pad(p_SV, ((0, 0), (0, -vocab % _BLOCK)))
    p_SBb = p_SV.reshape(num_rows, -1, _BLOCK)
    mass_SB = jnp.sum(p_SBb, axis=-1)
    upto_SB = jnp.cumsum(mass_SB, axis=-1)
    target_S = u_S * upto_SB[:, -1]
    block_S = _first_reached(mass_SB, upto_SB, target_S)
    before_S = jnp.where(block_S > 0, _pick(upto_SB, jnp.maximum(block_S - 1, 0)), 0.0)
    p_Sb = jnp.take_along_axis(p_SBb, block_S[:, None, None], axis=1, mode="clip")[:, 0]
    offset_S = _first_reached(p_Sb, before_S[:, None] + jnp.cumsum(p_Sb, axis=-1), target_S)
    return (block_S * _BLOCK + offset_S).astype(jnp.int32)


def _first_reached(mass_SX: jax.Array, upto_SX: jax.Array, target_S: jax.Array) -> jax.Array:
    """First entry with mass whose running sum exceeds the target, else the last one with mass.

    A parallel prefix sum is not monotone to the last bit, so entries without mass are ruled out.
    """
    ids_X = jnp.arange(mass_SX.shape[-1])
    reached_SX = (upto_SX > target_S[:, None]) & (mass_SX > 0)
    first_S = jnp.min(jnp.where(reached_SX, ids_X, ids_X.size), axis=-1)
    last_S = jnp.max(jnp.where(mass_SX > 0, ids_X, 0), axis=-1)
    return jnp.where(first_S < ids_X.size, first_S, last_S)


def _pick(x_SX: jax.Array, index_S: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_SX, index_S[:, None], axis=-1, mode="clip")[:, 0]
