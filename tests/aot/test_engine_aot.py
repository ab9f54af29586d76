"""The engine's own programs, compiled for chips: kernels per round, loops, copies of the cache."""

import re
from collections import Counter

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


def in_sweep(*values):
    """A program much like another that always runs."""
    return pytest.param(*values, marks=pytest.mark.sweep)


@pytest.mark.parametrize("target", ["v5e", in_sweep("v6e")])
def test_no_scatter_of_the_round_becomes_a_serial_loop_on_a_tpu(target):
    main = the_round(target).main
    assert [r.source for r in main.walk() if r.kind not in ("main", "when")] == []


def the_step(target: str, width: int, **changes):
    step = STEP | {"width": width} | changes
    result = compile_for("engine.step_programs:network_step", step, target)
    assert result.error is None, result.error
    assert result.alias_bytes >= result.part_bytes["cache"]
    return result


@pytest.mark.parametrize(
    ("target", "width"), [("cpu", 256), *(in_sweep(*x) for x in (("cpu", 32), ("h100", 256)))]
)
def test_the_cache_is_updated_in_place(target, width):
    result = the_step(target, width)
    assert result.part_bytes["cache"] == 8 * 4096 * 16 * 2 * 3 * 64 * 2
    assert result.watched_copies == ()
    assert result.temp_bytes < 0.1 * result.part_bytes["cache"]


# Two layers of an 8B model and their cache for 64 rows of 8,192 tokens.
LLAMA = {
    "model": "llama-3.1-8b",
    "num_layers": 2,
    "max_num_seqs": 64,
    "max_model_len": 8192,
    "num_pages": 8193,
    "page_size": 64,
    "token_budget": 512,
}


def moves_of_the_cache(result) -> list:
    """Collectives over arrays with the axes of a page pool."""
    collectives = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    five_axes = re.compile(r"\[(\d+,){4}\d+\]")
    found = [op for op in result.main.all_ops() if op.opcode.startswith(collectives)]
    return [op for op in found if five_axes.search(op.shape)]


@pytest.mark.parametrize(
    ("target", "width", "changes"),
    [
        ("v5e", 32, {"num_layers": 2, "page_size": 64, "num_pages": 1025}),
        ("v6e:2x2", 512, LLAMA),
        in_sweep("v5p", 64, LLAMA),
        in_sweep("tpu7x", 64, LLAMA),
        ("h100:1x1x8", 64, LLAMA),
    ],
    ids=[
        "smollm2-v5e-narrow",
        "llama-v6e:2x2-wide",
        "llama-v5p",
        "llama-tpu7x",
        "llama-h100:1x1x8",
    ],
)
def test_b81_the_whole_step_leaves_the_cache_where_it_is(target, width, changes):
    """By the chips' own kernels; on several devices each updates its own heads' pages."""
    result = the_step(target, width, **changes)
    kernels = [op.name for op in result.main.all_ops() if op.name.startswith("cache_update")]
    assert bool(kernels) == (not target.startswith("h100"))
    assert result.notes == ()
    assert result.watched_copies == ()
    assert moves_of_the_cache(result) == []
    # Of sampling and the vocabulary, however many layers there are: on larger TPUs for Llama below
    # 1% of the cache of all 32.
    most = 0.01 * 32 / 2 * result.part_bytes["cache"]
    if target in ("v5e", "h100:1x1x8"):
        most = 128 * 2**20
    assert result.temp_bytes <= most


def attention_operations(result) -> Counter:
    """What the program does for attention, by kind: the files of the kernel and its page layout."""
    found = Counter()
    for op in result.main.all_ops():
        if "/paged_attention/" in op.source:
            found["scatter" if op.source.endswith("scatter") else op.opcode] += 1
    return found


@pytest.mark.parametrize(
    ("target", "wide_calls"), [("h100", 2), in_sweep("h200", 2), in_sweep("a100", 3)]
)
def test_a_layer_of_a_step_on_a_gpu_attends_with_its_kernels_alone(target, wide_calls):
    """Each layer writes its new keys and values and calls attention and `combine`, in the pass of
    decoding rows and in that of prompt tokens, where Triton has a call more than Mosaic; what else
    there is, is there once for all layers."""
    layers = 4
    result = the_step(target, 64, **LLAMA | {"num_layers": layers})
    assert result.notes == ()
    found = attention_operations(result)
    assert found.pop("custom-call") == layers * (2 + wide_calls)
    assert found.pop("scatter") == layers * (1 + 1)
    # The plans of the two passes, 11 for Mosaic and 14 for Triton: an operation more per layer and
    # pass would be eight more.
    assert found.keys() <= {"fusion"}
    assert found["fusion"] < (11 if wide_calls == 2 else 14) + 2 * layers
    assert result.watched_copies == ()
