"""The Triton attention kernels compiled for GPUs that are not here: no spills, nothing beside them.

Registers and spills are ptxas's; shared memory of a Triton kernel is asked for at launch and is not
among them.
"""

import math

import pytest

from pallas_kernels.paged_attention.layout import pages_shape
from sharding.aot import compile_for
from sharding.targets import missing_compiler, parse_target

PROGRAMS = "tests.aot.gpu_kernel_programs:"
MISSING = missing_compiler(parse_target("h100"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
POOL_BYTES = 2 * math.prod(pages_shape(512, 16, 8, 128))


def compiled(entry, chip, *, kernels=True, **arguments):
    result = compile_for(PROGRAMS + entry, {"chip": chip} | arguments, chip, kernels=kernels)
    assert result.error is None, result.error
    return result


def ours(result):
    """Reports of our kernels; the compiler numbers further ones of the same name."""
    return [k for k in result.kernels if k.name.split("__")[0] in ("attention", "combine")]


@pytest.mark.parametrize(
    ("chip", "dtype"), [("h100", "bfloat16"), ("a100", "bfloat16"), ("h100", "float32")]
)
def test_named_cases_compile_without_spills(chip, dtype):
    kernels = ours(compiled("named_cases", chip, dtype=dtype))
    assert len(kernels) >= 10
    assert {k.name: k.spill_bytes for k in kernels if k.spill_bytes} == {}


@pytest.mark.parametrize(
    ("chip", "kv_dtype"),
    [("h100", "float8_e4m3fn"), ("a100", "int8"), ("h100", "float32")],
)
def test_other_pages_compile_without_spills(chip, kv_dtype):
    q_dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    kernels = ours(compiled("attention", chip, q_dtype=q_dtype, kv_dtype=kv_dtype))
    assert sorted(k.name for k in kernels) == ["attention", "combine"]
    assert all(k.spill_bytes == 0 for k in kernels)


def test_two_programs_share_an_sm():
    """As many registers of an SM as two programs of four warps take are there twice."""
    (attention, _) = ours(compiled("attention", "h100"))
    assert 2 * 4 * 32 * attention.registers <= 65_536


@pytest.mark.parametrize(("max_q_len", "rows"), [(1, 64), (512, 1024)], ids=["decode", "mixed"])
def test_cache_is_written_in_place(max_q_len, rows):
    """Two layers in a loop of steps: all of the cache is aliased and no operation copies it."""
    result = compiled("layers", "h100", kernels=False, max_q_len=max_q_len, rows=rows)
    assert result.alias_bytes >= 2 * POOL_BYTES
    assert result.watched_copies == ()
