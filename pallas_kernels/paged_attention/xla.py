"""Ragged paged attention in plain XLA operations: fast on a CPU, usable on every device.

The queries are cut into tiles of Q rows that never cross slots. Groups of W tiles walk over their
keys in blocks of B positions with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022):
gather the block's pages, two batched matmuls, rescale. Tile count, first block (window) and last
block (causal limit) are runtime numbers, so idle slots and invisible blocks cost nothing, and
temporaries are a few blocks, however long the prompt.

Invariant: a row's arithmetic depends on its own slot only. A block that a tile does not need (its
neighbour in the group has more) changes no bit: weights are 0 and the rescale is by exactly 1.

Letters beside those of the contract: Z all tiles, W tiles of a group, Q rows of a tile, B keys of a
block, G query heads per KV head.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chips import Chip
from pallas_kernels.paged_attention.key_blocks import KeyBlocks, key_blocks
from pallas_kernels.paged_attention.layout import TRASH_PAGE
from pallas_kernels.paged_attention.spec import KernelSpec

# A group's keys and values in float32; beyond this they leave the caches before they are used.
GROUP_BYTES = 4 << 20
# Float32 products on chips whose default is a shorter one.
_exact_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Blocks:
    """Sizes of one pass; results do not depend on them beyond rounding."""

    queries: int  # rows of a tile
    tiles: int  # tiles at once
    keys: int  # positions of a key block, rounded to whole pages or to a part of one page


class Tiles(NamedTuple):
    """Per tile: slot, first row in q, number of rows, position of that row, keys to visit."""

    slot: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array
    first_key: jax.Array
    first_block: jax.Array
    num_blocks: jax.Array


def default_passes(
    max_q_len: int, num_slots: int, num_kv_heads: int, page_size: int, head_dim: int
) -> tuple[Blocks, ...]:
    """One pass when all slots bring few rows, else one for decode rows and one for prefill."""
    keys = 64 if num_slots > 1 else min(64, max(32, page_size))
    block_bytes = 2 * 4 * keys * num_kv_heads * head_dim
    tiles = max(1, min(16, num_slots, GROUP_BYTES // block_bytes))
    if max_q_len <= 16:
        return (Blocks(max_q_len, max(1, min(tiles, 64 // max_q_len)), keys),)
    return (Blocks(1, tiles, keys), Blocks(min(64, max_q_len), 1, 64))


def supports(spec: KernelSpec, chip: Chip | None) -> str | None:
    del chip
    if spec.page_lanes != spec.head_dim:
        return (
            f"reads pages whose rows hold one head of {spec.head_dim}, not {spec.page_lanes} lanes"
        )
    if spec.kv_scales:
        return "knows no scales of keys and values"
    return None


def _work_list(
    q_len_S: jax.Array,
    kv_len_S: jax.Array,
    q_start_S: jax.Array,
    *,
    num_tiles: int,
    queries: int,
    window: int | None,
    layout: KeyBlocks,
) -> Tiles:
    """All slots' rows cut into tiles; tiles past the last live one have no rows and no blocks."""
    tiles_S = (q_len_S + queries - 1) // queries
    end_S = jnp.cumsum(tiles_S)
    z_Z = jnp.arange(num_tiles, dtype=jnp.int32)
    slot_Z = jnp.searchsorted(end_S, z_Z, side="right", method="compare_all").astype(jnp.int32)

    def of_slot(a_S):
        return a_S.at[slot_Z].get(mode="fill", fill_value=0)

    first_Z = (z_Z - of_slot(end_S - tiles_S)) * queries
    rows_Z = jnp.clip(of_slot(q_len_S) - first_Z, 0, queries)
    position_Z = of_slot(kv_len_S - q_len_S) + first_Z
    first_key_Z = jnp.zeros_like(z_Z)
    if window is not None:
        first_key_Z = jnp.maximum(position_Z - window + 1, 0)
    first_block_Z = layout.block_of(first_key_Z)
    last_block_Z = layout.block_of(jnp.maximum(position_Z + rows_Z - 1, 0))
    return Tiles(
        slot=slot_Z,
        row=of_slot(q_start_S) + first_Z,
        rows=rows_Z,
        position=position_Z,
        first_key=first_key_Z,
        first_block=first_block_Z,
        num_blocks=jnp.where(rows_Z > 0, last_block_Z - first_block_Z + 1, 0),
    )


