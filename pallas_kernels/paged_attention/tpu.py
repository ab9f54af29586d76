"""Ragged paged attention on a TPU: what the Mosaic kernel takes and how a call is packed for it.

The slots' rows are cut into tiles of Q new tokens that never cross slots, and the queries of a tile
are packed into matmul rows (`pack`). One kernel call takes the slots with few new tokens (decode
and verification), a second one those with many (chunks of a prompt), see `tpu_kernel`.

Invariant: only page table entries of a slot's visible positions are read.

Letters beside those of the contract: Z tiles, Q rows of a tile, R rows of a page, M matmul rows,
L lanes of a page row, F heads that share a row, G query heads per KV head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention import tpu_kernel
from pallas_kernels.paged_attention.spec import KernelSpec, check
from pallas_kernels.paged_attention.tpu_block import LANES, Plan
from pallas_kernels.paged_attention.tpu_kernel import kernel
from pallas_kernels.paged_attention.tpu_sizes import (
    SUBLANES,
    Sizes,
    default_sizes,
    unrolled,
    vmem_bytes,
    vmem_limit,
)

HEAD_DIMS = (64, 80, 96, 128, 256)
KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
PAGE_SIZES = (16, 256)


def supports(spec: KernelSpec, chip: Chip | None) -> str | None:
    """None, or why the kernel cannot take the call on this chip."""
    if chip is None or chip.kind != "tpu":
        return f"needs a TPU, the call is for {chip.name if chip else 'the host CPU'}"
    if spec.head_dim not in HEAD_DIMS:
        return f"head width {spec.head_dim}: must be one of {HEAD_DIMS}"
    if spec.page_lanes % LANES:
        return f"rows of a page are {spec.page_lanes} wide: must be {LANES}, see pages_shape"
    if spec.q_dtype not in ("bfloat16", "float32"):
        return f"queries are {spec.q_dtype}: must be bfloat16 or float32"
    if spec.kv_dtype not in KV_DTYPES:
        return f"pages are {spec.kv_dtype}: must be one of {KV_DTYPES}"
    low, high = PAGE_SIZES
    if spec.page_size % low or not low <= spec.page_size <= high:
        return f"page size {spec.page_size}: must be a multiple of {low} up to {high}"
    table_bytes = 4 * spec.num_slots * spec.pages_per_slot
    if table_bytes > chip.smem_bytes // 2:
        return (
            f"page table of {spec.num_slots} slots x {spec.pages_per_slot} pages is "
            f"{table_bytes:,} bytes: scalar memory has {chip.smem_bytes // 2:,} for it; use larger "
            "pages or fewer slots"
        )
    needed = max(vmem_bytes(spec, each) for each in default_sizes(spec, chip))
    if needed > vmem_limit(chip):
        return (
            f"blocks, queries and scores take {needed:,} bytes: vector memory has "
            f"{vmem_limit(chip):,} for them; use smaller pages"
        )
    return None


class QueryTiles(NamedTuple):
    """Per tile its slot, first row in q, number of rows, position of that row."""

    slot: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array


def cut(q_start_S, q_len_S, kv_len_S, queries: int, num_tiles: int) -> QueryTiles:
    """The slots' rows in tiles of at most `queries`; tiles past the last one have no rows."""
    tiles_S = (q_len_S + queries - 1) // queries
    end_S = jnp.cumsum(tiles_S)
    z_Z = jnp.arange(num_tiles, dtype=jnp.int32)
    slot_Z = jnp.searchsorted(end_S, z_Z, side="right", method="compare_all").astype(jnp.int32)

    def of_slot(a_S):
        return a_S.at[slot_Z].get(mode="fill", fill_value=0)

    first_Z = (z_Z - of_slot(end_S - tiles_S)) * queries
    return QueryTiles(
        slot=slot_Z,
        row=of_slot(q_start_S) + first_Z,
        rows=jnp.clip(of_slot(q_len_S) - first_Z, 0, queries),
        position=of_slot(kv_len_S - q_len_S) + first_Z,
    )


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
        q_ZRFGQL = jnp.where(own_FfH, q_ZRFGQH[..., None, :], 0).reshape(Z, R, F, G, Q, F * H)
        q_ZRFGQL = jnp.pad(q_ZRFGQL, ((0, 0),) * 5 + ((0, L - F * H),))
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


