"""Programs with the TPU attention kernel, to be compiled for chips that are not here."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged_attention
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.cache_update import update_cache
from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.layout import lanes_of, pages_shape
from sharding.aot import Program
from tests.aot.attention_calls import LLAMA, array, call, named_calls, steps_of


def _on_each(mesh: Mesh, fn):
    """Every device of the mesh does the same: a kernel is not partitioned by itself."""
    every = PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)


def named_cases(mesh: Mesh, *, chip: str, dtype: str) -> Program:
    """All named cases in one program."""
    chip = chip_named(chip)
    calls, static = named_calls(mesh, dtype, lanes_of(chip))

    def attend(calls):
        return [
            ragged_paged_attention(*arrays, sinks_N=sinks_N, **kwargs, impl="tpu", chip=chip)
            for (*arrays, sinks_N), kwargs in zip(calls, static, strict=True)
        ]

    return Program(_on_each(mesh, attend), (calls,))


def decode(
    mesh: Mesh,
    *,
    chip: str,
    heads: tuple[int, int, int] = LLAMA,
    page_size: int = 16,
    kv_dtype: str = "bfloat16",
    slots: int = 64,
    columns: int = 512,
    q_len: int = 1,
) -> Program:
    """One call of attention for slots that bring `q_len` tokens each."""
    chip = chip_named(chip)
    narrow = jnp.dtype(kv_dtype).itemsize == 1
    rows, lanes = slots * q_len, lanes_of(chip)
    arrays = call(mesh, heads, page_size, slots, rows, columns, "bfloat16", kv_dtype, 4096, lanes)
    scale_2K = array(mesh, (2, heads[1]), jnp.float32) if narrow else None
    attend = functools.partial(
        ragged_paged_attention, scale=heads[2] ** -0.5, max_q_len=q_len, impl="tpu", chip=chip
    )
    return Program(
        _on_each(mesh, lambda *a: attend(*a[:-1], kv_scale_2K=a[-1])), (*arrays, scale_2K)
    )


def jax_decode(
    mesh: Mesh,
    *,
    heads: tuple[int, int, int] = LLAMA,
    page_size: int = 16,
    pages_per_block: int = 32,
    slots: int = 64,
    columns: int = 512,
) -> Program:
    """The same call with the kernel that comes with jax."""
    num_heads, num_kv_heads, head_dim = heads
    pages = array(mesh, (num_kv_heads, 4096, page_size, head_dim), jnp.bfloat16)
    attend = functools.partial(jax_paged_attention, pages_per_compute_block=pages_per_block)
    return Program(
        _on_each(mesh, attend),
        (
            array(mesh, (slots, num_heads, head_dim), jnp.bfloat16),
            pages,
            pages,
            array(mesh, (slots,), jnp.int32),
            array(mesh, (slots, columns), jnp.int32),
        ),
    )


def layers(
    mesh: Mesh, *, chip: str, max_q_len: int, rows: int, heads=LLAMA, dtype="bfloat16"
) -> Program:
    """Two layers' donated pools, written and attended to in a loop of steps."""
    chip = chip_named(chip)
    slots, page_size, pages = 64, 16, 2048
    q_TNH, pool, table_SM, *slot_arrays = call(
        mesh, heads, page_size, slots, rows, 64, dtype, dtype, pages, lanes_of(chip)
    )
    row_T = array(mesh, (rows,), jnp.int32)
    attend = functools.partial(
        ragged_paged_attention, scale=0.1, max_q_len=max_q_len, impl="tpu", chip=chip
    )
    steps = steps_of(functools.partial(update_cache, chip=chip), attend, heads[1])
    return Program(
        _on_each(mesh, steps),
        ([pool, pool], q_TNH, row_T, row_T, table_SM, *slot_arrays),
        donate_argnums=(0,),
        watched=pool,
    )


def append(
    mesh: Mesh,
    *,
    chip: str,
    rows: int,
    by_kernel: bool = True,
    heads=LLAMA,
    dtype="bfloat16",
) -> Program:
    """The write of one layer's new keys and values alone, by the kernel or by XLA's scatter."""
    _, num_kv_heads, head_dim = heads
    chip = chip_named(chip)
    shape = pages_shape(2048, 16, num_kv_heads, head_dim, lanes_of(chip))
    pool, new = array(mesh, shape, dtype), array(mesh, (rows, num_kv_heads, head_dim), dtype)
    row_T = array(mesh, (rows,), jnp.int32)
    write = functools.partial(update_cache, chip=chip if by_kernel else None)
    return Program(_on_each(mesh, write), (pool, new, new, row_T, row_T), (0,), watched=pool)
