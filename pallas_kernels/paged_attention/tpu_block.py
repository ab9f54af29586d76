"""One step of the TPU kernel: a tile's queries against one block of its slot's pages.

Scores, running maximum and sum (Milakov and Gimelshein 2018) and output are float32; scores are in
units of log2, so that a weight is one exp2. Maximum and sum are kept equal in all 128 lanes. See
`tpu_kernel` for the arrays.

Invariant: values outside a tile's first and last visible position are zeroed before they are
multiplied, and scores there are masked: stale memory, page tails and pages that were not fetched
may hold NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Plan:
    """The static facts of one kernel call."""

    queries: int  # new tokens of a tile, a power of two
    pages: int  # of a block
    page_size: int
    buffers: int  # blocks in flight or in use, a power of two
    pages_per_slot: int
    scale: float
    window: int | None
    softcap: float | None
    scaled: bool  # pages hold multiples of a scale per head
    split: bool  # 8-bit pages meet queries and weights as sums of two 8-bit numbers, see `_split`
    unrolled: bool  # all rows of a page in one stretch of code


class Scratch(NamedTuple):
    """Vector memory: page blocks, queries and outputs in turn, running maximum, sum and output.

    kv is [buffer, page, part, row, position, lane]; where a register holds the positions of two
    pages, they lie below each other in one [position, lane].
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


def over_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """x[..., 128], equal in all lanes, as [..., lanes]."""
    whole, rest = divmod(lanes, LANES)
    parts = [x] * whole + ([x[..., :rest]] if rest else [])
    return jnp.concatenate(parts, axis=-1)


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


def split_queries(scratch: Scratch, tile):
    for r in range(scratch.split_q.shape[0]):
        q_ML = scratch.q[tile & 1, r].astype(jnp.float32)
        most_M1 = jnp.maximum(jnp.max(jnp.abs(q_ML), axis=1, keepdims=True), 1e-30)
        scratch.split_q[r] = _split(q_ML * (SPLIT_MOST / most_M1), scratch.split_q.dtype)
        unit_ML = jnp.broadcast_to(most_M1 * (1 / SPLIT_MOST), scratch.q_unit.shape[1:])
        scratch.q_unit[r] = unit_ML


def clear_outside(kv_buf, buffer, begin, first_key, last_key):
    """Zero the values of positions outside first_key .. last_key in a block's buffer."""
    _, places, parts, _, size, _ = kv_buf.shape

    def clear(i, _):
        # Where keys and values share a row both are cleared; scores there are masked anyway.
        x_RCL = kv_buf[buffer, i, parts - 1].astype(jnp.float32)
        x_C = begin + i * size + lax.broadcasted_iota(jnp.int32, x_RCL.shape, 1)
        real = (x_C >= first_key) & (x_C <= last_key)
        kv_buf[buffer, i, parts - 1] = jnp.where(real, x_RCL, 0.0).astype(kv_buf.dtype)

    before = jnp.clip(lax.div(first_key - begin + size - 1, size), 0, places)
    behind = jnp.clip(lax.div(last_key + 1 - begin, size), before, places)
    lax.fori_loop(0, before, clear, None)
    lax.fori_loop(behind, places, clear, None)


def attend_block(
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
    parts, block = kv_buf.shape[2], plan.pages * plan.page_size
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
            score_MB = _join(score_MB) * over_lanes(scratch.q_unit[r], block)
        unit = LOG2E
        if plan.softcap is not None:
            inside = plan.scale / plan.softcap
            score_MB *= over_lanes(scale_RM[r], block) * inside if plan.scaled else inside
            score_MB = jnp.tanh(score_MB) * (plan.softcap * unit)
        else:
            unit *= plan.scale
            score_MB *= over_lanes(scale_RM[r], block) * unit if plan.scaled else unit
        return jnp.where(visible_MB, score_MB, -jnp.inf)

    def weigh(r, score_MB):
        old_max = scratch.max[r]
        new_max = jnp.maximum(old_max, jnp.max(score_MB, axis=1, keepdims=True))
        shrink = jnp.exp2(old_max - new_max)
        weight_MB = jnp.exp2(score_MB - over_lanes(new_max, block))
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
        scratch.acc[r] = scratch.acc[r] * over_lanes(shrink, lanes) + o_ML

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
