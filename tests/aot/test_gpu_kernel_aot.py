"""The GPU attention kernels compiled for GPUs that are not here: no spills, nothing beside them.

Registers and spills are ptxas's, shared memory and threads are those that XLA launches with.
"""

import functools
import math
from collections import Counter

import jax
import pytest

from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention import gpu_mosaic, gpu_triton
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.gpu_cases import call, covering, named
from pallas_kernels.paged_attention.layout import pages_shape
from sharding.aot import compile_for
from sharding.attention_programs import kernels_of_calls
from sharding.targets import missing_compiler, parse_target
from tests.aot.attention_calls import LLAMA

MISSING = missing_compiler(parse_target("h100"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
POOL_BYTES = 2 * math.prod(pages_shape(512, 16, 8, 128))
NAMED_DTYPES = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
)
CHIPS = ("a100", "l4", "h100", "b200")
SPILLED_BYTES = 0 if jax.__version_info__ >= (0, 12) else 32  # at most; by older compilers
STRIDE = 12  # of the covering calls every twelfth, on each chip others


def check_calls(specs, chip):
    """No spills, and what a launch asks for is there: registers of a thread, shared memory."""
    most_bytes = chip_named(chip).shared_memory_bytes
    for spec, kernels in zip(specs, kernels_of_calls(specs, chip, "gpu_triton"), strict=True):
        names = [kernel.name.split("_")[0] for kernel in kernels]
        many = min(spec.max_q_len, spec.num_rows) > 16
        assert names == ["attention"] * (1 + many) + ["combine"], spec
        for kernel in kernels:
            assert max(kernel.spill_bytes, kernel.stack_bytes) <= SPILLED_BYTES, (spec, kernel)
            assert kernel.registers * kernel.threads <= 65_536, (spec, kernel)
            assert kernel.shared_bytes <= most_bytes, (spec, kernel)
        assert kernels[0].shared_bytes > 0, spec


def named_calls(chip):
    """All named cases in all pairs of dtypes that the chip has, pair by pair."""
    specs = [named(case, dtypes) for dtypes in NAMED_DTYPES for case in CASES]
    return [spec for spec in specs if gpu_triton.supports(spec, chip_named(chip)) is None]


@pytest.mark.parametrize("chip", CHIPS)
def test_calls_compile_without_spills(chip):
    """Some of the covering calls, and of the named ones on an H100 all, else each case once."""
    specs, first = named_calls(chip), CHIPS.index(chip)
    if chip != "h100":
        pairs = len(specs) // len(CASES)
        specs = [specs[(first + i) % pairs * len(CASES) + i] for i in range(len(CASES))]
    check_calls([*covering(chip_named(chip))[first::STRIDE], *specs], chip)


@pytest.mark.sweep
@pytest.mark.parametrize("chip", CHIPS)
def test_all_covering_calls_compile_without_spills(chip):
    check_calls(covering(chip_named(chip)), chip)


@pytest.mark.sweep
@pytest.mark.parametrize("chip", CHIPS)
def test_named_cases_compile_without_spills(chip):
    check_calls(named_calls(chip), chip)


@pytest.mark.parametrize("chip", ["h100", "a100"])
def test_two_programs_share_an_sm(chip):
    """Registers and shared memory of an SM hold two programs; each takes 1 KiB of its own there."""
    ((attention, _),) = kernels_of_calls([call(LLAMA)], chip, "gpu_triton")
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
REFUSED = gpu_mosaic.supports(call(LLAMA), chip_named("h100"))  # by an older jax
needs_mosaic = pytest.mark.skipif(REFUSED is not None, reason=REFUSED or "")
PROGRAMS = [
    pytest.param(*key, marks=needs_mosaic if key[0] == "gpu_mosaic" else ()) for key in CALLS
]


@functools.cache
def layers(impl, name, num_layers):
    """That many layers' pools, written and attended to in a loop of steps."""
    arguments = {"chip": "h100", "impl": impl, "num_layers": num_layers} | PASSES[name]
    result = compile_for("tests.aot.gpu_kernel_programs:layers", arguments, "h100")
    assert result.error is None, result.error
    return result


@pytest.mark.parametrize(("impl", "name"), PROGRAMS)
def test_cache_is_written_in_place(impl, name):
    """All of the cache is aliased and no operation copies it."""
    result = layers(impl, name, 2)
    assert result.alias_bytes >= 2 * POOL_BYTES
    assert result.watched_copies == ()


@pytest.mark.parametrize(("impl", "name"), PROGRAMS)
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
