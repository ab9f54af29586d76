"""The end of a round: histories grow, full pages are published, what finished frees its pages.

Letters beyond those of `engine.state`: W pages that a row may fill in a round.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from engine.config import EngineConfig
from engine.pages import page_hashes, publish, release
from engine.rows import column, pick, when
from engine.schedule import Plan
from engine.state import (
    DEAD_CHAIN,
    EMPTY,
    ERROR,
    LENGTH,
    NO_TOKEN,
    NO_UID,
    STOP,
    BatchState,
    count,
)


@struct.dataclass
class Emission:
    """What one round yields per row: token (or NO_TOKEN), its request, its finish reason, and what
    the sampler sends along."""

    token_R: jax.Array
    uid_R: jax.Array
    reason_R: jax.Array
    extra: Any = None


def commit(
    config: EngineConfig, state: BatchState, plan: Plan, token_R: jax.Array, ok_R: jax.Array
) -> tuple[BatchState, Emission]:
    """Take the round's tokens: grow, stop, publish full pages, free what finished.

    `token_R` counts where a row's whole history is now computed; `ok_R` False (logits that are not
    finite) ends the row with an error and publishes none of its pages.
    """
    slots = state.slots
    asked = slots.requests.replace(sampling=None)  # nothing here reads it
    requests = jax.tree.map(lambda x: pick(x, plan.slot_R), asked)
    known_R = pick(slots.num_tokens_S, plan.slot_R)
    ran_R = plan.q_len_R > 0
    computed_R = plan.start_R + plan.q_len_R
    emits_R = ran_R & ok_R & (computed_R == known_R)
    stops_R = emits_R & jnp.any(token_R[:, None] == requests.stop_ids, axis=1)
    full_R = emits_R & (known_R + 1 >= requests.max_len)
    reason_R = jnp.where(stops_R, STOP, jnp.where(full_R, LENGTH, 0))
    reason_R = jnp.where(ran_R & ~ok_R, ERROR, reason_R)

    at_R = jnp.where(emits_R, plan.slot_R, slots.status_S.shape[0])
    slots = slots.replace(
        num_computed_S=slots.num_computed_S.at[plan.slot_R].add(plan.q_len_R, mode="drop"),
        tokens_SX=slots.tokens_SX.at[at_R, known_R].set(token_R, mode="drop"),
        num_tokens_S=slots.num_tokens_S.at[at_R].add(1, mode="drop"),
    )
    decoded = jnp.sum(jnp.where(plan.decode_R, plan.q_len_R, 0))
    state = count(
        state.replace(slots=slots),
        rounds=1,
        decode_rounds=decoded > 0,
        decode_tokens=decoded,
        prefill_tokens=jnp.sum(plan.q_len_R) - decoded,
    )
    if config.enable_prefix_caching:
        state = _publish(config, state, plan, ran_R & ok_R)
    state = when(jnp.any(reason_R > 0), lambda s: retire(s, plan.slot_R, reason_R > 0), state)
    return state, Emission(
        token_R=jnp.where(emits_R, token_R, NO_TOKEN),
        uid_R=jnp.where(ran_R, requests.uid, NO_UID),
        reason_R=reason_R,
    )


def _publish(config: EngineConfig, state: BatchState, plan: Plan, sound_R: jax.Array) -> BatchState:
    """Publish pages that became full; how many one row can fill depends on the pass."""
    C, budget = config.page_size, config.token_budget
    chain_R = pick(state.slots.chain_len_S, plan.slot_R)
    computed_R = plan.start_R + plan.q_len_R
    fills_R = sound_R & (chain_R >= 0) & (computed_R // C > chain_R)
    many = jnp.any(fills_R & (computed_R // C > chain_R + 1))

    def offer(width: int):
        return lambda s: _publish_pages(config, s, plan, fills_R, computed_R // C, width)

    state = when(jnp.any(fills_R) & ~many, offer(1), state)
    return when(many, offer(budget // C + 1), state)


def _publish_pages(
    config, state: BatchState, plan: Plan, fills_R, num_full_R, width: int
) -> BatchState:
    slots, pool, C = state.slots, state.pool, config.page_size
    chain_R = pick(slots.chain_len_S, plan.slot_R)
    tip_R, tip_epoch_R = (
        pick(slots.chain_page_S, plan.slot_R),
        pick(slots.chain_epoch_S, plan.slot_R),
    )
    # The tip may be another request's page, and may have been taken for something else since.
    alive_R = pool.epoch_P.at[tip_R].get(mode="clip") == tip_epoch_R
    page_index_RW = chain_R[:, None] + jnp.arange(width)
    full_RW = (fills_R & alive_R)[:, None] & (page_index_RW < num_full_R[:, None])
    position_RWC = page_index_RW[:, :, None] * C + jnp.arange(C)
    tokens_RWC = slots.tokens_SX.at[plan.slot_R[:, None, None], position_RWC].get(mode="clip")
    hash_RW = pick(slots.chain_hash_S, plan.slot_R)[:, None] + jnp.cumsum(
        page_hashes(tokens_RWC, chain_R), axis=-1, dtype=jnp.uint32
    )
    page_RW = slots.page_table_SM.at[plan.slot_R[:, None], page_index_RW].get(mode="clip")
    pool, canonical_RW = publish(
        pool,
        page_RW,
        tokens_RWC,
        hash_RW,
        pick(slots.requests.salt, plan.slot_R),
        tip_R,
        tip_epoch_R,
        full_RW,
    )
    grown_R = jnp.sum(canonical_RW >= 0, axis=1, dtype=jnp.int32)
    whole_R = grown_R == jnp.sum(full_RW, axis=1)
    last_R = jnp.maximum(grown_R - 1, 0)
    new_tip_R = column(canonical_RW, last_R)
    at_R = jnp.where(fills_R & (grown_R > 0), plan.slot_R, slots.status_S.shape[0])
    chain_len_R = jnp.where(alive_R & whole_R, chain_R + grown_R, DEAD_CHAIN)
    slots = slots.replace(
        chain_len_S=slots.chain_len_S.at[
            jnp.where(fills_R, plan.slot_R, slots.status_S.shape[0])
        ].set(chain_len_R, mode="drop"),
        chain_page_S=slots.chain_page_S.at[at_R].set(new_tip_R, mode="drop"),
        chain_epoch_S=slots.chain_epoch_S.at[at_R].set(
            pool.epoch_P.at[new_tip_R].get(mode="clip"), mode="drop"
        ),
        chain_hash_S=slots.chain_hash_S.at[at_R].set(column(hash_RW, last_R), mode="drop"),
    )
    return state.replace(slots=slots, pool=pool)


def retire(state: BatchState, slot_R: jax.Array, ends_R: jax.Array) -> BatchState:
    """Empty the slots where `ends_R` and give back their pages."""
    slots = state.slots
    num_slots, M = slots.page_table_SM.shape
    column_M = jnp.arange(M - 1, -1, -1)
    page_RM = slots.page_table_SM.at[slot_R[:, None], column_M].get(mode="clip")
    held_RM = ends_R[:, None] & (column_M < pick(slots.num_pages_S, slot_R)[:, None])
    pool = release(state.pool, page_RM.reshape(-1), held_RM.reshape(-1))
    at_R = jnp.where(ends_R, slot_R, num_slots)
    slots = slots.replace(
        requests=slots.requests.replace(uid=slots.requests.uid.at[at_R].set(NO_UID, mode="drop")),
        status_S=slots.status_S.at[at_R].set(EMPTY, mode="drop"),
        num_tokens_S=slots.num_tokens_S.at[at_R].set(0, mode="drop"),
        num_computed_S=slots.num_computed_S.at[at_R].set(0, mode="drop"),
        num_pages_S=slots.num_pages_S.at[at_R].set(0, mode="drop"),
        page_table_SM=slots.page_table_SM.at[at_R].set(0, mode="drop"),
    )
    return state.replace(slots=slots, pool=pool)
