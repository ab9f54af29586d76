"""The Mosaic GPU kernel interpreted on the CPU: named and drawn cases, ways to split, poison."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.chips import CHIPS
from pallas_kernels.paged_attention import gpu_mosaic
from pallas_kernels.paged_attention.cases import CASES, PADDING_ROWS, Case, make_inputs
from pallas_kernels.paged_attention.layout import pages_shape
from pallas_kernels.paged_attention.spec import check
from tests.pallas_kernels.paged_attention.attention_oracle import excess, oracle
from tests.pallas_kernels.paged_attention.drawn import ROWS, drawn_inputs, lengths
from tests.pallas_kernels.paged_attention.gpu_runs import static_of
from tests.pallas_kernels.paged_attention.mosaic_runs import (
    attend,
    chunk_sizes,
    decode_sizes,
    jitted,
    needs_interpreter,
    run,
    wide_sizes,
)

pytestmark = needs_interpreter
# Sizes (None: those of an H100), parts, dtype.
NAMED = {
    "smollm2_135m_decode": (None, None, "bfloat16"),
    "smollm2_135m_prefill": (chunk_sizes, 1, "bfloat16"),
    "smollm2_135m_verify": (decode_sizes, 2, "float16"),
    "llama_3_1_8b_decode": (decode_sizes, 2, "bfloat16"),
    "llama_3_1_8b_chunk": (None, None, "float16"),
    "gemma_2_2b_decode": (wide_sizes, 1, "bfloat16"),
    "gemma_3_270m_local_prefill": (wide_sizes, 2, "bfloat16"),
    "gemma_3_270m_local_decode": (None, None, "float16"),
    "gpt_2_prefill": (chunk_sizes, 2, "float16"),
    "qwen_2_5_0_5b_decode": (decode_sizes, 1, "float16"),
    "gpt_oss_20b_decode": (decode_sizes, 2, "bfloat16"),
}


def test_named_cases_are_all_that_it_takes():
    taken = []
    for case in CASES:
        *arrays, sinks_N = make_inputs(case, dtype="bfloat16")
        spec = check(*arrays, **static_of(case), sinks_N=sinks_N)
        if gpu_mosaic.supports(spec, CHIPS["h100"]) is None:
            taken.append(case.name)
    assert taken == list(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_named_case(name):
    (case,) = (c for c in CASES if c.name == name)
    sizes_of, parts, dtype = NAMED[name]
    inputs = make_inputs(case, dtype=dtype)
    sizes = sizes_of and sizes_of(case, parts=parts)
    out_TNH, spec = run(case, inputs, sizes, chip=CHIPS["h100"])
    assert excess(out_TNH, case, inputs, spec) <= 1
    assert (out_TNH[-PADDING_ROWS:] == 0).all()
    expected = oracle(inputs, scale=case.scale, window=case.window, softcap=case.softcap)
    assert np.linalg.norm(out_TNH - expected) / np.linalg.norm(expected) < 5e-3


# Page size, heads, KV heads, head width, window, softcap, sinks; sizes, of any lengths the same.
SETTINGS = {
    "decode": (
        (16, 4, 2, 64, None, None, False),
        decode_sizes,
        {"queries": ROWS, "split_queries": ROWS},
    ),
    "chunks": ((32, 9, 1, 64, 7, 3.0, True), chunk_sizes, {"split_queries": 2}),
    "wide": (
        (16, 2, 1, 256, 9, None, True),
        wide_sizes,
        {"queries": 7, "split_queries": ROWS, "part_keys": 1},
    ),
}
LENGTH = 280  # five blocks of keys, in rings of three buffers


def drawn_excess(name, slots, seed=0, sinks_N=None):
    """Of a call of fixed shape for `slots`, a list of (q_len, kv_len)."""
    shape, sizes, change = SETTINGS[name]
    case, inputs = drawn_inputs(name, shape, slots, seed, LENGTH, "bfloat16")
    if sinks_N is not None:
        inputs = inputs._replace(sinks_N=sinks_N)
    out_TNH, spec = run(case, inputs, sizes(case, **change), max_q_len=ROWS)
    assert (out_TNH[sum(q_len for q_len, _ in slots) :] == 0).all()
    return excess(out_TNH, case, inputs, spec)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(lengths=lengths(LENGTH), seed=st.integers(0, 3))
def test_any_lengths(name, lengths, seed):
    assert drawn_excess(name, lengths, seed) <= 1


@pytest.mark.parametrize("name", SETTINGS)
def test_b106_sizes_around_block_edges(name):
    """Keys of one block and two, which are full pages, one more and one less, and of an empty slot;
    new tokens at a tile's and a unit's number."""
    for kv_lens, q_lens in (
        ((63, 64, 65, 0), (6, 7, 8, 0)),
        ((63, 64, 65, 0), (1, 1, 15, 0)),
        ((127, 128, 129, 0), (1, 14, 1, 0)),
        ((127, 128, 129, 0), (13, 1, 1, 0)),
    ):
        assert drawn_excess(name, list(zip(q_lens, kv_lens, strict=True))) <= 1


@pytest.mark.parametrize("name", ["chunks", "wide"])
def test_b86_sinks_of_minus_infinity_are_none(name):
    """Where the window hides all of the first block from a unit's last rows: in a tile alone and in
    a part, whose heads have a sink or none in turns."""
    slots = [(14, 78), (7, 73), (1, 65), (2, 129)]
    heads = SETTINGS[name][0][1]
    sinks_N = jnp.where(jnp.arange(heads) % 2 == 0, -jnp.inf, jnp.float32(0.5))
    assert drawn_excess(name, slots, sinks_N=sinks_N) <= 1


SPLIT = Case("split", 4, 2, 64, 16, (1, 1, 3, 0, 2), (256, 1, 137, 0, 133), sinks=True)


@pytest.mark.parametrize("parts", [1, 3, 32])
def test_b86_any_number_of_parts(parts):
    """One to more parts than blocks, exactly full pages, a slot of length 0, a sink per head."""
    inputs = make_inputs(SPLIT, dtype="bfloat16")
    out_TNH, spec = run(SPLIT, inputs, decode_sizes(SPLIT, parts=parts, part_keys=1))
    assert excess(out_TNH, SPLIT, inputs, spec) <= 1


def test_more_tokens_than_a_tile_has_rows_are_split_tile_by_tile():
    """7 heads per KV head: 9 tokens a tile, 12 in all, and each tile in parts."""
    case = Case("tiles", 7, 1, 128, 64, (12, 10), (200, 70))
    inputs = make_inputs(case, dtype="float16")
    sizes = decode_sizes(case, split_queries=16, parts=3, part_keys=1)
    assert sizes.queries == 9
    out_TNH, spec = run(case, inputs, sizes)
    assert excess(out_TNH, case, inputs, spec) <= 1


def test_how_a_slot_is_split_depends_on_itself_alone():
    """Neighbours of other lengths and pages change no bit of a row."""
    inputs = make_inputs(SPLIT, dtype="bfloat16")
    others = jnp.array([0, 1, 4])
    alone = inputs._replace(
        q_len_S=inputs.q_len_S.at[others].set(0, mode="drop"),
        kv_len_S=inputs.kv_len_S.at[others].set(7, mode="drop"),
    )
    sizes, rows = decode_sizes(SPLIT, parts=3, part_keys=1), slice(2, 5)
    np.testing.assert_array_equal(
        run(SPLIT, inputs, sizes)[0][rows], run(SPLIT, alone, sizes)[0][rows]
    )


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (128, 64), (16, 256)])
def test_b104_b105_poison_and_stray_pages_change_no_bit(page_size, head_dim):
    """The same call with all that must not matter set to 0, and with page numbers that exist or not
    past the used ones."""
    case = Case("poison", 4, 2, head_dim, page_size, (1, 9, 1), (150, 140, 5), window=70)
    inputs = make_inputs(case, dtype="bfloat16")
    ordinary = [
        jnp.where(jnp.abs(a) < 1e3, a, jnp.zeros_like(a)) for a in (inputs.q_TNH, inputs.kv_pages)
    ]
    assert not all(np.isfinite(np.asarray(a, np.float32)).all() for a in inputs[:2])
    table_SM = np.asarray(inputs.page_table_SM).copy()
    for s, kv_len in enumerate(case.kv_lens):
        table_SM[s, -(-kv_len // page_size) :] = (0, 1 << 30, -(1 << 31))[s]
    clean = inputs._replace(
        q_TNH=ordinary[0], kv_pages=ordinary[1], page_table_SM=jnp.asarray(table_SM)
    )
    sizes = (wide_sizes if head_dim == 256 else decode_sizes)(case)
    np.testing.assert_array_equal(run(case, inputs, sizes)[0], run(case, clean, sizes)[0])


@pytest.mark.parametrize("window", [1, 4, 70])
def test_b82_window_counts_itself(window):
    """80 tokens with equal scores and one-hot values: the output shows which keys were seen."""
    length, page_size = 80, 16
    kv_pages = np.full(pages_shape(6, page_size, 1, 128), np.nan, np.float32)
    for x in range(length):
        kv_pages[1 + x // page_size, :, 0, x % page_size] = (np.zeros(128), np.eye(128)[x])
    q_lens, kv_lens = jnp.array([40, 3, 1], jnp.int32), jnp.array([80, 67, 5], jnp.int32)
    case = Case("window", 1, 1, 128, page_size, (40, 3, 1), (80, 67, 5))
    out_TNH = attend(
        jnp.zeros((44, 1, 128), jnp.bfloat16),
        jnp.asarray(kv_pages, jnp.bfloat16),
        jnp.tile(jnp.arange(1, 6, dtype=jnp.int32), (3, 1)),
        jnp.array([0, 40, 43], jnp.int32),
        q_lens,
        kv_lens,
        scale=1.0,
        max_q_len=40,
        window=window,
        softcap=None,
        sinks_N=None,
        sizes=decode_sizes(case, split_queries=3),
    )
    rows = np.asarray(out_TNH, np.float32)[:, 0]
    ends = [*range(40, 80), 64, 65, 66, 4]
    for row_H, p in zip(rows, ends, strict=True):
        assert np.flatnonzero(row_H).tolist() == list(range(max(0, p - window + 1), p + 1))


@pytest.mark.parametrize(
    ("head_dim", "sizes", "parts"), [(64, decode_sizes, 2), (128, wide_sizes, 1)]
)
def test_no_races(head_dim, sizes, parts):
    """Pallas' race detector, which raises, over a call with parts, several units and blocks. It
    follows copies, and loads and stores of registers, but not what wgmma reads: operands that come
    or go too early show in the numbers or in a barrier's phases, if at all. It takes what shares a
    place for one, so that only one consumer may have parts."""
    case = dataclasses.replace(SPLIT, head_dim=head_dim, q_lens=(1, 3), kv_lens=(140, 70))
    inputs = make_inputs(case, dtype="bfloat16")
    sizes = sizes(case, streams=1, parts=parts, part_keys=1)
    out_TNH, spec = run(case, inputs, sizes, attend=jitted(races=True))
    assert excess(out_TNH, case, inputs, spec) <= 1
