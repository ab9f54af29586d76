"""A server runs for weeks: what counts without an end is exact, or harmless, beyond its bits."""

import jax.numpy as jnp
import pytest

from engine.sampling_params import SamplingParams
from engine.state import UID_SPAN
from tests.engine.test_metrics import Clock, rule_engine

COUNTER_SPAN = 2**32
SIZES = {"max_num_seqs": 4, "num_slots": 6, "num_pages": 14, "token_budget": 8}


def storm(engine) -> list[tuple]:
    """12 requests of three priorities, some of two choices, many alike: the news of each step."""
    for i in range(12):
        prompt = [7, 3, 9, 4, 1, *range(i % 4 * 3)]
        params = SamplingParams(temperature=0.5, n=1 + i % 2, max_tokens=12, detokenize=False)
        engine.add_request(str(i), prompt, params, priority=i % 3)
    news = []
    while engine.has_unfinished:
        updates = engine.step()
        news.append([(u.choice.request_id, u.choice.index, u.choice.token_ids) for u in updates])
    return news


@pytest.fixture(scope="module")
def from_zero():
    engine = rule_engine(Clock(), **SIZES)
    news, totals = storm(engine), engine.counters()
    assert all(totals[name] > 0 for name in ("preemptions", "page_copies", "prefix_hit_tokens"))
    return news, totals


def test_totals_are_exact_beyond_32_bits(from_zero):
    news, totals = from_zero
    engine = rule_engine(Clock(), **SIZES)
    start = COUNTER_SPAN - 3
    counts_2N = engine._state.counts_2N.at[1].set(start, mode="drop")
    engine._state = engine._state.replace(counts_2N=counts_2N)
    assert storm(engine) == news
    assert engine.counters() == {name: start + n for name, n in totals.items()}
    assert engine.metrics().rounds == start + totals["rounds"]


@pytest.mark.parametrize("before", [1, 5, 12])
def test_order_of_arrival_survives_the_last_uid(from_zero, before):
    engine = rule_engine(Clock(), **SIZES)
    engine._next_uid = UID_SPAN - before
    assert storm(engine) == from_zero[0]
    assert engine.counters() == from_zero[1]
    assert engine.snapshot().next_uid == UID_SPAN - before + 18


def test_epochs_of_pages_are_only_compared_and_may_wrap(from_zero):
    engine = rule_engine(Clock(), **SIZES)
    pool = engine._state.pool
    last = jnp.full_like(pool.epoch_P, 2**31 - 2)
    engine._state = engine._state.replace(pool=pool.replace(epoch_P=last))
    assert storm(engine) == from_zero[0]
    assert engine.counters() == from_zero[1]
    assert int(engine._state.pool.epoch_P.min()) < 0  # some did wrap
