"""The TPU kernel interpreted on the CPU: named and drawn cases, block sizes, mutants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.paged_attention import tpu
from pallas_kernels.paged_attention.cases import CASES, PADDING_ROWS, Case, make_inputs
from pallas_kernels.paged_attention.layout import pages_shape
from pallas_kernels.paged_attention.spec import check, tolerance
from pallas_kernels.paged_attention.tpu_sizes import Sizes
from tests.compiling import QUICK
from tests.pallas_kernels.paged_attention.attention_oracle import excess, oracle
from tests.pallas_kernels.paged_attention.drawn import ROWS, SLOTS, drawn_inputs, lengths
from tests.pallas_kernels.paged_attention.tpu_runs import packed, run


def name_of(value):
    return getattr(value, "name", value)


def small_blocks(case):
    """Blocks of few keys, so that the named cases have several."""
    pages = max(1, 64 // case.page_size)
    decode = (Sizes(1, pages, 2),)
    return decode if max(case.q_lens) == 1 else (*decode, Sizes(8, pages, 4))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_named_case_float32(case):
    inputs = make_inputs(case)
    out_TNH, spec = run(case, inputs, small_blocks(case))
    assert excess(out_TNH, case, inputs, spec) <= 1
    assert tolerance(spec, max(case.kv_lens))[0] <= 1e-5
    assert (out_TNH[-PADDING_ROWS:] == 0).all()


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[12]], ids=name_of)
def test_named_case_bfloat16(case):
    inputs = make_inputs(case, dtype="bfloat16")
    out_TNH, spec = run(case, inputs)
    assert excess(out_TNH, case, inputs, spec) <= 1
    expected = oracle(inputs, scale=case.scale, window=case.window, softcap=case.softcap)
    assert np.linalg.norm(out_TNH - expected) / np.linalg.norm(expected) < 5e-3


# Page size, heads, KV heads, head width, window, softcap, sinks, lanes of a row, sizes.
SETTINGS = {
    "heads_share": (4, 4, 2, 8, None, None, False, 128, (Sizes(1, 2, 2), Sizes(4, 4, 4))),
    "keys_and_values_share": (3, 9, 3, 5, 5, 3.0, True, 128, (Sizes(1, 2, 4), Sizes(2, 2, 2))),
    "one_head": (8, 3, 1, 16, 7, None, True, 1, (Sizes(8, 1, 2),)),
}


@functools.lru_cache
def compiled(name, interpret=True):
    _, _, _, head_dim, window, softcap, _, _, sizes = SETTINGS[name]
    return jax.jit(
        functools.partial(
            tpu.attend,
            scale=head_dim**-0.5,
            max_q_len=ROWS,
            window=window,
            softcap=softcap,
            sizes=sizes,
            interpret=interpret,
        ),
        compiler_options=QUICK,
    )


def drawn_excess(name, slots, seed=0, interpret=True):
    *shape, lanes, _ = SETTINGS[name]
    case, inputs = drawn_inputs(name, shape, slots, seed)
    *arrays, sinks_N = inputs
    arrays[1] = packed(arrays[1], lanes)
    out_TNH = np.asarray(compiled(name, interpret)(*arrays, sinks_N=sinks_N), np.float64)
    assert (out_TNH[sum(q_len for q_len, _ in slots) :] == 0).all()
    spec = check(
        *arrays, scale=case.scale, max_q_len=ROWS, window=None, softcap=None, sinks_N=sinks_N
    )
    return excess(out_TNH, case, inputs, spec)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(lengths=lengths(), seed=st.integers(0, 3))
def test_any_lengths(name, lengths, seed):
    assert drawn_excess(name, lengths, seed) <= 1


@pytest.mark.parametrize("name", ["heads_share", "keys_and_values_share", "one_head"])
def test_b106_sizes_around_block_edges(name):
    """New tokens and keys at block - 1, block, block + 1 and 2 * block + 1, padding poisoned."""
    sizes, page_size = SETTINGS[name][-1][-1], SETTINGS[name][0]
    block = sizes.pages * page_size
    for q_len in (sizes.queries - 1, sizes.queries, sizes.queries + 1, 2 * sizes.queries + 1):
        keys = (block - 1, block, block + 1, 2 * block + 1)
        slots = [(min(q_len, ROWS // SLOTS, size), size) for size in keys]
        assert drawn_excess(name, slots) <= 1


@pytest.mark.parametrize("name", SETTINGS)
def test_tpu_interpreter_finds_no_race(name, capfd):
    """Copies run when they are waited for, memory starts as NaN, every access is checked."""
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    assert drawn_excess(name, [(1, 40), (0, 7), (9, 30), (1, 1)], interpret=interpret) <= 1
    assert "RACE" not in capfd.readouterr().out.upper()


def test_b105_entries_past_the_used_ones_are_never_read():
    """The TPU interpreter raises on any access out of bounds, and unused entries are."""
    case = Case("edges", 4, 2, 8, 4, (1, 1, 0), (8, 5, 0))
    inputs = make_inputs(case)
    table_SM = np.asarray(inputs.page_table_SM).copy()
    for s, used in enumerate((2, 2, 0)):
        table_SM[s, used:] = 1 << 30
    inputs = inputs._replace(page_table_SM=jnp.asarray(table_SM))
    out_TNH, spec = run(case, inputs, (Sizes(1, 4, 2),), pltpu.InterpretParams())
    assert excess(out_TNH, case, inputs, spec) <= 1


@pytest.mark.parametrize("window", [None, 6])
def test_tiles_of_many_slots_are_attended_to_in_groups(window):
    """Slots with a part of a tile of 4 rows each: 8 tiles in groups of 3. One slot has three, in
    two groups, one has none."""
    q_lens, kv_lens = (3, 9, 2, 1, 0, 4, 2), (20, 40, 9, 33, 5, 4, 2)
    case = Case("groups", 4, 2, 8, 4, q_lens, kv_lens, window=window)
    inputs = make_inputs(case)
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    for sizes in ((Sizes(4, 2, 2),), (Sizes(1, 2, 2), Sizes(4, 2, 2))):
        out_TNH, spec = run(case, inputs, sizes, interpret)
        assert excess(out_TNH, case, inputs, spec) <= 1


def test_block_sizes_do_not_matter():
    """Three ways to cut the same call agree with the oracle and so with each other."""
    case = Case("sizes", 4, 2, 8, 4, (1, 13, 5), (30, 40, 5), window=9, softcap=2.0, sinks=True)
    inputs = make_inputs(case)
    for sizes in (
        (Sizes(1, 1, 2),),
        (Sizes(4, 2, 8), Sizes(16, 5, 4)),
        (Sizes(32, 10, 2),),
    ):
        out_TNH, spec = run(case, inputs, sizes)
        assert excess(out_TNH, case, inputs, spec) <= 1, sizes


@pytest.mark.parametrize("window", [1, 4, 12])
def test_b82_window_counts_itself(window):
    """10 tokens with equal scores and one-hot values: the output shows which keys were seen."""
    kv_pages = np.full(pages_shape(5, 3, 1, 10), np.nan, np.float32)
    for x in range(10):
        kv_pages[1 + x // 3, :, 0, x % 3] = (np.zeros(10), np.eye(10)[x])
    attend = jax.jit(
        functools.partial(
            tpu.attend,
            scale=1.0,
            max_q_len=10,
            window=window,
            softcap=None,
            sinks_N=None,
            sizes=(Sizes(1, 1, 2), Sizes(4, 2, 2)),
            interpret=True,
        ),
        compiler_options=QUICK,
    )
    for chunk, end in ((10, 10), (5, 5), (5, 10), *((1, n) for n in range(1, 11))):
        out_TNH = attend(
            jnp.zeros((10, 1, 10)),
            jnp.asarray(kv_pages),
            jnp.array([[1, 2, 3, 4]], jnp.int32),
            *(jnp.array([n], jnp.int32) for n in (0, chunk, end)),
        )
        for i in range(chunk):
            p = end - chunk + i
            seen = np.flatnonzero(np.asarray(out_TNH)[i, 0]).tolist()
            assert seen == list(range(max(0, p - window + 1), p + 1))


def test_b86_sink_is_one_more_logit_whose_value_is_dropped():
    """Zero keys, unit values, 3 query heads per KV head: n keys and a sink z give n / (n + e^z)."""
    lengths = (1, 16, 17, 48, 200)
    sinks_N = jnp.array([2.0, -jnp.inf, 0.5, 7.0, -3.0, 2.0])
    kv_pages = jnp.ones(pages_shape(15, 16, 2, 4)).at[:, 0].set(0.0)
    out_TNH = tpu.attend(
        jnp.ones((5, 6, 4)),
        packed(kv_pages),
        jnp.tile(jnp.arange(1, 14, dtype=jnp.int32), (5, 1)),
        jnp.arange(5, dtype=jnp.int32),
        jnp.ones(5, jnp.int32),
        jnp.array(lengths, jnp.int32),
        scale=1.0,
        max_q_len=1,
        window=None,
        softcap=None,
        sinks_N=sinks_N,
        sizes=(Sizes(1, 2, 2),),
        interpret=True,
    )
    n_S1 = np.array(lengths, np.float64)[:, None]
    expected_SN = n_S1 / (n_S1 + np.exp(np.asarray(sinks_N, np.float64)))
    np.testing.assert_allclose(out_TNH[..., 0], expected_SN, rtol=2.0**-24 * np.sqrt(200) * 4)


def test_b104_poison_changes_no_bit():
    """The same call with all that must not matter set to 0 instead of NaN, inf and 1e30."""
    case = Case("poison", 4, 2, 8, 4, (1, 9, 1), (30, 40, 5), window=9)
    inputs = make_inputs(case)
    ordinary = [jnp.where(jnp.abs(a) < 1e3, a, 0.0) for a in (inputs.q_TNH, inputs.kv_pages)]
    assert not all(np.isfinite(a).all() for a in inputs[:2])
    clean = inputs._replace(q_TNH=ordinary[0], kv_pages=ordinary[1])
    sizes = (Sizes(1, 3, 2), Sizes(4, 3, 2))
    np.testing.assert_array_equal(run(case, inputs, sizes)[0], run(case, clean, sizes)[0])


@pytest.mark.parametrize(
    ("kv_dtype", "chip", "page_size"),
    [
        ("int8", None, 16),
        ("float8_e4m3fn", None, 8),
        ("float8_e4m3fn", "tpu7x", 8),
        ("float8_e4m3fn", "tpu7x", 16),
        ("float8_e5m2", None, 8),
    ],
)
def test_narrow_pages_with_scales_per_head(kv_dtype, chip, page_size):
    """The oracle reads the multiples that were stored, so only arithmetic differs. On tpu7x float8
    meets float8: queries and weights are sums of two. Pages of 16 are two to a register."""
    case = Case("narrow", 6, 2, 64, page_size, (1, 7, 2), (30, 6 * page_size + 1, 5), window=60)
    inputs = make_inputs(case, dtype="bfloat16")
    scale_2K = np.array([[0.02, 0.03], [0.05, 0.01]], np.float32)
    by_head = scale_2K[None, :, :, None, None]
    kv_pages = np.asarray(inputs.kv_pages, np.float32)
    stored = np.clip(np.round(kv_pages / by_head), -100, 100)
    if kv_dtype == "int8":
        stored = np.nan_to_num(stored)
    stored = jnp.asarray(stored, jnp.dtype(kv_dtype))
    narrow = inputs._replace(kv_pages=stored)
    out_TNH, spec = run(
        case,
        narrow,
        (Sizes(1, 2, 2), Sizes(4, 2, 2)),
        kv_scale_2K=jnp.asarray(scale_2K),
        chip=chip and CHIPS[chip],
    )
    wide = inputs._replace(kv_pages=np.asarray(stored, np.float64) * by_head)
    assert excess(out_TNH, case, wide, spec) <= 1


def test_tpu_interpreter_finds_no_race_among_pages_of_one_register(capfd):
    """One, two and three pages of a block, the rest of whose memory starts as NaN."""
    case = Case("pairs", 2, 2, 128, 16, (1, 1, 1), (9, 70, 100))
    inputs = make_inputs(case, dtype="bfloat16")
    narrow = inputs._replace(kv_pages=inputs.kv_pages.astype(jnp.float8_e5m2))
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    out_TNH, spec = run(case, narrow, (Sizes(1, 4, 2),), interpret, jnp.ones((2, 2)))
    assert excess(out_TNH, case, narrow, spec) <= 1
    assert "RACE" not in capfd.readouterr().out.upper()