def _fetch(
    kv_pages: jax.Array, page_Wp: jax.Array, offset_W: jax.Array, layout: KeyBlocks
) -> tuple[jax.Array, jax.Array]:
    """The keys and values [W, K, B, H] of one block of each tile, float32."""
    num_pages, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    pool_rCH = kv_pages.reshape(num_pages * 2 * num_kv_heads, page_size, head_dim)
    # One index per (page, keys or values, head), so that each run of positions is one slice.
    row_WKp = page_Wp[:, None, :] * (2 * num_kv_heads) + jnp.arange(num_kv_heads)[:, None]
    offset_WKp = jnp.broadcast_to(offset_W[:, None, None], row_WKp.shape)
    dims = lax.GatherDimensionNumbers(
        offset_dims=(3, 4), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )

    def take(row_WKp):
        block_WKpCH = lax.gather(
            pool_rCH,
            jnp.stack([row_WKp, offset_WKp], axis=-1),
            dims,
            slice_sizes=(1, layout.keys_per_page, head_dim),
            mode=lax.GatherScatterMode.CLIP,
        )
        tiles = row_WKp.shape[0]
        return block_WKpCH.reshape(tiles, num_kv_heads, -1, head_dim).astype(jnp.float32)

    return take(row_WKp), take(row_WKp + num_kv_heads)


def _attend_group(
    q_WQNH: jax.Array,
    kv_pages: jax.Array,
    table_WM: jax.Array,
    tiles: Tiles,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_N: jax.Array | None,
    layout: KeyBlocks,
) -> jax.Array:
    """Online softmax of W tiles over their key blocks; o_WQNH in float32."""
    W, Q, N, H = q_WQNH.shape
    K = kv_pages.shape[2]
    G = N // K
    q_WKGQH = scale * q_WQNH.astype(jnp.float32).reshape(W, Q, K, G, H).transpose(0, 2, 3, 1, 4)
    position_WQ = tiles.position[:, None] + jnp.arange(Q)
    last_W = tiles.position + tiles.rows - 1

    # A sink is a key that was seen before all others and whose value is 0; none is a sink of -inf.
    sink_N = (
        jnp.full((N,), -jnp.inf, jnp.float32) if sinks_N is None else sinks_N.astype(jnp.float32)
    )
    sink_WKGQ = jnp.broadcast_to(sink_N.reshape(K, G, 1), (W, K, G, Q))
    max_WKGQ = jnp.maximum(sink_WKGQ, LOWEST)
    start = (max_WKGQ, jnp.exp(sink_WKGQ - max_WKGQ), jnp.zeros((W, K, G, Q, H), jnp.float32))

    def add_block(i, carry):
        max_WKGQ, sum_WKGQ, o_WKGQH = carry
        column_Wp, offset_W, x_WB = layout.locate(tiles.first_block + i)
        page_Wp = jnp.take_along_axis(table_WM, column_Wp, axis=1, mode="fill", fill_value=0)
        # Past the last key: the trash page, which stays in cache.
        page_Wp = jnp.where(column_Wp * layout.page_size <= last_W[:, None], page_Wp, TRASH_PAGE)
        k_WKBH, v_WKBH = _fetch(kv_pages, page_Wp, offset_W, layout)
        real_WB = (x_WB >= tiles.first_key[:, None]) & (x_WB <= last_W[:, None])
        v_WKBH = jnp.where(real_WB[:, None, :, None], v_WKBH, 0.0)

        score_WKGQB = _exact_einsum("WKGQH,WKBH->WKGQB", q_WKGQH, k_WKBH)
        if softcap is not None:
            score_WKGQB = softcap * jnp.tanh(score_WKGQB / softcap)
        visible_WQB = real_WB[:, None, :] & (x_WB[:, None, :] <= position_WQ[:, :, None])
        if window is not None:
            visible_WQB &= x_WB[:, None, :] > position_WQ[:, :, None] - window
        score_WKGQB = jnp.where(visible_WQB[:, None, None], score_WKGQB, -jnp.inf)

        new_max_WKGQ = jnp.maximum(max_WKGQ, jnp.max(score_WKGQB, axis=-1))
        shrink_WKGQ = jnp.exp(max_WKGQ - new_max_WKGQ)
        weight_WKGQB = jnp.exp(score_WKGQB - new_max_WKGQ[..., None])
        sum_WKGQ = sum_WKGQ * shrink_WKGQ + jnp.sum(weight_WKGQB, axis=-1)
        block_WKGQH = _exact_einsum("WKGQB,WKBH->WKGQH", weight_WKGQB, v_WKBH)
        return new_max_WKGQ, sum_WKGQ, o_WKGQH * shrink_WKGQ[..., None] + block_WKGQH

    _, sum_WKGQ, o_WKGQH = lax.fori_loop(0, jnp.max(tiles.num_blocks), add_block, start)
    o_WKGQH = o_WKGQH / jnp.where(sum_WKGQ == 0, 1.0, sum_WKGQ)[..., None]
    return o_WKGQH.transpose(0, 3, 1, 2, 4).reshape(W, Q, N, H)


