"""Who runs, with how many tokens, on which pages: the scheduler as pure functions of `BatchState`.

`admit`, `schedule`, `allocate` and `commit` take neither parameters nor a model, contain no loop
over slots or pages, and never fail: what does not fit waits. Order is (priority, arrival)
everywhere, so row r of a plan is the r-th running request in that order, and cumulative sums over
rows serve them in that order. The first running request is never preempted and always gets its
pages, so every request finishes in bounded time.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from engine.pages import lookup, page_hashes, publish, release, root_hash, share, take
from engine.state import (
    DEAD_CHAIN,
    EMPTY,
    ERROR,
    LENGTH,
    NO_TOKEN,
    NO_UID,
    ROOT_PAGE,
    RUNNING,
    STOP,
    UID_SPAN,
    WAITING,
    BatchState,
    EngineConfig,
    Slots,
    count,
)

T = TypeVar("T")


@struct.dataclass
class Plan:
    """One round. Row r is slot `slot_R[r]` (num_slots where there is none).

    q_len_R     tokens it runs, 0 if it must wait
    start_R     tokens whose keys it has
    decode_R    its one unknown token comes from the narrow pass, not from the prefill pass
    copy_*_R    pages to copy before the passes (copy-on-write); trash onto trash where none
    """

    slot_R: jax.Array
    q_len_R: jax.Array
    start_R: jax.Array
    decode_R: jax.Array
    copy_from_R: jax.Array
    copy_to_R: jax.Array


@struct.dataclass
class Emission:
    """What one round yields per row: token (or NO_TOKEN), its request, its finish reason, and what
    the sampler sends along."""

    token_R: jax.Array
    uid_R: jax.Array
    reason_R: jax.Array
    extra: Any = None


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
    # Of two uids less than half the span apart the older one is found whether they wrapped or not.
    older_SS = ((uid_S[None, :] - uid_S[:, None]) & (UID_SPAN // 2)) != 0
    before_SS = (priority_S[None, :] < priority_S[:, None]) | (
        (priority_S[None, :] == priority_S[:, None]) & older_SS
    )
    return jnp.sum(jnp.where(before_SS, count_S[None, :], 0), axis=1, dtype=jnp.int32)


def first_slots(mask_S: jax.Array, slots: Slots, count: int) -> jax.Array:
    """The first `count` masked slots in order; num_slots where there are fewer."""
    num_slots = mask_S.shape[0]
    at_S = jnp.where(mask_S, sum_before(mask_S, slots), count)
    ids_S = jnp.arange(num_slots, dtype=jnp.int32)
    return jnp.full(count, num_slots, jnp.int32).at[at_S].set(ids_S, mode="drop")


def pick(x_S: jax.Array, slot_R: jax.Array) -> jax.Array:
    """Entries of a per-slot array, 0 where there is no slot."""
    return x_S.at[slot_R].get(mode="fill", fill_value=0)


# ---- admission -----------------------------------------------------------------------------------


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
    hits_A = jnp.where(fork_A, 0, hits_A)
    shared_AM = slots.page_table_SM.at[pick(parent_S, slot_A)].get(mode="clip")
    table_AM = jnp.where(fork_A[:, None], shared_AM, hit_AM)
    held_A = jnp.where(fork_A, ceil_div(prompt_A, C), hits_A)
    held_AM = jnp.arange(config.pages_per_seq) < held_A[:, None]

    # A page that is found free is used up like one that is taken; a fork copies its last page.
    revived_A = jnp.sum(held_AM & (pool.refcount_P.at[table_AM].get(mode="clip") == 0), axis=1)
    cost_A = ceil_div(tokens_A, C) - held_A + revived_A + fork_A
    running_S = slots.status_S == RUNNING
    promised_S = ceil_div(slots.num_tokens_S, C) - slots.num_pages_S + 1  # and one to grow into
    available = pool.num_free - jnp.sum(jnp.where(running_S, promised_S, 0))
    # Every condition holds for a prefix of the candidates: nobody overtakes.
    fits_A = exists_A & (jnp.cumsum(cost_A) <= available)
    fits_A &= jnp.arange(config.admissions_per_round) < room
    if config.policy == "continuous":
        left_S = jnp.where(running_S, slots.num_tokens_S - slots.num_computed_S, 0)
        ahead_A = pick(sum_before(jnp.where(left_S > 1, left_S, 0), slots), slot_A)
        own_A = tokens_A - jnp.where(fork_A, prompt_A - 1, hits_A * C)
        fits_A &= ahead_A + jnp.cumsum(own_A) - own_A < config.token_budget

    held_AM &= fits_A[:, None]
    pool = when(
        jnp.any(held_AM), lambda p: share(p, table_AM.reshape(-1), held_AM.reshape(-1)), pool
    )
    last_A = jnp.maximum(hits_A - 1, 0)
    tip_A = jnp.where(hits_A > 0, _column(hit_AM, last_A), ROOT_PAGE)
    at_A = jnp.where(fits_A, slot_A, num_slots)

    def put(x_S, value_A):
        return x_S.at[at_A].set(value_A, mode="drop")

    slots = slots.replace(
        status_S=put(slots.status_S, RUNNING),
        num_computed_S=put(slots.num_computed_S, jnp.where(fork_A, prompt_A - 1, hits_A * C)),
        page_table_SM=put(slots.page_table_SM, jnp.where(held_AM, table_AM, 0)),
        num_pages_S=put(slots.num_pages_S, held_A),
        chain_len_S=put(slots.chain_len_S, jnp.where(fork_A, DEAD_CHAIN, hits_A)),
        chain_page_S=put(slots.chain_page_S, tip_A),
        chain_epoch_S=put(slots.chain_epoch_S, pool.epoch_P.at[tip_A].get(mode="clip")),
        chain_hash_S=put(
            slots.chain_hash_S, jnp.where(hits_A > 0, _column(hash_AM, last_A), root_hash(salt_A))
        ),
    )
    queried = jnp.sum(jnp.where(fits_A & ~fork_A, tokens_A, 0))
    hit = jnp.sum(jnp.where(fits_A & ~fork_A, hits_A * C, 0))
    state = count(state, prefix_query_tokens=queried, prefix_hit_tokens=hit)
    return state.replace(slots=slots, pool=pool)


def _column(x_AM: jax.Array, column_A: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_AM, column_A[:, None], axis=1, mode="clip")[:, 0]


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


# ---- one round -----------------------------------------------------------------------------------


def schedule(config: EngineConfig, state: BatchState) -> Plan:
    """Every decoding row runs its token; the token budget goes to prefilling rows in order."""
    slots = state.slots
    slot_R = first_slots(slots.status_S == RUNNING, slots, config.max_num_seqs)
    start_R = pick(slots.num_computed_S, slot_R)
    left_R = pick(slots.num_tokens_S, slot_R) - start_R
    decode_R = left_R == 1
    wanted_R = jnp.where(decode_R, 0, left_R)
    before_R = jnp.cumsum(wanted_R) - wanted_R
    chunk_R = jnp.clip(config.token_budget - before_R, 0, wanted_R)
    trash_R = jnp.zeros_like(slot_R)
    return Plan(
        slot_R=slot_R,
        q_len_R=jnp.where(decode_R, 1, chunk_R),
        start_R=start_R,
        decode_R=decode_R,
        copy_from_R=trash_R,
        copy_to_R=trash_R,
    )


def allocate(config: EngineConfig, state: BatchState, plan: Plan) -> tuple[BatchState, Plan]:
    """Give each row the pages its tokens need; rows that get none this round have q_len 0.

    When pages run short the last running request is preempted: it gives back its pages, keeps its
    tokens and will be computed again.
    """
    need_R, _ = _needs(config, state, plan)
    several = jnp.sum(state.slots.status_S == RUNNING) > 1
    short = jnp.sum(need_R) > state.pool.num_free
    state, plan = when(short & several, lambda x: _preempt_last(*x), (state, plan))
    need_R, _ = _needs(config, state, plan)
    fits_R = (need_R == 0) | (jnp.cumsum(need_R) <= state.pool.num_free)
    state = count(state, stalled_rows=jnp.sum(~fits_R, dtype=jnp.int32))
    plan = plan.replace(q_len_R=jnp.where(fits_R, plan.q_len_R, 0))
    need_R = jnp.where(fits_R, need_R, 0)
    return when(jnp.any(need_R > 0), lambda x: _hand_out(config, *x), (state, plan))


def _needs(config: EngineConfig, state: BatchState, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """(new pages per row, whether one of them replaces a shared page about to be written)."""
    slots, C = state.slots, config.page_size
    held_R = pick(slots.num_pages_S, plan.slot_R)
    runs_R = plan.q_len_R > 0
    written_R = _written_page(config, slots, plan)
    shared_R = state.pool.refcount_P.at[written_R].get(mode="clip") > 1
    copy_R = runs_R & shared_R & (plan.start_R // C < held_R)
    grown_R = ceil_div(plan.start_R + plan.q_len_R, C) - held_R
    return jnp.where(runs_R, jnp.maximum(grown_R, 0) + copy_R, 0), copy_R


def _written_page(config: EngineConfig, slots: Slots, plan: Plan) -> jax.Array:
    """The page in which each row's next token falls, as the table has it now."""
    column_R = plan.start_R // config.page_size
    return slots.page_table_SM.at[plan.slot_R, column_R].get(mode="fill", fill_value=0)


