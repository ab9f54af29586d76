"""The Mosaic kernel of ragged paged attention: tiles of queries walk over their pages.

A tile is up to Q new tokens of one slot with all heads; tile z attends to its blocks
begin_Z[z] .. end_Z[z] - 1 of B = pages_per_block * C positions each. One flat loop runs over all
blocks of all tiles. Each round starts the page copies of a block some rounds ahead, which may be the
next slot's, so the memory is never idle between slots; one copy brings all heads' keys and values of
a page. Scores, the running maximum and sum (Milakov and Gimelshein 2018) and the output are float32.

q_ZRML     queries of tile z that read row R of a page, [tiles, rows, M, lanes]: M rows of a matmul
           are (head of the row, head of the group, query), zero in the lanes of other streams
kv_PXRCL   page pool: rows of C positions and L lanes, see `layout`
o_ZRML     what the M rows collect from value row R, all lanes; the caller picks each head's own

Invariant: what a block's buffer holds beyond a slot's first and last visible position is replaced by
zeros before it is multiplied: stale memory, page tails and unfetched pages may hold NaN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Plan:
    """The static facts of one kernel call."""

    queries: int  # rows of q per tile, a power of two
    pages: int  # per block
    buffers: int  # blocks in flight or in use, a power of two
    pages_per_slot: int
    scale: float
    window: int | None
    softcap: float | None


class Scalars(NamedTuple):
    """Scalar memory: per tile its slot, first query's position, visible positions, blocks."""

    table: jax.Array  # page of column j of slot s at s * pages_per_slot + j
    slot: jax.Array
    position: jax.Array
    first_key: jax.Array
    last_key: jax.Array
    begin: jax.Array
    end: jax.Array
    counts: jax.Array  # tiles, rounds


def kernel(*refs, plan: Plan, scaled: bool):
    """See the module's docstring; `scaled` tells whether score scales per row come as an array."""
    scalars, refs = Scalars(*refs[:8]), refs[8:]
    q_hbm, kv_hbm, sink_RM, scale_2RM, o_hbm, *scratch = refs
    kv_buf, q_buf, o_buf, max_ref, sum_ref, acc_ref, kv_sem, q_sem, o_sem = scratch
    num_rounds = scalars.counts[1]
    page_size = kv_buf.shape[4]
    block = plan.pages * page_size

    def pages_of(z, b):
        """Pages of block b that tile z needs, as a range inside the block."""
        column = b * plan.pages
        begin = jnp.maximum(lax.div(scalars.first_key[z], page_size) - column, 0)
        end = jnp.minimum(lax.div(scalars.last_key[z], page_size) + 1 - column, plan.pages)
        return begin, end

    def each_page(z, b, buffer, act):
        entry = scalars.slot[z] * plan.pages_per_slot + b * plan.pages

        def one(i, _):
            page = scalars.table[entry + i]
            act(pltpu.make_async_copy(kv_hbm.at[page], kv_buf.at[buffer, i], kv_sem.at[buffer]))

        begin, end = pages_of(z, b)
        lax.fori_loop(begin, end, one, None)

    def following(z, b):
        ends = b + 1 >= scalars.end[z]
        z_next = jnp.minimum(jnp.where(ends, z + 1, z), scalars.slot.shape[0] - 1)
        return z_next, jnp.where(ends, scalars.begin[z_next], b + 1)

    def q_copy(z):
        return pltpu.make_async_copy(q_hbm.at[z], q_buf.at[z & 1], q_sem.at[z & 1])

    def o_copy(z):
        return pltpu.make_async_copy(o_buf.at[z & 1], o_hbm.at[z], o_sem.at[z & 1])

    def fetch(round_, z, b):
        @pl.when(round_ < num_rounds)
        def _():
            each_page(z, b, round_ & (plan.buffers - 1), lambda copy: copy.start())

    def run_round(round_, cursors):
        z, b, z_ahead, b_ahead = cursors
        fetch(round_ + plan.buffers - 1, z_ahead, b_ahead)
        buffer = round_ & (plan.buffers - 1)

        @pl.when(b == scalars.begin[z])
        def _():
            q_copy(z).wait()

            @pl.when(z + 1 < scalars.counts[0])
            def _():
                q_copy(z + 1).start()

            # A sink is a key seen before all others whose value is 0.
            max_ref[...] = jnp.maximum(sink_RM[...], LOWEST)
            sum_ref[...] = jnp.exp(sink_RM[...] - max_ref[...])
            acc_ref[...] = jnp.zeros_like(acc_ref)

        each_page(z, b, buffer, lambda copy: copy.wait())

        first_key, last_key = scalars.first_key[z], scalars.last_key[z]
        begin = b * block

        @pl.when((begin < first_key) | (begin + block - 1 > last_key))
        def _():
            _clear_outside(kv_buf, buffer, begin, first_key, last_key)

        _attend_block(
            q_buf,
            kv_buf,
            max_ref,
            sum_ref,
            acc_ref,
            scale_2RM.at[0] if scaled else None,
            tile=z,
            buffer=buffer,
            begin=begin,
            position=scalars.position[z],
            last_key=last_key,
            plan=plan,
        )

        @pl.when(b + 1 == scalars.end[z])
        def _():
            @pl.when(z >= 2)
            def _():
                o_copy(z - 2).wait()

            sum_RML = _to_lanes(sum_ref[...], acc_ref.shape[-1])
            out = acc_ref[...] / jnp.where(sum_RML == 0, 1.0, sum_RML)
            if scaled:
                out *= _to_lanes(scale_2RM[1], acc_ref.shape[-1])
            o_buf[z & 1] = out.astype(o_buf.dtype)
            o_copy(z).start()

        return (*following(z, b), *following(z_ahead, b_ahead))

    @pl.when(num_rounds > 0)
    def _():
        q_copy(0).start()
        ahead = (jnp.int32(0), scalars.begin[0])
        for i in range(plan.buffers - 1):
            fetch(i, *ahead)
            ahead = following(*ahead)
        lax.fori_loop(0, num_rounds, run_round, (jnp.int32(0), scalars.begin[0], *ahead))
        tiles = scalars.counts[0]

        @pl.when(tiles > 1)
        def _():
            o_copy(tiles - 2).wait()

        o_copy(tiles - 1).wait()


