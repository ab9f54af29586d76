"""Metrics against counts and times that can be made by hand; time is a clock that the test sets."""

import jax.numpy as jnp
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.metrics import Steps, summary
from engine.sampling_rows import SamplingLimits
from tests.compiling import QUICK
from tests.engine.rule_model import RuleModel
from tests.engine.test_llm import PROMPTS, ROUND_BY_ROUND, ask, fresh_llm, greedy

RULE_VOCAB = 97


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rule_engine(clock, *, overlap=True, rounds=2, **settings) -> Engine:
    fields = {
        "max_num_seqs": 1,
        "num_slots": 2,
        "max_model_len": 40,
        "num_pages": 30,
        "page_size": 4,
        "token_budget": 8,
        "max_rounds": 4,
        "inbox_tokens": 80,
    }
    config = EngineConfig(**fields | settings)
    model = RuleModel(RULE_VOCAB, config.page_size)
    cache = model.init_cache(config.num_pages)
    limits = SamplingLimits(vocab_size=RULE_VOCAB)
    return Engine(
        *(config, model, jnp.zeros(()), cache, limits),
        rounds=rounds,
        overlap=overlap,
        clock=clock,
        compiler_options=QUICK,
    )


def test_summary_is_numpy_percentiles():
    values = np.arange(101) / 10
    s = summary(values)
    assert (s.count, s.p50, s.p95, s.p99) == (101, 5.0, 9.5, 9.9)
    assert s.mean == pytest.approx(5.0)
    assert summary([]) is None


def test_dispatches_that_overlap_are_not_counted_twice():
    steps = Steps()
    assert steps.add(sent_s=1, returned_s=4, rounds=2, output_tokens=6) == 1
    assert steps.add(sent_s=2, returned_s=9, rounds=1, output_tokens=1) == 4
    assert steps.add(sent_s=3, returned_s=9.5, rounds=0, output_tokens=0) == 9
    assert steps.add(sent_s=20, returned_s=21, rounds=1, output_tokens=1) == 20
    assert list(steps.dispatch_s) == [3, 5, 1]
    assert list(steps.round_s) == [1.5, 5, 1]
    assert (steps.busy_s, steps.output_tokens) == (9, 8)


def test_times_of_two_requests_one_after_the_other():
    """One row, so the second request waits until the first has its three tokens.

    Dispatches go out at 1, 2, 4, 8, ... and each is read when the next one has gone out. A dispatch
    is one round while a first token is awaited.
    """
    clock = Clock()
    engine = rule_engine(clock)
    for name in ("a", "b"):
        engine.add_request(name, [5, 6, 7], greedy(3))
    done = {}
    for tick in range(40):
        clock.now_s = 2.0**tick
        for update in engine.step():
            if update.choice.finish_reason:
                done[update.choice.request_id] = update.choice.times
        if not engine.has_unfinished:
            break
    # Both slots are filled at once. Dispatch k runs one round each while b has no token: a's tokens
    # come in dispatches 0 to 2 and b's first in dispatch 3. That b has one is known at 2**4, when
    # dispatch 4 has gone out with one round; dispatch 5 has two, of which one is needed.
    a, b = done["a"], done["b"]
    assert (a.started_s, a.first_token_s, a.last_token_s) == (1, 2, 8)
    assert (b.started_s, b.first_token_s, b.last_token_s) == (8, 16, 64)
    metrics = engine.metrics()
    assert (metrics.queue_s.mean, metrics.queue_s.count) == (4.5, 2)
    assert metrics.ttft_s.mean == (2 + 16) / 2
    assert metrics.tpot_s.mean == (3 + 24) / 2
    assert metrics.end_to_end_s.mean == (8 + 64) / 2
    # Dispatch k lasts from 2**k to 2**(k + 1), as each is read when the next goes out.
    assert metrics.dispatch_s.mean == pytest.approx(63 / 6)
    assert metrics.round_s.mean == pytest.approx(63 / 6)
    assert metrics.output_tok_per_s == pytest.approx(6 / 63)


