"""Abstract calls of ragged paged attention, and the loop of layers, for any chip's kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.layout import pages_shape

LLAMA = (32, 8, 128)  # heads, KV heads, head width


def array(mesh: Mesh, shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def call(mesh, heads, page_size, slots, rows, columns, q_dtype, kv_dtype, pages, lanes=1):
    """Queries, pages, page table and three slot arrays."""
    num_heads, num_kv_heads, head_dim = heads
    return (
        array(mesh, (rows, num_heads, head_dim), q_dtype),
        array(mesh, pages_shape(pages, page_size, num_kv_heads, head_dim, lanes), kv_dtype),
        array(mesh, (slots, columns), jnp.int32),
        *(array(mesh, (slots,), jnp.int32) for _ in range(3)),
    )


def named_calls(mesh: Mesh, dtype: str, lanes: int = 1) -> tuple[list[tuple], list[dict]]:
    """Arrays (the sinks last) and static arguments of the named cases."""
    calls, static = [], []
    for case in CASES:
        heads = (case.num_heads, case.num_kv_heads, case.head_dim)
        rows, slots = max(1, sum(case.q_lens)), len(case.q_lens)
        columns = -(-max(case.kv_lens) // case.page_size)
        pages = slots * columns + 1
        sizes = (case.page_size, slots, rows, columns)
        arrays = call(mesh, heads, *sizes, dtype, dtype, pages, lanes)
        sinks_N = array(mesh, (case.num_heads,), jnp.float32) if case.sinks else None
        calls.append((*arrays, sinks_N))
        static.append(
            {
                "scale": case.scale,
                "max_q_len": max(case.q_lens),
                "window": case.window,
                "softcap": case.softcap,
            }
        )
    return calls, static


def steps_of(write: Callable, attend: Callable, num_kv_heads: int) -> Callable:
    """Three steps of layers that each write to their own pool and attend to it."""

    def steps(pools, x_TNH, page_T, offset_T, *slot_arrays):
        def step(_, carry):
            pools, x_TNH = carry
            written = []
            for pool in pools:
                k_TKH, v_TKH = x_TNH[:, :num_kv_heads], x_TNH[:, -num_kv_heads:]
                pool = write(pool, k_TKH, v_TKH, page_T, offset_T)
                x_TNH = attend(x_TNH, pool, *slot_arrays)
                written.append(pool)
            return written, x_TNH

        return jax.lax.fori_loop(0, 3, step, (pools, x_TNH))

    return steps
