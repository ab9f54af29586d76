"""The contract of ragged paged attention, for every implementation that a host runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLEMENTATIONS, ragged_paged_attention
from pallas_kernels.paged_attention.cases import CASES, PADDING_ROWS, Case, make_inputs
from pallas_kernels.paged_attention.layout import pages_shape, write_pages
from tests.pallas_kernels.paged_attention.attention_oracle import check, oracle

# The kernels of a chip run interpreted in their own tests.
IMPLS = sorted(IMPLEMENTATIONS.keys() - {"tpu", "gpu_mosaic", "gpu_triton"})
each_impl = pytest.mark.parametrize("impl", IMPLS)


def name_of(value):
    return getattr(value, "name", value)


def run(case, inputs, impl):
    *arrays, sinks_N = inputs
    with jax.numpy_dtype_promotion("strict"):
        return ragged_paged_attention(
            *arrays,
            scale=case.scale,
            max_q_len=max(1, *case.q_lens),
            window=case.window,
            softcap=case.softcap,
            sinks_N=sinks_N,
            impl=impl,
        )


@functools.lru_cache
def expected_of(case, dtype):
    inputs = make_inputs(case, dtype=dtype)
    return oracle(inputs, scale=case.scale, window=case.window, softcap=case.softcap)


@pytest.mark.parametrize(
    ("case", "impl"),
    [(case, "xla") for case in CASES] + [(case, "reference") for case in CASES[::3]],
    ids=name_of,
)
def test_real_shapes_float32(case, impl):
    inputs = make_inputs(case)
    out_TNH = run(case, inputs, impl)
    assert out_TNH.dtype == jnp.float32
    check(out_TNH, inputs, expected_of(case, "float32"))
    assert (np.asarray(out_TNH)[-PADDING_ROWS:] == 0).all()


@pytest.mark.parametrize(
    ("case", "impl"),
    [(CASES[0], "reference"), *((case, "xla") for case in CASES[::5])],
    ids=name_of,
)
def test_real_shapes_bfloat16(case, impl):
    inputs = make_inputs(case, dtype="bfloat16")
    out_TNH = run(case, inputs, impl)
    assert out_TNH.dtype == jnp.bfloat16
    check(out_TNH, inputs, expected_of(case, "bfloat16"))


@each_impl
def test_pages_may_have_another_dtype_than_queries(impl):
    case = CASES[0]
    inputs = make_inputs(case, dtype="bfloat16")
    wide = inputs._replace(kv_pages=inputs.kv_pages.astype(jnp.float32))
    same = run(case, inputs, impl)
    np.testing.assert_array_equal(run(case, wide, impl), same)


@each_impl
def test_b43_length_at_page_edges(impl):
    """Prompts of 1, 3, 4, 5, 8, 9 tokens on pages of 4: as with one page per sequence."""
    lengths = (1, 3, 4, 5, 8, 9)
    paged = Case("paged", 4, 2, 8, 4, (1,) * 6, lengths)
    whole = Case("whole", 4, 2, 8, 12, (1,) * 6, lengths)
    inputs, one_page = make_inputs(paged), make_inputs(whole)
    kv_pages, pages, table_SM = (
        np.array(a) for a in (one_page.kv_pages, inputs.kv_pages, inputs.page_table_SM)
    )
    for s, length in enumerate(lengths):
        for j in range(length):
            page = int(one_page.page_table_SM[s, 0])
            kv_pages[page, :, :, j] = pages[table_SM[s, j // 4], :, :, j % 4]
    one_page = one_page._replace(kv_pages=kv_pages, q_TNH=inputs.q_TNH)
    paged_out, whole_out = run(paged, inputs, impl), run(whole, one_page, impl)
    check(whole_out, inputs, np.asarray(paged_out, np.float64))


@each_impl
@pytest.mark.parametrize("window", [1, 4, 12])
def test_b82_window_counts_itself(impl, window):
    """10 tokens with equal scores and one-hot values: the output shows which keys were seen."""
    k_TKH = jnp.zeros((10, 1, 10))
    positions = jnp.arange(10)
    kv_pages = jnp.full(pages_shape(5, 3, 1, 10), jnp.nan)
    kv_pages = write_pages(kv_pages, k_TKH, jnp.eye(10)[:, None], 1 + positions // 3, positions % 3)
    table_SM = jnp.array([[1, 2, 3, 4]], jnp.int32)

    seen = {}
    for chunk in (10, 5, 1):  # prefill, chunked prefill, decode
        for end in range(chunk, 11, chunk):
            out_TNH = ragged_paged_attention(
                jnp.zeros((10, 1, 10)),
                kv_pages,
                table_SM,
                *(jnp.array([n], jnp.int32) for n in (0, chunk, end)),
                scale=1.0,
                max_q_len=10,
                window=window,
                impl=impl,
            )
            for i in range(chunk):
                seen[chunk, end - chunk + i] = np.flatnonzero(out_TNH[i, 0]).tolist()
    for (_, p), keys in seen.items():
        assert len(keys) == min(p + 1, window)
        assert keys == list(range(max(0, p - window + 1), p + 1))
    assert len(seen) == 30


@each_impl
def test_b86_sink_is_one_more_logit_whose_value_is_dropped(impl):
    """Zero keys, unit values, 3 query heads per KV head: n keys and a sink z give n / (n + e^z)."""
    lengths = (1, 16, 17, 48, 200)
    sinks_N = jnp.array([2.0, -jnp.inf, 0.5, 7.0, -3.0, 2.0])
    kv_pages = jnp.ones(pages_shape(15, 16, 2, 4)).at[:, 0].set(0.0)
    out_TNH = ragged_paged_attention(
        jnp.ones((5, 6, 4)),
        kv_pages,
        jnp.tile(jnp.arange(1, 14, dtype=jnp.int32), (5, 1)),
        jnp.arange(5, dtype=jnp.int32),
        jnp.ones(5, jnp.int32),
        jnp.array(lengths, jnp.int32),
        scale=1.0,
        max_q_len=1,
        sinks_N=sinks_N,
        impl=impl,
    )
    n_S1 = np.array(lengths, np.float64)[:, None]
    expected_SN = n_S1 / (n_S1 + np.exp(np.asarray(sinks_N, np.float64)))
    np.testing.assert_allclose(out_TNH[..., 0], expected_SN, rtol=2.0**-24 * np.sqrt(200) * 4)


@each_impl
@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[12]], ids=name_of)
def test_b104_poison_changes_no_bit(case, impl):
    """The same call with all that must not matter set to 0 instead of NaN, inf and 1e30."""
    inputs = make_inputs(case)
    ordinary = [jnp.where(jnp.abs(a) < 1e3, a, 0.0) for a in (inputs.q_TNH, inputs.kv_pages)]
    assert not all(np.isfinite(a).all() for a in inputs[:2])
    clean = inputs._replace(q_TNH=ordinary[0], kv_pages=ordinary[1])
    np.testing.assert_array_equal(run(case, inputs, impl), run(case, clean, impl))


@each_impl
def test_nothing_to_do(impl):
    """No slot brings a token: all rows are 0, whatever q and the pool hold."""
    case = Case("idle", 4, 2, 8, 4, (0, 0), (0, 7))
    assert (np.asarray(run(case, make_inputs(case), impl)) == 0).all()


@each_impl
def test_slots_may_share_pages(impl):
    """Three continuations of one prompt page: each equals the run on its own copy of the pages."""
    case = Case("fork", 4, 2, 8, 4, (2, 1, 1), (6, 5, 8))
    inputs = make_inputs(case)
    own = np.asarray(inputs.page_table_SM)
    shared_page = own[0, 0]
    kv_pages = inputs.kv_pages
    for s in (1, 2):
        kv_pages = kv_pages.at[own[s, 0]].set(kv_pages[shared_page])
    copied = inputs._replace(kv_pages=kv_pages)
    shared = copied._replace(page_table_SM=inputs.page_table_SM.at[:, 0].set(shared_page))
    np.testing.assert_array_equal(run(case, shared, impl), run(case, copied, impl))


@each_impl
@pytest.mark.parametrize("q_lens", [(1, 1, 1, 0), (20, 1, 5, 1)], ids=["decode", "mixed"])
def test_b103_neighbours_change_no_bit(impl, q_lens):
    """Slot 1 with the same shapes, but other content, lengths and pages of all other slots."""
    case = Case("neighbours", 6, 2, 16, 4, q_lens, (37, 50, 9, 3))
    inputs = make_inputs(case)
    mine = np.asarray(inputs.page_table_SM)[1, :13]
    rows = slice(q_lens[0], q_lens[0] + q_lens[1])
    rng = np.random.default_rng(1)
    other = inputs._replace(
        q_TNH=rng.standard_normal(inputs.q_TNH.shape, np.float32),
        kv_pages=rng.standard_normal(inputs.kv_pages.shape, np.float32),
        q_len_S=jnp.array([q_lens[0] // 2, q_lens[1], 0, q_lens[3]], jnp.int32),
        kv_len_S=jnp.array([11, 50, 0, 4], jnp.int32),
    )
    other.q_TNH[rows] = inputs.q_TNH[rows]
    other.kv_pages[mine] = np.asarray(inputs.kv_pages)[mine]
    first, second = run(case, inputs, impl)[rows], run(case, other, impl)[rows]
    assert (np.asarray(first) != 0).all()
    np.testing.assert_array_equal(first, second)
