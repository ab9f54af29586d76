"""What the Triton kernels refuse and why, and the sizes that they choose."""

import dataclasses
import itertools

import pytest

from pallas_kernels.chips import CHIPS, chip
from pallas_kernels.paged_attention import choose, gpu_triton, refusals
from pallas_kernels.paged_attention.gpu_cases import covering
from pallas_kernels.paged_attention.gpu_triton import Q_DTYPES
from pallas_kernels.paged_attention.gpu_triton_sizes import (
    MOST_ROWS,
    PARTS_BYTES,
    default_sizes,
    shared_bytes,
)
from tests.pallas_kernels.paged_attention.test_paged_attention_tpu_border import spec_of

GPUS = [each for each in CHIPS.values() if each.kind == "gpu"]
HEADS = [(32, 8, 128), (9, 3, 64), (32, 32, 96), (32, 8, 80), (8, 4, 256), (71, 1, 64)]


@pytest.mark.parametrize(
    ("gpu", "change", "message"),
    [
        ("h100", {"heads": (8, 1, 576)}, "head width 576: must be a multiple of 16 up to 256"),
        ("h100", {"heads": (8, 8, 72)}, "head width 72"),
        ("h100", {"heads": (8, 8, 64), "lanes": 128}, "hold one head of 64, not 128 lanes"),
        ("h100", {"page_size": 4}, "page size 4: must be between 8 and 256"),
        ("h100", {"page_size": 512}, "page size 512"),
        ("h100", {"q_dtype": "float64"}, "queries are float64: must be one of"),
        ("h100", {"kv_dtype": "uint8"}, "pages are uint8: must be one of"),
        ("a100", {"kv_dtype": "float8_e4m3fn"}, "needs compute capability 8.9, a100 has 8.0"),
        (
            "h100",
            {"kv_dtype": "int8", "num_pages": 70_000},
            "2,293,760,000 values: must be up to",
        ),
        ("v6e", {}, "needs an NVIDIA GPU, the call is for v6e"),
    ],
)
def test_refused_with_the_reason(gpu, change, message):
    spec = gpu_spec(**change)
    assert message in refusals(spec, chip(gpu))["gpu_triton"]
    with pytest.raises(ValueError, match="impl 'gpu_triton'"):
        choose(spec, chip(gpu), "gpu_triton")


def gpu_spec(**change):
    kv_dtype = change.pop("kv_dtype", "bfloat16")
    return dataclasses.replace(spec_of(**({"lanes": 1} | change)), kv_dtype=kv_dtype)


def test_fallback_and_its_reason():
    assert choose(gpu_spec(), chip("l4")) == "gpu_triton"
    assert choose(gpu_spec()) == "xla"
    assert refusals(gpu_spec(), None)["gpu_triton"].endswith("the call is for the host CPU")
    wide = gpu_spec(heads=(16, 1, 576))
    assert choose(wide, chip("h100")) == "xla"
    assert "head width 576" in refusals(wide, chip("h100"))["gpu_triton"]
    assert choose(gpu_spec(num_pages=70_000), chip("a100")) == "gpu_triton"
    assert choose(gpu_spec(kv_dtype="float8_e5m2"), chip("a100")) == "xla"
    assert choose(gpu_spec(kv_dtype="float8_e5m2"), chip("h200")) == "gpu_triton"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda each: each.name)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_sizes_fit(gpu, heads, dtype):
    for slots, max_q_len in ((1, 1), (64, 1), (256, 1), (64, 16), (64, 512)):
        rows = min(slots * max_q_len, 2048)
        spec = dataclasses.replace(
            gpu_spec(heads=heads, slots=slots), kv_dtype=dtype, max_q_len=max_q_len, num_rows=rows
        )
        few, *chunk = default_sizes(spec, gpu)
        assert len(chunk) == (max_q_len > 16)
        assert few.rows <= MOST_ROWS
        assert 1 <= few.parts <= 128
        for sizes in (few, *chunk):
            assert shared_bytes(spec, sizes) <= gpu.shared_memory_bytes
            assert sizes.rows & (sizes.rows - 1) == 0
        if few.parts > 1:
            parts_bytes = 4 * slots * few.parts * few.queries * heads[0] * heads[2]
            assert parts_bytes <= PARTS_BYTES


@pytest.mark.parametrize("gpu", ["a100", "l4", "h100", "b200"])
def test_any_two_properties_meet_in_a_covering_call(gpu):
    specs = covering(chip(gpu))
    assert {gpu_triton.supports(spec, chip(gpu)) for spec in specs} == {None}
    rows = [
        (
            (spec.q_dtype, spec.kv_dtype),
            spec.head_dim,
            spec.max_q_len,
            spec.num_heads // spec.num_kv_heads,
            spec.page_size,
            (spec.window, spec.softcap, spec.sinks),
        )
        for spec in specs
    ]
    axes = [set(column) for column in zip(*rows, strict=True)]
    assert {(q, kv) for q in Q_DTYPES for kv in (*Q_DTYPES, "int8")} <= axes[0]
    assert [len(axis) for axis in axes] == [12 if gpu == "a100" else 18, 8, 4, 6, 5, 5]
    for a, b in itertools.combinations(range(len(axes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(axes[a], axes[b]))


def test_few_slots_are_split_into_enough_units():
    """One slot of 32k keys occupies every SM of an H100; 64 slots are not cut finer than needed."""
    one, many = (default_sizes(gpu_spec(slots=slots), chip("h100"))[0] for slots in (1, 64))
    assert one.parts * 8 >= 132
    assert one.part_keys < many.part_keys
    assert many.parts * 64 * 8 >= 4 * 132
