"""Metrics against counts that can be made by hand."""

import numpy as np
import pytest

from engine.metrics import summary
from tests.engine.test_llm import PROMPTS, ask, fresh_llm, greedy


def test_summary_is_numpy_percentiles():
    values = np.arange(101) / 10
    s = summary(values)
    assert (s.count, s.p50, s.p95, s.p99) == (101, 5.0, 9.5, 9.9)
    assert s.mean == pytest.approx(5.0)
    assert summary([]) is None


def test_metrics_of_a_finished_and_a_running_batch():
    llm = fresh_llm(num_pages=60, steps_per_dispatch=1)
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
    assert metrics.pages_total == 59
    assert metrics.pages_used == held
    assert metrics.pages_cached > 0
    computed = np.asarray(llm.engine._state.slots.num_computed_S).sum()
    assert metrics.kv_waste == pytest.approx(1 - computed / (held * 4))
    assert metrics.ttft_s.count == metrics.end_to_end_s.count == 7
    assert 0 < metrics.ttft_s.p50 <= metrics.end_to_end_s.p50
    assert metrics.compiled_programs == 1
    stream.close()
    assert llm.get_metrics().finish_reasons == {"length": 7, "abort": 2}
