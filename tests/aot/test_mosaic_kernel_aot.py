"""The Mosaic GPU attention kernel compiled for Hopper GPUs that are not here: no spills.

Registers and spills are ptxas's; a kernel starts with its SM's registers in equal shares, which its
warpgroups then exchange.
"""

import functools
from collections import Counter

import pytest

from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.gpu_mosaic import DTYPES, HEAD_DIMS, PAGE_SIZES
from sharding.aot import compile_for
from sharding.targets import missing_compiler, parse_target

PROGRAMS = "tests.aot.gpu_kernel_programs:"
MISSING = missing_compiler(parse_target("h100"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
TAKEN = tuple(c.name for c in CASES if c.head_dim in HEAD_DIMS and c.page_size in PAGE_SIZES)


@functools.cache
def compiled(entry, chip, **arguments):
    arguments = {"chip": chip, "impl": "gpu_mosaic"} | arguments
    result = compile_for(PROGRAMS + entry, arguments, chip, kernels=True)
    assert result.error is None, result.error
    return result


def check_reports(result, calls):
    """Each call is two kernels, ours and the sum over parts, and none of them spills."""
    assert Counter(op.opcode for op in result.main.all_ops())["custom-call"] == 2 * calls
    kernels = [k for k in result.kernels if k.name.startswith(("attention", "combine"))]
    assert {k.name: k.spill_bytes for k in kernels if k.spill_bytes or k.stack_bytes} == {}
    attention = {k.registers for k in kernels if k.name.startswith("attention")}
    assert attention
    assert attention <= {128, 168}  # of four warpgroups, of three


@pytest.mark.parametrize(("chip", "dtype"), [("h100", "bfloat16"), ("h200", "float16")])
def test_named_cases_compile_without_spills(chip, dtype):
    assert dtype in DTYPES
    assert len(TAKEN) >= 8
    result = compiled("named_cases", chip, dtypes=((dtype, dtype),), names=TAKEN)
    check_reports(result, len(TAKEN))


def check_shapes(max_q_len, page_sizes, **arguments):
    result = compiled(
        "shapes",
        "h100",
        head_dims=HEAD_DIMS,
        page_sizes=page_sizes,
        max_q_len=max_q_len,
        **arguments,
    )
    check_reports(result, len(HEAD_DIMS) * len(page_sizes))


@pytest.mark.parametrize(
    ("max_q_len", "page_sizes", "everything"),
    [(1, PAGE_SIZES, False), (8, (16,), True), (512, (16, 64), False)],
)
def test_head_widths_and_page_sizes_compile_without_spills(max_q_len, page_sizes, everything):
    check_shapes(max_q_len, page_sizes, everything=everything)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 8, 64])
@pytest.mark.parametrize("everything", [False, True])
def test_every_shape_compiles_without_spills(everything, group, dtype):
    for max_q_len in (1, 16, 512):
        check_shapes(max_q_len, PAGE_SIZES, group=group, dtype=dtype, everything=everything)
