"""What each running request runs in a round, and on which pages: pure functions of `BatchState`.

`admit` (engine.admission), `schedule`, `allocate` and `commit` (engine.commit) take neither
parameters nor a model, contain no loop over slots or pages, and never fail: what does not fit
waits. Order is (priority, arrival) everywhere, so row r of a plan is the r-th running request in
that order, and cumulative sums over rows serve them in that order. The first running request is
never preempted, and a round that is short of pages takes those of the last one: the first goes on
after as many rounds as there are rows, so every request finishes in bounded time.

Letters beyond those of `engine.state`: N pages that a round hands out.
"""

import jax
import jax.numpy as jnp
from flax import struct

from engine.config import EngineConfig
from engine.pages import release, take
from engine.rows import ceil_div, first_slots, pick, when
from engine.state import RUNNING, WAITING, BatchState, Slots, count


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
    copy_R = runs_R & shared_R
    grown_R = ceil_div(plan.start_R + plan.q_len_R, C) - held_R
    return jnp.where(runs_R, jnp.maximum(grown_R, 0) + copy_R, 0), copy_R


def _written_page(config: EngineConfig, slots: Slots, plan: Plan) -> jax.Array:
    """The page in which each row's next token falls; page 0, which nobody shares, where it has none
    there yet."""
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
    # What the budget fills, and for each row an edge and a copy.
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
