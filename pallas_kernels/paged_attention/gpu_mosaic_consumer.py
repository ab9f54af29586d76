"""What a compute warpgroup of the Mosaic GPU kernel has: tile, columns, shared memory, barriers.

Letters beside those of the contract: M rows of a matmul, B keys of a block, I tiles, A consumers,
Z ring buffers, F some columns of the head width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_mosaic_ring import Ring, Work
from pallas_kernels.paged_attention.gpu_mosaic_sizes import KEYS, ROWS, WIDTH, Sizes


@dataclass(frozen=True)
class Plan:
    """The static facts of one kernel call."""

    sizes: Sizes
    group: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


class Scratch(NamedTuple):
    """Shared memory and barriers of one SM."""

    rows_AMF: Any  # its columns of queries on the way in, of outputs on the way out
    part_AMF: Any  # in the same place: some columns of a part of a split slot, float32
    q_IMH: Any  # queries as the tensor cores read them
    log_AM: Any
    weight_AMB: Any
    ring_ZBH: Any
    rows_here: Any
    q_here: Any  # where consumers of one tile meet
    full: Any
    free: Any


@dataclass(frozen=True)
class Consumer:
    """A compute warpgroup: which of the SM's, which tile of its ring's units it has, and which
    share of the tile's columns. What is always 0 is static, which saves registers."""

    index: jax.Array
    tile: jax.Array | int
    share: jax.Array | int
    ring: Ring
    scratch: Scratch
    plan: Plan

    @property
    def tile_of_sm(self) -> jax.Array:
        """Its tile, counted over the rings of the SM: where its queries lie."""
        return lax.div(self.index, self.plan.sizes.shares)

    @property
    def first_token(self) -> jax.Array | int:
        """Of its tile, in the unit."""
        return self.tile * self.plan.sizes.tile_queries

    @property
    def width(self) -> int:
        """Columns of its share."""
        return self.ring.buffers.shape[2] // self.plan.sizes.shares

    @property
    def first_column(self) -> jax.Array | int:
        return self.share * self.width

    def tokens(self, work: Work) -> jax.Array:
        """How many of the unit's it has; none if this is not positive."""
        return jnp.minimum(work.tokens - self.first_token, self.plan.sizes.tile_queries)


def scratch_types(plan: Plan, head_dim: int, page_size: int, dtype: Any) -> tuple:
    """For `Scratch`; `attention` takes the first two out of their shared place."""
    sizes = plan.sizes
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiles, consumers = sizes.streams * sizes.tiles, sizes.streams * sizes.consumers
    buffers, width = sizes.streams * sizes.stages, head_dim // sizes.shares
    return (
        # As many bytes per consumer, so that no consumer's place is another's.
        plgpu.RefUnion(
            plgpu.SMEM((consumers, ROWS * (2 * WIDTH // width), width), dtype),
            plgpu.SMEM((consumers, ROWS, WIDTH), jnp.float32),
        ),
        plgpu.SMEM((tiles, ROWS, head_dim), dtype, transforms=swizzled),
        plgpu.SMEM((consumers, ROWS), jnp.float32),
        plgpu.SMEM((consumers, ROWS, KEYS), dtype, transforms=swizzled),
        plgpu.SMEM((buffers, KEYS, head_dim), dtype, transforms=swizzled),
        plgpu.Barrier(num_arrivals=sizes.tile_queries, num_barriers=consumers),
        plgpu.Barrier(num_arrivals=sizes.shares, num_barriers=tiles),
        plgpu.Barrier(num_arrivals=max(1, KEYS // page_size), num_barriers=buffers),
        plgpu.Barrier(num_arrivals=sizes.consumers, num_barriers=buffers),
    )
