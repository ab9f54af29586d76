"""`fork`: slots take over each other's histories, pages by reference.

A search lets any of its slots go on from any other's history: the slot drops its own pages and
points to the other's, the last, partly filled one included. Nothing is copied here; who writes into
a page that several hold copies it then (`engine.schedule.allocate`). A slot that is told to wait
has every known token computed, so that no round finds anything to run in it.
"""

import jax
import jax.numpy as jnp

from engine.pages import release, share
from engine.rows import pick
from engine.state import EMPTY, NO_TOKEN, NO_UID, BatchState, Forks, Slots


def fork(state: BatchState, forks: Forks) -> BatchState:
    """Carry out all entries at once; one whose requests are not both in slots does nothing."""
    slots = state.slots
    num_slots, M = slots.page_table_SM.shape
    source_F = _slot_of(slots, forks.from_uid_F)
    target_F = jnp.where(source_F < num_slots, _slot_of(slots, forks.to_uid_F), num_slots)
    moves_F = target_F < num_slots

    table_FM = slots.page_table_SM.at[source_F].get(mode="fill", fill_value=0)
    column_M = jnp.arange(M)
    taken_FM = moves_F[:, None] & (column_M < pick(slots.num_pages_S, source_F)[:, None])
    dropped_FM = column_M[::-1] < pick(slots.num_pages_S, target_F)[:, None]
    old_FM = slots.page_table_SM.at[target_F].get(mode="fill", fill_value=0)[:, ::-1]
    # Taken before dropped: a page that one gives up and another takes is never free in between.
    pool = share(state.pool, table_FM.reshape(-1), taken_FM.reshape(-1))
    pool = release(pool, old_FM.reshape(-1), dropped_FM.reshape(-1))

    tokens_FX = slots.tokens_SX.at[source_F].get(mode="fill", fill_value=0)
    next_FX = jnp.arange(tokens_FX.shape[1]) == forks.length_F[:, None]
    goes_on_F = forks.token_F != NO_TOKEN
    tokens_FX = jnp.where(next_FX & goes_on_F[:, None], forks.token_F[:, None], tokens_FX)

    def put(x_S, value_F):
        return x_S.at[target_F].set(value_F, mode="drop")

    def follow(x_S):
        return put(x_S, x_S.at[source_F].get(mode="clip"))

    slots = slots.replace(
        status_S=follow(slots.status_S),
        tokens_SX=put(slots.tokens_SX, tokens_FX),
        num_tokens_S=put(slots.num_tokens_S, forks.length_F + goes_on_F),
        num_computed_S=follow(slots.num_computed_S),
        page_table_SM=follow(slots.page_table_SM),
        num_pages_S=follow(slots.num_pages_S),
        chain_len_S=follow(slots.chain_len_S),
        chain_page_S=follow(slots.chain_page_S),
        chain_epoch_S=follow(slots.chain_epoch_S),
        chain_hash_S=follow(slots.chain_hash_S),
    )
    return state.replace(slots=slots, pool=pool)


def _slot_of(slots: Slots, uid_F: jax.Array) -> jax.Array:
    """The slot of each request, num_slots where there is none."""
    ids_S = jnp.arange(slots.status_S.shape[0], dtype=jnp.int32)
    match_FS = (uid_F[:, None] == slots.requests.uid) & (slots.status_S != EMPTY)
    match_FS &= uid_F[:, None] != NO_UID
    return jnp.min(jnp.where(match_FS, ids_S, ids_S.size), axis=1)
