"""min-p, top-k and top-p as one prefix of each row's tokens in order of weight.

Weights are probabilities relative to the row's best: w = exp((logit - best) / temperature), float32
[R, V] in 0 .. 1. Tokens are ordered by (weight descending, id ascending); every filter keeps a
prefix of that order, so what all of them keep is named by the prefix's last member: its weight and
its id. Most rows are decided by their best `NUM_CANDIDATES` tokens, in large vocabularies others by
their best `MORE_CANDIDATES`; only those that are not are searched whole, a few at a time.

Rule for top-p: the shortest prefix whose share of the mass left by min-p and top-k reaches p, up to
`MASS_SLACK` (sums of float32 are no more exact); the first token always stays.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from engine.row_search import shortest_prefix, top_rows

NUM_CANDIDATES = 64
MORE_CANDIDATES = 1024  # of rows that the first ones do not decide and whose top-k is within these
LARGE_VOCABULARY = 2**17  # from here on finding so many is cheaper than searching the whole row
MASS_SLACK = 2.0**-20
_GROUPS = 8  # undecided rows are looked at an eighth of the batch at a time


@struct.dataclass
class Settings:
    """Per row. Off: min_p 0, top_k 0, top_p 1."""

    min_p_R: jax.Array
    top_k_R: jax.Array
    top_p_R: jax.Array


@struct.dataclass
class Kept:
    """Weights above `floor_R` are kept, and those equal to it up to the id `last_id_R`."""

    floor_R: jax.Array
    last_id_R: jax.Array


def kept_mask(kept: Kept, weight_RV: jax.Array) -> jax.Array:
    floor_R1, last_R1 = kept.floor_R[:, None], kept.last_id_R[:, None]
    ids_V = jnp.arange(weight_RV.shape[-1], dtype=jnp.int32)
    return (weight_RV > floor_R1) | ((weight_RV == floor_R1) & (ids_V <= last_R1))


def keep(weight_RV: jax.Array, settings: Settings, num_candidates: int = NUM_CANDIDATES) -> Kept:
    """What the filters leave of each row. Whatever is searched beyond min-p, some row asks for."""
    counts_R = (settings.top_k_R > 0) | (settings.top_p_R < 1)
    return jax.lax.cond(
        jnp.any(counts_R),
        lambda: _keep(weight_RV, settings, min(num_candidates, weight_RV.shape[-1])),
        lambda: _above(settings.min_p_R, weight_RV.shape[-1]),
    )


def _above(floor_R: jax.Array, vocab: int) -> Kept:
    return Kept(floor_R=floor_R, last_id_R=jnp.full(floor_R.shape, vocab - 1, jnp.int32))


def _keep(weight_RV: jax.Array, settings: Settings, num_candidates: int) -> Kept:
    kept, decided_R = keep_by_candidates(weight_RV, settings, num_candidates)
    search = partial(_search, weight_RV, settings)
    if weight_RV.shape[-1] < LARGE_VOCABULARY:
        return search(kept, ~decided_R, keep_by_whole_rows)
    more = MORE_CANDIDATES
    limited_R = (settings.top_k_R > 0) & (settings.top_k_R <= more)
    kept = search(kept, ~decided_R & limited_R, lambda w, s: keep_by_candidates(w, s, more)[0])
    return search(kept, ~decided_R & ~limited_R, keep_by_whole_rows)


def _search(
    weight_RV: jax.Array,
    settings: Settings,
    kept: Kept,
    rows_R: jax.Array,
    find: Callable[[jax.Array, Settings], Kept],
) -> Kept:
    """`kept` with what `find` says of the rows in `rows_R`, a few of them at a time."""
    num_rows = rows_R.shape[0]
    # A fixed size: what a row keeps must not depend on how many others are searched, and sums of
    # other shapes may round otherwise.
    size = max(num_rows // _GROUPS, min(2, num_rows))
    order_R = jnp.argsort(~rows_R, stable=True).astype(jnp.int32)  # these rows first
    count = jnp.sum(rows_R)

    def group(carry):
        start, kept = carry
        nth_U = jnp.minimum(start + jnp.arange(size), count - 1)  # the last one fills a group
        row_U = order_R.at[nth_U].get(mode="clip")

        def pick(x_R):
            return x_R.at[row_U].get(mode="clip")

        new = find(pick(weight_RV), jax.tree.map(pick, settings))
        return start + size, jax.tree.map(lambda x, y: x.at[row_U].set(y, mode="drop"), kept, new)

    return jax.lax.while_loop(lambda c: c[0] < count, group, (jnp.int32(0), kept))[1]


def keep_by_candidates(
    weight_RV: jax.Array, settings: Settings, num_candidates: int
) -> tuple[Kept, jax.Array]:
    """(kept, decided_R): the prefix as the best tokens show it, and whether they show all of it."""
    vocab = weight_RV.shape[-1]
    weight_RJ, id_RJ = top_rows(weight_RV, num_candidates)
    min_p_R1 = settings.min_p_R[:, None]
    top_k_R = jnp.where(settings.top_k_R > 0, settings.top_k_R, vocab)
    left_RJ = (weight_RJ >= min_p_R1) & (jnp.arange(num_candidates) < top_k_R[:, None])
    num_left_R = jnp.sum(left_RJ, axis=-1, dtype=jnp.int32)
    limits_mass_R = settings.top_p_R < 1
    ends_R = (num_left_R < num_candidates) | (top_k_R <= num_candidates)

    # top-p is a share of the mass that min-p and top-k leave. Where that goes on beyond the
    # candidates it lies between two bounds; they may name the same last token.
    upto_RJ = jnp.cumsum(jnp.where(left_RJ, weight_RJ, 0.0), axis=-1)
    seen_R = upto_RJ[:, -1]
    whole_R = jax.lax.cond(
        jnp.any(limits_mass_R & ~ends_R),
        lambda: jnp.sum(jnp.where(weight_RV >= min_p_R1, weight_RV, 0.0), axis=-1),
        lambda: seen_R,
    )
    unseen_R = (top_k_R - num_candidates) * weight_RJ[:, -1]
    most_R = jnp.where(ends_R, seen_R, jnp.minimum(whole_R, seen_R + unseen_R))
    least_R = jnp.where(ends_R | (top_k_R < vocab), seen_R, whole_R)
    first_R, _ = _first_reached(upto_RJ, _target(least_R, settings.top_p_R))
    latest_R, reached_R = _first_reached(upto_RJ, _target(most_R, settings.top_p_R))
    reached_R &= first_R == latest_R

    length_R = jnp.where(limits_mass_R, jnp.minimum(first_R, num_left_R), num_left_R)
    last_R1 = jnp.maximum(length_R - 1, 0)[:, None]
    kept = Kept(
        floor_R=jnp.take_along_axis(weight_RJ, last_R1, axis=1, mode="clip")[:, 0],
        last_id_R=jnp.take_along_axis(id_RJ, last_R1, axis=1, mode="clip")[:, 0],
    )
    # A row that only min-p limits needs no candidates.
    plain_R = ~limits_mass_R & (settings.top_k_R == 0)
    kept = jax.tree.map(partial(jnp.where, plain_R), _above(settings.min_p_R, vocab), kept)
    return kept, plain_R | jnp.where(limits_mass_R, reached_R, ends_R)


def keep_by_whole_rows(weight_RV: jax.Array, settings: Settings) -> Kept:
    """The same prefix for any row, whatever its length."""
    vocab = weight_RV.shape[-1]

    def cut(kept: Kept, asks_R: jax.Array, find: Callable) -> Kept:
        """`kept`, in rows that ask no longer than what `find` says of the weights it leaves."""

        def shorter() -> Kept:
            left_RV = jnp.where(kept_mask(kept, weight_RV), weight_RV, 0.0)
            return jax.tree.map(
                partial(jnp.where, asks_R), _shorter(kept, Kept(*find(left_RV))), kept
            )

        return jax.lax.cond(jnp.any(asks_R), shorter, lambda: kept)

    def by_count(left_RV: jax.Array):
        count_R = settings.top_k_R.astype(jnp.float32)
        return shortest_prefix(left_RV, jnp.zeros_like(count_R), count_R, jnp.ones_like)

    def by_mass(left_RV: jax.Array):
        total_R = jnp.sum(left_RV, axis=-1)
        target_R = _target(total_R, settings.top_p_R)
        # The last one kept and those after it have the rest together: it is above their mean. Half
        # of that, for sums that round.
        least_R = (total_R - target_R) / (2 * vocab)
        return shortest_prefix(left_RV, least_R, target_R, lambda x_RV: x_RV)

    limits_count_R = (settings.top_k_R > 0) & (settings.top_k_R < vocab)
    kept = cut(_above(settings.min_p_R, vocab), limits_count_R, by_count)
    return cut(kept, settings.top_p_R < 1, by_mass)


def _first_reached(upto_RJ: jax.Array, target_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(length of the shortest prefix that reaches the target, whether one does)."""
    reached_RJ = upto_RJ >= target_R[:, None]
    return jnp.argmax(reached_RJ, axis=-1).astype(jnp.int32) + 1, jnp.any(reached_RJ, axis=-1)


def _target(total_R: jax.Array, top_p_R: jax.Array) -> jax.Array:
    return jnp.maximum(top_p_R - MASS_SLACK, 0.0) * total_R


def _shorter(a: Kept, b: Kept) -> Kept:
    """Of two prefixes of one order, the one that ends first."""
    first_R = (a.floor_R > b.floor_R) | ((a.floor_R == b.floor_R) & (a.last_id_R < b.last_id_R))
    return jax.tree.map(partial(jnp.where, first_R), a, b)
