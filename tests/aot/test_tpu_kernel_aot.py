"""The TPU attention kernel compiled for chips that are not here: it compiles, in place, and fast.

Bundles of a round are those inside of the kernel's loop over blocks, its rare branches (first and
last block of a slot) included; the loops that clear page tails, one level deeper, are not. The
cycles of a block are those in which the chip's memory moves its bytes at the published rate.
"""

import math

import pytest

from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention.layout import lanes_of, pages_shape
from pallas_kernels.paged_attention.spec import KernelSpec
from pallas_kernels.paged_attention.tpu_sizes import default_sizes
from sharding.aot import compile_for
from sharding.targets import missing_compiler, parse_target
from tests.aot.attention_calls import LLAMA

PROGRAMS = "tests.aot.tpu_kernel_programs:"
CHIPS = ("v5e", "v6e", "v5p", "tpu7x")
GEMMA2 = (8, 4, 256)  # heads, KV heads, head width
MISSING = missing_compiler(parse_target("v6e"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


def compiled(entry, target, *, kernels=False, **arguments):
    result = compile_for(PROGRAMS + entry, arguments, target, kernels=kernels)
    assert result.error is None, result.error
    return result


def decode_ratio(chip, page_size=16, kv_dtype="bfloat16", heads=LLAMA):
    """Bundles per round over the memory's cycles for the block that it attends to."""
    kernel = compiled(
        "decode", chip, kernels=True, chip=chip, page_size=page_size, kv_dtype=kv_dtype, heads=heads
    ).kernels[0]
    spec = spec_of(heads, page_size, kv_dtype)
    block_bytes = default_sizes(spec, chip_named(chip))[0].pages * spec.page_bytes
    return kernel.bundles_by_depth[1] / chip_named(chip).hbm_cycles(block_bytes)


def spec_of(heads, page_size, kv_dtype):
    num_heads, num_kv_heads, head_dim = heads
    shape = pages_shape(2, page_size, num_kv_heads, head_dim, lanes_of(chip_named("v6e")))
    return KernelSpec(
        num_rows=64,
        num_slots=64,
        pages_per_slot=512,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=2,
        page_parts=shape[1],
        page_rows=shape[2],
        page_lanes=shape[4],
        max_q_len=1,
        scale=0.1,
        window=None,
        softcap=None,
        sinks=False,
        kv_scales=kv_dtype not in ("bfloat16", "float32"),
        q_dtype="bfloat16",
        kv_dtype=kv_dtype,
    )


@pytest.mark.parametrize("chip", CHIPS)
def test_named_cases_compile(chip):
    compiled("named_cases", chip, chip=chip, dtype="bfloat16")


def test_named_cases_compile_in_float32():
    compiled("named_cases", "v6e", chip="v6e", dtype="float32")


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("max_q_len", "rows"), [(1, 64), (512, 1024)], ids=["decode", "mixed"])
def test_cache_is_written_in_place(chip, max_q_len, rows):
    """Two layers in a loop of steps: all of the cache is aliased and no operation copies it.

    Temporaries are for the rows of a call, whatever the cache, and layers take turns with them:
    below 1% of the cache of a model with 32 layers, at 128 MiB a layer.
    """
    result = compiled("layers", chip, chip=chip, max_q_len=max_q_len, rows=rows)
    pool_bytes = 2 * math.prod(pages_shape(2048, 16, 8, 128, 128))
    assert result.alias_bytes >= 2 * pool_bytes
    assert result.watched_copies == ()
    assert result.temp_bytes <= 0.01 * 32 * pool_bytes


def test_page_tables_of_256_slots_of_32k_tokens_fit_into_scalar_memory():
    """The largest that the kernel does not refuse: 512 KiB."""
    compiled("decode", "v5e", chip="v5e", page_size=64, slots=256, columns=512)


@pytest.mark.parametrize(("chip", "kv_dtype"), [("tpu7x", "int8"), ("v6e", "float8_e4m3fn")])
def test_pages_that_no_matrix_unit_takes_are_widened(chip, kv_dtype):
    assert not chip_named(chip).multiplies(kv_dtype)
    compiled("decode", chip, chip=chip, page_size=32, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("chip", "page_size", "kv_dtype", "most"),
    [
        ("v6e", 16, "bfloat16", 0.6),
        ("tpu7x", 16, "bfloat16", 0.9),
        ("tpu7x", 16, "float8_e4m3fn", 1.2),
        ("tpu7x", 32, "float8_e4m3fn", 1.2),
    ],
)
def test_bundles_of_a_round_stay_below_the_memorys_cycles(chip, page_size, kv_dtype, most):
    assert decode_ratio(chip, page_size, kv_dtype) <= most


@pytest.mark.parametrize(("heads", "page_size"), [(LLAMA, 16), (LLAMA, 128), (GEMMA2, 16)], ids=str)
def test_fewer_bundles_per_byte_than_the_kernel_that_comes_with_jax(heads, page_size):
    """Its innermost loop takes 512 keys and values of one head, with its own rare branches. These
    are the heads of the named cases that it can take."""
    theirs = compiled(
        "jax_decode",
        "v6e",
        kernels=True,
        heads=heads,
        page_size=page_size,
        pages_per_block=512 // page_size,
    ).kernels[0]
    their_bytes = 2 * 512 * heads[2] * 2
    their_ratio = theirs.bundles_by_depth[2] / chip_named("v6e").hbm_cycles(their_bytes)
    assert decode_ratio("v6e", page_size, heads=heads) < their_ratio


def test_the_kernel_that_comes_with_jax_takes_no_heads_of_64():
    narrow = {"heads": (14, 2, 64), "page_size": 16}
    theirs = compile_for(PROGRAMS + "jax_decode", narrow, "v6e")
    assert "block shape" in theirs.error
    compiled("decode", "v6e", chip="v6e", **narrow)
