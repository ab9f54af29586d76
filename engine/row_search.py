"""Searches along rows of a large vocabulary that read it a few times instead of sorting it.

A row of V entries is seen as B blocks of b; what is sought is first narrowed to blocks, by a
reduction, then looked for inside them. Order is (value descending, id ascending) everywhere.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from engine.rows import column

_BLOCK = 256
_TOP_BLOCK = 64
_FEW = 64  # entries that a search sorts to end
_GUESSING = 12  # halvings of a search of which every second is a guess instead


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


@struct.dataclass
class _Bounds:
    """Bit patterns of two weights and the sums of values from each up: only the first reaches the
    target."""

    low_R: jax.Array
    high_R: jax.Array
    from_low_R: jax.Array
    from_high_R: jax.Array
    steps: jax.Array


def shortest_prefix(
    weight_RV: jax.Array,
    least_R: jax.Array,
    target_R: jax.Array,
    value: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """(weight_R, id_R) of the entry with which the sum of values, best weight first, reaches the
    target.

    Weights are in 0 .. 1, those from `least_R` up reach the target, and `value` of a weight does
    not fall with it. Bisection on bit patterns, which order like the non-negative floats that they
    encode, until what lies between the bounds is few enough to be sorted, or one weight that many
    entries have.
    """

    def sum_from(bits_R):
        mask_RV = weight_RV >= _float(bits_R)[:, None]
        return jnp.sum(jnp.where(mask_RV, value(weight_RV), 0.0), axis=-1)

    def halve_until(few: int, bounds: _Bounds) -> _Bounds:
        def unsettled(b: _Bounds):
            between_R = b.from_low_R - b.from_high_R  # each entry there counts at least value(low)
            return (b.high_R - b.low_R > 1) & (between_R > few * value(_float(b.low_R)))

        def halve(b: _Bounds) -> _Bounds:
            # Half way; or, where the target seems nearer to a bound, twice its distance from there:
            # then both bounds come close to it.
            share_R = (b.from_low_R - target_R) / (b.from_low_R - b.from_high_R)
            guesses = (b.steps % 2 == 1) & (b.steps < _GUESSING)
            part_R = jnp.where(guesses, jnp.clip(0.5, 2 * share_R - 1, 2 * share_R), 0.5)
            width_R = b.high_R - b.low_R
            middle_R = b.low_R + jnp.clip((part_R * width_R).astype(jnp.int32), 1, width_R - 1)
            # Settled rows stay as they are: a row must not depend on its neighbours.
            sum_R, goes_on_R = sum_from(middle_R), unsettled(b)
            reaches_R = sum_R >= target_R  # NaN never does, and its row ends, too
            up_R, down_R = goes_on_R & reaches_R, goes_on_R & ~reaches_R
            return _Bounds(
                low_R=jnp.where(up_R, middle_R, b.low_R),
                high_R=jnp.where(down_R, middle_R, b.high_R),
                from_low_R=jnp.where(up_R, sum_R, b.from_low_R),
                from_high_R=jnp.where(down_R, sum_R, b.from_high_R),
                steps=b.steps + 1,
            )

        return jax.lax.while_loop(lambda b: jnp.any(unsettled(b)), halve, bounds)

    low_R = jax.lax.bitcast_convert_type(least_R, jnp.int32)
    bounds = _Bounds(
        low_R=low_R,
        high_R=jnp.full_like(low_R, int(np.float32(1).view(np.int32)) + 1),
        from_low_R=sum_from(low_R),
        from_high_R=jnp.zeros_like(least_R),
        steps=jnp.int32(0),
    )
    bounds = halve_until(_FEW, bounds)
    below_RV = jnp.where(weight_RV < _float(bounds.high_R)[:, None], weight_RV, -1.0)
    weight_RJ, id_RJ = top_rows(below_RV, min(_FEW, weight_RV.shape[-1]))
    value_RJ = jnp.where(weight_RJ >= 0, value(weight_RJ), 0.0)
    reached_RJ = bounds.from_high_R[:, None] + jnp.cumsum(value_RJ, axis=-1) >= target_R[:, None]
    found_R, at_R = jnp.any(reached_RJ, axis=-1), jnp.argmax(reached_RJ, axis=-1)
    sorted_R = column(weight_RJ, at_R), column(id_RJ, at_R)

    def among_equals():
        b = halve_until(0, bounds.replace(steps=jnp.int32(_GUESSING)))
        weight_R = _float(b.low_R)
        # Some processors take subnormal numbers for 0.
        weight_R = jnp.where(weight_R < np.finfo(np.float32).smallest_normal, 0.0, weight_R)
        missing_R = (target_R - b.from_high_R) / jnp.maximum(value(weight_R), 1e-30)
        n_R = jnp.maximum(jnp.ceil(missing_R), 1.0)
        tied_R = weight_R, nth_true(weight_RV == weight_R[:, None], n_R)
        return jax.tree.map(lambda x, y: jnp.where(found_R, x, y), sorted_R, tied_R)

    return jax.lax.cond(jnp.all(found_R), lambda: sorted_R, among_equals)


def _float(bits_R: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits_R, jnp.float32)


def nth_true(mask_RV: jax.Array, n_R: jax.Array) -> jax.Array:
    """Index of each row's n-th true entry, n from 1; the last one if there are fewer."""
    one_RBb = _blocks(mask_RV.astype(jnp.float32), _BLOCK, 0)
    count_RB = jnp.sum(one_RBb, axis=-1)
    upto_RB = jnp.cumsum(count_RB, axis=-1)
    block_R = _first_above(count_RB, upto_RB, n_R - 1.0)
    before_R = column(upto_RB - count_RB, block_R)
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
