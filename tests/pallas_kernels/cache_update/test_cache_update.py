"""The TPU kernel that writes new keys and values, interpreted, against the plain scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_update import tpu, update_cache
from pallas_kernels.chips import chip
from pallas_kernels.paged_attention.layout import page_rows, pages_shape, write_pages

PAGES, TOKENS = 7, 40


@jax.jit
def write(kv_pages, k_TKH, v_TKH, page_T, offset_T):
    new_TRL = page_rows(kv_pages, k_TKH, v_TKH, page_T, offset_T)
    return tpu.write(kv_pages, new_TRL, page_T, offset_T, interpret=True)


def inputs(slots, heads=(2, 8), page_size=32, lanes=128, dtype=jnp.float32):
    """Tokens of slots that own a page each: (first position, tokens) per slot, then padding."""
    rng = np.random.default_rng(0)
    shape = pages_shape(PAGES, page_size, *heads, lanes)
    kv_pages = jnp.asarray(rng.standard_normal(shape), dtype)
    page_T, offset_T = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.int32)
    t = 0
    for s, (first, count) in enumerate(slots):
        count = min(count, page_size - first, TOKENS - t)
        page_T[t : t + count] = PAGES - 1 - s
        offset_T[t : t + count] = first + np.arange(count)
        t += count
    k_TKH, v_TKH = jnp.asarray(rng.standard_normal((2, TOKENS, *heads)), dtype)
    return kv_pages, k_TKH, v_TKH, jnp.asarray(page_T), jnp.asarray(offset_T)


def same_beside_trash(got, expected):
    got, expected = (np.asarray(a[1:], np.float32) for a in (got, expected))
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 32)), max_size=6))
def test_any_runs(slots):
    call = inputs(slots)
    same_beside_trash(write(*call), write_pages(*call))


@pytest.mark.parametrize("heads", [(2, 8), (3, 64), (4, 64), (1, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_heads_share(heads, dtype):
    call = inputs([(5, 20), (31, 1), (0, 3)], heads, 32, 128, jnp.dtype(dtype))
    same_beside_trash(write(*call), write_pages(*call))


def test_more_runs_than_buffers():
    """Twelve runs of one token: buffers are taken again after their slab is written."""
    kv_pages, k_TKH, v_TKH, _, _ = inputs([], page_size=32)
    page_T = jnp.zeros(TOKENS, jnp.int32).at[:12].set(jnp.arange(12) // 2 + 1)
    offset_T = jnp.zeros(TOKENS, jnp.int32).at[:12].set(jnp.arange(12) % 2 * 16 + 3)
    call = (kv_pages, k_TKH, v_TKH, page_T, offset_T)
    same_beside_trash(write(*call), write_pages(*call))


def test_b105_index_out_of_range_writes_nowhere():
    kv_pages, k_TKH, v_TKH, page_T, offset_T = inputs([(0, 4)])
    page_T = page_T.at[4:8].set(jnp.array([-1, PAGES, 2, 2]))
    offset_T = offset_T.at[4:8].set(jnp.array([0, 0, -1, 32]))
    got = write(kv_pages, k_TKH, v_TKH, page_T, offset_T)
    same_beside_trash(got, write_pages(*inputs([(0, 4)])))


def test_tpu_interpreter_finds_no_race(capfd):
    call = inputs([(5, 20), (31, 1), (0, 3), (15, 2)])
    new_TRL = page_rows(*call)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    got = tpu.write(call[0], new_TRL, *call[3:], interpret=interpret)
    same_beside_trash(got, write_pages(*call))
    assert "RACE" not in capfd.readouterr().out.upper()


def test_chosen_by_chip_and_page_size():
    assert tpu.supports(pages_shape(2, 32, 2, 128), chip("v6e")) is None
    assert "multiple of 16" in tpu.supports(pages_shape(2, 24, 2, 128), chip("v6e"))
    assert "the host CPU" in tpu.supports(pages_shape(2, 32, 2, 128), None)
    call = inputs([(5, 20)])
    np.testing.assert_array_equal(update_cache(*call), write_pages(*call))
