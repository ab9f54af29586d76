"""The page pool of one layer: how keys and values of all slots lie in memory.

kv_pages is one array kv_P2KCH [page, 2, KV head, position in page, dim], keys at index 0 of axis 1
and values at 1. The positions of one head of one page are contiguous: a kernel reads one head of a
page as one run of C * H values, and gathered pages are already the operand of a batched matmul.

On a TPU a row of a page is as wide as the vector registers, 128 lanes. There narrower heads share a
row: F heads side by side, [page, 2, K / F, C, F * H], or where K is odd one head's keys and values,
[page, 1, K, C, 2 * H]. Heads whose width does not divide the row are filled up with zeros.
`pages_shape` decides it by `lanes`, everything else reads it off the shape.

Slot s keeps position j in page page_table_SM[s, j // C] at offset j % C. Page 0 is the trash page:
padding is written there and unused page table entries point there. Invariant: nothing that is
read back depends on page 0 or on a position that was never written; both may hold NaN.

A contiguous cache is the case page size = maximum length, one page per slot.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.chips import Chip

TRASH_PAGE = 0
TPU_LANES = 128

# Logical axis of each dimension, for sharding rules: heads are the only one that is ever split.
PAGES_AXES = (None, None, "kv_heads", None, None)


def lanes_of(chip: Chip | None) -> int:
    """Width of a page row that the chip's kernels want: for `pages_shape`."""
    return TPU_LANES if chip is not None and chip.kind == "tpu" else 1


def default_page_size(chip: Chip | None) -> int:
    """Positions of a page where nobody says otherwise: a TPU starts a copy per page, which takes as
    long however small the page, and its 8-bit registers hold 32 positions."""
    return 64 if chip is not None and chip.kind == "tpu" else 16


def pages_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, lanes: int = 1
) -> tuple[int, int, int, int, int]:
    """Shape of one layer's pool. num_pages counts the trash page.

    Heads share a row as far as they fit into `lanes`, else rows are whole multiples of it.
    """
    if num_pages < 2:
        raise ValueError(
            f"num_pages is {num_pages}: needs at least 2, the trash page and one page to use"
        )
    for name, value in (
        ("page_size", page_size),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}: needs at least 1")
    shared = math.gcd(num_kv_heads, lanes // head_dim) if lanes % head_dim == 0 else 1
    if shared == 1 and 2 * head_dim <= lanes:
        return (num_pages, 1, num_kv_heads, page_size, 2 * head_dim)
    if shared == 1:
        return (num_pages, 2, num_kv_heads, page_size, -(-head_dim // lanes) * lanes)
    return (num_pages, 2, num_kv_heads // shared, page_size, shared * head_dim)


def page_size_of(kv_pages: jax.Array) -> int:
    return kv_pages.shape[3]


def num_kv_heads_of(shape: tuple[int, ...], head_dim: int) -> int:
    """KV heads of a pool with this shape; ValueError if heads of this width cannot lie in it."""
    _, parts, rows, _, lanes = shape
    if parts == 2 and lanes % head_dim == 0:
        return rows * lanes // head_dim
    if parts == 2 and lanes == -(-head_dim // TPU_LANES) * TPU_LANES:
        return rows
    if parts == 1 and lanes == 2 * head_dim:
        return rows
    raise ValueError(
        f"kv_pages has shape {shape}: must be (any, 2, any, any, {head_dim}) for heads of "
        f"{head_dim}, or what pages_shape gives for them"
    )


def page_rows(
    kv_pages: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
) -> jax.Array:
    """new_TRL: what each token puts into the rows of its page, keys first, in the pool's dtype.

    ValueError if keys, values and places do not fit each other and the pool.
    """
    _, parts, rows, _, lanes = kv_pages.shape
    tokens, head_dim = page_T.shape[0], k_TKH.shape[-1]
    expected = (tokens, num_kv_heads_of(kv_pages.shape, head_dim), head_dim)
    if k_TKH.shape != expected or v_TKH.shape != expected:
        raise ValueError(
            f"keys {k_TKH.shape} and values {v_TKH.shape} do not fit pages {kv_pages.shape}: "
            f"both must be {expected} for {tokens} places"
        )
    if offset_T.shape != (tokens,):
        raise ValueError(f"offset_T has shape {offset_T.shape}: must be {(tokens,)} as page_T")
    new = jnp.stack([k_TKH, v_TKH], axis=1 if parts == 2 else 2).astype(kv_pages.dtype)
    if lanes % head_dim:
        new = jnp.pad(new, ((0, 0),) * 3 + ((0, lanes - head_dim),))
    return new.reshape(tokens, parts * rows, lanes)


def write_pages(
    kv_pages: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
) -> jax.Array:
    """Put the keys and values of T tokens at (page, offset); in place when the pool is donated.

    Padding tokens come with page 0. A page or offset outside of the pool, negative included,
    is dropped. Two tokens must not share a place, except in the trash page.
    """
    num_pages, parts, rows, _, lanes = kv_pages.shape
    new_TRL = page_rows(kv_pages, k_TKH, v_TKH, page_T, offset_T)
    new_TpRL = new_TRL.reshape(page_T.shape[0], parts, rows, lanes)
    # A negative index would count from the end; num_pages is out of range and dropped instead.
    page_T = jnp.where((page_T >= 0) & (offset_T >= 0), page_T, num_pages)
    return kv_pages.at[page_T, :, :, offset_T].set(new_TpRL, mode="drop")


def read_dense(
    kv_pages: jax.Array, page_table_SM: jax.Array, head_dim: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all slots in position order, [S, X, K, H] each, X = M * C.

    For references and tests: it copies the whole cache. A page outside of the pool reads the
    nearest page that exists; which positions are real is the caller's knowledge (kv_len).
    `head_dim` must be given where heads share rows.
    """
    page_table_SM = jnp.maximum(page_table_SM, 0)
    slots, pages_per_slot = page_table_SM.shape
    _, parts, _, size, lanes = kv_pages.shape
    head_dim = head_dim or lanes
    num_kv_heads = num_kv_heads_of(kv_pages.shape, head_dim)
    kv_SMpRCL = kv_pages.at[page_table_SM].get(mode="clip")[..., : lanes // head_dim * head_dim]
    kv_SMpRCfH = kv_SMpRCL.reshape(*kv_SMpRCL.shape[:-1], lanes // head_dim, head_dim)
    # Keys or values first: they are told apart by p, or by f where they share a row.
    order = (2, 0, 1, 4, 3, 5, 6) if parts == 2 else (5, 0, 1, 4, 3, 2, 6)
    kv_2SXKH = kv_SMpRCfH.transpose(order).reshape(
        2, slots, pages_per_slot * size, num_kv_heads, head_dim
    )
    return kv_2SXKH[0], kv_2SXKH[1]
