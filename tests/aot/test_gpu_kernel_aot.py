"""The GPU attention kernels compiled for GPUs that are not here: no spills, nothing beside them.

Registers and spills are ptxas's, shared memory and threads are those that XLA launches with.
"""

import functools
import math
from collections import Counter

import pytest

from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention.layout import pages_shape
from sharding.aot import compile_for
from sharding.targets import missing_compiler, parse_target

PROGRAMS = "tests.aot.gpu_kernel_programs:"
MISSING = missing_compiler(parse_target("h100"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
POOL_BYTES = 2 * math.prod(pages_shape(512, 16, 8, 128))
BFLOAT16 = ("bfloat16", "bfloat16")
WIDE = (BFLOAT16, ("float16", "float16"), ("float32", "float32"), ("bfloat16", "int8"))
FLOAT8 = (("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"))
# A group of three heads, chunks, a width that is filled up, the widest heads, sinks.
FEW = (
    "smollm2_135m_verify",
    "llama_3_1_8b_chunk",
    "h2o_danube_1_8b_prefill",
    "gemma_2_2b_decode",
    "gpt_oss_20b_decode",
)


@functools.cache
def compiled(entry, chip, *, kernels=True, **arguments):
    result = compile_for(PROGRAMS + entry, {"chip": chip} | arguments, chip, kernels=kernels)
    assert result.error is None, result.error
    return result


def ours(result):
    """Reports of our kernels; the compiler numbers further ones of the same name."""
    return [k for k in result.kernels if k.name.split("__")[0] in ("attention", "combine")]


def check_reports(kernels, chip, at_least):
    """No spills, and what a launch asks for is there: registers of a thread, shared memory."""
    assert len(kernels) >= at_least
    assert [kernel for kernel in kernels if kernel.spill_bytes or kernel.stack_bytes] == []
    for kernel in kernels:
        assert kernel.registers * kernel.threads <= 65_536, kernel
        assert kernel.shared_bytes <= chip_named(chip).shared_memory_bytes, kernel
    assert any(kernel.shared_bytes for kernel in kernels)


@pytest.mark.parametrize(
    ("chip", "dtypes", "names"),
    [
        ("h100", (BFLOAT16,), ()),
        ("a100", (BFLOAT16,), ()),
        ("h100", (WIDE[2],), ()),
        ("h100", (WIDE[1], WIDE[3], *FLOAT8), FEW),
        ("l4", (BFLOAT16, *FLOAT8), FEW),
        ("b200", (BFLOAT16,), FEW),
    ],
    ids=["h100", "a100", "h100-float32", "h100-others", "l4", "b200"],
)
def test_named_cases_compile_without_spills(chip, dtypes, names):
    kernels = ours(compiled("named_cases", chip, dtypes=dtypes, names=names))
    check_reports(kernels, chip, at_least=10)


@pytest.mark.sweep
@pytest.mark.parametrize("chip", ["a100", "l4", "h100", "h200", "b200"])
def test_every_supported_case_compiles_without_spills(chip):
    """Each named case with each pair of dtypes that the chip takes."""
    for dtypes in WIDE if chip == "a100" else (*WIDE, *FLOAT8):
        kernels = ours(compiled("named_cases", chip, dtypes=(dtypes,)))
        check_reports(kernels, chip, at_least=10)


@pytest.mark.parametrize(
    ("chip", "kv_dtype"),
    [("h100", "float8_e4m3fn"), ("l4", "float8_e5m2"), ("a100", "int8"), ("h100", "float32")],
)
def test_other_pages_compile_without_spills(chip, kv_dtype):
    q_dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    kernels = ours(compiled("attention", chip, q_dtype=q_dtype, kv_dtype=kv_dtype))
    assert sorted(k.name for k in kernels) == ["attention", "combine"]
    check_reports(kernels, chip, at_least=2)


@pytest.mark.parametrize("chip", ["h100", "a100"])
def test_two_programs_share_an_sm(chip):
    """Registers and shared memory of an SM hold two programs; each takes 1 KiB of its own there."""
    (attention,) = (k for k in ours(compiled("attention", chip)) if k.name == "attention")
    assert 2 * attention.threads * attention.registers <= 65_536
    each = chip_named(chip)
    assert 2 * (attention.shared_bytes + 1024) <= each.shared_memory_sm_bytes


PASSES = {"decode": {"max_q_len": 1, "rows": 64}, "mixed": {"max_q_len": 512, "rows": 1024}}
# Kernels of a layer: attention, of few and of many new tokens with Triton, and `combine`.
CALLS = {
    ("gpu_triton", "decode"): 2,
    ("gpu_triton", "mixed"): 3,
    ("gpu_mosaic", "decode"): 2,
    ("gpu_mosaic", "mixed"): 2,
}


def layers(impl, name, num_layers):
    """That many layers' pools, written and attended to in a loop of steps."""
    arguments = {"impl": impl, "num_layers": num_layers} | PASSES[name]
    return compiled("layers", "h100", kernels=False, **arguments)


@pytest.mark.parametrize(("impl", "name"), CALLS)
def test_cache_is_written_in_place(impl, name):
    """All of the cache is aliased and no operation copies it."""
    result = layers(impl, name, 2)
    assert result.alias_bytes >= 2 * POOL_BYTES
    assert result.watched_copies == ()


@pytest.mark.parametrize(("impl", "name"), CALLS)
def test_a_layer_is_its_write_and_its_kernels(impl, name):
    """What a layer more adds to the program: attention, `combine` and the scatter of new keys."""

    def operations(result):
        kinds = Counter()
        for op in result.main.all_ops():
            scatters = "scatter" in op.name or "scatter" in op.source.rsplit("/", 1)[-1]
            kinds["scatter" if scatters else op.opcode] += 1
        return kinds

    more = operations(layers(impl, name, 3)) - operations(layers(impl, name, 2))
    assert more == {"custom-call": CALLS[impl, name], "scatter": 1}
