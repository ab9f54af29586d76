"""The Mosaic GPU kernel of ragged paged attention for Hopper: warpgroups that fill and drain rings.

The first warpgroups of an SM are producers, one per stream, the others consumers: each multiplies
its 64 rows (token, head of the group) on the tensor cores (wgmma) with the blocks that come through
its stream's ring. Several consumers share the ring where a unit has more rows, one per tile, or
where heads are wide: each of a tile's consumers then computes all weights, but only its share of
the output's columns.

units_W8     per unit its tile and blocks, see `gpu_plan.Unit`; count_1 how many there are
q_TKGH, o_TKGH   queries and outputs of all slots
kv_XCH       page pool; X counts (page, keys or values, KV head)
part_WKRH    of split slots: output of one unit's keys alone, float32, and
log_WKM      log2 of the sum of its weights: the sum over parts is another kernel's

Scores, weights, sums and output are float32 until they are stored or multiplied.

Invariant: what a block holds beside positions that its unit sees is masked out of the scores and
overwritten with 0 in the values, NaN included.

Letters beside those of the contract: G heads of a group, W units, M rows of a matmul, R those of a
part, B keys of a block, I tiles, A consumers, Z ring buffers, F some columns of the head width.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_mosaic_softmax as softmax
from pallas_kernels.paged_attention.gpu_mosaic_consumer import Consumer, Plan, Scratch
from pallas_kernels.paged_attention.gpu_mosaic_ring import Ring, Work, each_work, load, skip
from pallas_kernels.paged_attention.gpu_mosaic_sizes import KEYS, ROWS, WIDTH
from pallas_kernels.paged_attention.gpu_mosaic_softmax import COLUMN, TILE, columns

# Registers of a producer's and a consumer's thread, by warpgroups of the SM: together at most what
# they start with, 3 x 168 or 4 x 128. Up to 2 have as many as a thread can address without asking.
REGISTERS = {3: (40, 232), 4: (40, 208)}


def attention(units_ref, count_ref, q_ref, kv_ref, table_ref, *refs, plan: Plan):
    """Grid (sm,), threads `warpgroup`: first the producers, then the consumers of each stream."""
    sizes, refs = plan.sizes, list(refs)
    sinks_ref = refs.pop(0) if plan.sinks else None
    out_refs = [refs.pop(0) for _ in range(3 if sizes.parts > 1 else 1)]
    (rows, part), *rest = refs
    scratch = Scratch(rows, part, *rest)

    warpgroup = lax.axis_index("warpgroup")
    produces = warpgroup < sizes.streams
    index = warpgroup - sizes.streams
    stream = 0
    if sizes.streams > 1:
        stream = jnp.where(produces, warpgroup, lax.div(index, sizes.consumers))
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
        share = lax.rem(index, sizes.shares) if sizes.shares > 1 else 0
        tile = lax.rem(lax.div(index, sizes.shares), sizes.tiles) if sizes.tiles > 1 else 0
        consumer = Consumer(index, tile, share, ring, scratch, plan)
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
        q_MH = scratch.q_IMH.at[consumer.tile_of_sm]
        score_MB = _dot(q_MH, ring.buffers.at[keys].transpose((1, 0)))
        plgpu.barrier_arrive(ring.free.at[keys])
        score_MB = softmax.scaled(score_MB, plan.scale, plan.softcap)
        score_MB = softmax.visible(score_MB, position_M - b * KEYS, plan.window)
        weight_MB, max_M, sum_M, shrink_M = softmax.add_scores(score_MB, max_M, sum_M)
        scratch.weight_AMB[mine] = weight_MB.astype(scratch.weight_AMB.dtype)
        plgpu.commit_smem()

        plgpu.barrier_wait(ring.full.at[values])
        _clear_unseen(consumer, values, b, work)
        for j, o_MF in enumerate(o):
            place = pl.ds(consumer.first_column + j * WIDTH, WIDTH)
            v_BF = ring.buffers.at[values, :, place]
            o[j] = o_MF * columns(shrink_M, WIDTH) + _dot(scratch.weight_AMB.at[mine], v_BF)
        plgpu.barrier_arrive(ring.free.at[values])
        return max_M, sum_M, *o

    start = softmax.start(sinks_ref, r_M, plan.group, work)
    zeros_MF = plgpu.layout_cast(jnp.zeros((ROWS, WIDTH), jnp.float32), TILE)
    start = (*start, *[zeros_MF] * (consumer.width // WIDTH))
    max_M, sum_M, *o = lax.fori_loop(work.begin, work.end, add_block, start)
    inverse_M = 1 / jnp.where(sum_M == 0, 1.0, sum_M)
    o = [o_MF * columns(inverse_M, WIDTH) for o_MF in o]
    _store(consumer, o, softmax.log_sum(max_M, sum_M), out_refs, work)


def _read_queries(consumer: Consumer, q_ref, work: Work) -> None:
    """Token by token, since a tile may end anywhere in a slot; other rows hold anything. Each of a
    tile's consumers brings its columns."""
    scratch, mine, group = consumer.scratch, consumer.index, consumer.plan.group
    tokens = consumer.tokens(work)
    place = pl.ds(consumer.first_column, consumer.width)

    @pl.loop(0, tokens)
    def _(i):
        plgpu.copy_gmem_to_smem(
            q_ref.at[work.row + consumer.first_token + i, work.head, :, place],
            scratch.rows_AMF.at[mine, pl.ds(i * group, group)],
            scratch.rows_here.at[mine],
        )

    @pl.loop(tokens, consumer.plan.sizes.tile_queries)
    def _(_):
        plgpu.barrier_arrive(scratch.rows_here.at[mine])

    plgpu.barrier_wait(scratch.rows_here.at[mine])
    _meet(consumer)  # the last unit's are needed no more
    for j in range(0, consumer.width, WIDTH):
        rows = scratch.rows_AMF.at[mine, pl.ds(0, ROWS), pl.ds(j, WIDTH)]
        q_MF = plgpu.load(rows, layout=TILE, optimized=False)
        place = pl.ds(consumer.first_column + j, WIDTH)
        scratch.q_IMH[consumer.tile_of_sm, :, place] = q_MF
    plgpu.commit_smem()
    _meet(consumer)


