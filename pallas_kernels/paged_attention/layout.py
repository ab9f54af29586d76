"""The page pool of one layer: how keys and values of all slots lie in memory.

kv_pages is one array kv_P2KCH [page, 2, KV head, position in page, dim], keys at index 0 of axis 1
and values at 1. The positions of one head of one page are contiguous: a kernel reads one head of a
page as one run of C * H values, and gathered pages are already the operand of a batched matmul.

Slot s keeps position j in page page_table_SM[s, j // C] at offset j % C. Page 0 is the trash page:
padding is written there and unused page table entries point there. Invariant: nothing that is
read back depends on page 0 or on a position that was never written; both may hold NaN.

A contiguous cache is the case page size = maximum length, one page per slot.
"""

import jax
import jax.numpy as jnp

TRASH_PAGE = 0

# Logical axis of each dimension, for sharding rules: heads are the only one that is ever split.
PAGES_AXES = (None, None, "kv_heads", None, None)


def pages_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Shape of one layer's pool. num_pages counts the trash page."""
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
    return (num_pages, 2, num_kv_heads, page_size, head_dim)


def page_size_of(kv_pages: jax.Array) -> int:
    return kv_pages.shape[3]


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
    num_pages, two, num_kv_heads, _, head_dim = kv_pages.shape
    tokens = page_T.shape[0]
    expected = (tokens, num_kv_heads, head_dim)
    if two != 2 or k_TKH.shape != expected or v_TKH.shape != expected:
        raise ValueError(
            f"keys {k_TKH.shape} and values {v_TKH.shape} do not fit pages {kv_pages.shape}: "
            f"both must be {expected} for {tokens} places"
        )
    if offset_T.shape != (tokens,):
        raise ValueError(f"offset_T has shape {offset_T.shape}: must be {(tokens,)} as page_T")
    new_T2KH = jnp.stack([k_TKH, v_TKH], axis=1).astype(kv_pages.dtype)
    # A negative index would count from the end; num_pages is out of range and dropped instead.
    page_T = jnp.where((page_T >= 0) & (offset_T >= 0), page_T, num_pages)
    return kv_pages.at[page_T, :, :, offset_T].set(new_T2KH, mode="drop")


def read_dense(kv_pages: jax.Array, page_table_SM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all slots in position order, [S, X, K, H] each, X = M * C.

    For references and tests: it copies the whole cache. A page outside of the pool reads the
    nearest page that exists; which positions are real is the caller's knowledge (kv_len).
    """
    page_table_SM = jnp.maximum(page_table_SM, 0)
    slots, pages_per_slot = page_table_SM.shape
    _, _, num_kv_heads, size, head_dim = kv_pages.shape
    kv_SM2KCH = kv_pages.at[page_table_SM].get(mode="clip")
    kv_2SMCKH = kv_SM2KCH.transpose(2, 0, 1, 4, 3, 5)
    kv_2SXKH = kv_2SMCKH.reshape(2, slots, pages_per_slot * size, num_kv_heads, head_dim)
    return kv_2SXKH[0], kv_2SXKH[1]
