"""Small programs that the ahead-of-time tests compile in a child process."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.aot import Program


def _array(mesh: Mesh, shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
    )


def split_matmul(mesh: Mesh, *, width: int) -> Program:
    """A contraction over the split axis: every device has partial sums."""
    x, w = _array(mesh, (8, width), None, "tensor"), _array(mesh, (width, 128), "tensor")
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Program(lambda x, w: x @ w, (x, w), parts={"w": w}, out_shardings=everywhere)


def in_place(mesh: Mesh, *, rows: int, donate: bool) -> Program:
    """One row of a large array changes; without donation the whole of it must be copied."""
    pool = _array(mesh, (rows, 256))
    row = _array(mesh, (256,))
    return Program(
        lambda pool, row: pool.at[7].set(row, mode="drop"),
        (pool, row),
        donate_argnums=(0,) if donate else (),
        parts={"pool": pool},
        watched=pool,
    )


def too_large(mesh: Mesh) -> Program:
    """64 GiB of argument, and as much of result."""
    return Program(lambda x: x + 1, (_array(mesh, (2**24, 1024)),))


def running_sum(mesh: Mesh, *, trips: int) -> Program:
    def body(i, x):
        return x + jnp.sin(x) * i

    return Program(lambda x: jax.lax.fori_loop(0, trips, body, x), (_array(mesh, (256, 256)),))


def doubled_by_kernel(mesh: Mesh, *, blocks: int) -> Program:
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((8 * blocks, 128), jnp.float32),
        name="doubled",
    )
    return Program(call, (_array(mesh, (8 * blocks, 128)),))


def refuses(mesh: Mesh, *, rows: int) -> Program:
    raise ValueError(f"rows must be even, got {rows}")