def _meet(consumer: Consumer) -> None:
    """The consumers of a tile wait for each other."""
    if consumer.plan.sizes.shares > 1:
        here = consumer.scratch.q_here.at[consumer.tile_of_sm]
        plgpu.barrier_arrive(here)
        plgpu.barrier_wait(here)


def _dot(a_ref, b_ref) -> jax.Array:
    """Of two matrices in shared memory, by the warpgroup."""

    def multiply(sum_ref):
        plgpu.wgmma(sum_ref, a_ref, b_ref)
        return sum_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((a_ref.shape[0], b_ref.shape[1]), jnp.float32))


def _clear_unseen(consumer: Consumer, values, b, work: Work) -> None:
    """0 for values of positions that no row of the unit sees: a weight of 0 times NaN is NaN.
    Consumers of the same columns write the same."""
    buffers, plan = consumer.ring.buffers, consumer.plan
    first, last = work.visible(plan.window)

    @pl.when((b * KEYS < first) | (b * KEYS + KEYS - 1 > last))
    def _():
        x_BF = b * KEYS + plgpu.broadcasted_iota(jnp.int32, (KEYS, WIDTH), 0, layout=TILE)
        seen_BF = (x_BF >= first) & (x_BF <= last)
        for j in range(0, consumer.width, WIDTH):
            place = (values, slice(None), pl.ds(consumer.first_column + j, WIDTH))
            v_BF = plgpu.load(buffers.at[place], layout=TILE)
            buffers[place] = jnp.where(seen_BF, v_BF, jnp.zeros_like(v_BF))
        plgpu.commit_smem()


def _put(rows_ref, o_MF: jax.Array) -> None:
    """Into shared memory row by row, which is not the tensor cores' order: jax 0.12 wants to be
    told that it is slow, 0.11 has no word for it."""
    if hasattr(plgpu, "store"):
        plgpu.store(rows_ref, o_MF, optimized=False)
    else:
        rows_ref[...] = o_MF


def _store(
    consumer: Consumer, o: Sequence[jax.Array], log_M: jax.Array, out_refs, work: Work
) -> None:
    """The output itself where the unit has its tile alone, else what is needed to sum up parts."""
    scratch, group = consumer.scratch, consumer.plan.group
    o_ref, *part_refs = out_refs

    def put(staged, place: Callable) -> None:
        """Each token's rows from shared memory to their place."""
        plgpu.commit_smem()

        @pl.loop(0, consumer.tokens(work))
        def _(i):
            rows = pl.ds(i * group, group)
            plgpu.copy_smem_to_gmem(staged.at[consumer.index, rows], place(i, rows))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(work.parts == 1)
    def _():
        for j, o_MF in enumerate(o):
            place = (consumer.index, pl.ds(0, ROWS), pl.ds(j * WIDTH, WIDTH))
            _put(scratch.rows_AMF.at[place], o_MF.astype(o_ref.dtype))
        row = work.row + consumer.first_token
        place = pl.ds(consumer.first_column, consumer.width)
        put(scratch.rows_AMF, lambda i, _: o_ref.at[row + i, work.head, :, place])

    if part_refs:
        part_ref, log_ref = (ref.at[work.unit, work.head] for ref in part_refs)

        @pl.when(work.parts > 1)
        def _():
            scratch.log_AM[consumer.index] = log_M
            plgpu.commit_smem()

            @pl.when(consumer.share == 0)
            def _():
                plgpu.copy_smem_to_gmem(scratch.log_AM.at[consumer.index], log_ref)

            for j, o_MF in enumerate(o):
                place = pl.ds(consumer.first_column + j * WIDTH, WIDTH)
                _put(scratch.part_AMF.at[consumer.index, pl.ds(0, ROWS)], o_MF)
                put(scratch.part_AMF, lambda _, rows, p=place: part_ref.at[rows, p])