def _to_lanes(x, lanes: int):
    """x[..., 128], all lanes equal, as [..., lanes]."""
    if lanes <= LANES:
        return x[..., :lanes]
    return jnp.concatenate([x] * (lanes // LANES), axis=-1)


def _clear_outside(kv_buf, buffer, begin, first_key, last_key):
    """Zero the values of positions outside first_key .. last_key in a block's buffer."""
    _, pages, _, _, page_size, _ = kv_buf.shape

    def clear(i, _):
        value = kv_buf.shape[2] - 1  # where keys and values share a row, both are cleared
        x_RCL = kv_buf[buffer, i, value].astype(jnp.float32)
        position = begin + i * page_size + lax.broadcasted_iota(jnp.int32, x_RCL.shape, 1)
        real = (position >= first_key) & (position <= last_key)
        kv_buf[buffer, i, value] = jnp.where(real, x_RCL, 0.0).astype(kv_buf.dtype)

    lead = jnp.clip(lax.div(first_key - begin + page_size - 1, page_size), 0, pages)
    tail = jnp.clip(lax.div(last_key + 1 - begin, page_size), 0, pages)
    lax.fori_loop(0, lead, clear, None)
    lax.fori_loop(jnp.maximum(tail, lead), pages, clear, None)


def _attend_block(
    q_buf, kv_buf, max_ref, sum_ref, acc_ref, scale_RM, *, tile, buffer, begin, position, last_key, plan
):
    """One step of the online softmax of all rows over one block."""
    _, num_rows, rows, lanes = q_buf.shape
    _, pages, parts, _, page_size, _ = kv_buf.shape
    block = pages * page_size
    exact = kv_buf.dtype == jnp.float32 or q_buf.dtype == jnp.float32
    dtype = jnp.float32 if exact else jnp.bfloat16
    precision = lax.Precision.HIGHEST if exact else None

    x_MB = begin + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
    query_MB = lax.broadcasted_iota(jnp.int32, (rows, block), 0) & (plan.queries - 1)
    position_MB = jnp.minimum(position + query_MB, last_key)
    visible_MB = x_MB <= position_MB
    if plan.window is not None:
        visible_MB &= x_MB > position_MB - plan.window

    def one_row(r, _):
        k_BL = kv_buf[buffer, :, 0, r].reshape(block, lanes).astype(dtype)
        v_BL = k_BL
        if parts == 2:
            v_BL = kv_buf[buffer, :, 1, r].reshape(block, lanes).astype(dtype)
        score_MB = lax.dot_general(
            q_buf[tile & 1, r].astype(dtype),
            k_BL,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        if scale_RM is None:
            score_MB *= plan.scale
        else:
            score_MB *= _to_lanes(scale_RM[r], block)
        if plan.softcap is not None:
            score_MB = plan.softcap * jnp.tanh(score_MB / plan.softcap)
        score_MB = jnp.where(visible_MB, score_MB, -jnp.inf)

        old_max = max_ref[r]
        new_max = jnp.maximum(old_max, jnp.max(score_MB, axis=1, keepdims=True))
        shrink = jnp.exp(old_max - new_max)
        weight_MB = jnp.exp(score_MB - _to_lanes(new_max, block))
        max_ref[r] = new_max
        sum_ref[r] = sum_ref[r] * shrink + jnp.sum(weight_MB, axis=1, keepdims=True)
        o_ML = jnp.dot(
            weight_MB.astype(dtype), v_BL, preferred_element_type=jnp.float32, precision=precision
        )
        acc_ref[r] = acc_ref[r] * _to_lanes(shrink, lanes) + o_ML

    if rows <= 32:
        for r in range(num_rows):
            one_row(r, None)
    else:
        lax.fori_loop(0, num_rows, one_row, None)