def _run_pass(o_TNH, q_TNH, kv_pages, page_table_SM, tiles: Tiles, blocks: Blocks, **maths):
    """All live tiles, `blocks.tiles` at once; each writes its own rows of o_TNH."""
    num_rows = q_TNH.shape[0]
    if blocks.tiles > 1:
        # Similar lengths share a group: its trips are those of its longest tile.
        order_Z = jnp.argsort(-tiles.num_blocks)
        tiles = Tiles(*(a_Z.at[order_Z].get(mode="clip") for a_Z in tiles))
    padding = -tiles.slot.shape[0] % blocks.tiles
    tiles = Tiles(*(jnp.pad(a_Z, (0, padding)) for a_Z in tiles))
    num_live = jnp.sum(tiles.num_blocks > 0)

    def attend_group(g, o_TNH):
        group = Tiles(
            *(lax.dynamic_slice_in_dim(a_Z, g * blocks.tiles, blocks.tiles) for a_Z in tiles)
        )
        i_Q = jnp.arange(blocks.queries)
        row_WQ = jnp.where(i_Q < group.rows[:, None], group.row[:, None] + i_Q, num_rows)
        q_WQNH = q_TNH.at[row_WQ].get(mode="fill", fill_value=0)
        table_WM = page_table_SM.at[group.slot].get(mode="fill", fill_value=0)
        o_WQNH = _attend_group(q_WQNH, kv_pages, table_WM, group, **maths)
        return o_TNH.at[row_WQ].set(o_WQNH.astype(o_TNH.dtype), mode="drop")

    num_groups = (num_live + blocks.tiles - 1) // blocks.tiles
    return lax.fori_loop(0, num_groups, attend_group, o_TNH)


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
    kv_scale_2K: None = None,
    chip: Chip | None = None,
    passes: tuple[Blocks, ...] | None = None,
) -> jax.Array:
    """Attention of every row to the keys of its slot, 0 for rows that no slot owns.

    `passes` in ascending order of `queries`: each takes the slots whose rows fit into one of its
    tiles and did not fit before, the last one takes all that are left.
    """
    del kv_scale_2K, chip
    num_rows, _, head_dim = q_TNH.shape
    num_slots = q_len_S.shape[0]
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
    if passes is None:
        most_rows = min(max_q_len, num_rows)
        passes = default_passes(most_rows, num_slots, num_kv_heads, page_size, head_dim)
    o_TNH = jnp.zeros_like(q_TNH)
    done = 0
    for blocks in passes:
        last = blocks is passes[-1]
        mine_S = (q_len_S > done) & (last | (q_len_S <= blocks.queries))
        done = blocks.queries
        layout = key_blocks(page_size, blocks.keys)
        most = -(-max_q_len // blocks.queries) if last else 1
        tiles = _work_list(
            jnp.where(mine_S, q_len_S, 0),
            kv_len_S,
            q_start_S,
            num_tiles=min(num_slots * most, num_slots + num_rows // blocks.queries),
            queries=blocks.queries,
            window=window,
            layout=layout,
        )
        o_TNH = _run_pass(
            o_TNH,
            q_TNH,
            kv_pages,
            page_table_SM,
            tiles,
            blocks,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_N=sinks_N,
            layout=layout,
        )
    return o_TNH
