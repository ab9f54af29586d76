"""The scheduler against the rule model: whatever the schedule, every request gets its own tokens.

`Driver` checks the state's invariants after every dispatch.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.pages import release, share, take
from engine.state import init_state, totals
from tests.engine.driver import VOCAB, Driver, Request
from tests.engine.rule_model import outputs, prompt_scores

BASE = EngineConfig(
    max_num_seqs=3,
    num_slots=6,
    max_model_len=40,
    num_pages=14,
    page_size=4,
    token_budget=8,
    max_rounds=4,
    inbox_size=4,
    inbox_tokens=80,
    max_stop_ids=2,
    admissions_per_round=2,
)
# Few configurations, each in several tests: a program takes some seconds to compile.
TIGHT = replace(BASE, num_pages=11)  # 10 pages of 4 tokens: exactly max_model_len
ROOMY = replace(BASE, num_pages=60)
TIGHT_UNCACHED = replace(TIGHT, enable_prefix_caching=False)
CONFIGS = (
    BASE,
    replace(BASE, page_size=1, num_pages=41, token_budget=3),
    TIGHT_UNCACHED,
    replace(BASE, policy="static", max_num_seqs=2, num_pages=30, page_size=3),
)
RNG = np.random.default_rng(0)
STEMS = [RNG.integers(0, VOCAB, 24).tolist() for _ in range(2)]


def expected(request: Request) -> tuple[list[int], str]:
    return outputs(request.prompt, VOCAB, request.max_len, request.stop_ids)


def assert_right(driver: Driver, requests: list[Request]) -> None:
    for request in requests:
        tokens, reason = expected(request)
        got = driver.outputs[request.uid]
        if driver.reasons[request.uid] == "abort":
            assert got == tokens[: len(got)]
        else:
            assert (got, driver.reasons[request.uid]) == (tokens, reason), request
        if got and request.score_prompt:
            scores = dict(enumerate(prompt_scores(request.prompt, VOCAB), start=1))
            assert driver.scores[request.uid] == scores, request
        if not request.score_prompt:
            assert driver.scores[request.uid] == {}


@st.composite
def request_sets(draw):
    requests = []
    for uid in range(draw(st.integers(1, 9))):
        parent = draw(st.integers(-1, uid - 1)) if draw(st.booleans()) else -1
        if parent >= 0 and requests[parent].parent_uid < 0:
            original = requests[parent]
            prompt, salt, scores = original.prompt, original.salt, False
        else:
            parent = -1
            stem = draw(st.sampled_from(STEMS))[: draw(st.integers(0, 24))]
            tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if stem else 1, max_size=5))
            prompt = stem + tail
            scores = draw(st.booleans())
            salt = draw(st.integers(0, 1))
        max_len = min(40, len(prompt) + draw(st.integers(1, 12)))
        first = expected(Request(uid, prompt, max_len))[0]
        stop = (draw(st.sampled_from(first)),) if draw(st.booleans()) else ()
        requests.append(
            Request(
                uid,
                prompt,
                max_len,
                arrival=draw(st.integers(0, 6)),
                priority=draw(st.integers(0, 2)),
                parent_uid=parent,
                salt=salt,
                score_prompt=int(scores),
                stop_ids=stop,
                abort_at=draw(st.none() | st.none() | st.integers(0, 12)),
            )
        )
    return requests


@settings(max_examples=60, deadline=None)
@given(request_sets(), st.sampled_from(CONFIGS), st.integers(1, 4))
def test_any_schedule_gives_each_request_its_own_tokens(requests, config, rounds):
    driver = Driver(config, rounds=rounds)
    driver.run(requests)
    assert_right(driver, requests)
    assert int(driver.state.pool.num_free) == config.num_pages - 1


def test_rounds_per_dispatch_change_nothing():
    requests = [Request(i, STEMS[i % 2][: 3 + 2 * i], 34) for i in range(6)]
    runs = []
    for rounds in (1, 4):
        driver = Driver(BASE, rounds=rounds)
        driver.run([replace(r) for r in requests])
        runs.append((driver.outputs, driver.num_rounds))
    # Arrivals enter at dispatches, so only the tokens must agree, not the rounds.
    assert runs[0][0] == runs[1][0]


def test_b44_request_that_needs_the_whole_pool_runs_beside_others():
    big = Request(0, STEMS[0], 40)
    small = [Request(i, STEMS[1][:i], 12) for i in (1, 2, 3)]
    driver = Driver(TIGHT)
    driver.run([big, *small])
    assert_right(driver, [big, *small])


def test_b45_running_request_gets_a_token_every_round_while_prompts_arrive():
    runner = Request(0, STEMS[0][:2], 40)
    flood = [Request(i, (STEMS[1] + STEMS[0])[:36], 37, arrival=1) for i in range(1, 20)]
    driver = Driver(ROOMY, rounds=1)
    driver.run([runner, *flood])
    assert_right(driver, [runner, *flood])
    gaps = np.diff(driver.token_rounds[0])
    assert gaps.max() == 1


def test_b45_every_waiting_request_is_admitted_in_order():
    requests = [Request(i, STEMS[i % 2][:8], 12) for i in range(12)]
    driver = Driver(BASE, rounds=1)
    driver.run(requests)
    firsts = [driver.token_rounds[i][0] for i in range(12)]
    assert firsts == sorted(firsts)


def test_b46_preempted_requests_give_the_tokens_of_an_unpreempted_run():
    config = replace(BASE, num_pages=15)
    requests = [Request(i, STEMS[i % 2][: 6 + i], 38) for i in range(4)]
    driver = Driver(config)
    driver.run(requests)
    assert totals(driver.state)["preemptions"] > 0
    assert_right(driver, requests)


def test_preemption_takes_the_lowest_priority_then_the_youngest():
    urgent = Request(2, STEMS[0][:8], 36, priority=0)
    others = [Request(i, STEMS[1][: 8 + i], 36, priority=1) for i in (0, 1)]
    driver = Driver(TIGHT_UNCACHED, rounds=1)
    driver.run([*others, urgent])
    assert totals(driver.state)["preemptions"] > 0
    rounds = driver.token_rounds
    assert np.diff(rounds[2]).max() == 1  # never preempted
    assert rounds[2][-1] < rounds[0][-1] < rounds[1][-1]


@pytest.mark.parametrize("when", range(8))
def test_b48_abort_in_any_state_returns_every_page(when):
    # At successive dispatches the request waits, prefills, decodes, has finished or is unknown.
    config = replace(BASE, max_num_seqs=1)
    first, second = Request(0, STEMS[0][:20], 23), Request(1, STEMS[1][:9], 12)
    driver = Driver(config, rounds=1)
    driver.dispatch([first, second])
    for _ in range(when):
        driver.dispatch()
    driver.dispatch([], [1, 0, 99])
    driver.dispatch([], [1, 0])
    assert not driver.live
    assert int(driver.state.pool.num_free) == config.num_pages - 1
    assert np.all(np.asarray(driver.state.slots.status_S) == 0)


def test_b51_a_row_that_waits_for_pages_or_budget_yields_nothing():
    requests = [Request(0, STEMS[0][:3], 20), Request(1, STEMS[1][:24], 28)]
    driver = Driver(BASE, rounds=1)
    driver.run(requests)
    assert_right(driver, requests)
    # A budget of 8 leaves 5, 8, 8 and 3 tokens to the long prompt: its first token is in round 3.
    assert driver.token_rounds[1][0] == 3


def test_b24_a_row_with_unsound_logits_ends_alone_and_publishes_nothing():
    bad = Request(0, [*STEMS[0][:5], -2, *STEMS[0][5:9]], 20)
    good = [Request(1, STEMS[1][:10], 20), Request(2, STEMS[0][:7], 20)]
    driver = Driver(BASE)
    driver.run([bad, *good])
    assert driver.reasons[0] == "error"
    assert driver.outputs[0] == []
    assert_right(driver, good)
    content = np.asarray(driver.state.pool.content_PC)[np.asarray(driver.state.pool.published_P)]
    assert -2 not in content


# ---- scores of prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_prompt_tokens_are_scored_once_each_in_whatever_chunks(budget):
    config = replace(ROOMY, token_budget=budget)
    asking = [Request(i, STEMS[i % 2][: 1 + 7 * i], 26, score_prompt=1) for i in (0, 1, 2, 3)]
    silent = [Request(4 + i, STEMS[0][: 9 + i], 26) for i in range(2)]
    driver = Driver(config, rounds=4)
    driver.run([*asking, *silent])
    assert_right(driver, [*asking, *silent])
    assert driver.scored == sum(len(r.prompt) - 1 for r in asking)


def test_b46_preemption_loses_no_score_and_scores_nothing_after_the_first_token():
    config = replace(BASE, num_pages=15)
    requests = [Request(i, STEMS[i % 2][: 6 + i], 38, score_prompt=1) for i in range(4)]
    driver = Driver(config)
    driver.run(requests)
    assert totals(driver.state)["preemptions"] > 0
    assert_right(driver, requests)


# ---- prefix cache and copy-on-write --------------------------------------------------------------


def hit_tokens(driver: Driver) -> int:
    return totals(driver.state)["prefix_hit_tokens"]


@pytest.mark.parametrize(("length", "hits"), [(7, 4), (8, 4), (9, 8)])
def test_b55_the_same_prompt_again_recomputes_at_least_one_token(length, hits):
    driver = Driver(BASE)
    for uid, max_new in ((0, 1), (1, 1), (2, 5)):
        request = Request(uid, STEMS[0][:length], length + max_new)
        before = hit_tokens(driver)
        driver.run([request])
        assert hit_tokens(driver) - before == (hits if uid else 0)
        assert_right(driver, [request])


def test_output_pages_serve_the_next_turn():
    driver = Driver(ROOMY)
    first = Request(0, STEMS[0][:6], 22)
    driver.run([first])
    turn = Request(1, first.prompt + driver.outputs[0] + STEMS[1][:3], 30)
    driver.run([turn])
    # 21 of 22 tokens were computed: five full pages.
    assert hit_tokens(driver) == 20
    assert_right(driver, [turn])


def test_b53_salt_isolates():
    driver = Driver(BASE)
    driver.run([Request(0, STEMS[0][:20], 21, salt=1)])
    driver.run([Request(1, STEMS[0][:20], 21, salt=2)])
    assert hit_tokens(driver) == 0
    driver.run([Request(2, STEMS[0][:20], 21, salt=1)])
    assert hit_tokens(driver) == 16
    # One tenant's pages do not keep another's out of the index.
    driver.run([Request(3, STEMS[0][:20], 21, salt=2)])
    assert hit_tokens(driver) == 32


def test_a_scored_prompt_is_computed_whole_and_serves_others():
    driver = Driver(BASE)
    driver.run([Request(0, STEMS[0][:20], 21)])
    driver.run([Request(1, STEMS[0][:20], 21, score_prompt=1)])
    assert hit_tokens(driver) == 0
    driver.run([Request(2, STEMS[0][:20], 21)])
    assert hit_tokens(driver) == 16


def test_b54_colliding_hashes_never_serve_foreign_pages(monkeypatch):
    import engine.commit
    from engine import pages
    from tests.engine import driver as driver_module

    def collide(tokens_BWC, first_page_B):
        return jnp.zeros(tokens_BWC.shape[:2], jnp.uint32)

    monkeypatch.setattr(pages, "page_hashes", collide)
    monkeypatch.setattr(engine.commit, "page_hashes", collide)
    driver_module.compiled_step.cache_clear()
    try:
        requests = [Request(i, STEMS[i % 2][: 9 + i], 30) for i in range(6)]
        driver = Driver(BASE)
        driver.run(requests)
        assert_right(driver, requests)
    finally:
        driver_module.compiled_step.cache_clear()


def test_b56_evicted_pages_are_not_found():
    driver = Driver(TIGHT)
    driver.run([Request(0, STEMS[0][:20], 21)])
    driver.run([Request(1, STEMS[1][:23], 40)])  # takes every page
    before = hit_tokens(driver)
    again = Request(2, STEMS[0][:20], 24)
    driver.run([again])
    assert hit_tokens(driver) == before
    assert_right(driver, [again])


def test_least_recently_used_pages_go_first_and_leaves_before_roots():
    driver = Driver(BASE)
    driver.run([Request(0, STEMS[0][:20], 21)])
    driver.run([Request(1, STEMS[1][:12], 13)])
    driver.run([Request(2, STEMS[0][:20], 21)])  # touches the first chain again
    driver.run([Request(3, [5] * 16, 17)])  # takes 5 pages: 3 unused ones, then the oldest
    before = hit_tokens(driver)
    driver.run([Request(4, STEMS[0][:20], 21)])
    assert hit_tokens(driver) - before == 16


def test_identical_prompts_side_by_side_publish_one_chain():
    driver = Driver(ROOMY)
    requests = [Request(i, STEMS[0][:8], 30) for i in range(3)]
    driver.run(requests)
    assert_right(driver, requests)
    before = hit_tokens(driver)
    driver.run([Request(3, STEMS[0][:8] + driver.outputs[0], 40)])
    # 29 of 30 tokens were computed, all seven full pages are found as one chain.
    assert hit_tokens(driver) - before == 28


def test_choices_share_the_prompt_and_copy_only_the_page_they_write():
    prompt = STEMS[0][:18]  # four full pages and half a one
    family = [Request(0, prompt, 24), Request(1, prompt, 24, parent_uid=0)]
    family.append(Request(2, prompt, 24, parent_uid=0))
    driver = Driver(TIGHT_UNCACHED, rounds=1)
    driver.dispatch(family)
    most = 0
    while driver.live:
        held = set(np.asarray(driver.state.slots.page_table_SM).ravel().tolist()) - {0}
        most = max(most, len(held))
        driver.dispatch()
    assert_right(driver, family)
    # All three write the half page in one round, each to a copy, and the original is given back.
    assert totals(driver.state)["page_copies"] == 3
    assert most == 4 + 3 + 3  # full prompt pages, copies, one more page each from token 21


def test_b59_release_counts_every_reference_and_frees_once():
    pool = init_state(BASE, None).pool
    pool, page_N = take(pool, jnp.asarray([True, True, False]))
    assert page_N.tolist() == [1, 2, 0]
    pool = share(pool, jnp.asarray([1, 1]), jnp.asarray([True, True]))
    assert pool.refcount_P[:3].tolist() == [0, 3, 1]
    pool = release(pool, jnp.asarray([1, 1, 2]), jnp.asarray([True, True, True]))
    assert pool.refcount_P[:3].tolist() == [0, 1, 0]
    assert int(pool.num_free) == BASE.num_pages - 2
    pool = release(pool, jnp.asarray([1]), jnp.asarray([True]))
    queue = np.asarray(pool.queue_P)[
        (int(pool.head) + np.arange(int(pool.num_free))) % BASE.num_pages
    ]
    assert sorted(queue.tolist()) == list(range(1, BASE.num_pages))
    assert queue[-2:].tolist() == [2, 1]
