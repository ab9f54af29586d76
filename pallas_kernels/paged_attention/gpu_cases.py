"""Calls that the GPU kernels are compiled for where there is no GPU, as specs.

What the compiler makes of a kernel depends on dtypes, widths and tiles together, and there are tens
of thousands of combinations that `gpu_triton.supports` accepts: `covering` takes so many that any
two values of two axes meet in one of them. `SERVING` are calls at a server's sizes.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention import gpu_triton
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.gpu_triton import KV_DTYPES, Q_DTYPES
from pallas_kernels.paged_attention.spec import KernelSpec

MASKS = {
    "causal": {},
    "window": {"window": 300},
    "softcap": {"softcap": 50.0},
    "sinks": {"sinks": True},
    "all": {"window": 300, "softcap": 50.0, "sinks": True},
}
AXES = {
    "dtypes": tuple(itertools.product(Q_DTYPES, KV_DTYPES)),
    "head_dim": (16, 32, 64, 80, 96, 128, 192, 256),
    "max_q_len": (1, 4, 16, 512),
    "group": (1, 3, 4, 8, 16, 64),
    "page_size": (8, 16, 24, 64, 256),
    "mask": tuple(MASKS),
}


def call(
    heads: tuple[int, int, int],
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    *,
    page_size: int = 16,
    slots: int = 64,
    max_q_len: int = 1,
    mask: str = "causal",
    columns: int = 512,
) -> KernelSpec:
    """`heads`: query heads, KV heads, head width. Pages of 8 bits have scales."""
    num_heads, num_kv_heads, head_dim = heads
    q_dtype, kv_dtype = dtypes
    facts = {"window": None, "softcap": None, "sinks": False} | MASKS[mask]
    return KernelSpec(
        num_rows=slots * min(max_q_len, 16),
        num_slots=slots,
        pages_per_slot=columns,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=4096,
        page_parts=2,
        page_rows=num_kv_heads,
        page_lanes=head_dim,
        max_q_len=max_q_len,
        scale=head_dim**-0.5,
        kv_scales=jnp.dtype(kv_dtype).itemsize == 1,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        **facts,
    )


# 64 slots, 32 query and 8 KV heads, pages of 16: decode, verification, chunks of a prompt.
SERVING = tuple(
    call((32, 8, head_dim), dtypes, max_q_len=max_q_len)
    for head_dim, dtypes, max_q_len in (
        *itertools.product((64, 128, 256), [("bfloat16", "bfloat16")], (1, 8, 512)),
        *itertools.product((128,), [("bfloat16", d) for d in ("float8_e4m3fn", "int8")], (1, 512)),
    )
)


def named(case: Case, dtypes: tuple[str, str]) -> KernelSpec:
    """A named case's call."""
    heads = (case.num_heads, case.num_kv_heads, case.head_dim)
    slots, columns = len(case.q_lens), -(-max(case.kv_lens) // case.page_size)
    return replace(
        call(heads, dtypes, page_size=case.page_size, slots=slots, columns=columns),
        num_rows=sum(case.q_lens),
        max_q_len=max(case.q_lens),
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
    )


def covering(chip: Chip) -> list[KernelSpec]:
    """Calls that `gpu_triton` takes on this chip."""
    taken = [d for d in AXES["dtypes"] if gpu_triton.supports(call((8, 2, 64), d), chip) is None]
    values = list((AXES | {"dtypes": taken}).values())
    specs = []
    for row in all_pairs([len(axis) for axis in values]):
        dtypes, head_dim, max_q_len, group, page_size, mask = (
            axis[i] for axis, i in zip(values, row, strict=True)
        )
        heads = (2 * group, 2, head_dim)
        how = {"page_size": page_size, "max_q_len": max_q_len, "mask": mask}
        specs.append(call(heads, dtypes, **how))
    return specs


def all_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows with one of `sizes[a]` values for each axis a, so that any two values of two axes are in
    one row. Greedy: a row starts with a missing pair, then takes axis by axis the value that is in
    most missing pairs with those it has, of equal ones the least used."""
    points = [(a, i) for a, size in enumerate(sizes) for i in range(size)]
    missing = {(p, q) for p, q in itertools.combinations(points, 2) if p[0] != q[0]}
    used, rows = Counter(), []
    while missing:
        row = dict(min(missing))
        for a, size in enumerate(sizes):
            if a not in row:
                pairs = {
                    i: sum(_pair(p, (a, i)) in missing for p in row.items()) for i in range(size)
                }
                row[a] = max(pairs, key=lambda i, a=a: (pairs[i], -used[a, i]))
        used.update(row.items())
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append(tuple(row[a] for a in range(len(sizes))))
    return rows


def _pair(p: tuple[int, int], q: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (p, q) if p < q else (q, p)
