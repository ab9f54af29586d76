"""The Mosaic kernel of ragged paged attention: tiles of queries walk over their pages.

A tile is up to Q new tokens of one slot with all their heads; tile z attends to its blocks
begin[z] .. end[z] - 1 of B positions each, whole pages. One flat loop runs over all blocks of all
tiles. Each round starts the page copies of a block some rounds ahead, which may be the next slot's,
so the memory does not idle between slots; one copy brings a page with all its heads.

q_ZRML     queries of tile z that read row R of a page; the M rows of a matmul are (head of the row,
           head of the group, query) and zero in the lanes of other heads
kv_PpRCL   page pool, see `layout`: p is keys or values, or 1 where they share a row
o_ZRML     what the M rows collect from value row R, all lanes; the caller picks each head's own

Scores, running maximum and sum (Milakov and Gimelshein 2018) and output are float32; scores are in
units of log2, so that a weight is one exp2. Maximum and sum are kept equal in all 128 lanes.

Invariant: values outside a tile's first and last visible position are zeroed before they are
multiplied, and scores there are masked: stale memory, page tails and pages that were not fetched
may hold NaN. Only table entries of visible positions are read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Plan:
    """The static facts of one kernel call."""

    queries: int  # new tokens of a tile, a power of two
    pages: int  # of a block
    buffers: int  # blocks in flight or in use, a power of two
    pages_per_slot: int
    scale: float
    window: int | None
    softcap: float | None
    scaled: bool  # pages hold multiples of a scale per head
    split: bool  # 8-bit pages meet queries and weights as sums of two 8-bit numbers, see `_split`
    unrolled: bool  # all rows of a block in one stretch of code, which hides latencies of few rows


class Tiles(NamedTuple):
    """Scalar memory, per tile; one entry more than there are tiles."""

    slot: jax.Array
    position: jax.Array  # of the tile's first query
    first_key: jax.Array  # visible positions
    last_key: jax.Array
    begin: jax.Array  # blocks
    end: jax.Array


class Scratch(NamedTuple):
    """Vector memory: page blocks, queries and outputs in turn, running maximum, sum and output.

    split_q and q_unit hold a tile's queries in the form of `_split` and the unit of each row.
    """

    kv: jax.Array
    q: jax.Array
    o: jax.Array
    max: jax.Array
    sum: jax.Array
    acc: jax.Array
    split_q: jax.Array
    q_unit: jax.Array
    kv_sem: jax.Array
    q_sem: jax.Array
    o_sem: jax.Array


def kernel(table, counts, *refs, plan: Plan):
    """table[s * pages_per_slot + j] is column j of slot s; counts are tiles and rounds."""
    tiles, refs = Tiles(*refs[:6]), refs[6:]
    q_hbm, kv_hbm, sink_RM, scale_2RM, o_hbm, *refs = refs
    scratch = Scratch(*refs)
    num_tiles, num_rounds = counts[0], counts[1]
    page_size = scratch.kv.shape[4]
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
                target = scratch.kv.at[buffer, i]
                pltpu.make_async_copy(source, target, scratch.kv_sem.at[buffer]).start()

    def wait_for_pages(z, b, buffer):
        """A semaphore counts bytes: wait for the number of pages in its binary digits."""
        begin, end = pages_of(z, b)
        for digit in range(plan.pages.bit_length()):

            @pl.when(((end - begin) >> digit) & 1 == 1)
            def _(some=1 << digit):
                pages = scratch.kv.at[buffer, pl.ds(0, some)]
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
                _split_queries(scratch, z)

        wait_for_pages(z, b, buffer)
        first_key, last_key = tiles.first_key[z], tiles.last_key[z]
        begin = b * block

        @pl.when((begin < first_key) | (begin + block - 1 > last_key))
        def _():
            _clear_outside(scratch.kv, buffer, begin, first_key, last_key)

        _attend_block(
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
            sum_RML = _over_lanes(scratch.sum[...], scratch.acc.shape[-1])
            out_RML = scratch.acc[...] / jnp.where(sum_RML == 0, 1.0, sum_RML)
            if plan.scaled:
                out_RML *= _over_lanes(scale_2RM[1], scratch.acc.shape[-1])
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


def _over_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """x[..., 128], equal in all lanes, as [..., lanes]."""
    whole, rest = divmod(lanes, LANES)
    return jnp.concatenate([x] * whole + [x[..., :rest]] * (rest > 0), axis=-1)


# The largest number of float8_e4m3fn is 448 and a step is 2^-3 to 2^-4 of a number.
SPLIT_MOST = 256.0
SPLIT_STEP = 16.0


def _split(x_MX: jax.Array, dtype) -> jax.Array:
    """x, at most SPLIT_MOST, as coarse + fine / SPLIT_STEP in 8 bits each, below each other.

    Together they have as many bits as bfloat16, and a product with 8-bit pages needs no wider copy
    of the pages: it is the sum of two products that the matrix unit does in one.
    """
    coarse_MX = x_MX.astype(dtype)
    fine_MX = ((x_MX - coarse_MX.astype(jnp.float32)) * SPLIT_STEP).astype(dtype)
    return jnp.concatenate([coarse_MX, fine_MX], axis=0)


def _join(y_MX: jax.Array) -> jax.Array:
    """The product of a `_split` operand."""
    rows = y_MX.shape[0] // 2
    return y_MX[:rows] + y_MX[rows:] * (1 / SPLIT_STEP)


def _split_queries(scratch: Scratch, tile):
    for r in range(scratch.split_q.shape[0]):
        q_ML = scratch.q[tile & 1, r].astype(jnp.float32)
        most_M1 = jnp.maximum(jnp.max(jnp.abs(q_ML), axis=1, keepdims=True), 1e-30)
        scratch.split_q[r] = _split(q_ML * (SPLIT_MOST / most_M1), scratch.split_q.dtype)
        unit_ML = jnp.broadcast_to(most_M1 * (1 / SPLIT_MOST), scratch.q_unit.shape[1:])
        scratch.q_unit[r] = unit_ML


def _clear_outside(kv_buf, buffer, begin, first_key, last_key):
    """Zero the values of positions outside first_key .. last_key in a block's buffer."""
    _, pages, parts, _, page_size, _ = kv_buf.shape

    def clear(i, _):
        # Where keys and values share a row both are cleared; scores there are masked anyway.
        x_RCL = kv_buf[buffer, i, parts - 1].astype(jnp.float32)
        x_C = begin + i * page_size + lax.broadcasted_iota(jnp.int32, x_RCL.shape, 1)
        real = (x_C >= first_key) & (x_C <= last_key)
        kv_buf[buffer, i, parts - 1] = jnp.where(real, x_RCL, 0.0).astype(kv_buf.dtype)

    before = jnp.clip(lax.div(first_key - begin + page_size - 1, page_size), 0, pages)
    behind = jnp.clip(lax.div(last_key + 1 - begin, page_size), before, pages)
    lax.fori_loop(0, before, clear, None)
    lax.fori_loop(behind, pages, clear, None)


