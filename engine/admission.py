"""Admission: which waiting requests run from now on, and what they find of their history.

Order is (priority, arrival), without overtaking. A request starts from cached pages of its prefix,
from its parent's pages (a fork), or from nothing. The function contains no loop over slots or
pages and never fails: what does not fit waits.

Letters beyond those of `engine.state`: A candidates of a round.
"""

import jax
import jax.numpy as jnp

from engine.config import EngineConfig
from engine.pages import lookup, root_hash, share
from engine.rows import ceil_div, column, first_slots, pick, sum_before, when
from engine.state import (
    DEAD_CHAIN,
    NO_UID,
    ROOT_PAGE,
    RUNNING,
    WAITING,
    BatchState,
    Slots,
    count,
)


def admit(config: EngineConfig, state: BatchState) -> BatchState:
    """Let waiting requests run while rows and pages allow, in order, without overtaking.

    One whose prompt this round's token budget will not reach waits on: it loses nothing, holds no
    pages, and finds in the prefix cache what those before it are computing.
    """
    slots = state.slots
    num_running = jnp.sum(slots.status_S == RUNNING)
    room = config.max_num_seqs - num_running
    if config.policy == "static":
        room = jnp.where(num_running == 0, room, 0)
    waiting = jnp.any(slots.status_S == WAITING)
    return when(waiting & (room > 0), lambda s: _admit(config, s, room), state)


def _admit(config: EngineConfig, state: BatchState, room: jax.Array) -> BatchState:
    slots, pool, C = state.slots, state.pool, config.page_size
    num_slots = slots.status_S.shape[0]
    parent_S, fork_S, blocked_S = _parents(slots)
    eligible_S = (slots.status_S == WAITING) & ~blocked_S
    slot_A = first_slots(eligible_S, slots, config.admissions_per_round)
    exists_A = slot_A < num_slots
    tokens_A = pick(slots.num_tokens_S, slot_A)
    prompt_A = pick(slots.requests.prompt_len, slot_A)
    fork_A, salt_A = pick(fork_S, slot_A), pick(slots.requests.salt, slot_A)

    hit_AM, hits_A, hash_AM = _prefix(config, state, slot_A, tokens_A)
    shared_AM = slots.page_table_SM.at[pick(parent_S, slot_A)].get(mode="clip")
    table_AM = jnp.where(fork_A[:, None], shared_AM, hit_AM)
    held_A = jnp.where(fork_A, ceil_div(prompt_A, C), hits_A)
    computed_A = jnp.where(fork_A, prompt_A - 1, hits_A * C)
    held_AM = jnp.arange(config.pages_per_seq) < held_A[:, None]

    # A page that is found free is used up like one that is taken (counted for each that finds it,
    # which errs on the safe side); a fork copies its last page.
    revived_A = jnp.sum(held_AM & (pool.refcount_P.at[table_AM].get(mode="clip") == 0), axis=1)
    cost_A = ceil_div(tokens_A, C) - held_A + revived_A + fork_A
    running_S = slots.status_S == RUNNING
    promised_S = ceil_div(slots.num_tokens_S, C) - slots.num_pages_S + 1  # and one to grow into
    available = pool.num_free - jnp.sum(jnp.where(running_S, promised_S, 0))
    # Every condition holds for a prefix of the candidates: nobody overtakes.
    fits_A = exists_A & (jnp.cumsum(cost_A) <= available)
    fits_A &= jnp.arange(config.admissions_per_round) < room
    if config.policy == "continuous":
        # A row that lacks one token decodes, outside of the budget.
        left_S = jnp.where(running_S, slots.num_tokens_S - slots.num_computed_S, 0)
        ahead_A = pick(sum_before(jnp.where(left_S > 1, left_S, 0), slots), slot_A)
        own_A = tokens_A - computed_A
        fits_A &= ahead_A + jnp.cumsum(own_A) - own_A < config.token_budget

    held_AM &= fits_A[:, None]
    pool = when(
        jnp.any(held_AM), lambda p: share(p, table_AM.reshape(-1), held_AM.reshape(-1)), pool
    )
    last_A = jnp.maximum(hits_A - 1, 0)
    tip_A = jnp.where(hits_A > 0, column(hit_AM, last_A), ROOT_PAGE)
    at_A = jnp.where(fits_A, slot_A, num_slots)

    def put(x_S, value_A):
        return x_S.at[at_A].set(value_A, mode="drop")

    slots = slots.replace(
        status_S=put(slots.status_S, RUNNING),
        num_computed_S=put(slots.num_computed_S, computed_A),
        page_table_SM=put(slots.page_table_SM, jnp.where(held_AM, table_AM, 0)),
        num_pages_S=put(slots.num_pages_S, held_A),
        chain_len_S=put(slots.chain_len_S, jnp.where(fork_A, DEAD_CHAIN, hits_A)),
        chain_page_S=put(slots.chain_page_S, tip_A),
        chain_epoch_S=put(slots.chain_epoch_S, pool.epoch_P.at[tip_A].get(mode="clip")),
        chain_hash_S=put(
            slots.chain_hash_S, jnp.where(hits_A > 0, column(hash_AM, last_A), root_hash(salt_A))
        ),
    )
    queried = jnp.sum(jnp.where(fits_A & ~fork_A, tokens_A, 0))
    hit = jnp.sum(jnp.where(fits_A & ~fork_A, hits_A * C, 0))
    state = count(state, prefix_query_tokens=queried, prefix_hit_tokens=hit)
    return state.replace(slots=slots, pool=pool)


def _parents(slots: Slots) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per slot: its parent's slot; whether it can fork from it now; whether it must wait for it."""
    uid_S, wanted_S = slots.requests.uid, slots.requests.parent_uid
    match_SS = (wanted_S[:, None] == uid_S[None, :]) & (wanted_S != NO_UID)[:, None]
    alive_S = jnp.any(match_SS, axis=1)
    parent_S = jnp.max(jnp.where(match_SS, jnp.arange(uid_S.shape[0]), 0), axis=1)
    ready_S = (slots.status_S == RUNNING).at[parent_S].get(mode="clip") & (
        slots.num_computed_S.at[parent_S].get(mode="clip") >= slots.requests.prompt_len
    )
    return parent_S, alive_S & ready_S, alive_S & ~ready_S


def _prefix(config: EngineConfig, state: BatchState, slot_A: jax.Array, tokens_A: jax.Array):
    """Cached pages of each candidate's history. The last token is always computed."""
    A, M, C = slot_A.shape[0], config.pages_per_seq, config.page_size
    if not config.enable_prefix_caching:
        zeros_AM = jnp.zeros((A, M), jnp.int32)
        return zeros_AM, jnp.zeros(A, jnp.int32), zeros_AM.astype(jnp.uint32)
    history_AMC = state.slots.tokens_SX.at[slot_A].get(mode="clip").reshape(A, M, C)
    requests = state.slots.requests
    usable_AM = (jnp.arange(M) + 1) * C < tokens_A[:, None]
    # Whose prompt is to be scored computes all of it.
    usable_AM &= (pick(requests.score_prompt, slot_A) == 0)[:, None]
    return lookup(state.pool, history_AMC, pick(requests.salt, slot_A), usable_AM)
