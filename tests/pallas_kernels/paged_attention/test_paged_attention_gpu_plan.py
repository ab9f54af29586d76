"""The GPU kernels' plan for any lengths, sizes and order of the slots."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.gpu_mosaic_sizes import Sizes
from pallas_kernels.paged_attention.gpu_plan import Row, Unit, plan_rows, plan_units

SLOTS, MOST_NEW, MOST_PARTS, GAP = 5, 20, 12, 2
NUM_ROWS = SLOTS * (MOST_NEW + GAP)
NUM_UNITS = SLOTS * MOST_PARTS * MOST_NEW


class Call(NamedTuple):
    """`mine`: slots with more new tokens are another call's."""

    sizes: Sizes
    window: int | None
    mine: int
    q_start_S: np.ndarray
    q_len_S: np.ndarray
    kv_len_S: np.ndarray


@st.composite
def calls(draw):
    sizes = Sizes(
        queries=draw(st.integers(1, 8)),
        keys=draw(st.sampled_from((16, 32, 64))),
        parts=draw(st.integers(1, MOST_PARTS)),
        part_keys=draw(st.sampled_from((1, 17, 64, 256, 1024))),
        split_queries=draw(st.integers(0, MOST_NEW)),
        **dict.fromkeys(("tiles", "streams", "stages", "programs"), 1),
    )
    new = st.integers(0, 2) | st.integers(0, MOST_NEW)
    old = st.integers(0, 3) | st.integers(0, 300) | st.integers(0, 5000)
    slots = draw(st.lists(st.tuples(new, old), min_size=SLOTS, max_size=SLOTS))
    q_len_S, old_S = np.array(slots, np.int32).T
    q_start_S, t = np.zeros(SLOTS, np.int32), 0
    for s in draw(st.permutations(range(SLOTS))):
        q_start_S[s] = t + draw(st.integers(0, GAP))
        t = q_start_S[s] + q_len_S[s]
    window = draw(st.none() | st.integers(1, 5) | st.integers(1, 300))
    mine = draw(st.sampled_from((4, MOST_NEW)))
    return Call(sizes, window, mine, q_start_S, q_len_S, q_len_S + old_S)


def plan(call):
    """The units that count, and rows_T4."""
    lengths = [jnp.asarray(a) for a in call[3:]]
    q_start_S, q_len_S, _ = lengths
    mine_S = (q_len_S > 0) & (q_len_S <= call.mine)
    split_S = q_len_S <= call.sizes.split_queries
    units_W8, count_1, *cuts = plan_units(
        *lengths, mine_S, split_S, call.sizes, call.window, NUM_UNITS
    )
    rows_T4 = plan_rows(q_start_S, q_len_S, mine_S, *cuts, call.sizes.queries, NUM_ROWS)
    return np.asarray(units_W8)[: int(count_1[0])], np.asarray(rows_T4)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(call=calls())
def test_units_tile_the_blocks_that_a_tile_sees_and_rows_name_them(call):
    """Every block that a tile of new tokens sees is in one of its units, no other one is, each unit
    is some tile's, and each row finds its tile's units and its own place in them."""
    sizes, named = call.sizes, 0
    units_W8, rows_T4 = plan(call)
    owned_T = np.zeros(NUM_ROWS, bool)
    for s, (start, q_len, kv_len) in enumerate(zip(*call[3:], strict=True)):
        owned_T[start : start + q_len] = True
        if q_len > call.mine:
            assert (rows_T4[start : start + q_len, Row.PARTS] == 1).all()
            continue
        for token in range(0, q_len, sizes.queries):
            tokens, p = min(sizes.queries, q_len - token), kv_len - q_len + token
            rows = rows_T4[start + token : start + token + tokens]
            (unit,), (parts,) = (np.unique(rows[:, c]) for c in (Row.UNIT, Row.PARTS))
            assert rows[:, Row.TOKEN].tolist() == list(range(tokens))
            assert 1 <= parts <= (sizes.parts if q_len <= sizes.split_queries else 1)
            its = units_W8[unit : unit + parts]
            same = its[:, [Unit.SLOT, Unit.ROW, Unit.TOKENS, Unit.POSITION, Unit.PARTS]]
            assert same.tolist() == [[s, start + token, tokens, p, parts]] * parts
            first = 0 if call.window is None else max(0, p - call.window + 1)
            blocks = [b for u in its for b in range(u[Unit.BEGIN], u[Unit.END])]
            assert blocks == list(range(first // sizes.keys, (p + tokens - 1) // sizes.keys + 1))
            named += parts
    assert named == len(units_W8)
    assert (rows_T4[~owned_T, Row.PARTS] == 0).all()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(call=calls(), slot=st.integers(0, SLOTS - 1))
def test_b103_how_a_slot_is_cut_depends_on_itself_alone(call, slot):
    others = np.arange(SLOTS) != slot
    alone = call._replace(
        q_len_S=np.where(others, 0, call.q_len_S), kv_len_S=np.where(others, 9, call.kv_len_S)
    )
    units_W8, _ = plan(call)
    np.testing.assert_array_equal(units_W8[units_W8[:, Unit.SLOT] == slot], plan(alone)[0])
