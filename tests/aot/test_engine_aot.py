"""The engine's own programs, compiled for chips: kernels per round, loops, copies of the cache."""

import pytest

from sharding.aot import compile_for

ROUND = {
    "num_slots": 256,
    "max_num_seqs": 256,
    "num_pages": 16_384,
    "page_size": 16,
    "max_model_len": 4096,
    "inbox_tokens": 4096,
    "token_budget": 256,
}
# 4,096 pages of 16 tokens: 24 MiB per layer in bfloat16, so that a copy of one would show.
STEP = {
    "model": "smollm2-135m",
    "num_layers": 8,
    "dtype": "bfloat16",
    "max_num_seqs": 32,
    "max_model_len": 2048,
    "num_pages": 4096,
    "page_size": 16,
    "token_budget": 256,
}


def the_round(target: str):
    result = compile_for("engine.step_programs:scheduling_round", ROUND, target)
    assert result.error is None
    return result


def test_the_scheduling_round_is_at_most_25_kernels_on_a_gpu():
    main = the_round("h100").main
    listing = "\n".join(f"{op.opcode} {op.shape} {op.source}" for op in main.ops)
    assert len(main.ops) <= 25, listing
    # What one round may or may not do besides stands in loops of zero or one trips.
    assert [r.source for r in main.walk() if r.kind not in ("main", "when")] == []
    for region in main.regions:
        assert len(region.ops) <= 40, (region.source, len(region.ops))


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_no_scatter_of_the_round_becomes_a_serial_loop_on_a_tpu(target):
    main = the_round(target).main
    assert [r.source for r in main.walk() if r.kind not in ("main", "when")] == []


def the_step(target: str, width: int):
    result = compile_for("engine.step_programs:network_step", STEP | {"width": width}, target)
    assert result.error is None
    assert result.part_bytes["cache"] == 8 * 4096 * 16 * 2 * 3 * 64 * 2
    assert result.alias_bytes >= result.part_bytes["cache"]
    return result


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("width", [32, 256])
def test_the_cache_is_updated_in_place(target, width):
    result = the_step(target, width)
    assert result.watched_copies == ()
    assert result.temp_bytes < 0.1 * result.part_bytes["cache"]


def test_the_whole_step_compiles_for_a_tpu():
    # XLA's TPU backend gives the page pool one layout for `write_pages` and another for the plain
    # XLA attention, and copies between them: here only what holds for any attention is asserted.
    assert the_step("v5e", 32).collectives == {}
