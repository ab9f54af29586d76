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
