"""The sampling benchmark runs every request it names, on a small vocabulary."""

import importlib
from pathlib import Path

import numpy as np


def test_every_request_samples_and_greedy_ones_take_the_best(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    bench = importlib.import_module("bench_sampling")
    functions = bench.make_sampler(vocab=300, num_rows=8)
    assert list(functions) == list(bench.REQUESTS)
    for name, function in functions.items():
        sampled = function()
        assert np.asarray(sampled.ok_R).all(), name
        token_R = np.asarray(sampled.token_R)
        assert ((token_R >= 0) & (token_R < 300)).all(), name
    best_R = bench.make_logits(300, 8, 0).argmax(axis=1)
    np.testing.assert_array_equal(functions["greedy"]().token_R, best_R)
    times = bench.measure({name: functions[name] for name in ("greedy", "top_k 40")}, 3, "quick")
    assert all(0 < fastest <= median for median, fastest in times.values())
