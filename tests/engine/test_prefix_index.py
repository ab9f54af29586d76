"""A prefix hit is proved: each part of the proof ends the chain alone, even where hashes agree."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.pages import MOST_PAIRS, least_rank, lookup, page_hashes, publish, root_hash, take
from engine.state import PagePool, init_state
from tests.engine.test_advance import BASE, STEMS

TOKENS_BWC = jnp.asarray(STEMS[0][:8], jnp.int32).reshape(1, 2, 4)
SALT_B, ZERO_B = jnp.asarray([3], jnp.int32), jnp.zeros(1, jnp.int32)
BOTH_BW = jnp.ones((1, 2), bool)


@lru_cache
def published() -> PagePool:
    """Pages 1 and 2 hold a history of eight tokens."""
    pool, page_W = take(init_state(BASE, None).pool, jnp.asarray([True, True]))
    hash_BW = root_hash(SALT_B)[:, None] + jnp.cumsum(page_hashes(TOKENS_BWC, ZERO_B), axis=-1)
    page_BW, hash_BW = page_W[None], hash_BW.astype(jnp.uint32)
    pool, canonical_BW = publish(
        *(pool, page_BW, TOKENS_BWC, hash_BW, SALT_B, ZERO_B, ZERO_B, BOTH_BW)
    )
    assert canonical_BW.tolist() == [[1, 2]]
    return pool


def found(pool: PagePool) -> int:
    page_BW, length_B, _ = lookup(pool, TOKENS_BWC, SALT_B, BOTH_BW)
    assert page_BW[0, : int(length_B[0])].tolist() == [1, 2][: int(length_B[0])]
    return int(length_B[0])


def test_a_published_history_is_found_whole():
    assert found(published()) == 2


@pytest.mark.parametrize(
    ("field", "page", "value", "length"),
    [
        ("published_P", 2, False, 1),
        ("content_PC", 2, 96, 1),
        ("salt_P", 2, 4, 1),
        ("parent_P", 2, 5, 1),
        ("parent_epoch_P", 2, 9, 1),
        ("epoch_P", 1, 9, 1),  # the parent was taken again: the link is stale
        ("content_PC", 1, 96, 0),  # nothing counts behind what does not
        ("salt_P", 1, 4, 0),
    ],
)
def test_b54_each_part_of_the_proof_ends_the_chain(field, page, value, length):
    pool = published()
    changed = getattr(pool, field).at[page].set(value, mode="drop")
    assert found(pool.replace(**{field: changed})) == length


@pytest.mark.parametrize(
    ("token", "salt", "epoch", "canonical"),
    [(0, 0, 0, 1), (1, 0, 0, -1), (0, 1, 0, -1), (0, 0, 7, -1)],
    ids=["alike", "content", "salt", "parent"],
)
def test_b54_a_page_of_equal_hash_is_another_unless_all_else_is_equal(
    token, salt, epoch, canonical
):
    """A history that fills a third page as the first one was; a chain ends where it cannot tell."""
    pool, page_N = take(published(), jnp.asarray([True]))
    pool, canonical_BW = publish(
        *(pool, page_N[None], TOKENS_BWC[:, :1] + token, pool.hash_P[1].reshape(1, 1)),
        *(SALT_B + salt, ZERO_B, ZERO_B + epoch, BOTH_BW[:, :1]),
    )
    assert canonical_BW.tolist() == [[canonical]]
    assert pool.published_P.nonzero()[0].tolist() == [1, 2]
    assert found(pool) == 2


def test_a_page_that_is_taken_begins_an_epoch():
    pool, page_N = take(published(), jnp.asarray([True, False]))
    assert (pool.epoch_P - published().epoch_P).tolist() == [
        int(page == int(page_N[0])) for page in range(BASE.num_pages)
    ]


def test_hashes_tell_where_tokens_stand():
    here, there = (page_hashes(TOKENS_BWC, jnp.asarray([first])) for first in (0, 1))
    assert bool(jnp.all(here != there))
    swapped = page_hashes(TOKENS_BWC[:, ::-1], ZERO_B)
    assert int(jnp.sum(here)) != int(jnp.sum(swapped))


@pytest.mark.parametrize("num_pages", [50, 5000])
def test_the_least_rank_of_a_hash(num_pages):
    """Few hashes, all in pairs, and many, sorted: several pages and several queries of most, the
    largest hash among them, pages that do not count, hashes that nobody has or seeks."""
    rng = np.random.default_rng(num_pages)
    values = np.append(rng.integers(0, 2**32, 40, np.uint32), np.uint32(2**32 - 1))
    sought = np.delete(values, range(20, 30))
    hash_P, hash_BW = rng.choice(values[5:], num_pages), rng.choice(sought, (8, 32))
    assert (hash_P.size * hash_BW.size > MOST_PAIRS) == (num_pages == 5000)
    none = 2 * num_pages
    rank_P = np.where(rng.random(num_pages) < 0.3, none, rng.permutation(num_pages))
    expected = [
        min((r for h, r in zip(hash_P, rank_P, strict=True) if h == sought), default=none)
        for sought in hash_BW.flatten()
    ]
    found_BW = jax.jit(least_rank, static_argnums=3)(hash_P, rank_P.astype(np.int32), hash_BW, none)
    assert found_BW.flatten().tolist() == expected
    assert none in expected
