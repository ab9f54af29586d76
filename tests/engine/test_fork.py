"""Forks between dispatches, over the rule model; the driver checks the state's invariants."""

import jax
import jax.numpy as jnp
import numpy as np

from engine.fork import fork
from engine.state import NO_TOKEN, Forks, totals
from tests.engine.driver import VOCAB, Driver, Request
from tests.engine.rule_model import check_invariants, next_token
from tests.engine.test_advance import ROOMY, STEMS

LENGTH = 9  # tokens known after the prompt of 7: two full pages and a token of a third one


def started(uids=(0, 1, 2)) -> tuple[Driver, dict[int, list[int]]]:
    """Requests of different prompts, and what each knows, all but its last token computed."""
    driver = Driver(ROOMY, rounds=1, may_hold=True)
    requests = [Request(uid, STEMS[uid % 2][uid : uid + 7], 30) for uid in uids]
    driver.dispatch(requests)
    while any(len(driver.outputs[uid]) < 3 for uid in uids):
        late = [uid for uid in uids if len(driver.outputs[uid]) < 3]
        early = [uid for uid in uids if uid not in late]
        driver.dispatch(forks=[(u, u, LENGTH, NO_TOKEN) for u in early])
        for uid in early:
            del driver.outputs[uid][3:]
    known = {r.uid: [*r.prompt, *driver.outputs[r.uid]][:LENGTH] for r in requests}
    return driver, known


def go_on(driver: Driver, histories: dict[int, list[int]], count: int = 6) -> None:
    """Everything that comes from now on follows from the histories."""
    for tokens in driver.outputs.values():
        tokens.clear()
    for _ in range(count):
        driver.dispatch()
    for uid, known in histories.items():
        for token in driver.outputs[uid]:
            assert token == next_token(known, VOCAB)
            known.append(token)
        assert len(driver.outputs[uid]) == count


def test_histories_move_around_at_once():
    driver, known = started()
    forks = [(0, 1, LENGTH, 50), (1, 2, LENGTH, 51), (2, 0, LENGTH, 52)]
    driver.dispatch(forks=forks)
    expected = {to: [*known[source], token] for to, source, _, token in forks}
    for uid, history in expected.items():
        history.append(next_token(history, VOCAB))
        assert driver.outputs[uid][-1] == history[-1]
    go_on(driver, expected)


def test_one_history_for_all_shares_every_page_until_it_is_written():
    driver, known = started()
    before = totals(driver.state)["page_copies"]
    driver.dispatch(forks=[(to, 1, LENGTH, 60 + to) for to in (0, 1, 2)])
    tables = np.asarray(driver.state.slots.page_table_SM)
    held = [set(row[row > 0].tolist()) for row in tables if row.any()]
    assert len(set.intersection(*held)) == 2  # the full pages; each wrote the third in a copy
    assert totals(driver.state)["page_copies"] - before == 3
    expected = {}
    for to in (0, 1, 2):
        expected[to] = [*known[1], 60 + to]
        expected[to].append(next_token(expected[to], VOCAB))
    go_on(driver, expected)


def test_a_held_slot_yields_nothing_until_it_goes_on():
    driver, known = started((0, 1))
    for _ in range(3):
        driver.dispatch(forks=[(1, 1, LENGTH, NO_TOKEN)])
        driver.outputs[1].clear()
    driver.dispatch()
    assert driver.outputs[1] == []
    driver.dispatch(forks=[(1, 1, LENGTH, 70)])
    assert driver.outputs[1] == [next_token([*known[1], 70], VOCAB)]


def test_unknown_requests_change_nothing():
    driver, _ = started((0, 1))
    entries = [(0, 9, LENGTH, 1), (9, 1, LENGTH, 1), (-1, 0, LENGTH, 1)]
    after = fork(driver.state, Forks(*jnp.asarray(entries).T))
    jax.tree.map(np.testing.assert_array_equal, driver.state.slots, after.slots)
    np.testing.assert_array_equal(driver.state.pool.refcount_P, after.pool.refcount_P)
    check_invariants(ROOMY, after, driver.live, may_hold=True)
