"""Programs with the GPU attention kernels, to be compiled for chips that are not here."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention import gpu_triton
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.layout import pages_shape, write_pages
from sharding.aot import Program

LLAMA = (32, 8, 128)


def _array(mesh: Mesh, shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _call(mesh, heads, page_size, slots, rows, columns, q_dtype, kv_dtype, pages):
    """Abstract queries, pages, page table and three slot arrays."""
    num_heads, num_kv_heads, head_dim = heads
    return (
        _array(mesh, (rows, num_heads, head_dim), q_dtype),
        _array(mesh, pages_shape(pages, page_size, num_kv_heads, head_dim), kv_dtype),
        _array(mesh, (slots, columns), jnp.int32),
        *(_array(mesh, (slots,), jnp.int32) for _ in range(3)),
    )


def named_cases(mesh: Mesh, *, chip: str, dtype: str, names: tuple[str, ...] = ()) -> Program:
    """The named cases, all of them by default, in one program."""
    calls, static = [], []
    for case in CASES:
        if names and case.name not in names:
            continue
        heads = (case.num_heads, case.num_kv_heads, case.head_dim)
        rows, slots = max(1, sum(case.q_lens)), len(case.q_lens)
        columns = -(-max(case.kv_lens) // case.page_size)
        pages = slots * columns + 1
        call = _call(mesh, heads, case.page_size, slots, rows, columns, dtype, dtype, pages)
        sinks_N = _array(mesh, (case.num_heads,), jnp.float32) if case.sinks else None
        calls.append((*call, sinks_N))
        static.append(
            {
                "scale": case.scale,
                "max_q_len": max(case.q_lens),
                "window": case.window,
                "softcap": case.softcap,
            }
        )

    def attend(calls):
        return [
            gpu_triton.attend(*arrays, sinks_N=sinks_N, **kwargs, chip=chip_named(chip))
            for (*arrays, sinks_N), kwargs in zip(calls, static, strict=True)
        ]

    return Program(attend, (calls,))


def attention(
    mesh: Mesh,
    *,
    chip: str,
    heads: tuple[int, int, int] = LLAMA,
    page_size: int = 16,
    q_dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    slots: int = 64,
    columns: int = 512,
    rows: int = 64,
    max_q_len: int = 1,
    pages: int = 4096,
) -> Program:
    """One call of attention."""
    call = _call(mesh, heads, page_size, slots, rows, columns, q_dtype, kv_dtype, pages)
    scale_2K = None
    if jnp.dtype(kv_dtype).itemsize == 1:
        scale_2K = _array(mesh, (2, heads[1]), jnp.float32)
    attend = functools.partial(
        gpu_triton.attend,
        scale=heads[2] ** -0.5,
        max_q_len=max_q_len,
        window=None,
        softcap=None,
        sinks_N=None,
        chip=chip_named(chip),
    )
    return Program(lambda *a: attend(*a[:-1], kv_scale_2K=a[-1]), (*call, scale_2K))


def layers(
    mesh: Mesh, *, chip: str, max_q_len: int, rows: int, num_layers: int = 2, heads=LLAMA
) -> Program:
    """Layers' donated pools, written and attended to in a loop of steps."""
    slots, dtype = 64, "bfloat16"
    q_TNH, pool, table_SM, *slot_arrays = _call(mesh, heads, 16, slots, rows, 64, dtype, dtype, 512)
    row_T = _array(mesh, (rows,), jnp.int32)

    def steps(pools, x_TNH, page_T, offset_T, table_SM, q_start_S, q_len_S, kv_len_S):
        def step(_, carry):
            pools, x_TNH = carry
            written = []
            for pool in pools:
                k_TKH, v_TKH = x_TNH[:, : heads[1]], x_TNH[:, -heads[1] :]
                pool = write_pages(pool, k_TKH, v_TKH, page_T, offset_T)
                x_TNH = gpu_triton.attend(
                    x_TNH, pool, table_SM, q_start_S, q_len_S, kv_len_S,
                    scale=0.1, max_q_len=max_q_len, window=None, softcap=None,
                    sinks_N=None, chip=chip_named(chip),
                )  # fmt: skip
                written.append(pool)
            return written, x_TNH

        return jax.lax.fori_loop(0, 3, step, (pools, x_TNH))

    return Program(
        steps,
        ([pool] * num_layers, q_TNH, row_T, row_T, table_SM, *slot_arrays),
        donate_argnums=(0,),
        watched=pool,
    )
