"""The page pool as pure functions: take, release, share, look up and publish.

No function loops over pages or slots: lists of pages are flat arrays with a mask, their places come
from cumulative sums. A free page keeps its content until it is taken again, so the prefix cache is
the free pages and costs no memory. A hit is proved, not trusted to a hash: tokens are compared
exactly, and each page's parent link must lead to the page proved before it, in the same epoch.
"""

import jax
import jax.numpy as jnp

from engine.state import ROOT_PAGE, PagePool

MOST_PAIRS = 1 << 20  # of hashes that are compared one by one


def take(pool: PagePool, wanted_N: jax.Array) -> tuple[PagePool, jax.Array]:
    """Give a page to each entry where `wanted_N`, least recently freed first; 0 elsewhere.

    The caller has checked that `num_free` suffices. What the pages held is forgotten.
    """
    size = pool.queue_P.shape[0]
    rank_N = jnp.cumsum(wanted_N) - 1
    page_N = pool.queue_P.at[(pool.head + rank_N) % size].get(mode="clip")
    count = jnp.sum(wanted_N, dtype=jnp.int32)
    at_N = jnp.where(wanted_N, page_N, size)
    pool = pool.replace(
        refcount_P=pool.refcount_P.at[at_N].set(1, mode="drop"),
        epoch_P=pool.epoch_P.at[at_N].add(1, mode="drop"),
        published_P=pool.published_P.at[at_N].set(False, mode="drop"),
        head=(pool.head + count) % size,
        num_free=pool.num_free - count,
    )
    return pool, jnp.where(wanted_N, page_N, 0)


def release(pool: PagePool, page_N: jax.Array, held_N: jax.Array) -> PagePool:
    """Drop one reference per entry where `held_N`; pages left without any join the free queue.

    They are taken again in the order of the list, so a caller lists a sequence's last page first.
    A page may stand in the list several times.
    """
    size, count = pool.queue_P.shape[0], page_N.shape[0]
    at_N = jnp.where(held_N, page_N, size)
    refcount_P = pool.refcount_P.at[at_N].add(-1, mode="drop")
    index_N = jnp.arange(count, dtype=jnp.int32)
    first_P = jnp.full(size, count, jnp.int32).at[at_N].min(index_N, mode="drop")
    freed_N = (
        held_N
        & (first_P.at[page_N].get(mode="clip") == index_N)
        & (refcount_P.at[page_N].get(mode="clip") == 0)
    )
    place_N = (pool.head + pool.num_free + jnp.cumsum(freed_N) - 1) % size
    return pool.replace(
        refcount_P=refcount_P,
        queue_P=pool.queue_P.at[jnp.where(freed_N, place_N, size)].set(page_N, mode="drop"),
        num_free=pool.num_free + jnp.sum(freed_N, dtype=jnp.int32),
    )


def share(pool: PagePool, page_N: jax.Array, held_N: jax.Array) -> PagePool:
    """Add one reference per entry where `held_N`; pages that were free leave the queue."""
    size = pool.queue_P.shape[0]
    refcount_P = pool.refcount_P.at[jnp.where(held_N, page_N, size)].add(1, mode="drop")
    ring_P = jnp.arange(size, dtype=jnp.int32)
    order_P = pool.queue_P.at[(pool.head + ring_P) % size].get(mode="clip")
    stays_P = (ring_P < pool.num_free) & (refcount_P.at[order_P].get(mode="clip") == 0)
    place_P = jnp.where(stays_P, jnp.cumsum(stays_P) - 1, size)
    return pool.replace(
        refcount_P=refcount_P,
        queue_P=jnp.zeros_like(pool.queue_P).at[place_P].set(order_P, mode="drop"),
        head=jnp.int32(0),
        num_free=jnp.sum(stays_P, dtype=jnp.int32),
    )


def page_hashes(tokens_BWC: jax.Array, first_page_B: jax.Array) -> jax.Array:
    """A hash of each page's tokens and where they stand, uint32 [B, W].

    Hashes of a sequence's pages, added to `root_hash`, give the hash of the whole history, so a
    chain needs no loop.
    A collision costs a hit, never a wrong page.
    """
    _, width, size = tokens_BWC.shape
    page_BW = first_page_B[:, None] + jnp.arange(width)
    position_BWC = page_BW[:, :, None] * size + jnp.arange(size)
    x = tokens_BWC.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x = x ^ (position_BWC.astype(jnp.uint32) * jnp.uint32(0x85EBCA77) + jnp.uint32(0x27D4EB2F))
    x = (x ^ (x >> 15)) * jnp.uint32(0x2C1B3C6D)
    x = (x ^ (x >> 12)) * jnp.uint32(0x297A2D39)
    return jnp.sum(x ^ (x >> 15), axis=-1, dtype=jnp.uint32)


def root_hash(salt_B: jax.Array) -> jax.Array:
    """Where the chain hashes of a salt begin, uint32: salts hold the same history side by side."""
    x = salt_B.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
    return x ^ (x >> 13)


