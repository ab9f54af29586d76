"""The XLA implementation: any lengths, any block sizes, bounded memory, no copy of the pool."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import ragged_paged_attention, xla
from pallas_kernels.paged_attention.key_blocks import key_blocks
from pallas_kernels.paged_attention.layout import pages_shape, write_pages
from pallas_kernels.paged_attention.xla import Blocks
from tests.pallas_kernels.paged_attention.attention_oracle import check, oracle
from tests.pallas_kernels.paged_attention.drawn import LENGTH, ROWS, SLOTS, drawn_inputs, lengths

# Page size, heads, KV heads, head width, window, softcap, sinks, passes (None: the defaults).
SETTINGS = {
    "defaults": (4, 4, 2, 8, None, None, False, None),
    "small_blocks": (3, 6, 2, 5, 5, 3.0, True, (Blocks(1, 2, 6), Blocks(4, 2, 6))),
    "page_of_1": (1, 3, 1, 7, None, None, True, (Blocks(2, 3, 4), Blocks(5, 1, 4))),
    "part_of_a_page": (LENGTH, 2, 2, 4, 7, None, False, (Blocks(1, 4, 16), Blocks(3, 1, 16))),
}


@functools.lru_cache
def compiled(name):
    _, _, _, head_dim, window, softcap, _, passes = SETTINGS[name]
    return jax.jit(
        functools.partial(
            xla.attend,
            scale=head_dim**-0.5,
            max_q_len=ROWS,
            window=window,
            softcap=softcap,
            passes=passes,
        )
    )


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(lengths=lengths(), seed=st.integers(0, 3))
def test_any_lengths(name, lengths, seed):
    case, inputs = drawn_inputs(name, SETTINGS[name][:-1], lengths, seed)
    *arrays, sinks_N = inputs
    out_TNH = compiled(name)(*arrays, sinks_N=sinks_N)
    expected = oracle(inputs, scale=case.scale, window=case.window, softcap=case.softcap)
    check(out_TNH, inputs, expected)
    rows = sum(q_len for q_len, _ in lengths)
    assert (np.asarray(out_TNH)[rows:] == 0).all()


@pytest.mark.parametrize("name", ["small_blocks", "part_of_a_page"])
def test_b106_sizes_around_block_edges(name):
    """Rows and keys at block - 1, block, block + 1 and 2 * block + 1, padding poisoned."""
    passes = SETTINGS[name][-1]
    queries, keys = passes[-1].queries, passes[-1].keys
    window, softcap = SETTINGS[name][4:6]
    for q_len in (queries - 1, queries, queries + 1, 2 * queries + 1):
        sizes = (keys - 1, keys, keys + 1, 2 * keys + 1)
        slots = [(min(q_len, ROWS // SLOTS, size), size) for size in sizes]
        case, inputs = drawn_inputs(name, SETTINGS[name][:-1], slots)
        *arrays, sinks_N = inputs
        out_TNH = compiled(name)(*arrays, sinks_N=sinks_N)
        check(out_TNH, inputs, oracle(inputs, scale=case.scale, window=window, softcap=softcap))


@pytest.mark.parametrize(
    ("page_size", "keys"), [(1, 32), (16, 32), (24, 32), (64, 64), (48, 64), (100, 64), (257, 64)]
)
def test_key_blocks_cover_every_position_once(page_size, keys):
    layout = key_blocks(page_size, keys)
    end = 3 * layout.pages * page_size
    blocks = layout.block_of(end - 1) + 1
    column_Wp, offset_W, x_WB = (np.asarray(a) for a in layout.locate(jnp.arange(blocks)))
    assert sorted(x_WB[x_WB >= 0]) == list(range(end))
    assert (offset_W + layout.keys_per_page <= page_size).all()
    for w, x_B in enumerate(x_WB):
        x_B = x_B[x_B >= 0]
        assert (layout.block_of(x_B) == w).all()
        assert set(x_B // page_size) <= set(column_Wp[w].tolist())


def test_memory_does_not_grow_with_the_prompt():
    """A prompt of 4096 tokens over 32,768 keys, 32 heads: scores alone would take 17 GB."""
    rows, length, heads, kv_heads, head_dim, page_size = 4096, 32768, 32, 8, 128, 16
    pages = length // page_size

    scalar_S = jax.ShapeDtypeStruct((1,), jnp.int32)
    pool = jax.ShapeDtypeStruct(pages_shape(pages, page_size, kv_heads, head_dim), jnp.float32)
    attend = functools.partial(ragged_paged_attention, scale=0.1, max_q_len=rows, impl="xla")
    program = jax.jit(attend).lower(
        jax.ShapeDtypeStruct((rows, heads, head_dim), jnp.float32),
        pool,
        jax.ShapeDtypeStruct((1, pages), jnp.int32),
        scalar_S,
        scalar_S,
        scalar_S,
    )
    assert program.compile().memory_analysis().temp_size_in_bytes < 16 << 20


# jax 0.10's CPU backend scatters and gathers bfloat16 through a float32 copy of the whole pool.
IN_PLACE_DTYPES = ["float32"] + ["bfloat16"] * (jax.__version_info__ >= (0, 11))


@pytest.mark.parametrize("max_q_len", [1, 20], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", IN_PLACE_DTYPES)
def test_pool_is_never_copied(dtype, max_q_len):
    """Two layers' donated pools, written and read in a loop: no operation makes another pool."""
    shape = pages_shape(57, 16, 3, 64)
    slots, rows = 2, 2 * max_q_len

    def steps(pools, x_TNH, page_T, table_SM, q_start_S, q_len_S, kv_len_S):
        def step(_, carry):
            pools, x_TNH = carry
            written = []
            for pool in pools:
                pool = write_pages(pool, x_TNH[:, :3], x_TNH[:, 3:6], page_T, page_T)
                written.append(pool)
                x_TNH = ragged_paged_attention(
                    x_TNH, pool, table_SM, q_start_S, q_len_S, kv_len_S,
                    scale=0.1, max_q_len=max_q_len, impl="xla",
                )  # fmt: skip
            return written, x_TNH

        return jax.lax.fori_loop(0, 3, step, (pools, x_TNH))

    pool = jax.ShapeDtypeStruct(shape, dtype)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((rows,), (slots, 4), *[(slots,)] * 3)]
    x_TNH = jax.ShapeDtypeStruct((rows, 9, 64), dtype)
    program = jax.jit(steps, donate_argnums=0).lower([pool, pool], x_TNH, *ints).compile()
    dims = {",".join(map(str, shape)), "342,16,64"}
    allowed = "parameter|get-tuple-element|tuple|bitcast|scatter|while"
    makers = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\((.*)", program.as_text())
    pools = [(op, rest) for shown, op, rest in makers if shown in dims]
    assert any(op == "scatter" for op, _ in pools)
    for op, rest in pools:
        in_place = op == "fusion" and "scatter" in rest
        assert in_place or re.fullmatch(allowed, op), f"{op}({rest[:200]}"
    assert program.memory_analysis().temp_size_in_bytes < 8 << 20
