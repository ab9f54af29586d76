"""What the Mosaic GPU kernel refuses and why, what `auto` takes then, and the sizes it chooses."""

import dataclasses

import jax
import pytest

from pallas_kernels.chips import chip
from pallas_kernels.paged_attention import choose, refusals
from pallas_kernels.paged_attention.gpu_mosaic import JAX_FROM
from pallas_kernels.paged_attention.gpu_mosaic_sizes import ROWS, default_sizes, shared_bytes
from tests.pallas_kernels.paged_attention.test_paged_attention_gpu_border import gpu_spec


@pytest.mark.parametrize(
    ("gpu", "change", "message", "instead"),
    [
        ("h200", {"heads": (8, 4, 192)}, "head width 192: must be one of", "gpu_triton"),
        ("h100", {"heads": (32, 32, 96)}, "head width 96: must be one of", "gpu_triton"),
        ("h100", {"heads": (16, 1, 576)}, "head width 576: must be one of", "xla"),
        ("h100", {"heads": (8, 8, 64), "lanes": 128}, "one head of 64, not 128 lanes", "reference"),
        ("h100", {"heads": (71, 1, 64)}, "71 query heads per KV head: must be", "gpu_triton"),
        ("h200", {"page_size": 8}, "page size 8: must be one of", "gpu_triton"),
        ("h200", {"page_size": 256}, "page size 256: must be one of", "gpu_triton"),
        ("h200", {"q_dtype": "float32"}, "queries are float32 and pages bfloat16", "gpu_triton"),
        ("h200", {"kv_dtype": "float8_e5m2"}, "pages are float8_e5m2: must be", "gpu_triton"),
        ("h200", {"kv_dtype": "int8"}, "pages are int8: must be one of", "gpu_triton"),
        ("l4", {}, "needs compute capability 9.0 (Hopper), l4 has 8.9", "gpu_triton"),
        ("b200", {}, "needs compute capability 9.0 (Hopper), b200 has 10.0", "gpu_triton"),
        ("v6e", {"lanes": 128, "page_size": 64}, "needs an NVIDIA GPU, the call is", "tpu"),
    ],
)
def test_refused_with_the_reason_and_what_auto_takes(gpu, change, message, instead):
    spec = gpu_spec(**change)
    assert message in refusals(spec, chip(gpu))["gpu_mosaic"]
    with pytest.raises(ValueError, match="impl 'gpu_mosaic'"):
        choose(spec, chip(gpu), "gpu_mosaic")
    assert choose(spec, chip(gpu)) == instead


OLD = jax.__version_info__ < JAX_FROM


@pytest.mark.skipif(not OLD, reason="this jax is new enough")
def test_an_old_jax_is_refused_last():
    assert refusals(gpu_spec(), chip("h100"))["gpu_mosaic"].startswith("needs jax 0.11 or newer")
    assert choose(gpu_spec(), chip("h100")) == "gpu_triton"


@pytest.mark.skipif(OLD, reason="the kernel needs jax 0.11")
@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_taken_on_hopper(gpu, head_dim, page_size):
    for dtype in ("bfloat16", "float16"):
        spec = gpu_spec(heads=(32, 8, head_dim), page_size=page_size, q_dtype=dtype, kv_dtype=dtype)
        assert choose(spec, chip(gpu)) == "gpu_mosaic"
    assert refusals(spec, None)["gpu_mosaic"].endswith("the call is for the host CPU")


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (9, 3, 64), (12, 12, 64), (64, 1, 64), (8, 4, 256)], ids=str
)
def test_sizes_fit(heads):
    gpu, group = chip("h100"), heads[0] // heads[1]
    for slots, max_q_len in ((1, 1), (64, 1), (256, 1), (64, 16), (64, 512)):
        rows = min(slots * max_q_len, 2048)
        spec = dataclasses.replace(
            gpu_spec(heads=heads, slots=slots), max_q_len=max_q_len, num_rows=rows
        )
        sizes = default_sizes(spec, gpu)
        assert sizes.stages >= 2
        assert shared_bytes(spec, sizes) <= gpu.shared_memory_bytes
        assert sizes.tile_queries * group <= ROWS
        assert sizes.tile_queries * sizes.tiles == sizes.queries
        assert (sizes.tiles == 2) == (max_q_len > 16 and heads[2] <= 128)
        assert heads[2] // sizes.shares <= 128
        assert sizes.streams * sizes.consumers == 2
        assert sizes.parts >= 2
