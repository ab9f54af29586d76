"""Who is let in when, so that nobody has to be put out again, and which free pages go first."""

from dataclasses import replace

import numpy as np

from engine.state import RUNNING, totals
from tests.engine.driver import Driver, Request
from tests.engine.test_advance import BASE, CONFIGS, STEMS, TIGHT, assert_right


def test_a_prefix_on_free_pages_costs_these_pages():
    """Of 13 pages a runner needs 7 and may need an eighth; those left hold the prefix of a second
    request, which needs all six of them and waits."""
    driver = Driver(replace(BASE, max_model_len=52, num_pages=14), rounds=1)
    driver.run([Request(0, STEMS[0][:20], 21)])
    runner = Request(1, STEMS[1] + STEMS[1][:3], 32)
    again = Request(2, STEMS[0], 28, arrival=1)
    driver.run([runner, again])
    assert_right(driver, [runner, again])
    assert totals(driver.state)["preemptions"] == 0
    assert driver.token_rounds[2][0] > driver.token_rounds[1][-1]
    assert totals(driver.state)["prefix_hit_tokens"] == 20


def test_never_more_rows_run_than_the_configuration_says():
    config = replace(BASE, max_num_seqs=3, num_slots=8, inbox_size=8, admissions_per_round=8)
    driver = Driver(replace(config, num_pages=60), rounds=1)
    # They end in different rounds: a place that one leaves is no place for two.
    driver.dispatch([Request(i, STEMS[0][: 2 + i], 20 + 4 * (i % 5)) for i in range(8)])
    most = 0
    while driver.live:
        most = max(most, int((np.asarray(driver.state.slots.status_S) == RUNNING).sum()))
        driver.dispatch()
    assert most == 3


def test_a_choice_is_let_in_only_with_a_page_for_its_copy():
    """The first choice holds five of six pages and may need the sixth: the second one waits."""
    driver = Driver(replace(BASE, num_pages=7), rounds=1)
    family = [Request(0, STEMS[0][:18], 22), Request(1, STEMS[0][:18], 22, parent_uid=0)]
    driver.run(family)
    assert_right(driver, family)
    assert totals(driver.state)["preemptions"] == 0
    assert driver.token_rounds[1][0] > driver.token_rounds[0][-1]


def test_the_end_of_a_free_chain_goes_before_its_root():
    """Of ten pages five were never used and five hold a chain; a request takes seven."""
    driver = Driver(TIGHT)
    driver.run([Request(0, STEMS[0][:20], 21)])
    driver.run([Request(1, STEMS[1] + STEMS[1][:3], 28)])
    before = totals(driver.state)["prefix_hit_tokens"]
    driver.run([Request(2, STEMS[0][:20], 21)])
    assert totals(driver.state)["prefix_hit_tokens"] - before == 3 * 4


def test_a_prompt_that_fills_the_pool_is_let_in():
    whole = Request(0, (STEMS[0] + STEMS[1])[:39], 40)  # ten pages of ten
    driver = Driver(TIGHT)
    driver.run([whole])
    assert_right(driver, [whole])


def test_two_that_fit_one_by_one_are_not_let_in_together():
    """The runner leaves three of ten pages and may need one of them; both others need two."""
    runner = Request(0, STEMS[0], 30)
    others = [Request(i, STEMS[1][i : i + 5], 7) for i in (1, 2)]
    driver = Driver(TIGHT, rounds=1)
    driver.dispatch([runner])
    for _ in range(3):
        driver.dispatch()
    assert len(driver.outputs[0]) == 2
    driver.run(others)
    assert_right(driver, [runner, *others])
    assert totals(driver.state)["preemptions"] == 0
    assert driver.token_rounds[1][0] == 4  # at once
    assert driver.token_rounds[1][-1] < driver.token_rounds[2][0]


def test_the_static_policy_lets_nobody_in_while_anyone_runs():
    (config,) = (c for c in CONFIGS if c.policy == "static")
    requests = [Request(i, STEMS[i % 2][: 3 + i], 8 + 4 * i) for i in range(5)]
    driver = Driver(config, rounds=1)
    driver.run(requests)
    assert_right(driver, requests)
    first, last = ([driver.token_rounds[i][at] for i in range(5)] for at in (0, -1))
    assert first[2] > max(last[:2])
    assert first[4] > max(last[2:4])
    assert last[0] < last[1]  # its row was free meanwhile


def test_pages_filled_in_a_request_s_only_round_are_found():
    driver = Driver(BASE)
    driver.run([Request(0, STEMS[0][:8], 9)])
    assert driver.num_rounds == 1
    driver.run([Request(1, STEMS[0][:9], 10)])
    assert totals(driver.state)["prefix_hit_tokens"] == 8


def test_b56_a_history_is_not_published_behind_a_page_that_was_taken():
    """Two compute one page at the same time; the first one's is in the index, and a third request
    takes it. What the second one fills then nobody could find, and it would stand in the way of
    the same history: a fourth computes it again, and for a fifth it is there."""
    config = replace(BASE, max_num_seqs=2, page_size=8, num_pages=8, token_budget=16)
    driver = Driver(config, rounds=1)
    twins = [Request(0, STEMS[0][:9], 10), Request(1, STEMS[0][:9], 20)]
    driver.dispatch(twins)
    driver.dispatch()
    slots = driver.state.slots
    tip, epoch = int(slots.chain_page_S[1]), int(slots.chain_epoch_S[1])
    assert tip not in slots.page_table_SM[1].tolist()
    taker = Request(2, STEMS[1] + STEMS[1][:8], 36)
    driver.dispatch([taker])
    while int(driver.state.slots.num_computed_S[1]) < 15:
        driver.dispatch()
    assert int(driver.state.pool.epoch_P[tip]) > epoch
    driver.run([])
    assert_right(driver, [*twins, taker])
    history = STEMS[0][:9] + driver.outputs[1][:8]
    driver.run([Request(3, history, 18)])
    before = totals(driver.state)["prefix_hit_tokens"]
    driver.run([Request(4, history, 18)])
    assert totals(driver.state)["prefix_hit_tokens"] - before == 16
