"""How prompts reach the prefill pass: who waits for whom."""

from engine.state import totals
from tests.engine.driver import Driver, Request
from tests.engine.test_advance import ROOMY, STEMS, assert_right


def test_equal_prompts_that_come_together_are_computed_once():
    """All three fit into the rows at once; the later ones wait for the pages of the first."""
    driver = Driver(ROOMY, rounds=1)
    requests = [Request(uid, STEMS[0][:20], 24) for uid in range(3)]
    driver.run(requests)
    assert_right(driver, requests)
    # 20 tokens, of which the last page is computed by each.
    assert totals(driver.state)["prefill_tokens"] == 20 + 4 + 4
    assert totals(driver.state)["prefix_hit_tokens"] == 16 + 16


def test_a_long_prompt_of_low_priority_keeps_nobody_of_high_priority_waiting():
    driver = Driver(ROOMY, rounds=1)
    long = Request(0, STEMS[0] + STEMS[1][:14], 40, priority=1)  # five passes
    short = Request(1, STEMS[1][:4], 8, arrival=1, priority=0)
    driver.run([long, short])
    assert_right(driver, [long, short])
    assert driver.token_rounds[1][0] == 1


def test_a_prompt_that_takes_the_whole_budget_keeps_its_like_waiting():
    """Eight tokens a round: the second finds the first one's pages when its turn comes."""
    driver = Driver(ROOMY, rounds=1)
    driver.run([Request(uid, STEMS[0][:8], 12) for uid in range(2)])
    assert totals(driver.state)["prefill_tokens"] == 8 + 4


def test_what_decodes_takes_nothing_of_the_budget():
    """While another request decodes, seven and one of eight tokens go to two prompts at once."""
    driver = Driver(ROOMY, rounds=1)
    driver.dispatch([Request(0, STEMS[0][:2], 20)])
    pair = [Request(1, STEMS[1][:7], 12), Request(2, STEMS[0][4:13], 14)]
    driver.run(pair)
    assert_right(driver, pair)
    assert driver.token_rounds[1][0] == 1
    assert driver.token_rounds[2][0] == 2  # the other eight tokens of nine


def test_a_choice_waits_for_the_short_prompt_that_it_shares():
    driver = Driver(ROOMY, rounds=1)
    driver.run([Request(0, STEMS[0][:6], 12), Request(1, STEMS[0][:6], 12, parent_uid=0)])
    counted = totals(driver.state)
    assert (counted["prefill_tokens"], counted["page_copies"]) == (6, 2)
    assert counted["prefix_query_tokens"] == 6  # a choice asks nothing
