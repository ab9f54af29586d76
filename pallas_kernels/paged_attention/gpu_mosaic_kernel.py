"""The Mosaic GPU kernel of ragged paged attention for Hopper: warpgroups that fill and drain rings.

The first warpgroups of an SM are producers, one per stream, the others consumers: each multiplies
its 64 rows (token, head of the group) on the tensor cores (wgmma) with the blocks that come through
its stream's ring. A unit of more rows has several consumers, which share the ring.

units_W8     per unit its tile and blocks, see `gpu_plan.Unit`; count_1 how many there are
q_TKGH, o_TKGH   queries and outputs of all slots
kv_XCH       page pool; X counts (page, keys or values, KV head)
part_WKRH    of split slots: output of one unit's keys alone, float32, and
log_WKM      log2 of the sum of its weights: the sum over parts is another kernel's

Scores, weights, sums and output are float32 until they are stored or multiplied.

Invariant: what a block holds beside positions that its unit sees is masked out of the scores and
overwritten with 0 in the values, NaN included.

Letters beside those of the contract: G heads of a group, W units, M rows of a matmul, R those of a
part, B keys of a block, A consumers, Z ring buffers, F some columns of the head width.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_mosaic_softmax as softmax
from pallas_kernels.paged_attention.gpu_mosaic_ring import Ring, Work, each_work, load, skip
from pallas_kernels.paged_attention.gpu_mosaic_sizes import KEYS, ROWS, Sizes
from pallas_kernels.paged_attention.gpu_mosaic_softmax import COLUMN, TILE, columns

WIDTH = 128  # columns of the output that one matmul accumulates
# Registers of a producer's and a consumer's thread, by warpgroups of the SM; they share 65,536. Up
# to 2 warpgroups have as many as a thread can address without asking.
REGISTERS = {3: (40, 232), 4: (40, 208)}


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

    rows_AMH: Any  # queries on the way in, outputs on the way out, as they lie in memory
    half_AMF: Any  # in the same place: half of the columns of a part of a split slot, float32
    q_AMH: Any  # queries as the tensor cores read them
    log_AM: Any
    weight_AMB: Any
    ring_ZBH: Any
    rows_here: Any
    full: Any
    free: Any


@dataclass(frozen=True)
class Consumer:
    """A compute warpgroup: which of the SM's, and which tile of its ring's units it has."""

    index: jax.Array
    tile: jax.Array
    ring: Ring
    scratch: Scratch
    plan: Plan

    @property
    def first_token(self) -> jax.Array:
        """Of its tile, in the unit."""
        return self.tile * self.plan.sizes.tile_queries

    def tokens(self, work: Work) -> jax.Array:
        """How many of the unit's it has; none if this is not positive."""
        return jnp.minimum(work.tokens - self.first_token, self.plan.sizes.tile_queries)


