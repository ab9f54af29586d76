"""Programs with the GPU attention kernels, to be compiled for chips that are not here."""

import functools

import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from pallas_kernels.paged_attention.layout import write_pages
from sharding.aot import Program
from tests.aot.attention_calls import LLAMA, array, call, named_calls, steps_of


def named_cases(
    mesh: Mesh,
    *,
    chip: str,
    dtypes: tuple[tuple[str, str], ...],
    names: tuple[str, ...] = (),
    impl: str = "gpu_triton",
) -> Program:
    """The named cases, all of them by default, with queries and pages of each of these pairs of
    dtypes, in one program."""
    calls, static = [], []
    for q_dtype, kv_dtype in dtypes:
        more, facts = named_calls(mesh, q_dtype, names=names, kv_dtype=kv_dtype)
        narrow = jnp.dtype(kv_dtype).itemsize == 1
        for (*arrays, sinks_N), each in zip(more, facts, strict=True):
            num_kv_heads = arrays[1].shape[2]
            scale_2K = array(mesh, (2, num_kv_heads), jnp.float32) if narrow else None
            calls.append((*arrays, sinks_N, scale_2K))
            static.append(each)

    def attend(calls):
        return [
            IMPLEMENTATIONS[impl].attend(
                *arrays, sinks_N=sinks_N, kv_scale_2K=scale_2K, **each, chip=chip_named(chip)
            )
            for (*arrays, sinks_N, scale_2K), each in zip(calls, static, strict=True)
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
    impl: str = "gpu_triton",
    everything: bool = False,
) -> Program:
    """One call of attention, with a window, a soft-cap and sinks if `everything`."""
    arrays = call(mesh, heads, page_size, slots, rows, columns, q_dtype, kv_dtype, pages)
    scale_2K = None
    if jnp.dtype(kv_dtype).itemsize == 1:
        scale_2K = array(mesh, (2, heads[1]), jnp.float32)
    attend = functools.partial(
        IMPLEMENTATIONS[impl].attend,
        scale=heads[2] ** -0.5,
        max_q_len=max_q_len,
        window=300 if everything else None,
        softcap=50.0 if everything else None,
        chip=chip_named(chip),
    )
    sinks_N = array(mesh, heads[:1], jnp.float32) if everything else None
    return Program(
        lambda *a: attend(*a[:-2], sinks_N=a[-2], kv_scale_2K=a[-1]), (*arrays, sinks_N, scale_2K)
    )


def shapes(
    mesh: Mesh,
    *,
    chip: str,
    impl: str,
    head_dims: tuple[int, ...],
    page_sizes: tuple[int, ...],
    max_q_len: int,
    group: int = 4,
    dtype: str = "bfloat16",
    everything: bool = False,
) -> Program:
    """A call for each of these head widths and page sizes."""
    calls = [
        attention(
            mesh,
            chip=chip,
            impl=impl,
            heads=(8 * group, 8, head_dim),
            page_size=page_size,
            q_dtype=dtype,
            kv_dtype=dtype,
            everything=everything,
            max_q_len=max_q_len,
            rows=64 * min(max_q_len, 16),
            columns=64,
        )
        for head_dim in head_dims
        for page_size in page_sizes
    ]
    return Program(
        lambda *args: [c.fn(*a) for c, a in zip(calls, args, strict=True)],
        tuple(c.args for c in calls),
    )


def layers(
    mesh: Mesh,
    *,
    chip: str,
    max_q_len: int,
    rows: int,
    num_layers: int = 2,
    heads=LLAMA,
    impl: str = "gpu_triton",
) -> Program:
    """Layers' donated pools, written and attended to in a loop of steps."""
    slots, dtype = 64, "bfloat16"
    q_TNH, pool, table_SM, *slot_arrays = call(mesh, heads, 16, slots, rows, 64, dtype, dtype, 512)
    row_T = array(mesh, (rows,), jnp.int32)
    attend = functools.partial(
        IMPLEMENTATIONS[impl].attend,
        scale=0.1,
        max_q_len=max_q_len,
        window=None,
        softcap=None,
        sinks_N=None,
        chip=chip_named(chip),
    )
    return Program(
        steps_of(write_pages, attend, heads[1]),
        ([pool] * num_layers, q_TNH, row_T, row_T, table_SM, *slot_arrays),
        donate_argnums=(0,),
        watched=pool,
    )
