"""Queries as the rows of the TPU kernel's matmuls, and back.

`cut` makes tiles of at most Q new tokens of one slot each, `pack` lays a tile's queries q_ZQNH out
as q_ZRML: for every row R of a page the M queries that read it, over all its L lanes. `unpack`
takes each head's own lanes of what the kernel returns.

Letters as in `tpu`: Z tiles, Q rows of a tile, R rows of a page, M matmul rows, L lanes of a page
row, F heads that share a row, G query heads per KV head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu_block import LANES
from pallas_kernels.paged_attention.tpu_sizes import SUBLANES


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


def per_row(a_N: jax.Array, queries: int, shape: tuple[int, ...]) -> jax.Array:
    """One number per query head as an array [R, M, 128] in the order of the matmul rows."""
    R, M = shape[1:3]
    a_RM = jnp.repeat(a_N.astype(jnp.float32).reshape(R, -1), queries, axis=1)
    a_RM = jnp.pad(a_RM, ((0, 0), (0, M - a_RM.shape[1])))
    return jnp.broadcast_to(a_RM[..., None], (R, M, LANES))