def _run(
    arrays,
    tiles: QueryTiles,
    num_tiles: jax.Array,
    spec: KernelSpec,
    sizes: Sizes,
    chip: Chip | None,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """o_ZQNH of all tiles; what tiles without rows hold is unspecified."""
    q_TNH, kv_pages, page_table_SM, sinks_N, kv_scale_2K = arrays
    _, parts, R, C, L = kv_pages.shape
    N, Q = spec.num_heads, sizes.queries
    block = sizes.pages * C
    # An 8-bit register holds 32 positions.
    pairs = C == 16 and kv_pages.dtype.itemsize == 1 and sizes.pages % 2 == 0
    stacked = 2 if pairs else 1

    i_Q = jnp.arange(Q)
    row_ZQ = jnp.where(i_Q < tiles.rows[:, None], tiles.row[:, None] + i_Q, spec.num_rows)
    q_ZRML = pack(q_TNH.at[row_ZQ].get(mode="fill", fill_value=0), kv_pages)
    M = q_ZRML.shape[2]

    last_Z = tiles.position + tiles.rows - 1
    first_Z = jnp.zeros_like(last_Z)
    if spec.window is not None:
        first_Z = jnp.maximum(tiles.position - spec.window + 1, 0)
    begin_Z, end_Z = first_Z // block, last_Z // block + 1
    rounds = jnp.sum(jnp.where(tiles.rows > 0, end_Z - begin_Z, 0))
    in_scalar_memory = tpu_kernel.Tiles(tiles.slot, tiles.position, first_Z, last_Z, begin_Z, end_Z)

    sink_N = jnp.full((N,), -jnp.inf) if sinks_N is None else sinks_N
    scale_2RM = jnp.zeros((2, 1, SUBLANES, LANES), jnp.float32)
    if spec.kv_scales:
        scale_2N = jnp.repeat(kv_scale_2K, N // spec.num_kv_heads, axis=1)
        scale_2RM = jnp.stack([_per_row(a_N, Q, q_ZRML.shape) for a_N in scale_2N])
    # Only where the matrix unit takes the pages as they are.
    split = spec.kv_dtype == "float8_e4m3fn" and chip is not None and chip.multiplies(spec.kv_dtype)
    plan = Plan(
        queries=Q,
        pages=sizes.pages,
        page_size=C,
        buffers=sizes.buffers,
        pages_per_slot=spec.pages_per_slot,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        scaled=spec.kv_scales,
        split=split,
        unrolled=unrolled(spec, sizes),
    )
    rows_of_split = (R, 2 * M, L) if split else (1, SUBLANES, LANES)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    o_ZRML = pl.pallas_call(
        functools.partial(kernel, plan=plan),
        out_shape=jax.ShapeDtypeStruct(q_ZRML.shape, q_TNH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 + len(in_scalar_memory),
            grid=(1,),
            in_specs=[hbm, hbm, vmem, vmem],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM(
                    (sizes.buffers, sizes.pages // stacked, parts, R, stacked * C, L),
                    kv_pages.dtype,
                ),
                pltpu.VMEM((2, R, M, L), q_TNH.dtype),
                pltpu.VMEM((2, R, M, L), q_TNH.dtype),
                pltpu.VMEM((R, M, LANES), jnp.float32),
                pltpu.VMEM((R, M, LANES), jnp.float32),
                pltpu.VMEM((R, M, L), jnp.float32),
                pltpu.VMEM(rows_of_split, kv_pages.dtype),
                pltpu.VMEM((R, M, LANES) if split else (1, SUBLANES, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((sizes.buffers,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=chip.vmem_bytes * 7 // 8 if chip else None,
            # Bounds checks of every page copy cost more than the copy: tests make them instead.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"paged_attention_q{Q}",
    )(
        page_table_SM.reshape(-1),
        jnp.stack([num_tiles, rounds]).astype(jnp.int32),
        # The cursor that runs ahead reads one entry past the last tile.
        *(jnp.pad(a_Z, (0, 1)) for a_Z in in_scalar_memory),
        q_ZRML,
        kv_pages,
        _per_row(sink_N, Q, q_ZRML.shape),
        scale_2RM,
    )
    return unpack(o_ZRML, Q, N, spec.head_dim, parts)


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
    chip: Chip | None = None,
    sizes: tuple[Sizes, ...] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Attention of every row to the keys of its slot, 0 for rows that no slot owns.

    `sizes` in ascending order of `queries`: each takes the slots whose rows fit into one of its
    tiles and did not fit before, the last one takes all that are left.
    """
    spec = check(
        q_TNH, kv_pages, page_table_SM, q_start_S, q_len_S, kv_len_S,
        scale=scale, max_q_len=max_q_len, window=window, softcap=softcap,
        sinks_N=sinks_N, kv_scale_2K=kv_scale_2K,
    )  # fmt: skip
    arrays = (q_TNH, kv_pages, page_table_SM, sinks_N, kv_scale_2K)
    row_T = jnp.arange(spec.num_rows, dtype=jnp.int32)
    owns_ST = (q_start_S[:, None] <= row_T) & (row_T < (q_start_S + q_len_S)[:, None])
    slot_T = jnp.argmax(owns_ST, axis=0)
    owned_T = jnp.any(owns_ST, axis=0)
    row_in_slot_T = row_T - q_start_S.at[slot_T].get(mode="clip")

    o_TNH = jnp.zeros_like(q_TNH)
    done = 0
    sizes = sizes or default_sizes(spec, chip)
    for each in sizes:
        last, Q = each is sizes[-1], each.queries
        mine_S = (q_len_S > done) & (last | (q_len_S <= Q))
        tiles_S = jnp.where(mine_S, (q_len_S + Q - 1) // Q, 0)
        most = -(-min(max_q_len, spec.num_rows) // Q) if last else 1
        num_tiles = min(spec.num_slots * most, spec.num_slots + spec.num_rows // Q)
        tiles = cut(q_start_S, jnp.where(mine_S, q_len_S, 0), kv_len_S, Q, num_tiles)
        o_ZQNH = _run(arrays, tiles, jnp.sum(tiles_S), spec, each, chip, interpret)
        # Each row's place among the tiles: a gather, since a scatter may become a serial loop.
        z_T = (jnp.cumsum(tiles_S) - tiles_S).at[slot_T].get(mode="clip") + row_in_slot_T // Q
        got_TNH = o_ZQNH.at[z_T, row_in_slot_T % Q].get(mode="clip")
        mine_T = owned_T & mine_S.at[slot_T].get(mode="clip")
        o_TNH = jnp.where(mine_T[:, None, None], got_TNH, o_TNH)
        done = Q
    return o_TNH
