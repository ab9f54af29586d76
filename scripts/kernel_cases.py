"""Attention problems at serving sizes, and what a call of each must move and multiply.

`GPU_SERVING` are sizes at which decode attention is compared on GPUs: 64 query heads over 8 KV
heads of 128. `at_serving_size` gives a named case of `pallas_kernels/paged_attention/cases.py` the
slots and lengths of a server. Bytes and operations count what a query sees, each key and value
once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.layout import lanes_of, pages_shape
from pallas_kernels.paged_attention.spec import KernelSpec, check


@dataclass(frozen=True)
class ServingCase(Case):
    """A case whose pages may be narrower than its queries; then each KV head has scales."""

    kv_dtype: str = "bfloat16"


def _gqa(name: str, kv_lens: tuple[int, ...], q_len: int = 1, **rest) -> ServingCase:
    return ServingCase(
        f"gqa_64_8_{name}",
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        q_lens=(q_len,) * len(kv_lens),
        kv_lens=kv_lens,
        dtype="bfloat16",
        **{"page_size": 16} | rest,
    )


# 64 lengths from 128 to 32k in equal ratios, together as many keys as 64 times 6,055; in no order,
# as requests come: one sorted by length would suit a kernel that hands them out in turn.
RAGGED = tuple(
    int(x) for x in np.random.default_rng(0).permutation(np.geomspace(128, 32_768, 64).round())
)
GPU_SERVING = (
    _gqa("b64_4k", (4096,) * 64),
    _gqa("b64_16k", (16_384,) * 64),
    _gqa("b64_4k_page_64", (4096,) * 64, page_size=64),
    _gqa("b64_ragged", RAGGED),
    _gqa("b64_4k_fp8", (4096,) * 64, kv_dtype="float8_e4m3fn"),
    _gqa("b64_4k_int8", (4096,) * 64, kv_dtype="int8"),
    _gqa("b64_4k_q4", (4096,) * 64, q_len=4),
    _gqa("b64_4k_q8", (4096,) * 64, q_len=8),
    _gqa("b16_32k_window_4k", (32_768,) * 16, window=4096),
    _gqa("b64_8k", (8192,) * 64),
    _gqa("b8_16k", (16_384,) * 8),
    _gqa("b1_16k", (16_384,)),
    _gqa("b64_16k_fp8", (16_384,) * 64, kv_dtype="float8_e4m3fn"),
    _gqa("b64_16k_page_64", (16_384,) * 64, page_size=64),
)


def at_serving_size(
    case: Case, slots: int, context: int, chunk: int, page_size: int
) -> ServingCase:
    """The same heads, window, cap and sinks for as many slots, or for a chunk of one prompt."""
    most = max(case.q_lens)
    q_lens = (most,) * slots if most <= 16 else (chunk,)
    return ServingCase(
        case.name,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        page_size,
        q_lens=q_lens,
        kv_lens=(context,) * len(q_lens),
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        dtype="bfloat16",
    )


def serving_cases(
    kind: str, slots: int, context: int, chunk: int, page_size: int
) -> tuple[ServingCase, ...]:
    """All that is measured on a kind of chip, the most telling ones first."""
    named = (at_serving_size(case, slots, context, chunk, page_size) for case in CASES)
    return (*(GPU_SERVING if kind == "gpu" else ()), *named)


def slot_pages(case: Case) -> list[int]:
    """How many pages each slot uses."""
    return [-(-kv_len // case.page_size) for kv_len in case.kv_lens]


def pool_pages(case: Case, tables: int) -> int:
    """Pages of a pool in which each of so many page tables has its own, and the trash page."""
    return tables * sum(slot_pages(case)) + 1


def spec_of(case: ServingCase, each: Chip, tables: int) -> KernelSpec:
    """What the implementations decide on, where so many page tables share a pool."""
    slots, heads = len(case.q_lens), (case.num_kv_heads, case.head_dim)
    shape = pages_shape(pool_pages(case, tables), case.page_size, *heads, lanes_of(each))
    array, ints = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((slots,), jnp.int32)
    narrow = jnp.dtype(case.kv_dtype).itemsize == 1
    return check(
        array((sum(case.q_lens), case.num_heads, case.head_dim), case.dtype),
        array(shape, case.kv_dtype),
        array((slots, max(slot_pages(case))), jnp.int32),
        *(ints,) * 3,
        scale=case.scale,
        max_q_len=max(case.q_lens),
        window=case.window,
        softcap=case.softcap,
        sinks_N=array((case.num_heads,), jnp.float32) if case.sinks else None,
        kv_scale_2K=array((2, case.num_kv_heads), jnp.float32) if narrow else None,
    )


def keys_of(case: Case) -> int:
    """Keys that some query of a slot sees, summed over slots."""
    window = case.window or max(case.kv_lens)
    lengths = zip(case.q_lens, case.kv_lens, strict=True)
    return sum(min(kv_len, window + q_len - 1) for q_len, kv_len in lengths)


def bytes_of(case: ServingCase) -> int:
    """Of one call: visible keys and values, queries and outputs."""
    kv = 2 * keys_of(case) * case.num_kv_heads * case.head_dim
    q_and_o = 2 * sum(case.q_lens) * case.num_heads * case.head_dim
    return kv * jnp.dtype(case.kv_dtype).itemsize + q_and_o * jnp.dtype(case.dtype).itemsize


def flops_of(case: Case) -> int:
    """Of one call: two matmuls over the pairs of a query and a key that it sees."""
    window = case.window or max(case.kv_lens)
    pairs = sum(
        min(position + 1, window)
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
        for position in range(kv_len - q_len, kv_len)
    )
    return 4 * pairs * case.num_heads * case.head_dim


def bound_s(case: ServingCase, each: Chip) -> float:
    """The longer of moving the bytes at the published bandwidth and multiplying at that rate."""
    rate = each.bf16_flops_per_s / each.devices
    return max(bytes_of(case) / each.device_hbm_bytes_per_s, flops_of(case) / rate)
