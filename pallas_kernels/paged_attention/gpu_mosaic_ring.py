"""Work lists and rings of the Mosaic GPU kernel: what an SM computes, and how blocks reach it.

A stream is a producer warpgroup with the consumers of its ring. It takes every n-th item of the
list (unit, KV head). The producer reads page ids from the page table and starts one copy (TMA) per
page into the ring, whose buffers hold the keys or the values of one block in turn.

Invariant: a buffer is written by the producer between a wait on `free` and the arrivals on `full`
and read by consumers between a wait on `full` and their arrival on `free`. Page table columns are
read between those of the unit's first and last visible position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_mosaic_sizes import KEYS
from pallas_kernels.paged_attention.gpu_plan import Unit


class Work(NamedTuple):
    """A unit for one KV head; the fields from `slot` on are the columns of `Unit`."""

    unit: jax.Array
    head: jax.Array
    slot: jax.Array
    row: jax.Array
    tokens: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array
    parts: jax.Array

    def visible(self, window: int | None) -> tuple[jax.Array, jax.Array]:
        """First and last position that any of its tokens sees."""
        first = 0 if window is None else jnp.maximum(self.position - window + 1, 0)
        return jnp.int32(first), self.position + self.tokens - 1


@dataclass(frozen=True)
class Ring:
    """The n-th use of a stream's ring, counted over all of its units."""

    stream: jax.Array
    stages: int
    buffers: Any
    full: Any
    free: Any

    def at(self, n: jax.Array | int) -> jax.Array:
        return self.stream * self.stages + lax.rem(n, self.stages)


def each_work(
    units_ref, count_ref, body: Callable, *, num_kv_heads: int, program: jax.Array, programs: int
) -> None:
    """`body(work, n)` for the items program, program + programs, ..: n buffers were used before."""
    items = count_ref[0] * num_kv_heads

    def step(i, n):
        item = program + i * programs
        u, k = lax.div(item, num_kv_heads), lax.rem(item, num_kv_heads)
        work = Work(u, k, *(units_ref[u, column] for column in Unit))
        body(work, n)
        return n + 2 * jnp.maximum(work.end - work.begin, 0)

    lax.fori_loop(0, lax.div(items - program + programs - 1, programs), step, jnp.int32(0))


def load(
    kv_ref, table_ref, ring: Ring, num_kv_heads: int, window: int | None, work: Work, n0: jax.Array
) -> None:
    """A producer's part of a unit: keys and values of its blocks into the ring, page by page."""
    page_size = kv_ref.shape[1]
    rows = min(page_size, KEYS)
    columns = [lax.div(x, page_size) for x in work.visible(window)]

    @pl.loop(work.begin, work.end)
    def _(b):
        # Ids of pages that nobody sees may be anything: one that is seen takes their place.
        pages = [
            table_ref[work.slot, jnp.clip(lax.div(b * KEYS + x, page_size), *columns)]
            for x in range(0, KEYS, rows)
        ]
        offset = lax.rem(b * KEYS, page_size) if page_size > KEYS else 0
        for part in (0, 1):
            at = ring.at(n0 + 2 * (b - work.begin) + part)
            plgpu.barrier_wait(ring.free.at[at])
            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    kv_ref.at[(page * 2 + part) * num_kv_heads + work.head, pl.ds(offset, rows)],
                    ring.buffers.at[at, pl.ds(i * rows, rows)],
                    ring.full.at[at],
                )


def skip(ring: Ring, work: Work, n0: jax.Array) -> None:
    """The part of a consumer that has no rows in a unit."""

    @pl.loop(0, 2 * (work.end - work.begin))
    def _(i):
        plgpu.barrier_wait(ring.full.at[ring.at(n0 + i)])
        plgpu.barrier_arrive(ring.free.at[ring.at(n0 + i)])