def lookup(
    pool: PagePool, tokens_BWC: jax.Array, salt_B: jax.Array, usable_BW: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The longest proven chain of each history from its root: (page_BW, length_B, chain hash_BW).

    Page w counts when its tokens and salt are equal, its parent is page w-1 (the root for w = 0) in
    its present epoch, and page w-1 counts. Pages that are not `usable_BW` never do.
    """
    size, num_histories = pool.hash_P.shape[0], salt_B.shape[0]
    hashes_BW = page_hashes(tokens_BWC, jnp.zeros_like(salt_B))
    hash_BW = root_hash(salt_B)[:, None] + jnp.cumsum(hashes_BW, -1, dtype=jnp.uint32)
    rank_P = jnp.where(pool.published_P, jnp.arange(size, dtype=jnp.int32), size)
    page_BW = least_rank(pool.hash_P, rank_P, hash_BW, size)
    root_B1 = jnp.full((num_histories, 1), ROOT_PAGE, jnp.int32)
    before_BW = jnp.concatenate([root_B1, page_BW[:, :-1]], axis=1)
    counts_BW = (
        usable_BW
        & (page_BW < size)
        & jnp.all(pool.content_PC.at[page_BW].get(mode="clip") == tokens_BWC, axis=-1)
        & (pool.salt_P.at[page_BW].get(mode="clip") == salt_B[:, None])
        & _linked(pool, page_BW, before_BW, pool.epoch_P.at[before_BW].get(mode="clip"))
    )
    length_B = jnp.sum(jnp.cumprod(counts_BW, axis=-1), axis=-1, dtype=jnp.int32)
    return page_BW, length_B, hash_BW


def least_rank(hash_P: jax.Array, rank_P: jax.Array, hash_BW: jax.Array, none: int) -> jax.Array:
    """The least rank among the pages of each hash, `none` if there is no such page: int32 [B, W].
    Pages of rank `none` do not count."""
    if hash_P.size * hash_BW.size <= MOST_PAIRS:
        return jnp.min(jnp.where(hash_P == hash_BW[:, :, None], rank_P, none), axis=-1)
    # Each page finds its hash among those that are sought, sorted; equal ones share the first.
    hash_Q = jnp.sort(hash_BW.reshape(-1))
    q_P = jnp.searchsorted(hash_Q, hash_P, method="scan_unrolled")
    q_P = jnp.where(hash_Q.at[q_P].get(mode="clip") == hash_P, q_P, hash_Q.size)
    rank_Q = jnp.full(hash_Q.size, none, jnp.int32).at[q_P].min(rank_P, mode="drop")
    q_BW = jnp.searchsorted(hash_Q, hash_BW, method="scan_unrolled")
    return rank_Q.at[q_BW].get(mode="clip")


def _linked(pool: PagePool, page_BW, parent_BW, epoch_BW) -> jax.Array:
    return (pool.parent_P.at[page_BW].get(mode="clip") == parent_BW) & (
        pool.parent_epoch_P.at[page_BW].get(mode="clip") == epoch_BW
    )


def publish(
    pool: PagePool,
    page_BW: jax.Array,
    tokens_BWC: jax.Array,
    hash_BW: jax.Array,
    salt_B: jax.Array,
    tip_page_B: jax.Array,
    tip_epoch_B: jax.Array,
    full_BW: jax.Array,
) -> tuple[PagePool, jax.Array]:
    """Offer newly filled pages to the prefix index: (pool, canonical page of each, [B, W]).

    A history that is published already stays with its first page, and so does one that two rows
    fill in the same call; the other page remains private. Chains therefore never fork by copy.
    """
    size = pool.hash_P.shape[0]
    ids_P = jnp.arange(size, dtype=jnp.int32)
    at_BW = jnp.where(full_BW, page_BW, size)
    offered_P = jnp.zeros(size, bool).at[at_BW].set(True, mode="drop")
    trial = pool.replace(
        hash_P=pool.hash_P.at[at_BW].set(hash_BW, mode="drop"),
        content_PC=pool.content_PC.at[at_BW].set(tokens_BWC, mode="drop"),
        salt_P=pool.salt_P.at[at_BW].set(
            jnp.broadcast_to(salt_B[:, None], at_BW.shape), mode="drop"
        ),
    )
    # Published pages come before offered ones, then the lower page id.
    rank_P = jnp.where(pool.published_P, ids_P, jnp.where(offered_P, size + ids_P, 2 * size))
    best_BW = least_rank(trial.hash_P, rank_P, hash_BW, 2 * size) % size
    same_BW = jnp.all(trial.content_PC.at[best_BW].get(mode="clip") == tokens_BWC, axis=-1) & (
        trial.salt_P.at[best_BW].get(mode="clip") == salt_B[:, None]
    )
    published_BW = pool.published_P.at[best_BW].get(mode="clip")
    parent_BW = jnp.concatenate([tip_page_B[:, None], best_BW[:, :-1]], axis=1)
    epoch_BW = jnp.concatenate(
        [tip_epoch_B[:, None], pool.epoch_P.at[best_BW[:, :-1]].get(mode="clip")], axis=1
    )
    linked_BW = _linked(pool, best_BW, parent_BW, epoch_BW)
    # A published page that only looks alike (collision, stale link) ends the chain here.
    sound_BW = jnp.cumprod(full_BW & same_BW & (linked_BW | ~published_BW), axis=-1).astype(bool)
    new_BW = sound_BW & ~published_BW & (best_BW == page_BW)
    set_BW = jnp.where(new_BW, page_BW, size)
    pool = trial.replace(
        published_P=pool.published_P.at[set_BW].set(True, mode="drop"),
        parent_P=pool.parent_P.at[set_BW].set(parent_BW, mode="drop"),
        parent_epoch_P=pool.parent_epoch_P.at[set_BW].set(epoch_BW, mode="drop"),
    )
    return pool, jnp.where(sound_BW, best_BW, -1)
