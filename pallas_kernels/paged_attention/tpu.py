"""Ragged paged attention on a TPU: what the Mosaic kernel takes and how a call is packed for it.

The slots' rows are cut into tiles of Q new tokens that never cross slots, and the queries of a tile
are packed into matmul rows (`pack`). One kernel call takes the slots with few new tokens (decode and
verification), a second one those with many (chunks of a prompt), see `tpu_kernel`.

Invariant: only page table entries of a slot's visible positions are read.

Letters beside those of the contract: Z tiles, Q rows of a tile, R rows of a page, M matmul rows,
L lanes of a page row, F heads that share a row, G query heads per KV head.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_kernel import LANES, Plan, kernel


SUBLANES = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of one kernel call; results do not depend on them beyond rounding."""

    queries: int  # new tokens of a tile, a power of two
    pages: int  # of a block
    buffers: int  # blocks in vector memory, a power of two
    vmem_bytes: int | None = None


def default_sizes(q_TNH: jax.Array, kv_pages: jax.Array, most_rows: int) -> tuple[Sizes, ...]:
    """Blocks of about 2 MiB, so that a few of them in flight hide the latency of the memory."""
    _, parts, R, C, L = kv_pages.shape
    page_bytes = parts * R * C * L * kv_pages.dtype.itemsize
    unit = math.lcm(C, LANES) // C  # blocks of whole vector registers of scores
    pages = max(1, min((2 << 20) // page_bytes, 512 // C) // unit) * unit
    vmem_bytes = 64 << 20
    group = q_TNH.shape[1] // R
    if most_rows <= 16:
        return (Sizes(1 << (most_rows - 1).bit_length(), pages, 4, vmem_bytes),)
    queries = max(8, min(128, 256 // group))
    return Sizes(1, pages, 4, vmem_bytes), Sizes(1 << (queries.bit_length() - 1), pages, 4, vmem_bytes)


class Tiles(NamedTuple):
    """Per tile its slot, first row in q, number of rows, position of that row."""

    slot: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array


def cut(q_start_S, q_len_S, kv_len_S, queries: int, num_tiles: int) -> tuple[Tiles, jax.Array]:
    """The slots' rows in tiles of at most `queries`, and the number of tiles that have any."""
    end_S = jnp.cumsum((q_len_S + queries - 1) // queries)
    z_Z = jnp.arange(num_tiles, dtype=jnp.int32)
    slot_Z = jnp.searchsorted(end_S, z_Z, side="right", method="compare_all").astype(jnp.int32)

    def of_slot(a_S):
        return a_S.at[slot_Z].get(mode="fill", fill_value=0)

    first_Z = (z_Z - of_slot(end_S - (q_len_S + queries - 1) // queries)) * queries
    tiles = Tiles(
        slot=slot_Z,
        row=of_slot(q_start_S) + first_Z,
        rows=jnp.clip(of_slot(q_len_S) - first_Z, 0, queries),
        position=of_slot(kv_len_S - q_len_S) + first_Z,
    )
    return tiles, end_S[-1]


def pack(q_ZQNH: jax.Array, kv_pages: jax.Array) -> jax.Array:
    """Queries as q_ZRML, heads that share a row of the page below each other.

    A head's queries are zero in the lanes of the other heads, or of the values where a row holds
    one head's keys and values, so that one product over all lanes gives the scores.
    """
    Z, Q, N, H = q_ZQNH.shape
    _, parts, R, _, L = kv_pages.shape
    F = L // H if parts == 2 else 1
    G = N // (R * F)
    q_ZRFGQH = q_ZQNH.reshape(Z, Q, R, F, G, H).transpose(0, 2, 3, 4, 1, 5)
    if parts == 1:
        q_ZRFGQL = jnp.pad(q_ZRFGQH, ((0, 0),) * 5 + ((0, L - H),))
    else:
        own_FfH = jnp.eye(F, dtype=bool)[:, None, None, :, None]
        q_ZRFGQL = jnp.where(own_FfH, q_ZRFGQH[..., None, :], 0).reshape(Z, R, F, G, Q, L)
    rows = F * G * Q
    padding = -rows % SUBLANES
    return jnp.pad(q_ZRFGQL.reshape(Z, R, rows, L), ((0, 0), (0, 0), (0, padding), (0, 0)))


def unpack(o_ZRML: jax.Array, queries: int, num_heads: int, head_dim: int, parts: int) -> jax.Array:
    """o_ZQNH of what the kernel returns: each head's own lanes."""
    Z, R, _, L = o_ZRML.shape
    N, H, Q = num_heads, head_dim, queries
    F = L // H if parts == 2 else 1
    o_ZRFGQL = o_ZRML[:, :, : N // R * Q].reshape(Z, R, F, N // (R * F), Q, L)
    if parts == 1:
        o_ZRFGQH = o_ZRFGQL[..., L - H :]
    else:
        own = [o_ZRFGQL[:, :, f, :, :, f * H : (f + 1) * H] for f in range(F)]
        o_ZRFGQH = jnp.stack(own, axis=2)
    return o_ZRFGQH.transpose(0, 4, 1, 2, 3, 5).reshape(Z, Q, N, H)


def _per_row(a_N: jax.Array, queries: int, shape: tuple[int, ...]) -> jax.Array:
    """One number per query head as an array [R, M, 128] in the order of the matmul rows."""
    R, M = shape[1:3]
    a_RM = jnp.repeat(a_N.astype(jnp.float32).reshape(R, -1), queries, axis=1)
    a_RM = jnp.pad(a_RM, ((0, 0), (0, M - a_RM.shape[1])))
    return jnp.broadcast_to(a_RM[..., None], (R, M, LANES))


def run_pass(
    q_TNH, kv_pages, page_table_SM, tiles: Tiles, num_tiles, sizes: Sizes, *,
    scale, window, softcap, sinks_N, kv_scale_2K, interpret,
):  # fmt: skip
    """o_ZQNH of all tiles; what tiles without rows hold is unspecified."""
    _, N, H = q_TNH.shape
    _, parts, R, C, L = kv_pages.shape
    Q, Z = sizes.queries, tiles.slot.shape[0]
    block = sizes.pages * C

    i_Q = jnp.arange(Q)
    row_ZQ = jnp.where(i_Q < tiles.rows[:, None], tiles.row[:, None] + i_Q, q_TNH.shape[0])
    q_ZQNH = q_TNH.at[row_ZQ].get(mode="fill", fill_value=0)
    q_ZRML = pack(q_ZQNH, kv_pages)
    M = q_ZRML.shape[2]

    last_Z = tiles.position + tiles.rows - 1
    first_Z = jnp.zeros_like(last_Z)
    if window is not None:
        first_Z = jnp.maximum(tiles.position - window + 1, 0)
    begin_Z, end_Z = first_Z // block, last_Z // block + 1
    rounds = jnp.sum(jnp.where(tiles.rows > 0, end_Z - begin_Z, 0))

    def ahead(a_Z):  # the cursor that runs ahead reads one entry past the last tile
        return jnp.pad(a_Z, (0, 1))

    sinks = jnp.full((N,), -jnp.inf) if sinks_N is None else sinks_N
    scaled = kv_scale_2K is not None
    scale_2RM = jnp.zeros((2, 1, SUBLANES, LANES), jnp.float32)
    if scaled:
        per_head_2N = jnp.repeat(kv_scale_2K, N // kv_scale_2K.shape[1], axis=1)
        per_head_2N *= jnp.array([[scale], [1.0]], jnp.float32)
        scale_2RM = jnp.stack([_per_row(a_N, Q, q_ZRML.shape) for a_N in per_head_2N])
    plan = Plan(Q, sizes.pages, sizes.buffers, page_table_SM.shape[1], scale, window, softcap)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    o_ZRML = pl.pallas_call(
        functools.partial(kernel, plan=plan, scaled=scaled),
        out_shape=jax.ShapeDtypeStruct(q_ZRML.shape, q_TNH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(1,),
            in_specs=[hbm, hbm, vmem, vmem],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((sizes.buffers, sizes.pages, parts, R, C, L), kv_pages.dtype),
                pltpu.VMEM((2, R, M, L), q_TNH.dtype),
                pltpu.VMEM((2, R, M, L), q_TNH.dtype),
                pltpu.VMEM((R, M, LANES), jnp.float32),
                pltpu.VMEM((R, M, LANES), jnp.float32),
                pltpu.VMEM((R, M, L), jnp.float32),
                pltpu.SemaphoreType.DMA((sizes.buffers,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=sizes.vmem_bytes),
        interpret=interpret,
        name=f"paged_attention_q{Q}",
    )(
        page_table_SM.reshape(-1),
        ahead(tiles.slot), ahead(tiles.position), ahead(first_Z), ahead(last_Z),
        ahead(begin_Z), ahead(end_Z),
        jnp.stack([num_tiles, rounds]).astype(jnp.int32),
        q_ZRML, kv_pages, _per_row(sinks, Q, q_ZRML.shape), scale_2RM,
    )  # fmt: skip
    return unpack(o_ZRML, Q, N, H, parts)


def attend(
    q_TNH: jax.Array,
    kv_pages: jax.Array,
    page_table_SM: jax.Array,
    q_start_S: jax.Array,
    q_len_S: jax.Array,
    kv_len_S: jax.Array,
    *,
    scale: float,
    max_q_len: int,
    window: int | None,
    softcap: float | None,
    sinks_N: jax.Array | None,
    kv_scale_2K: jax.Array | None = None,
    sizes: tuple[Sizes, ...] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Attention of every row to the keys of its slot, 0 for rows that no slot owns.

    `sizes` in ascending order of `queries`: each takes the slots whose rows fit into one of its
    tiles and did not fit before, the last one takes all that are left.
    """
    num_rows, num_slots = q_TNH.shape[0], q_len_S.shape[0]
    most_rows = min(max_q_len, num_rows)
    if sizes is None:
        sizes = default_sizes(q_TNH, kv_pages, most_rows)
    row_T = jnp.arange(num_rows, dtype=jnp.int32)
    owns_ST = (q_start_S[:, None] <= row_T) & (row_T < (q_start_S + q_len_S)[:, None])
    slot_T = jnp.argmax(owns_ST, axis=0)
    owned_T = jnp.any(owns_ST & (kv_len_S > 0)[:, None], axis=0)
    row_in_slot_T = row_T - q_start_S.at[slot_T].get(mode="clip")

    o_TNH = jnp.zeros_like(q_TNH)
    done = 0
    for each in sizes:
        last = each is sizes[-1]
        mine_S = (q_len_S > done) & (last | (q_len_S <= each.queries))
        done = each.queries
        most = -(-most_rows // each.queries) if last else 1
        tiles, num_tiles = cut(
            q_start_S,
            jnp.where(mine_S, q_len_S, 0),
            kv_len_S,
            each.queries,
            min(num_slots * most, num_slots + num_rows // each.queries),
        )
        o_ZQNH = run_pass(
            q_TNH, kv_pages, page_table_SM, tiles, num_tiles, each,
            scale=scale, window=window, softcap=softcap, sinks_N=sinks_N,
            kv_scale_2K=kv_scale_2K, interpret=interpret,
        )  # fmt: skip
        # Each row's place among the tiles: a gather, since a scatter may become a serial loop.
        tiles_S = jnp.where(mine_S, (q_len_S + each.queries - 1) // each.queries, 0)
        first_S = jnp.cumsum(tiles_S) - tiles_S
        z_T = first_S.at[slot_T].get(mode="clip") + row_in_slot_T // each.queries
        got_TNH = o_ZQNH.at[z_T, row_in_slot_T % each.queries].get(mode="clip")
        mine_T = owned_T & mine_S.at[slot_T].get(mode="clip")
        o_TNH = jnp.where(mine_T[:, None, None], got_TNH, o_TNH)
    return o_TNH