def scratch_types(plan: Plan, head_dim: int, page_size: int, dtype: Any) -> tuple:
    """For `Scratch`; `attention` takes the first two out of their shared place."""
    sizes = plan.sizes
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    consumers, buffers = sizes.streams * sizes.tiles, sizes.streams * sizes.stages
    shape_AMH = (consumers, ROWS, head_dim)
    return (
        # As many bytes per consumer, so that no consumer's place is another's.
        plgpu.RefUnion(
            plgpu.SMEM(shape_AMH, dtype),
            plgpu.SMEM((consumers, ROWS, head_dim // 2), jnp.float32),
        ),
        plgpu.SMEM(shape_AMH, dtype, transforms=swizzled),
        plgpu.SMEM((consumers, ROWS), jnp.float32),
        plgpu.SMEM((consumers, ROWS, KEYS), dtype, transforms=swizzled),
        plgpu.SMEM((buffers, KEYS, head_dim), dtype, transforms=swizzled),
        plgpu.Barrier(num_arrivals=sizes.tile_queries, num_barriers=consumers),
        plgpu.Barrier(num_arrivals=max(1, KEYS // page_size), num_barriers=buffers),
        plgpu.Barrier(num_arrivals=sizes.tiles, num_barriers=buffers),
    )


def attention(units_ref, count_ref, q_ref, kv_ref, table_ref, *refs, plan: Plan):
    """Grid (sm,), threads `warpgroup`: first the producers, then the consumers of each stream."""
    sizes, refs = plan.sizes, list(refs)
    sinks_ref = refs.pop(0) if plan.sinks else None
    out_refs = [refs.pop(0) for _ in range(3 if sizes.parts > 1 else 1)]
    (rows, half), *rest = refs
    scratch = Scratch(rows, half, *rest)

    warpgroup = lax.axis_index("warpgroup")
    produces = warpgroup < sizes.streams
    index = warpgroup - sizes.streams
    stream = jnp.where(produces, warpgroup, lax.div(index, sizes.tiles))
    ring = Ring(stream, sizes.stages, scratch.ring_ZBH, scratch.full, scratch.free)
    works = functools.partial(
        each_work,
        units_ref,
        count_ref,
        num_kv_heads=q_ref.shape[1],
        program=lax.axis_index("sm") * sizes.streams + stream,
        programs=sizes.programs * sizes.streams,
    )

    @pl.when(produces)
    def _():
        if sizes.warpgroups in REGISTERS:
            plgpu.set_max_registers(REGISTERS[sizes.warpgroups][0], action="decrease")
        works(functools.partial(load, kv_ref, table_ref, ring, q_ref.shape[1], plan.window))
        # Every arrival is waited for, the last use of each buffer too.
        for n in range(sizes.stages):
            plgpu.barrier_wait(ring.free.at[ring.at(n)])

    @pl.when(jnp.logical_not(produces))
    def _():
        if sizes.warpgroups in REGISTERS:
            plgpu.set_max_registers(REGISTERS[sizes.warpgroups][1], action="increase")
        for n in range(sizes.stages):
            plgpu.barrier_arrive(ring.free.at[ring.at(n)])
        consumer = Consumer(index, lax.rem(index, sizes.tiles), ring, scratch, plan)
        attend = functools.partial(_attend, consumer, q_ref, sinks_ref, out_refs)

        def attend_or_skip(work, n):
            mine = consumer.tokens(work) > 0
            pl.when(mine)(lambda: attend(work, n))
            pl.when(jnp.logical_not(mine))(lambda: skip(ring, work, n))

        works(attend if sizes.tiles == 1 else attend_or_skip)


def _attend(consumer: Consumer, q_ref, sinks_ref, out_refs, work: Work, n0: jax.Array) -> None:
    """A consumer's part of a unit: attention of its rows to the unit's keys."""
    plan, ring, scratch, mine = consumer.plan, consumer.ring, consumer.scratch, consumer.index
    _read_queries(consumer, q_ref, work)
    r_M = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=COLUMN)
    position_M = work.position + consumer.first_token + lax.div(r_M, plan.group)

    def add_block(b, carry):
        max_M, sum_M, *o = carry
        keys = ring.at(n0 + 2 * (b - work.begin))
        values = ring.at(n0 + 2 * (b - work.begin) + 1)
        plgpu.barrier_wait(ring.full.at[keys])
        score_MB = _dot(scratch.q_AMH.at[mine], ring.buffers.at[keys].transpose((1, 0)))
        plgpu.barrier_arrive(ring.free.at[keys])
        score_MB = softmax.scaled(score_MB, plan.scale, plan.softcap)
        score_MB = softmax.visible(score_MB, position_M - b * KEYS, plan.window)
        weight_MB, max_M, sum_M, shrink_M = softmax.add_scores(score_MB, max_M, sum_M)
        scratch.weight_AMB[mine] = weight_MB.astype(scratch.weight_AMB.dtype)
        plgpu.commit_smem()

        plgpu.barrier_wait(ring.full.at[values])
        _clear_unseen(ring.buffers, values, b, work, plan)
        for j, o_MH in enumerate(o):
            width = o_MH.shape[1]
            v_BH = ring.buffers.at[values, :, pl.ds(j * WIDTH, width)]
            o[j] = o_MH * columns(shrink_M, width) + _dot(scratch.weight_AMB.at[mine], v_BH)
        plgpu.barrier_arrive(ring.free.at[values])
        return max_M, sum_M, *o

    start = (*softmax.start(sinks_ref, r_M, plan.group, work), *_zeros(q_ref.shape[3]))
    max_M, sum_M, *o = lax.fori_loop(work.begin, work.end, add_block, start)
    inverse_M = 1 / jnp.where(sum_M == 0, 1.0, sum_M)
    o = [o_MH * columns(inverse_M, o_MH.shape[1]) for o_MH in o]
    _store(consumer, o, softmax.log_sum(max_M, sum_M), out_refs, work)


def _read_queries(consumer: Consumer, q_ref, work: Work) -> None:
    """Token by token, since a tile may end anywhere in a slot: past its end the last one again."""
    plan, scratch = consumer.plan, consumer.scratch
    last = consumer.tokens(work) - 1
    for i in range(plan.sizes.tile_queries):
        plgpu.copy_gmem_to_smem(
            q_ref.at[work.row + consumer.first_token + jnp.minimum(i, last), work.head],
            scratch.rows_AMH.at[consumer.index, pl.ds(i * plan.group, plan.group)],
            scratch.rows_here.at[consumer.index],
        )
    plgpu.barrier_wait(scratch.rows_here.at[consumer.index])
    q_MH = plgpu.load(scratch.rows_AMH.at[consumer.index], layout=TILE, optimized=False)
    scratch.q_AMH[consumer.index] = q_MH
    plgpu.commit_smem()


def _dot(a_ref, b_ref) -> jax.Array:
    """Of two matrices in shared memory, by the warpgroup."""

    def multiply(sum_ref):
        plgpu.wgmma(sum_ref, a_ref, b_ref)
        return sum_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((a_ref.shape[0], b_ref.shape[1]), jnp.float32))


def _clear_unseen(buffers, values, b, work: Work, plan: Plan) -> None:
    """0 for values of positions that no row of the unit sees: a weight of 0 times NaN is NaN.
    Consumers that share the buffer write the same."""
    first, last = work.visible(plan.window)

    @pl.when((b * KEYS < first) | (b * KEYS + KEYS - 1 > last))
    def _():
        v_BH = plgpu.load(buffers.at[values], layout=TILE)
        x_BH = b * KEYS + plgpu.broadcasted_iota(jnp.int32, v_BH.shape, 0, layout=TILE)
        seen_BH = (x_BH >= first) & (x_BH <= last)
        buffers[values] = jnp.where(seen_BH, v_BH, jnp.zeros_like(v_BH))
        plgpu.commit_smem()


def _zeros(head_dim: int) -> list[jax.Array]:
    widths = [min(WIDTH, head_dim - j) for j in range(0, head_dim, WIDTH)]
    return [plgpu.layout_cast(jnp.zeros((ROWS, w), jnp.float32), TILE) for w in widths]


def _store(
    consumer: Consumer, o: Sequence[jax.Array], log_M: jax.Array, out_refs, work: Work
) -> None:
    """The output itself where the unit has its tile alone, else what is needed to sum up parts."""
    scratch, group = consumer.scratch, consumer.plan.group
    o_ref, *part_refs = out_refs

    def put(staged_AMF, pieces: Sequence[jax.Array], place: Callable) -> None:
        for j, o_MH in enumerate(pieces):
            columns = pl.ds(j * pieces[0].shape[1], o_MH.shape[1])
            staged_AMF[consumer.index, :, columns] = o_MH.astype(staged_AMF.dtype)
        plgpu.commit_smem()

        @pl.loop(0, consumer.tokens(work))
        def _(i):
            rows = pl.ds(i * group, group)
            plgpu.copy_smem_to_gmem(staged_AMF.at[consumer.index, rows], place(i, rows))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(work.parts == 1)
    def _():
        row = work.row + consumer.first_token
        put(scratch.rows_AMH, o, lambda i, _: o_ref.at[row + i, work.head])

    if part_refs:
        part_ref, log_ref = part_refs

        @pl.when(work.parts > 1)
        def _():
            scratch.log_AM[consumer.index] = log_M
            plgpu.commit_smem()
            log_M_ref = log_ref.at[work.unit, work.head]
            plgpu.copy_smem_to_gmem(scratch.log_AM.at[consumer.index], log_M_ref)
            half = scratch.half_AMF.shape[2]
            pieces = o if len(o) == 2 else [o[0][:, :half], o[0][:, half:]]
            for j, piece in enumerate(pieces):
                columns = pl.ds(j * half, half)
                put(
                    scratch.half_AMF,
                    [piece],
                    lambda _, rows, c=columns: part_ref.at[work.unit, work.head, rows, c],
                )