def _preempt_last(state: BatchState, plan: Plan) -> tuple[BatchState, Plan]:
    slots = state.slots
    num_slots, M = slots.page_table_SM.shape
    last = jnp.sum(plan.slot_R < num_slots) - 1
    slot = plan.slot_R.at[last].get(mode="clip")
    # Last page first, so that what is reused first is what a prefix needs least.
    column_M = jnp.arange(M - 1, -1, -1)
    page_M = slots.page_table_SM.at[slot, column_M].get(mode="clip")
    held = slots.num_pages_S.at[slot].get(mode="clip")
    pool = release(state.pool, page_M, column_M < held)
    slots = slots.replace(
        status_S=slots.status_S.at[slot].set(WAITING, mode="drop"),
        num_computed_S=slots.num_computed_S.at[slot].set(0, mode="drop"),
        num_pages_S=slots.num_pages_S.at[slot].set(0, mode="drop"),
        page_table_SM=slots.page_table_SM.at[slot].set(0, mode="drop"),
        preemptions_S=slots.preemptions_S.at[slot].add(1, mode="drop"),
    )
    plan = plan.replace(
        slot_R=plan.slot_R.at[last].set(num_slots, mode="drop"),
        q_len_R=plan.q_len_R.at[last].set(0, mode="drop"),
        decode_R=plan.decode_R.at[last].set(False, mode="drop"),
    )
    state = count(state, preemptions=1)
    return state.replace(slots=slots, pool=pool), plan