def _attend_block(
    scratch: Scratch,
    scale_RM,
    fetch: Callable,
    *,
    tile,
    buffer,
    begin,
    position,
    last_key,
    plan: Plan,
):
    """One step of the online softmax of all rows over one block."""
    kv_buf, q_buf = scratch.kv, scratch.q
    _, num_rows, rows, lanes = q_buf.shape
    _, pages, parts, _, page_size, _ = kv_buf.shape
    block = pages * page_size
    exact = not plan.split and jnp.float32 in (kv_buf.dtype, q_buf.dtype)
    dtype = jnp.float32 if exact else jnp.bfloat16
    precision = lax.Precision.HIGHEST if exact else None

    x_MB = begin + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
    query_MB = lax.broadcasted_iota(jnp.int32, (rows, block), 0) & (plan.queries - 1)
    position_MB = jnp.minimum(position + query_MB, last_key)
    visible_MB = x_MB <= position_MB
    if plan.window is not None:
        visible_MB &= x_MB > position_MB - plan.window

    def page_row(part, r):
        x_BL = kv_buf[buffer, :, part, r].reshape(block, lanes)
        return x_BL if plan.split else x_BL.astype(dtype)

    def score(r):
        score_MB = lax.dot_general(
            scratch.split_q[r] if plan.split else q_buf[tile & 1, r].astype(dtype),
            page_row(0, r),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        if plan.split:
            score_MB = _join(score_MB) * _over_lanes(scratch.q_unit[r], block)
        unit = LOG2E
        if plan.softcap is not None:
            inside = plan.scale / plan.softcap
            score_MB *= _over_lanes(scale_RM[r], block) * inside if plan.scaled else inside
            score_MB = jnp.tanh(score_MB) * (plan.softcap * unit)
        else:
            unit *= plan.scale
            score_MB *= _over_lanes(scale_RM[r], block) * unit if plan.scaled else unit
        return jnp.where(visible_MB, score_MB, -jnp.inf)

    def weigh(r, score_MB):
        old_max = scratch.max[r]
        new_max = jnp.maximum(old_max, jnp.max(score_MB, axis=1, keepdims=True))
        shrink = jnp.exp2(old_max - new_max)
        weight_MB = jnp.exp2(score_MB - _over_lanes(new_max, block))
        scratch.max[r] = new_max
        scratch.sum[r] = scratch.sum[r] * shrink + jnp.sum(weight_MB, axis=1, keepdims=True)
        if plan.split:
            return _split(weight_MB * SPLIT_MOST, kv_buf.dtype), shrink
        return weight_MB.astype(dtype), shrink

    def collect(r, weight_MB, shrink):
        o_ML = jnp.dot(
            weight_MB,
            page_row(parts - 1, r),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        if plan.split:
            o_ML = _join(o_ML) * (1 / SPLIT_MOST)
        scratch.acc[r] = scratch.acc[r] * _over_lanes(shrink, lanes) + o_ML

    if plan.unrolled:
        scores = []
        for r in range(num_rows):
            fetch(r, num_rows)
            scores.append(score(r))
        weights = [weigh(r, score_MB) for r, score_MB in enumerate(scores)]
        for r, weight in enumerate(weights):
            collect(r, *weight)
    else:
        fetch(0, 1)
        lax.fori_loop(0, num_rows, lambda r, _: collect(r, *weigh(r, score(r))), None)
