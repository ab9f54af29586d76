"""Ragged paged attention on a TPU: what the Mosaic kernel takes and how a call is packed for it.

The slots' rows are cut into tiles of Q new tokens that never cross slots, and the queries of a tile
are packed into matmul rows (`tpu_pack`). One kernel call takes the slots with few new tokens
(decode and verification), a second one those with many (chunks of a prompt), see `tpu_kernel`.

Invariant: only page table entries of a slot's visible positions are read.

Letters beside those of the contract: Z tiles, Q rows of a tile, R rows of a page, M matmul rows,
L lanes of a page row, F heads that share a row, G query heads per KV head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention import tpu_kernel
from pallas_kernels.paged_attention.spec import KernelSpec, check
from pallas_kernels.paged_attention.tpu_block import LANES, Plan
from pallas_kernels.paged_attention.tpu_kernel import kernel
from pallas_kernels.paged_attention.tpu_pack import QueryTiles, cut, pack, per_row, unpack
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
        scale_2RM = jnp.stack([per_row(a_N, Q, q_ZRML.shape) for a_N in scale_2N])
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
        per_row(sink_N, Q, q_ZRML.shape),
        scale_2RM,
    )
    return unpack(o_ZRML, Q, N, spec.head_dim, parts)


def _run_pass(
    o_TNH: jax.Array,
    arrays,
    slots,
    most: int,
    spec: KernelSpec,
    sizes: Sizes,
    chip: Chip | None,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """o_TNH with the rows of `slots` (q_start_S, q_len_S, kv_len_S), of which none has over `most`.

    Tiles hold several times the rows that there are if every slot has a part of one. Where they
    might, half as many rows as the call has are packed and attended to at once.
    """
    q_start_S, q_len_S, _ = slots
    T, Q = spec.num_rows, sizes.queries
    num_tiles = min(spec.num_slots * -(-most // Q), spec.num_slots + T // Q, T)
    at_once = num_tiles if num_tiles * Q <= 2 * T else max(1, T // (2 * Q))
    tiles = cut(*slots, Q, num_tiles + -num_tiles % at_once)
    tiles_S = (q_len_S + Q - 1) // Q
    live = jnp.sum(tiles_S)

    # Each row's place among the tiles: a gather, since a scatter may become a serial loop.
    row_T = jnp.arange(T, dtype=jnp.int32)
    owns_ST = (q_start_S[:, None] <= row_T) & (row_T < (q_start_S + q_len_S)[:, None])
    slot_T = jnp.argmax(owns_ST, axis=0)
    place_T = row_T - q_start_S.at[slot_T].get(mode="clip")
    z_T = (jnp.cumsum(tiles_S) - tiles_S).at[slot_T].get(mode="clip") + place_T // Q
    z_T = jnp.where(jnp.any(owns_ST, axis=0), z_T, -1)

    def attend_some(group, o_TNH):
        first = group * at_once
        some = QueryTiles(*(lax.dynamic_slice_in_dim(a_Z, first, at_once) for a_Z in tiles))
        num_some = jnp.clip(live - first, 0, at_once)
        o_ZQNH = _run(arrays, some, num_some, spec, sizes, chip, interpret)
        got_TNH = o_ZQNH.at[z_T - first, place_T % Q].get(mode="clip")
        here_T = (z_T >= first) & (z_T < first + at_once)
        return jnp.where(here_T[:, None, None], got_TNH, o_TNH)

    if at_once == num_tiles:
        return attend_some(0, o_TNH)
    return lax.fori_loop(0, (live + at_once - 1) // at_once, attend_some, o_TNH)


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
    o_TNH = jnp.zeros_like(q_TNH)
    done = 0
    sizes = sizes or default_sizes(spec, chip)
    for each in sizes:
        last = each is sizes[-1]
        mine_S = (q_len_S > done) & (last | (q_len_S <= each.queries))
        slots = (q_start_S, jnp.where(mine_S, q_len_S, 0), kv_len_S)
        most = min(max_q_len, spec.num_rows) if last else each.queries
        o_TNH = _run_pass(o_TNH, arrays, slots, most, spec, each, chip, interpret)
        done = each.queries
    return o_TNH
