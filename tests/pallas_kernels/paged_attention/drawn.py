"""Drawn calls of one fixed shape, so that any number of them compile once.

SLOTS slots bring at most ROWS new tokens together and hold at most `length` keys each; whatever a
call does not own is poisoned: rows and pages with NaN, the page table with numbers of no page.
"""

import numpy as np
from hypothesis import strategies as st

from pallas_kernels.paged_attention.cases import PADDING_ROWS, Case, Inputs, make_inputs

SLOTS, ROWS, LENGTH = 4, 24, 40


def drawn_inputs(
    name: str,
    shape: tuple,
    slots: list,
    seed: int = 0,
    length: int = LENGTH,
    dtype: str = "float32",
) -> tuple[Case, Inputs]:
    """`shape`: page size, heads, KV heads, head width, window, softcap, sinks; `slots`: (q_len,
    kv_len) of each."""
    page_size, heads, kv_heads, head_dim, window, softcap, sinks = shape
    q_lens, kv_lens = zip(*slots, strict=True)
    case = Case(name, heads, kv_heads, head_dim, page_size, q_lens, kv_lens, window, softcap, sinks)
    inputs = make_inputs(case, seed, dtype)
    columns = -(-length // page_size) + 2
    q_TNH, kv_pages, table_SM = (np.asarray(a) for a in inputs[:3])

    def padded(a, size, value, axis=0):
        widths = [(0, size - n if i == axis else 0) for i, n in enumerate(a.shape)]
        return np.pad(a, widths, constant_values=value)

    return case, inputs._replace(
        q_TNH=padded(q_TNH, ROWS + PADDING_ROWS, np.nan),
        kv_pages=padded(kv_pages, SLOTS * columns, np.nan),
        page_table_SM=padded(table_SM, columns, -7, axis=1),
    )


@st.composite
def lengths(draw, length: int = LENGTH):
    """(q_len, kv_len) of each slot, together at most ROWS new tokens."""
    left, slots = ROWS, []
    for _ in range(SLOTS):
        q_len = draw(st.one_of(st.integers(0, min(2, left)), st.integers(0, left)))
        left -= q_len
        slots.append((q_len, draw(st.integers(q_len, length))))
    return slots
