"""The throughput benchmark's lengths and tables, without running a model."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module


def test_lengths_are_those_of_the_trace_scaled_by_one_factor(script):
    bench = script("bench_throughput")
    lengths = bench.trace_lengths(200)
    assert len(lengths) == 200
    assert max(prompt + output for prompt, output in lengths) == 1021
    # The trace begins with 374 and 44 tokens; its longest of 200 requests has 4,176.
    assert lengths[0] == (374 * 1022 // 4176, 44 * 1022 // 4176)
    assert min(min(pair) for pair in lengths) >= 1
    with pytest.raises(ValueError, match="has 3000 requests, got --requests 3001"):
        bench.trace_lengths(3001)


def test_every_mode_reserves_the_memory_its_name_says(script):
    bench = script("bench_throughput")
    tokens = {name: (m["num_pages"] - 1) * m["page_size"] for name, m in bench.MODES.items()}
    assert tokens["continuous, paged"] == tokens["continuous, contiguous"] == 32 * 1024
    assert tokens["continuous, paged, memory of static 8"] == tokens["static 8"] == 8 * 1024


def test_the_scaled_rival_and_the_ratios(script):
    bench, report = script("bench_throughput"), script("bench_throughput_report")
    anchors = {
        "tok_per_s": {
            "transformers": {"float32": {"8": 10}, "bfloat16": {"8": 40}},
            "vllm": {"float32": {"8": 15}, "bfloat16": {"8": 50}},
        },
        "goals_over_vllm": {"8": 1.1},
    }
    measured = {"pallasite": (60, 90), "hf": (30, 60)}
    rate = {
        (8, dtype, engine): pair[i]
        for engine, pair in measured.items()
        for i, dtype in enumerate(bench.DTYPES)
    }
    row = bench._decode_row(8, rate, anchors, "a peer")
    assert row["vllm_scaled_tok_per_s"] == {"float32": 45, "bfloat16": 75}
    assert (row["best_over_vllm"], row["best_over_hf"]) == (1.2, 1.5)
    facts = {"cores": 2, "cpu": "a CPU", "python": "3", "jax": "0", "date": "today", "commit": "c"}
    text = report.tables([facts | row])
    assert "| batch 8 | 60 | 90 | 30 | 60 | 45.0 | 75.0 | 1.2 | 1.1 |" in text
    assert "Measured on 2 cores (a CPU), Python 3, jax 0, today, commit c." in text


def test_cache_use_is_weighted_by_time(script):
    bench = script("bench_throughput")

    def look(utilization, waste, running):
        fields = {"kv_utilization": utilization, "kv_waste": waste, "running": running}
        return type("Metrics", (), fields)()

    looks = [(11.0, look(0.5, 0.2, 4)), (14.0, look(0.9, 0.0, 8))]
    assert bench.cache_use(10.0, looks) == {"kv_held": 0.8, "kv_waste": 0.05, "running": 7.0}
