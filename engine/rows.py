"""Slots in order and as rows: what the scheduler's functions share.

A round works on rows: row r is the r-th running request in (priority, arrival) order, of slot
`slot_R[r]`. Rows without a request name slot num_slots, which is outside of every per-slot array:
reading there gives a fill value, writing there is dropped.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from engine.state import UID_SPAN, Slots

T = TypeVar("T")


def when(condition: jax.Array, f: Callable[[T], T], x: T) -> T:
    """`f(x)` if the condition holds, else x, as a loop of zero or one trips.

    A `cond` would copy large operands on some backends; a `while_loop` updates them in place.
    """
    return jax.lax.while_loop(
        lambda c: c[0], lambda c: (jnp.bool_(False), f(c[1])), (condition, x)
    )[1]


def ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b


def sum_before(count_S: jax.Array, slots: Slots) -> jax.Array:
    """For each slot, the sum of `count_S` over those before it in (priority, arrival) order."""
    priority_S, uid_S = slots.requests.priority, slots.requests.uid
    # Uids wrap. Of two less than half the span apart the other one is older if the difference is
    # negative modulo the span, which is this bit.
    older_SS = ((uid_S[None, :] - uid_S[:, None]) & (UID_SPAN // 2)) != 0
    before_SS = (priority_S[None, :] < priority_S[:, None]) | (
        (priority_S[None, :] == priority_S[:, None]) & older_SS
    )
    return jnp.sum(jnp.where(before_SS, count_S[None, :], 0), axis=1, dtype=jnp.int32)


def first_slots(mask_S: jax.Array, slots: Slots, num: int) -> jax.Array:
    """The first `num` masked slots in order; num_slots where there are fewer."""
    num_slots = mask_S.shape[0]
    at_S = jnp.where(mask_S, sum_before(mask_S, slots), num)
    ids_S = jnp.arange(num_slots, dtype=jnp.int32)
    return jnp.full(num, num_slots, jnp.int32).at[at_S].set(ids_S, mode="drop")


def pick(x_S: jax.Array, slot_R: jax.Array) -> jax.Array:
    """Entries of a per-slot array, 0 where there is no slot."""
    return x_S.at[slot_R].get(mode="fill", fill_value=0)


def column(x_RX: jax.Array, index_R: jax.Array) -> jax.Array:
    """Of each row, the entry at its index."""
    return jnp.take_along_axis(x_RX, index_R[:, None], axis=1, mode="clip")[:, 0]
