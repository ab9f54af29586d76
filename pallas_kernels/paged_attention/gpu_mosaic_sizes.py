"""Sizes of the Mosaic GPU kernel, by formula from the call's static facts and the chip's.

Lengths are no input: how a slot is split depends on its own length and on static facts only, so
that a slot's neighbours change no bit of its output.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.gpu_triton_sizes import FEW_QUERIES, FEWEST_ROWS, parts_of
from pallas_kernels.paged_attention.spec import KernelSpec

ROWS = 64  # of a warpgroup's matmul
KEYS = 64  # of a block
WIDTH = 64  # columns of queries, values and outputs that are in registers at once
MOST_COLUMNS = 128  # of the output that a consumer has registers for
MOST_STAGES = 8
RESERVED_BYTES = 4096  # barriers, sums across warps, alignment


@dataclass(frozen=True)
class Sizes:
    """Sizes of one kernel call; results do not depend on them beyond rounding."""

    queries: int  # new tokens of a unit
    tiles: int  # of a unit, each of up to ROWS rows
    streams: int  # units that an SM works on at once, each with its own ring
    stages: int  # buffers of a ring; one holds a block's keys or its values
    programs: int  # SMs
    split_queries: int  # slots with more new tokens are not split
    parts: int = 1  # most parts of a tile
    part_keys: int = 256  # fewer are not split off
    keys: int = KEYS  # of a block
    shares: int = 1  # consumers of a tile, each with as many columns of the output

    @property
    def consumers(self) -> int:
        """Of a stream."""
        return self.tiles * self.shares

    @property
    def tile_queries(self) -> int:
        return self.queries // self.tiles

    @property
    def warpgroups(self) -> int:
        return self.streams * (1 + self.consumers)


def shared_bytes(spec: KernelSpec, sizes: Sizes) -> int:
    """Shared memory of one SM: per tile queries, per consumer some columns of queries or outputs,
    weights and logarithms; rings."""
    itemsize = jnp.dtype(spec.kv_dtype).itemsize
    tile = ROWS * spec.head_dim * itemsize
    columns = max(2 * WIDTH, spec.head_dim // sizes.shares)
    consumer = ROWS * ((columns + KEYS) * itemsize + 4)
    ring = sizes.stages * KEYS * spec.head_dim * itemsize
    return sizes.streams * (sizes.tiles * tile + sizes.consumers * consumer + ring) + RESERVED_BYTES


def default_sizes(spec: KernelSpec, chip: Chip) -> Sizes:
    """Two consumers: each with a ring of its own, or sharing one where the output of wide heads
    fills the registers of two and for chunks of a prompt, which then read keys for twice the rows.
    """
    group = spec.num_heads // spec.num_kv_heads
    most, fit = min(spec.max_q_len, spec.num_rows), ROWS // group
    chunks = most > FEW_QUERIES
    shares = -(-spec.head_dim // MOST_COLUMNS)
    tiles = 2 if chunks and shares == 1 else 1
    split_queries = max(1, FEWEST_ROWS // group) if chunks else most
    parts, part_keys = parts_of(spec, split_queries, chip)
    sizes = Sizes(
        queries=tiles * min(fit, most),
        tiles=tiles,
        streams=2 // (tiles * shares),
        stages=0,
        programs=chip.cores,
        split_queries=split_queries,
        parts=parts,
        part_keys=part_keys,
        shares=shares,
    )
    left = chip.shared_memory_bytes - shared_bytes(spec, sizes)
    buffer = sizes.streams * KEYS * spec.head_dim * jnp.dtype(spec.kv_dtype).itemsize
    return replace(sizes, stages=min(MOST_STAGES, left // buffer))
