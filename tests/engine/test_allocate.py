"""Who waits and who is preempted in a round in which pages run short."""

from dataclasses import replace

import jax.numpy as jnp

from engine.config import EngineConfig
from engine.pages import take
from engine.schedule import allocate, schedule
from engine.state import RUNNING, WAITING, BatchState, init_state, totals
from tests.engine.test_advance import BASE


def running(
    computed: list[int], num_free: int, known: list[int] | None = None, shared: tuple[int, ...] = ()
) -> tuple[EngineConfig, BatchState]:
    """Rows that have computed so many tokens of those known, by default all but one; so many pages
    are free. The last pages of the rows in `shared` are held by somebody else, too."""
    C = BASE.page_size
    held = [-(-n // C) for n in computed]
    config = replace(
        BASE,
        max_num_seqs=len(computed),
        num_slots=len(computed),
        num_pages=1 + sum(held) + num_free,
    )
    state = init_state(config, None)
    pool, page_N = take(state.pool, jnp.ones(sum(held), bool))
    ends = [sum(held[: s + 1]) for s in range(len(held))]
    table_SM = state.slots.page_table_SM
    for s, (end, pages) in enumerate(zip(ends, held, strict=True)):
        table_SM = table_SM.at[s, :pages].set(page_N[end - pages : end], mode="drop")
    twice = page_N[jnp.asarray([ends[s] - 1 for s in shared], jnp.int32)]
    pool = pool.replace(refcount_P=pool.refcount_P.at[twice].add(1, mode="drop"))
    computed_S = jnp.asarray(computed, jnp.int32)
    requests = state.slots.requests.replace(uid=jnp.arange(len(computed), dtype=jnp.int32))
    slots = state.slots.replace(
        requests=requests,
        status_S=jnp.full_like(computed_S, RUNNING),
        num_computed_S=computed_S,
        num_tokens_S=computed_S + 1 if known is None else jnp.asarray(known, jnp.int32),
        page_table_SM=table_SM,
        num_pages_S=jnp.asarray(held, jnp.int32),
    )
    return config, state.replace(slots=slots, pool=pool)


def test_a_row_that_needs_no_page_waits_for_nobody():
    """Three rows are at the end of their pages, the fourth is not; the fifth gives its two back,
    the last one first, which are too few."""
    config, state = running([4, 4, 4, 5, 5], num_free=0)
    *_, (last, end) = state.slots.page_table_SM[:, :2].tolist()
    state, plan = allocate(config, state, schedule(config, state))
    assert plan.q_len_R.tolist() == [1, 1, 0, 1, 0]
    assert plan.slot_R.tolist() == [0, 1, 2, 3, config.num_slots]
    assert plan.decode_R.tolist() == [True, True, True, True, False]
    assert state.slots.status_S.tolist() == [RUNNING] * 4 + [WAITING]
    assert state.slots.num_pages_S.tolist() == [2, 2, 1, 2, 0]
    assert state.slots.page_table_SM[:2, 1].tolist() == [end, last]
    assert not state.slots.page_table_SM[4].any()
    assert int(state.pool.num_free) == 0
    assert (totals(state)["preemptions"], totals(state)["stalled_rows"]) == (1, 1)


def test_the_only_row_is_never_preempted():
    config, state = running([4], num_free=0)
    after, plan = allocate(config, state, schedule(config, state))
    assert plan.q_len_R.tolist() == [0]
    assert after.slots.status_S.tolist() == [RUNNING]
    assert after.slots.page_table_SM.tolist() == state.slots.page_table_SM.tolist()
    assert totals(after)["preemptions"] == 0


def test_nobody_is_preempted_while_pages_suffice():
    config, state = running([4, 4, 5], num_free=2)
    state, plan = allocate(config, state, schedule(config, state))
    assert plan.q_len_R.tolist() == [1, 1, 1]
    assert state.slots.num_pages_S.tolist() == [2, 2, 2]
    assert (int(state.pool.num_free), totals(state)["preemptions"]) == (0, 0)


def test_a_row_may_replace_one_page_and_take_another():
    """Three rows go on writing pages that others read, and over their ends: six pages."""
    config, state = running([3, 3, 3], num_free=6, known=[6, 6, 5], shared=(0, 1, 2))
    before = state.slots.page_table_SM[:, 0].tolist()
    state, plan = allocate(config, state, schedule(config, state))
    assert plan.q_len_R.tolist() == [3, 3, 2]
    assert plan.copy_from_R.tolist() == before
    assert plan.copy_to_R.tolist() == state.slots.page_table_SM[:, 0].tolist()
    pages = state.slots.page_table_SM[:, :2].flatten().tolist()
    assert sorted(pages + before) == list(range(1, 10))
    assert state.slots.num_pages_S.tolist() == [2, 2, 2]
    assert (int(state.pool.num_free), totals(state)["page_copies"]) == (0, 3)
    assert state.pool.refcount_P.tolist() == [0] + [1] * 9


def test_a_row_without_a_page_for_its_copy_keeps_what_it_shares():
    """The first row takes the page that the last one gives back; the second one waits."""
    config, state = running([4, 3, 1], num_free=0, shared=(1,))
    after, plan = allocate(config, state, schedule(config, state))
    assert plan.q_len_R.tolist() == [1, 0, 0]
    shared = int(state.slots.page_table_SM[1, 0])
    assert int(after.slots.page_table_SM[1, 0]) == shared
    assert int(after.pool.refcount_P[shared]) == 2
    assert plan.copy_to_R.tolist() == [0, 0, 0]
