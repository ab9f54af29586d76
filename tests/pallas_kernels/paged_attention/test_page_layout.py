"""The page pool: where a token goes, what comes back, what an index out of range does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.layout import page_size_of, pages_shape, read_dense, write_pages


@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 80), (4, 7), (16, 64), (40, 128)])
def test_what_is_written_is_read_at_its_position(page_size, head_dim):
    """3 sequences of up to 40 tokens in shuffled pages; 40 is the contiguous case."""
    rng = np.random.default_rng(0)
    columns = -(-40 // page_size)
    table_SM = 1 + rng.permutation(3 * columns).reshape(3, columns).astype(np.int32)
    kv_pages = jnp.full(pages_shape(3 * columns + 1, page_size, 2, head_dim), jnp.nan)
    assert page_size_of(kv_pages) == page_size
    k_SXKH, v_SXKH = rng.standard_normal((2, 3, 40, 2, head_dim)).astype(np.float32)
    slot_T, x_T = (a.ravel() for a in np.mgrid[:3, :40])
    order = rng.permutation(120)
    slot_T, x_T = slot_T[order], x_T[order]
    kv_pages = write_pages(
        kv_pages,
        k_SXKH[slot_T, x_T],
        v_SXKH[slot_T, x_T],
        jnp.asarray(table_SM[slot_T, x_T // page_size]),
        jnp.asarray(x_T % page_size),
    )
    k_read, v_read = read_dense(kv_pages, jnp.asarray(table_SM))
    np.testing.assert_array_equal(k_read[:, :40], k_SXKH)
    np.testing.assert_array_equal(v_read[:, :40], v_SXKH)
    assert np.isnan(kv_pages[0]).all()


@pytest.mark.parametrize("jit", [False, True])
def test_b105_index_out_of_range_writes_nowhere(jit):
    """Pads of -1 and num_pages, offsets of -1 and page size; the last page holds a canary."""
    kv_pages = jnp.zeros(pages_shape(4, 2, 1, 3)).at[3].set(7.0)
    page_T = jnp.array([-1, 4, 1, 1, -4, 1, 2])
    offset_T = jnp.array([0, 1, -1, 2, 1, 1, 0])
    new_TKH = jnp.arange(1.0, 8.0)[:, None, None] * jnp.ones((7, 1, 3))
    write = jax.jit(write_pages) if jit else write_pages
    expected = np.array(kv_pages)
    expected[1, :, :, 1], expected[2, :, :, 0] = 6.0, 7.0
    np.testing.assert_array_equal(write(kv_pages, new_TKH, new_TKH, page_T, offset_T), expected)


def test_b105_last_slot_of_last_page():
    """Two tokens at the pool's end: the second is out of range and does not slide back."""
    kv_pages = jnp.zeros(pages_shape(2, 2, 1, 1))
    new_TKH = jnp.array([5.0, 6.0])[:, None, None]
    kv_pages = write_pages(kv_pages, new_TKH, new_TKH, jnp.array([1, 2]), jnp.array([1, 0]))
    assert kv_pages[1, 0, 0].ravel().tolist() == [0.0, 5.0]
    assert (kv_pages[0] == 0).all()


def test_dense_view_of_a_bad_table_stays_in_the_pool():
    kv_pages = jnp.arange(4.0).reshape(4, 1, 1, 1, 1) * jnp.ones(pages_shape(4, 1, 1, 1))
    k_SXKH, _ = read_dense(kv_pages, jnp.array([[2, -1, 9]]))
    assert k_SXKH.ravel().tolist() == [2.0, 0.0, 3.0]


def test_values_take_the_pools_dtype():
    kv_pages = jnp.zeros(pages_shape(2, 2, 1, 2), jnp.bfloat16)
    new_TKH = jnp.full((1, 1, 2), 1.0 + 2**-12)
    kv_pages = write_pages(kv_pages, new_TKH, new_TKH, jnp.array([1]), jnp.array([0]))
    assert kv_pages.dtype == jnp.bfloat16
    assert (kv_pages[1, :, :, 0] == 1).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 16, 1, 8), "num_pages is 1: needs at least 2"),
        ((2, 0, 1, 8), "page_size is 0: needs at least 1"),
        ((2, 16, 0, 8), "num_kv_heads is 0"),
        ((2, 16, 1, -8), "head_dim is -8"),
    ],
)
def test_shape_that_holds_nothing_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        pages_shape(*shape)


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "offsets"), [((3, 1, 8), (2, 1, 8), 3), ((3, 2, 8), (3, 2, 8), 3),
                                        ((3, 1, 8), (3, 1, 8), 2)],
)  # fmt: skip
def test_write_of_wrong_shape_is_refused(k_shape, v_shape, offsets):
    kv_pages = jnp.zeros(pages_shape(2, 4, 1, 8))
    with pytest.raises(ValueError, match="must be"):
        write_pages(
            kv_pages,
            jnp.zeros(k_shape),
            jnp.zeros(v_shape),
            jnp.zeros(3, jnp.int32),
            jnp.zeros(offsets, jnp.int32),
        )
