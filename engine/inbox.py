"""What the outside changes in the state at the start of a dispatch: aborts, forks, arrivals."""

import jax
import jax.numpy as jnp

from engine.commit import retire
from engine.fork import fork
from engine.rows import when
from engine.state import EMPTY, NO_UID, WAITING, BatchState, Inbox


def receive(state: BatchState, inbox: Inbox) -> BatchState:
    """Abort, fork, put arrivals into empty slots. The host sends no more than there is room for."""
    aborts = jnp.any(inbox.abort_A != NO_UID)
    state = when(aborts, lambda s: _abort(s, inbox.abort_A), state)
    forks = jnp.any(inbox.forks.to_uid_F != NO_UID)
    state = when(forks, lambda s: fork(s, inbox.forks), state)
    arrivals = jnp.any(inbox.requests.uid != NO_UID)
    return when(arrivals, lambda s: _arrive(s, inbox), state)


def _abort(state: BatchState, abort_A: jax.Array) -> BatchState:
    slots = state.slots
    hit_S = jnp.any(slots.requests.uid[:, None] == abort_A[None, :], axis=1)
    hit_S &= slots.status_S != EMPTY
    return retire(state, jnp.arange(hit_S.shape[0], dtype=jnp.int32), hit_S)


def _arrive(state: BatchState, inbox: Inbox) -> BatchState:
    slots = state.slots
    num_slots, room = slots.tokens_SX.shape
    new_A = inbox.requests.uid != NO_UID
    empty_S = slots.status_S == EMPTY
    nth_S = jnp.where(empty_S, jnp.cumsum(empty_S) - 1, num_slots)
    ids_S = jnp.arange(num_slots, dtype=jnp.int32)
    slot_of_nth = jnp.full(num_slots, num_slots, jnp.int32).at[nth_S].set(ids_S, mode="drop")
    slot_A = slot_of_nth.at[jnp.cumsum(new_A) - 1].get(mode="fill", fill_value=num_slots)
    slot_A = jnp.where(new_A, slot_A, num_slots)

    position_X = jnp.arange(room)
    source_AX = inbox.start_A[:, None] + position_X
    tokens_AX = inbox.tokens_Y.at[source_AX].get(mode="fill", fill_value=0)
    tokens_AX = jnp.where(position_X < inbox.requests.prompt_len[:, None], tokens_AX, 0)

    def put(x_S, value_A):
        return x_S.at[slot_A].set(value_A, mode="drop")

    slots = slots.replace(
        requests=jax.tree.map(put, slots.requests, inbox.requests),
        status_S=put(slots.status_S, WAITING),
        tokens_SX=put(slots.tokens_SX, tokens_AX),
        num_tokens_S=put(slots.num_tokens_S, inbox.requests.prompt_len),
        num_computed_S=put(slots.num_computed_S, 0),
        preemptions_S=put(slots.preemptions_S, 0),
    )
    return state.replace(slots=slots)
