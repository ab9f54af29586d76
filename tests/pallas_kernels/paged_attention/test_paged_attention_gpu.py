"""The Triton kernels interpreted on the CPU: named and drawn cases, ways to split, narrow pages."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.chips import CHIPS
from pallas_kernels.paged_attention.cases import CASES, PADDING_ROWS, Case, make_inputs
from pallas_kernels.paged_attention.gpu_triton_sizes import Sizes
from pallas_kernels.paged_attention.layout import pages_shape
from pallas_kernels.paged_attention.spec import tolerance
from tests.pallas_kernels.paged_attention.attention_oracle import excess, oracle
from tests.pallas_kernels.paged_attention.drawn import ROWS, SLOTS, drawn_inputs, lengths
from tests.pallas_kernels.paged_attention.gpu_runs import attend, run, small_sizes


def name_of(value):
    return getattr(value, "name", value)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_named_case_float32(case):
    inputs = make_inputs(case)
    out_TNH, spec = run(case, inputs, small_sizes(case))
    assert excess(out_TNH, case, inputs, spec) <= 1
    assert tolerance(spec, max(case.kv_lens))[0] <= 1e-5
    assert (out_TNH[-PADDING_ROWS:] == 0).all()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(CASES[2], "bfloat16"), (CASES[4], "float16"), (CASES[12], "bfloat16")],
    ids=name_of,
)
def test_named_case_narrow(case, dtype):
    """With the sizes that an H100 would have."""
    inputs = make_inputs(case, dtype=dtype)
    out_TNH, spec = run(case, inputs, chip=CHIPS["h100"])
    assert excess(out_TNH, case, inputs, spec) <= 1
    expected = oracle(inputs, scale=case.scale, window=case.window, softcap=case.softcap)
    assert np.linalg.norm(out_TNH - expected) / np.linalg.norm(expected) < 5e-3


# Page size, heads, KV heads, head width, window, softcap, sinks, sizes.
SETTINGS = {
    "group_of_two": (4, 4, 2, 16, None, None, False, (Sizes(2, 16, 16, 3, 8, 2), Sizes(8, 16, 16))),
    "odd": (3, 9, 3, 10, 5, 3.0, True, (Sizes(5, 16, 16, 2, 16, 1), Sizes(5, 16, 16, programs=2))),
    "tiles_of_rows": (8, 20, 1, 16, 7, None, True, (Sizes(ROWS, 32, 16, 4, 4, 3),)),
}


def drawn_excess(name, slots, seed=0, sinks_N=None):
    """Of a call of fixed shape for `slots`, a list of (q_len, kv_len)."""
    *shape, sizes = SETTINGS[name]
    case, inputs = drawn_inputs(name, shape, slots, seed)
    if sinks_N is not None:
        inputs = inputs._replace(sinks_N=sinks_N)
    out_TNH, spec = run(case, inputs, sizes, max_q_len=ROWS)
    assert (out_TNH[sum(q_len for q_len, _ in slots) :] == 0).all()
    return excess(out_TNH, case, inputs, spec)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(lengths=lengths(), seed=st.integers(0, 3))
def test_any_lengths(name, lengths, seed):
    assert drawn_excess(name, lengths, seed) <= 1


@pytest.mark.parametrize("name", SETTINGS)
def test_b106_sizes_around_block_edges(name):
    """New tokens and keys at block - 1, block, block + 1 and 2 * block + 1, padding poisoned."""
    sizes = SETTINGS[name][-1][-1]
    block = sizes.keys
    for q_len in (sizes.queries - 1, sizes.queries, sizes.queries + 1):
        keys = (block - 1, block, block + 1, 2 * block + 1)
        slots = [(min(q_len, ROWS // SLOTS, size), size) for size in keys]
        assert drawn_excess(name, slots) <= 1


@pytest.mark.parametrize("name", ["odd", "tiles_of_rows"])
def test_b86_sinks_of_minus_infinity_are_none(name):
    """Where the window hides all of the first block from a tile's last rows: in a tile alone and in
    a part, whose heads have a sink or none in turns."""
    slots = [(7, 23), (14, 30), (1, 17), (2, 33)]
    heads = SETTINGS[name][1]
    sinks_N = jnp.where(jnp.arange(heads) % 2 == 0, -jnp.inf, jnp.float32(0.5))
    assert drawn_excess(name, slots, sinks_N=sinks_N) <= 1


SPLIT = Case("split", 6, 2, 16, 4, (1, 1, 3, 0, 2), (64, 1, 37, 0, 33), sinks=True)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16, 32])
def test_b86_any_number_of_parts(parts):
    """One to more parts than blocks, exactly full pages, a slot of length 0, a sink per head."""
    inputs = make_inputs(SPLIT)
    out_TNH, spec = run(SPLIT, inputs, (Sizes(3, 16, 16, parts, 1, programs=4),))
    assert excess(out_TNH, SPLIT, inputs, spec) <= 1


def test_how_a_slot_is_split_depends_on_itself_alone():
    """Neighbours of other lengths and pages change no bit of a row."""
    sizes = (Sizes(3, 16, 16, 3, 20, programs=2),)
    inputs = make_inputs(SPLIT)
    alone = inputs._replace(
        q_len_S=inputs.q_len_S.at[jnp.array([0, 1, 4])].set(0, mode="drop"),
        kv_len_S=inputs.kv_len_S.at[jnp.array([0, 1, 4])].set(7, mode="drop"),
    )
    rows = slice(2, 5)
    np.testing.assert_array_equal(
        run(SPLIT, inputs, sizes)[0][rows], run(SPLIT, alone, sizes)[0][rows]
    )


@pytest.mark.parametrize("window", [1, 4, 12])
def test_b82_window_counts_itself(window):
    """10 tokens with equal scores and one-hot values: the output shows which keys were seen."""
    kv_pages = np.full(pages_shape(5, 3, 1, 10), np.nan, np.float32)
    for x in range(10):
        kv_pages[1 + x // 3, :, 0, x % 3] = (np.zeros(10), np.eye(10)[x])
    for chunk, end in ((10, 10), (5, 5), (5, 10), *((1, n) for n in range(1, 11))):
        out_TNH = attend(
            jnp.zeros((10, 1, 10)),
            jnp.asarray(kv_pages),
            jnp.array([[1, 2, 3, 4]], jnp.int32),
            *(jnp.array([n], jnp.int32) for n in (0, chunk, end)),
            scale=1.0,
            max_q_len=10,
            window=window,
            softcap=None,
            sinks_N=None,
            sizes=(Sizes(1, 16, 16, 2, 1), Sizes(4, 16, 16)),
        )
        for i in range(chunk):
            p = end - chunk + i
            seen = np.flatnonzero(np.asarray(out_TNH)[i, 0]).tolist()
            assert seen == list(range(max(0, p - window + 1), p + 1))


def test_b104_poison_changes_no_bit():
    """The same call with all that must not matter set to 0 instead of NaN, inf and 1e30."""
    case = Case("poison", 4, 2, 16, 4, (1, 9, 1), (30, 40, 5), window=9)
    inputs = make_inputs(case)
    ordinary = [jnp.where(jnp.abs(a) < 1e3, a, 0.0) for a in (inputs.q_TNH, inputs.kv_pages)]
    assert not all(np.isfinite(a).all() for a in inputs[:2])
    clean = inputs._replace(q_TNH=ordinary[0], kv_pages=ordinary[1])
    sizes = (Sizes(1, 16, 16, 3, 1), Sizes(4, 16, 16))
    np.testing.assert_array_equal(run(case, inputs, sizes)[0], run(case, clean, sizes)[0])


def test_b105_entries_past_the_used_ones_do_not_matter():
    """Neither their value nor whether a page of that number exists changes a bit."""
    case = Case("edges", 4, 2, 16, 4, (1, 1, 2), (8, 5, 16))
    inputs = make_inputs(case)
    sizes = (Sizes(2, 16, 16, 2, 1),)
    expected_TNH, _ = run(case, inputs, sizes)
    for value in (0, -1, 3, 1 << 30, -(1 << 31)):
        table_SM = np.asarray(inputs.page_table_SM).copy()
        for s, used in enumerate((2, 2, 4)):
            table_SM[s, used:] = value
        out_TNH, _ = run(case, inputs._replace(page_table_SM=jnp.asarray(table_SM)), sizes)
        np.testing.assert_array_equal(out_TNH, expected_TNH)


@pytest.mark.parametrize(
    ("kv_dtype", "q_dtype"),
    [
        ("int8", "bfloat16"),
        ("int8", "float32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float16"),
    ],
)
def test_narrow_pages_with_scales_per_head(kv_dtype, q_dtype):
    """The oracle reads the multiples that were stored, so only arithmetic differs."""
    case = Case("narrow", 6, 2, 64, 8, (1, 7, 2), (30, 40, 5))
    inputs = make_inputs(case, dtype=q_dtype)
    scale_2K = np.array([[0.02, 0.03], [0.05, 0.01]], np.float32)
    by_head = scale_2K[None, :, :, None, None]
    kv_pages = np.asarray(inputs.kv_pages, np.float32)
    stored = np.clip(np.round(kv_pages / by_head), -100, 100)
    if kv_dtype == "int8":
        stored = np.nan_to_num(stored)
    stored = jnp.asarray(stored, jnp.dtype(kv_dtype))
    out_TNH, spec = run(
        case, inputs._replace(kv_pages=stored), small_sizes(case), jnp.asarray(scale_2K)
    )
    wide = inputs._replace(kv_pages=np.asarray(stored, np.float64) * by_head)
    assert excess(out_TNH, case, wide, spec) <= 1


MIXED = Case("mixed", 4, 2, 16, 8, (1, 7), (30, 40))
# With the sizes that an H100 would have: the rows of a KV head are four tiles.
MIXED_WIDE = Case("mixed_wide", 8, 1, 256, 8, (8, 3), (30, 40))


@pytest.mark.parametrize(
    ("case", "sizes", "dtypes"),
    [
        (MIXED, small_sizes(MIXED), ("float32", "bfloat16")),
        (MIXED, small_sizes(MIXED), ("bfloat16", "float32")),
        (MIXED, small_sizes(MIXED), ("bfloat16", "float16")),
        (MIXED_WIDE, None, ("float32", "bfloat16")),
    ],
    ids=name_of,
)
def test_pages_of_another_dtype_are_multiplied_in_float32(case, sizes, dtypes):
    inputs = make_inputs(case)
    q_TNH, kv_pages = (jnp.asarray(a, d) for a, d in zip(inputs[:2], dtypes, strict=True))
    inputs = inputs._replace(q_TNH=q_TNH, kv_pages=kv_pages)
    out_TNH, spec = run(case, inputs, sizes, chip=CHIPS["h100"])
    assert excess(out_TNH, case, inputs, spec) <= 1
