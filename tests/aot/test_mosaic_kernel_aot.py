"""The Mosaic GPU attention kernel compiled for Hopper GPUs that are not here: no spills, nothing
beside it, the cache in place.

Registers and spills are ptxas's; a kernel starts with its SM's registers in equal shares, which its
warpgroups then exchange.
"""

import functools
import math
from collections import Counter

import pytest

from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.gpu_mosaic import DTYPES, HEAD_DIMS, PAGE_SIZES
from pallas_kernels.paged_attention.layout import pages_shape
from sharding.aot import compile_for
from sharding.targets import missing_compiler, parse_target

PROGRAMS = "tests.aot.gpu_kernel_programs:"
MISSING = missing_compiler(parse_target("h100"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
TAKEN = tuple(c.name for c in CASES if c.head_dim in HEAD_DIMS and c.page_size in PAGE_SIZES)
POOL_BYTES = 2 * math.prod(pages_shape(512, 16, 8, 128))


@functools.cache
def compiled(entry, chip, *, kernels=True, **arguments):
    arguments = {"chip": chip, "impl": "gpu_mosaic"} | arguments
    result = compile_for(PROGRAMS + entry, arguments, chip, kernels=kernels)
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


@pytest.mark.parametrize(
    ("max_q_len", "page_sizes"), [(1, PAGE_SIZES), (8, (16,)), (512, (16, 64))]
)
def test_head_widths_and_page_sizes_compile_without_spills(max_q_len, page_sizes):
    result = compiled(
        "shapes", "h100", head_dims=HEAD_DIMS, page_sizes=page_sizes, max_q_len=max_q_len
    )
    check_reports(result, len(HEAD_DIMS) * len(page_sizes))


PASSES = {"decode": {"max_q_len": 1, "rows": 64}, "mixed": {"max_q_len": 512, "rows": 1024}}


def layers(name, num_layers):
    """That many layers' pools, written and attended to in a loop of steps."""
    return compiled("layers", "h100", kernels=False, num_layers=num_layers, **PASSES[name])


@pytest.mark.parametrize("name", PASSES)
def test_cache_is_written_in_place(name):
    """All of the cache is aliased and no operation copies it."""
    result = layers(name, 2)
    assert result.alias_bytes >= 2 * POOL_BYTES
    assert result.watched_copies == ()


@pytest.mark.parametrize("name", PASSES)
def test_a_layer_is_its_write_and_its_two_kernels(name):
    """What a layer more adds to the program: the kernel, the sum and the scatter of new keys."""

    def operations(result):
        kinds = Counter()
        for op in result.main.all_ops():
            scatters = "scatter" in op.name or "scatter" in op.source.rsplit("/", 1)[-1]
            kinds["scatter" if scatters else op.opcode] += 1
        return kinds

    more = operations(layers(name, 3)) - operations(layers(name, 2))
    assert more == {"custom-call": 2, "scatter": 1}