def test_a_dispatch_of_several_rounds_shares_its_time():
    clock = Clock()
    engine = rule_engine(clock, overlap=False, rounds=4)
    engine.add_request("a", [5, 6, 7], greedy(8))
    read = engine._collect

    def collect(*sent):
        clock.now_s += 2  # the device takes 2 s for whatever it is sent
        return read(*sent)

    engine._collect = collect
    while engine.has_unfinished:
        clock.now_s += 100  # and the host idles in between
        engine.step()
    metrics = engine.metrics()
    # 1 round for the first token, then 4 and 3 rounds.
    assert (metrics.dispatch_s.count, metrics.dispatch_s.mean) == (3, 2)
    assert metrics.round_s.mean == pytest.approx((2 + 2 / 4 + 2 / 3) / 3)
    assert metrics.output_tok_per_s == pytest.approx(8 / 6)
    assert metrics.queue_s.mean == 100


def test_an_abort_during_a_dispatch_leaves_no_idle_time_behind():
    clock = Clock()
    engine = rule_engine(clock)
    engine.add_request("a", [5, 6, 7], greedy(9))
    engine.step()
    engine.abort("a")
    clock.now_s = 1_000.0
    engine.add_request("b", [5, 6, 7], greedy(1))
    while engine.has_unfinished:
        clock.now_s += 1
        engine.step()
    metrics = engine.metrics()
    assert metrics.finish_reasons == {"abort": 1, "length": 1}
    assert metrics.dispatch_s.count == 1
    assert metrics.dispatch_s.mean <= 2
    assert (metrics.queue_s.count, metrics.ttft_s.count) == (1, 1)  # a had no token


def test_prefix_hit_rate():
    engine = rule_engine(Clock())
    assert engine.metrics().prefix_hit_rate == 0
    for name in ("a", "b"):
        engine.add_request(name, list(range(9)), greedy(1))
        while engine.has_unfinished:
            engine.step()
    # The second of two prompts of 9 finds two pages of 4.
    assert engine.metrics().prefix_hit_rate == 8 / 18


def test_counts_of_pages_and_requests_round_by_round():
    """A row and two slots: a third request waits on the host. Prompts fill two pages and more."""
    engine = rule_engine(Clock(), overlap=False, rounds=1, token_budget=16)
    engine.add_request("a", list(range(9)), greedy(1))
    engine.step()
    metrics = engine.metrics()
    assert (metrics.pages_total, metrics.pages_used, metrics.pages_cached) == (29, 0, 2)
    assert (metrics.kv_utilization, metrics.kv_waste) == (0, 0)
    for name in ("b", "c", "d"):
        engine.add_request(name, list(range(9)), greedy(2))
    assert (engine.metrics().running, engine.metrics().waiting) == (0, 3)
    engine.step()
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting) == (1, 2)  # one in a slot, one on the host
    # The two pages that "a" left are used and published now, but no longer free.
    assert (metrics.pages_used, metrics.pages_cached) == (3, 0)
    assert metrics.kv_utilization == pytest.approx(3 / 29)
    assert metrics.kv_waste == pytest.approx(1 - 9 / 12)
    assert (metrics.prompt_tokens, metrics.prefix_hit_rate) == (9, 8 / 18)


def test_metrics_of_a_finished_and_a_running_batch():
    llm = fresh_llm(**ROUND_BY_ROUND)
    ask(llm, PROMPTS[:5], greedy(6))
    ask(llm, [PROMPTS[6]] * 2, greedy(3))
    stream = llm.stream([PROMPTS[4], PROMPTS[5]], greedy(20))
    for _ in range(6):
        next(stream)
    metrics = llm.get_metrics()
    assert (metrics.running, metrics.waiting) == (2, 0)
    assert metrics.finish_reasons == {"length": 7}
    assert metrics.prompt_tokens == sum(map(len, PROMPTS[:5])) + 60
    assert metrics.output_tokens == 5 * 6 + 2 * 3
    held = np.asarray(llm.engine._state.slots.num_pages_S).sum()
    assert metrics.pages_total == 19
    assert metrics.pages_used == held
    assert metrics.pages_cached > 0
    computed = np.asarray(llm.engine._state.slots.num_computed_S).sum()
    assert metrics.kv_waste == pytest.approx(1 - computed / (held * 4))
    assert metrics.ttft_s.count == metrics.end_to_end_s.count == metrics.queue_s.count == 7
    assert 0 < metrics.queue_s.p50 < metrics.ttft_s.p50 <= metrics.end_to_end_s.p50
    assert metrics.compiled_programs == 1
    stream.close()
    assert llm.get_metrics().finish_reasons == {"length": 7, "abort": 2}
