"""Searches along rows of a large vocabulary that read it once or twice instead of sorting it.

A row of V entries is seen as B blocks of b; what is sought is first narrowed to blocks, by a
reduction, then looked for inside them. Order is (value descending, id ascending) everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 256
_TOP_BLOCK = 64


def argmax_rows(x_RV: jax.Array) -> jax.Array:
    """Lowest index of each row's maximum, or -1: NaN or +inf in the row, or nothing above -inf.

    Two plain reductions: XLA's argmax carries pairs, which its CPU backend does not vectorise.
    """
    vocab = x_RV.shape[-1]
    top_R1 = jnp.max(x_RV, axis=-1, keepdims=True)
    ids_V = jnp.arange(vocab, dtype=jnp.int32)
    best_RV = jnp.where((x_RV == top_R1) & (x_RV > -jnp.inf), ids_V, vocab)
    id_R = jnp.min(jnp.where(x_RV < jnp.inf, best_RV, -1), axis=-1)
    return jnp.where(id_R < vocab, id_R, -1)


def top_rows(x_RV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """(value_RJ, id_RJ) of the `count` best entries, best first; exact, ties by id.

    The best J entries lie in the J blocks with the best maxima, so only those are sorted.
    """
    num_rows, vocab = x_RV.shape
    if vocab <= 2 * count * _TOP_BLOCK:
        return _top_k(x_RV, count)
    x_RBb = _blocks(x_RV, _TOP_BLOCK, -jnp.inf)
    _, block_RJ = _top_k(jnp.max(x_RBb, axis=-1), count)
    block_RJ = jnp.sort(block_RJ, axis=-1)  # ids ascend, so that ties keep their order
    x_RJb = jnp.take_along_axis(x_RBb, block_RJ[:, :, None], axis=1, mode="clip")
    id_RJb = block_RJ[:, :, None] * _TOP_BLOCK + jnp.arange(_TOP_BLOCK, dtype=jnp.int32)
    value_RJ, place_RJ = _top_k(x_RJb.reshape(num_rows, -1), count)
    return value_RJ, jnp.take_along_axis(
        id_RJb.reshape(num_rows, -1), place_RJ, axis=1, mode="clip"
    )


def _top_k(x_RV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    # XLA finds its top-k by a pattern (sort, then slice). A slice of the result would be merged
    # into the pattern and leave a full sort.
    value_RJ, id_RJ = jax.lax.optimization_barrier(jax.lax.top_k(x_RV, count))
    return value_RJ, id_RJ.astype(jnp.int32)


def largest_threshold(reaches, num_rows: int) -> jax.Array:
    """Per row, the largest float32 in 0 .. 1 that `reaches`, which is true at 0 and monotone.

    Bisection on bit patterns, which order like the non-negative floats they encode. Subnormal
    numbers, which some processors take for 0, become 0.
    """

    def halve(_, bounds):
        low_R, high_R = bounds
        middle_R = (low_R + high_R) // 2
        yes_R = reaches(jax.lax.bitcast_convert_type(middle_R, jnp.float32))
        return jnp.where(yes_R, middle_R, low_R), jnp.where(yes_R, high_R, middle_R)

    above_one = int(np.float32(1).view(np.int32)) + 1
    bounds = jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, above_one, jnp.int32)
    low_R, _ = jax.lax.fori_loop(0, above_one.bit_length(), halve, bounds)
    smallest = int(np.finfo(np.float32).smallest_normal.view(np.int32))
    low_R = jnp.where(low_R < smallest, 0, low_R)
    return jax.lax.bitcast_convert_type(low_R, jnp.float32)


def nth_true(mask_RV: jax.Array, n_R: jax.Array) -> jax.Array:
    """Index of each row's n-th true entry, n from 1; the last one if there are fewer."""
    one_RBb = _blocks(mask_RV.astype(jnp.float32), _BLOCK, 0)
    count_RB = jnp.sum(one_RBb, axis=-1)
    upto_RB = jnp.cumsum(count_RB, axis=-1)
    block_R = _first_above(count_RB, upto_RB, n_R - 1.0)
    before_R = _column(upto_RB - count_RB, block_R)
    one_Rb = _block(one_RBb, block_R)
    offset_R = _first_above(one_Rb, jnp.cumsum(one_Rb, axis=-1), n_R - 1.0 - before_R)
    return block_R * one_RBb.shape[-1] + offset_R


def draw_rows(weight_RV: jax.Array, u_R2: jax.Array) -> jax.Array:
    """Index drawn in proportion to the weights: u_R2[:, 0] picks a block, u_R2[:, 1] inside it.

    Two uniforms, because the 2^23 values of one do not resolve 262,144 entries.
    """
    weight_RBb = _blocks(weight_RV, _BLOCK, 0)
    mass_RB = jnp.sum(weight_RBb, axis=-1)
    block_R = _draw(mass_RB, u_R2[:, 0])
    return block_R * weight_RBb.shape[-1] + _draw(_block(weight_RBb, block_R), u_R2[:, 1])


def _draw(mass_RX: jax.Array, u_R: jax.Array) -> jax.Array:
    upto_RX = jnp.cumsum(mass_RX, axis=-1)
    return _first_above(mass_RX, upto_RX, u_R * upto_RX[:, -1])


def _first_above(mass_RX: jax.Array, upto_RX: jax.Array, target_R: jax.Array) -> jax.Array:
    """First entry with mass whose running sum exceeds the target, else the last one with mass.

    A parallel prefix sum is not monotone to the last bit, so entries without mass are ruled out.
    """
    ids_X = jnp.arange(mass_RX.shape[-1], dtype=jnp.int32)
    reached_RX = (upto_RX > target_R[:, None]) & (mass_RX > 0)
    first_R = jnp.min(jnp.where(reached_RX, ids_X, ids_X.size), axis=-1)
    last_R = jnp.max(jnp.where(mass_RX > 0, ids_X, 0), axis=-1)
    return jnp.where(first_R < ids_X.size, first_R, last_R)


def _blocks(x_RV: jax.Array, size: int, padding: float) -> jax.Array:
    """[R, B, b] with b at most `size`; the last block is padded."""
    num_rows, vocab = x_RV.shape
    size = min(size, vocab)
    x_RV = jnp.pad(x_RV, ((0, 0), (0, -vocab % size)), constant_values=padding)
    return x_RV.reshape(num_rows, -1, size)


def _block(x_RBb: jax.Array, block_R: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_RBb, block_R[:, None, None], axis=1, mode="clip")[:, 0]


def _column(x_RX: jax.Array, index_R: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_RX, index_R[:, None], axis=1, mode="clip")[:, 0]