def _hand_out(config: EngineConfig, state: BatchState, plan: Plan) -> tuple[BatchState, Plan]:
    slots, C = state.slots, config.page_size
    need_R, copy_R = _needs(config, state, plan)
    # Decoding rows take one page at most, prefilling ones what the budget fills and their edges.
    most = 2 * config.max_num_seqs + config.token_budget // C
    end_R = jnp.cumsum(need_R)
    item_N = jnp.arange(most, dtype=jnp.int32)
    wanted_N = item_N < end_R[-1]
    row_N = jnp.searchsorted(end_R, item_N, side="right", method="compare_all").astype(jnp.int32)
    pool, page_N = take(state.pool, wanted_N)

    nth_N = item_N - (end_R - need_R).at[row_N].get(mode="clip")
    copies_N = copy_R.at[row_N].get(mode="clip") & (nth_N == 0)
    held_R = pick(slots.num_pages_S, plan.slot_R)
    column_N = jnp.where(
        copies_N,
        (plan.start_R // C).at[row_N].get(mode="clip"),
        (held_R - copy_R).at[row_N].get(mode="clip") + nth_N,
    )
    old_R = _written_page(config, slots, plan)
    slot_N = plan.slot_R.at[row_N].get(mode="clip")
    num_slots = slots.status_S.shape[0]
    table_SM = slots.page_table_SM.at[jnp.where(wanted_N, slot_N, num_slots), column_N].set(
        page_N, mode="drop"
    )
    row_of_copy_N = jnp.where(wanted_N & copies_N, row_N, need_R.shape[0])
    plan = plan.replace(
        copy_from_R=jnp.where(copy_R, old_R, 0),
        copy_to_R=jnp.zeros_like(old_R).at[row_of_copy_N].set(page_N, mode="drop"),
    )
    pool = when(jnp.any(copy_R), lambda p: release(p, old_R, copy_R), pool)
    slots = slots.replace(
        page_table_SM=table_SM,
        num_pages_S=slots.num_pages_S.at[plan.slot_R].add(need_R - copy_R, mode="drop"),
    )
    state = count(state, page_copies=jnp.sum(copy_R, dtype=jnp.int32))
    return state.replace(slots=slots, pool=pool), plan


def commit(
    config: EngineConfig, state: BatchState, plan: Plan, token_R: jax.Array, ok_R: jax.Array
) -> tuple[BatchState, Emission]:
    """Take the round's tokens: grow, stop, publish full pages, free what finished.

    `token_R` counts where a row's whole history is now computed; `ok_R` False (logits that are not
    finite) ends the row with an error and publishes none of its pages.
    """
    slots = state.slots
    requests = jax.tree.map(lambda x: pick(x, plan.slot_R), slots.requests.replace(sampling=None))
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
    config, state: BatchState, plan: Plan, fills_R, full_R, width: int
) -> BatchState:
    slots, pool, C = state.slots, state.pool, config.page_size
    chain_R = pick(slots.chain_len_S, plan.slot_R)
    tip_R, tip_epoch_R = (
        pick(slots.chain_page_S, plan.slot_R),
        pick(slots.chain_epoch_S, plan.slot_R),
    )
    # Another request's page may be the tip, and it may have been taken for something else since.
    alive_R = (tip_R == ROOT_PAGE) | (
        pool.published_P.at[tip_R].get(mode="clip")
        & (pool.epoch_P.at[tip_R].get(mode="clip") == tip_epoch_R)
    )
    page_index_RW = chain_R[:, None] + jnp.arange(width)
    full_RW = (fills_R & alive_R)[:, None] & (page_index_RW < full_R[:, None])
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
    new_tip_R = _column(canonical_RW, last_R)
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
        chain_hash_S=slots.chain_hash_S.at[at_R].set(_column(hash_RW, last_R), mode="drop"),
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
