"""The Mosaic kernel of ragged paged attention: tiles of queries walk over their pages.

A tile is up to Q new tokens of one slot with all their heads; tile z attends to its blocks
begin[z] .. end[z] - 1 of B positions each, whole pages. One flat loop runs over all blocks of all
tiles. Each round starts the page copies of a block some rounds ahead, which may be the next slot's,
so the memory does not idle between slots; one copy brings a page with all its heads.

q_ZRML     queries of tile z that read row R of a page; the M rows of a matmul are (head of the row,
           head of the group, query) and zero in the lanes of other heads
kv_PpRCL   page pool, see `layout`: p is keys or values, or 1 where they share a row
o_ZRML     what the M rows collect from value row R, all lanes; the caller picks each head's own

What happens to a block is in `tpu_block`.

Invariant: only table entries and pages of visible positions are read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_block import (
    LOG2E,
    LOWEST,
    Plan,
    Scratch,
    attend_block,
    clear_outside,
    over_lanes,
    split_queries,
)


class Tiles(NamedTuple):
    """Scalar memory, per tile; one entry more than there are tiles."""

    slot: jax.Array
    position: jax.Array  # of the tile's first query
    first_key: jax.Array  # visible positions
    last_key: jax.Array
    begin: jax.Array  # blocks
    end: jax.Array


def kernel(table, counts, *refs, plan: Plan):
    """table[s * pages_per_slot + j] is column j of slot s; counts are tiles and rounds."""
    tiles, refs = Tiles(*refs[:6]), refs[6:]
    q_hbm, kv_hbm, sink_RM, scale_2RM, o_hbm, *refs = refs
    scratch = Scratch(*refs)
    num_tiles, num_rounds = counts[0], counts[1]
    page_size = plan.page_size
    stacked = scratch.kv.shape[4] // page_size  # pages of one register
    block = plan.pages * page_size

    def pages_of(z, b):
        """Pages of block b that tile z needs, as a range inside the block."""
        column = b * plan.pages
        begin = jnp.maximum(lax.div(tiles.first_key[z], page_size) - column, 0)
        end = jnp.minimum(lax.div(tiles.last_key[z], page_size) + 1 - column, plan.pages)
        return begin, end

    def following(z, b):
        ends = b + 1 >= tiles.end[z]
        z_next = jnp.minimum(jnp.where(ends, z + 1, z), tiles.slot.shape[0] - 1)
        return z_next, jnp.where(ends, tiles.begin[z_next], b + 1)

    def place(buffer, i):
        """Of page i of a block."""
        if stacked == 1:
            return scratch.kv.at[buffer, i]
        positions = pl.ds(i % stacked * page_size, page_size)
        return scratch.kv.at[buffer, i // stacked, :, :, positions]

    def fetch(round_, z, b, part=0, parts=1):
        """Start a part of the page copies of a block; each is a predicated instruction."""
        begin, end = pages_of(z, b)
        end = jnp.where(round_ < num_rounds, end, 0)
        buffer = round_ & (plan.buffers - 1)
        entry = tiles.slot[z] * plan.pages_per_slot + b * plan.pages
        for i in range(part * plan.pages // parts, (part + 1) * plan.pages // parts):

            @pl.when((begin <= i) & (i < end))
            def _(i=i):
                source = kv_hbm.at[table[entry + i]]
                pltpu.make_async_copy(source, place(buffer, i), scratch.kv_sem.at[buffer]).start()

    def wait_for_pages(z, b, buffer):
        """A semaphore counts bytes: wait for the number of pages in its binary digits."""
        begin, end = pages_of(z, b)
        for digit in range(plan.pages.bit_length()):

            @pl.when(((end - begin) >> digit) & 1 == 1)
            def _(some=1 << digit):
                pages = place(buffer, 0)
                if some >= stacked:
                    pages = scratch.kv.at[buffer, pl.ds(0, some // stacked)]
                pltpu.make_async_copy(pages, pages, scratch.kv_sem.at[buffer]).wait()

    def q_copy(z):
        return pltpu.make_async_copy(q_hbm.at[z], scratch.q.at[z & 1], scratch.q_sem.at[z & 1])

    def o_copy(z):
        return pltpu.make_async_copy(scratch.o.at[z & 1], o_hbm.at[z], scratch.o_sem.at[z & 1])

    def run_round(round_, cursors):
        z, b, z_ahead, b_ahead = cursors
        buffer = round_ & (plan.buffers - 1)

        @pl.when(b == tiles.begin[z])
        def _():
            q_copy(z).wait()
            pl.when(z + 1 < num_tiles)(lambda: q_copy(z + 1).start())
            # A sink is a key that was seen before all others and whose value is 0.
            scratch.max[...] = jnp.maximum(sink_RM[...] * LOG2E, LOWEST)
            scratch.sum[...] = jnp.exp2(sink_RM[...] * LOG2E - scratch.max[...])
            scratch.acc[...] = jnp.zeros_like(scratch.acc)
            if plan.split:
                split_queries(scratch, z)

        wait_for_pages(z, b, buffer)
        first_key, last_key = tiles.first_key[z], tiles.last_key[z]
        begin = b * block

        @pl.when((begin < first_key) | (begin + block - 1 > last_key))
        def _():
            clear_outside(scratch.kv, buffer, begin, first_key, last_key)

        attend_block(
            scratch,
            scale_2RM.at[0],
            lambda part, parts: fetch(round_ + plan.buffers - 1, z_ahead, b_ahead, part, parts),
            tile=z,
            buffer=buffer,
            begin=begin,
            position=tiles.position[z],
            last_key=last_key,
            plan=plan,
        )

        @pl.when(b + 1 == tiles.end[z])
        def _():
            pl.when(z >= 2)(lambda: o_copy(z - 2).wait())
            sum_RML = over_lanes(scratch.sum[...], scratch.acc.shape[-1])
            out_RML = scratch.acc[...] / jnp.where(sum_RML == 0, 1.0, sum_RML)
            if plan.scaled:
                out_RML *= over_lanes(scale_2RM[1], scratch.acc.shape[-1])
            scratch.o[z & 1] = out_RML.astype(scratch.o.dtype)
            o_copy(z).start()

        return (*following(z, b), *following(z_ahead, b_ahead))

    def fill(round_, cursor):
        fetch(round_, *cursor)
        return following(*cursor)

    @pl.when(num_rounds > 0)
    def _():
        q_copy(0).start()
        first = (jnp.int32(0), tiles.begin[0])
        ahead = lax.fori_loop(0, plan.buffers - 1, fill, first, unroll=True)
        lax.fori_loop(0, num_rounds, run_round, (*first, *ahead))
        pl.when(num_tiles > 1)(lambda: o_copy(num_tiles - 2).wait())
        o_copy(num_tiles - 1).wait()
