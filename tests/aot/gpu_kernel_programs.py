"""A program with layers of GPU attention, to be compiled for chips that are not here."""

import functools

import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.chips import chip as chip_named
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from pallas_kernels.paged_attention.layout import write_pages
from sharding.aot import Program
from tests.aot.attention_calls import LLAMA, array, call, steps_of


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
