"""The Triton kernels of ragged paged attention: units of work, then one sum over split slots.

A unit is a tile of up to Q new tokens of one slot against a range of its key blocks, for one KV
head. Program (p, k) takes the units p, p + P, .. of head k, so that a grid as large as the GPU does
all of them. The M rows of a matmul are (token, head of the group), so that several new tokens cost
what one does as long as they fit.

units_W8     per unit its tile and blocks, see `gpu_plan.Unit`; count_1 how many there are
q_TNH, o_TNH queries and outputs of all slots
kv_P2KCH     page pool, read in place: a position's page comes from table_SM
part_WKRH    of split slots: output of one unit's keys alone, float32, and
log_WKR      log2 of the sum of its weights; `combine` weighs the parts with it

Scores, running maximum and sum (Milakov and Gimelshein 2018) and output are float32; scores are in
units of log2, so that a weight is one exp2.

Invariant: loads are masked by the tile's first and last visible position and give 0 elsewhere, page
table entries included: memory that must not matter is not read.

Letters beside those of the contract: W units, R rows of a tile, M of them in a matmul, B keys of a
block, E parts.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.gpu_plan import Row, Unit

LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)
COMBINED = 1024  # values of parts of a row that are summed at once: what registers hold


@dataclass(frozen=True)
class Plan:
    """The static facts of one kernel call."""

    queries: int  # new tokens of a tile
    rows: int  # of a matmul
    keys: int  # of a block
    group: int
    lanes: int  # the head width, rounded up to a power of two
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    scaled: bool  # pages hold multiples of a scale per head
    split: bool  # slots may be split


def matmul_dtype(q_dtype, kv_dtype):
    """Of both operands: the queries' where the pages' values are exact in it, else float32."""
    narrow = jnp.dtype(kv_dtype).itemsize == 1 and q_dtype != jnp.float32
    return q_dtype if narrow or q_dtype == kv_dtype else jnp.dtype(jnp.float32)


def _dot(a, b, contract: tuple[int, int]):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)


def _scores(q_MH, k_BH, k_scale, plan: Plan):
    """Scaled and capped, in units of log2."""
    score_MB = _dot(q_MH, k_BH, (1, 1))
    if plan.softcap is None:
        return score_MB * (k_scale * (plan.scale * LOG2E))
    score_MB = jnp.tanh(score_MB * (k_scale * (plan.scale / plan.softcap)))
    return score_MB * (plan.softcap * LOG2E)


def attention(units_ref, count_ref, q_ref, kv_ref, table_ref, *refs, plan: Plan):
    """Grid (programs, KV heads x tiles of matmul rows)."""
    refs = list(refs)
    sinks_ref = refs.pop(0) if plan.sinks else None
    scale_ref = refs.pop(0) if plan.scaled else None
    # Outputs come last. Before them may be the array whose place o takes, which is not read.
    o_ref, *part_refs = refs[-3:] if plan.split else refs[-1:]
    head_dim, page_size = kv_ref.shape[4], kv_ref.shape[3]
    dtype = matmul_dtype(q_ref.dtype, kv_ref.dtype)

    program, head_and_tile = pl.program_id(0), pl.program_id(1)
    programs = pl.num_programs(0)
    row_tiles = -(-plan.queries * plan.group // plan.rows)
    k = lax.div(head_and_tile, row_tiles)
    first_row = lax.rem(head_and_tile, row_tiles) * plan.rows
    h_1H = jnp.arange(plan.lanes)[None, :]
    k_scale, v_scale = (scale_ref[0, k], scale_ref[1, k]) if plan.scaled else (1.0, 1.0)

    def tile(row, tokens, zero=0):
        """Rows, their tokens and heads, which rows there are, and their places in q and o. A `zero`
        that the compiler does not know for one makes it compute them anew."""
        r_M = first_row + zero + jnp.arange(plan.rows)
        token_M = lax.div(r_M, plan.group)
        n_M = k * plan.group + lax.rem(r_M, plan.group)
        own_M = (token_M < tokens) & (r_M < plan.queries * plan.group)
        place = (row + token_M[:, None], n_M[:, None], h_1H)
        return r_M, token_M, n_M, own_M, own_M[:, None] & (h_1H < head_dim), place

    def attend_unit(i, carry):
        u = program + i * programs
        slot, row, tokens, position, begin, end, parts = (units_ref[u, c] for c in Unit)
        first = jnp.int32(0) if plan.window is None else jnp.maximum(position - plan.window + 1, 0)
        last = position + tokens - 1
        _, token_M, n_M, own_M, own_MH, place = tile(row, tokens)
        q_MH = plgpu.load(q_ref.at[place], mask=own_MH, other=0.0).astype(dtype)
        position_M1 = position + token_M[:, None]

        def add_block(b, carry):
            max_M, sum_M, o_MH = carry
            x_B = b * plan.keys + jnp.arange(plan.keys)
            real_B = (x_B >= first) & (x_B <= last)
            real_BH = real_B[:, None] & (h_1H < head_dim)
            column_B = lax.div(x_B, page_size)
            page_B = plgpu.load(table_ref.at[slot, column_B], mask=real_B, other=0)
            page_B1, offset_B1 = page_B[:, None], lax.rem(x_B, page_size)[:, None]

            def read(part):
                view = kv_ref.at[page_B1, part, k, offset_B1, h_1H]
                zero = jnp.zeros((), kv_ref.dtype)
                return plgpu.load(view, mask=real_BH, other=zero).astype(dtype)

            score_MB = _scores(q_MH, read(0), k_scale, plan)
            visible_MB = real_B[None, :] & (x_B[None, :] <= position_M1)
            if plan.window is not None:
                visible_MB &= x_B[None, :] > position_M1 - plan.window
            score_MB = jnp.where(visible_MB, score_MB, -jnp.inf)
            new_max_M = jnp.maximum(max_M, jnp.max(score_MB, axis=1))
            shrink_M = jnp.exp2(max_M - new_max_M)
            weight_MB = jnp.exp2(score_MB - new_max_M[:, None])
            o_MH = o_MH * shrink_M[:, None] + _dot(weight_MB.astype(dtype), read(1), (1, 0))
            return new_max_M, sum_M * shrink_M + jnp.sum(weight_MB, axis=1), o_MH

        # A sink is a key that was seen before all others and whose value is 0. Where a tile is
        # shared, `combine` adds it once.
        sink_M = jnp.full((plan.rows,), -jnp.inf, jnp.float32)
        if plan.sinks:
            sink_M = plgpu.load(sinks_ref.at[n_M], mask=own_M, other=0.0).astype(jnp.float32)
            sink_M = jnp.where(parts == 1, sink_M * LOG2E, -jnp.inf)
        max_M = jnp.maximum(sink_M, LOWEST)
        start = (max_M, jnp.exp2(sink_M - max_M), jnp.zeros(q_MH.shape, jnp.float32))
        max_M, sum_M, o_MH = lax.fori_loop(begin, end, add_block, start)
        o_MH = o_MH * (v_scale / jnp.where(sum_M == 0, 1.0, sum_M))[:, None]

        # Read once more, so that no register holds a place while keys are attended to.
        row, tokens, parts = (
            plgpu.load(units_ref.at[u, jnp.int32(c)], volatile=True)
            for c in (Unit.ROW, Unit.TOKENS, Unit.PARTS)
        )
        r_M, _, _, own_M, own_MH, place = tile(row, tokens, jnp.minimum(parts, 0))

        @pl.when(parts == 1)
        def _():
            plgpu.store(o_ref.at[place], o_MH.astype(o_ref.dtype), mask=own_MH)

        if plan.split:
            part_ref, log_ref = part_refs

            @pl.when(parts > 1)
            def _():
                log_M = jnp.where(sum_M == 0, -jnp.inf, max_M + jnp.log(sum_M) * LOG2E)
                plgpu.store(part_ref.at[u, k, r_M[:, None], h_1H], o_MH, mask=own_MH)
                plgpu.store(log_ref.at[u, k, r_M], log_M, mask=own_M)

        return carry

    trips = lax.div(count_ref[0] - program + programs - 1, programs)
    lax.fori_loop(0, trips, attend_unit, 0)


def combine(rows_ref, *refs, lanes: int, group: int):
    """Grid (T, N): zeros where no slot owns the row, and the weighed sum of a row's parts, if there
    are slots with parts: then part_ref, log_ref and, with sinks, sinks_ref are among `refs`."""
    *part_refs, _, o_ref = refs
    t, n = pl.program_id(0), pl.program_id(1)
    unit, parts, token = (rows_ref[t, c] for c in Row)
    k, r = lax.div(n, group), token * group + lax.rem(n, group)
    h_H = jnp.arange(lanes)
    real_H = h_H < o_ref.shape[2]

    @pl.when(parts == 0)
    def _():
        plgpu.store(o_ref.at[t, n, h_H], jnp.zeros((lanes,), o_ref.dtype), mask=real_H)

    if not part_refs:
        return
    part_ref, log_ref, *sinks_ref = part_refs

    @pl.when(parts > 1)
    def _():
        at_once = COMBINED // lanes

        def add_parts(i, carry):
            max_, sum_, o_H = carry
            e_E = i * at_once + jnp.arange(at_once)
            real_E = e_E < parts
            log_E = plgpu.load(log_ref.at[unit + e_E, k, r], mask=real_E, other=-jnp.inf)
            part_EH = plgpu.load(
                part_ref.at[(unit + e_E)[:, None], k, r, h_H[None, :]],
                mask=real_E[:, None] & real_H[None, :],
                other=0.0,
            )
            new_max = jnp.maximum(max_, jnp.max(log_E))
            shrink, weight_E = jnp.exp2(max_ - new_max), jnp.exp2(log_E - new_max)
            o_H = o_H * shrink + jnp.sum(weight_E[:, None] * part_EH, axis=0)
            return new_max, sum_ * shrink + jnp.sum(weight_E), o_H

        sink = sinks_ref[0][n].astype(jnp.float32) * LOG2E if sinks_ref else jnp.float32(-jnp.inf)
        max_ = jnp.maximum(sink, LOWEST)
        start = (max_, jnp.exp2(sink - max_), jnp.zeros((lanes,), jnp.float32))
        blocks = lax.div(parts + at_once - 1, at_once)
        _, sum_, o_H = lax.fori_loop(0, blocks, add_parts, start)
        o_H = o_H * (1 / jnp.where(sum_ == 0, 1.0, sum_))
        plgpu.store(o_ref.at[t, n, h_H], o_H.astype(o_ref.dtype), mask=real_H)
