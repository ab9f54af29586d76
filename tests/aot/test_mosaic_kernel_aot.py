"""The Mosaic GPU attention kernel compiled for Hopper GPUs that are not here: no spills.

Registers and spills are ptxas's; a kernel starts with its SM's registers in equal shares, which its
warpgroups then exchange.
"""

import itertools
from collections import Counter

import pytest

from pallas_kernels.chips import chip
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.gpu_cases import call, named
from pallas_kernels.paged_attention.gpu_mosaic import DTYPES, HEAD_DIMS, PAGE_SIZES, supports
from sharding.aot import compile_for
from sharding.targets import missing_compiler, parse_target

MISSING = missing_compiler(parse_target("h100")) or supports(call((32, 8, 128)), chip("h100"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
TAKEN = [c for c in CASES if c.head_dim in HEAD_DIMS and c.page_size in PAGE_SIZES]


def check_calls(specs, target="h100"):
    """Each call is two kernels, ours and the sum over parts, and none of them spills."""
    arguments = {"specs": tuple(specs), "impl": "gpu_mosaic"}
    entry = "sharding.attention_programs:attention_calls"
    result = compile_for(entry, arguments, target, kernels=True)
    assert result.error is None, result.error
    assert Counter(op.opcode for op in result.main.all_ops())["custom-call"] == 2 * len(specs)
    kernels = [k for k in result.kernels if k.name.startswith(("attention", "combine"))]
    assert {k.name: k.spill_bytes for k in kernels if k.spill_bytes or k.stack_bytes} == {}
    attention = {k.registers for k in kernels if k.name.startswith("attention")}
    assert attention
    assert attention <= {128, 168}  # of four warpgroups, of three


@pytest.mark.parametrize(("target", "dtype"), [("h100", "bfloat16"), ("h200", "float16")])
def test_named_cases_compile_without_spills(target, dtype):
    assert dtype in DTYPES
    assert len(TAKEN) >= 8
    check_calls([named(case, (dtype, dtype)) for case in TAKEN], target)


def shapes(max_q_len, page_sizes, group=4, dtype="bfloat16", mask="causal"):
    how = {"max_q_len": max_q_len, "mask": mask}
    return [
        call((8 * group, 8, head_dim), (dtype, dtype), page_size=page_size, **how)
        for head_dim, page_size in itertools.product(HEAD_DIMS, page_sizes)
    ]


@pytest.mark.parametrize(
    ("max_q_len", "page_sizes", "mask"),
    [(1, PAGE_SIZES, "causal"), (8, (16,), "all"), (512, (16, 64), "causal")],
)
def test_head_widths_and_page_sizes_compile_without_spills(max_q_len, page_sizes, mask):
    check_calls(shapes(max_q_len, page_sizes, mask=mask))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 8, 64])
@pytest.mark.parametrize("mask", ["causal", "all"])
def test_every_shape_compiles_without_spills(mask, group, dtype):
    for max_q_len in (1, 16, 512):
        check_calls(shapes(max_q_len, PAGE_SIZES, group, dtype, mask))
