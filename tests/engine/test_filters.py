"""What the filters keep: by hand at edges and ties, and three ways of finding it compared."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.filters import Settings, keep, keep_by_candidates, keep_by_whole_rows, kept_mask
from tests.engine.sampling_reference import kept as reference

SHAPE = re.compile(r"\[([\d,]+)\]")
CANDIDATES = 4  # few, so that small rows are searched whole too


def settings_of(rows):
    """Settings from (min_p, top_k, top_p) per row."""
    min_p, top_k, top_p = zip(*rows, strict=True)
    return Settings(
        jnp.asarray(min_p, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
        jnp.asarray(top_p, jnp.float32),
    )


def mask(kept, weight_RV):
    return np.asarray(kept_mask(kept, weight_RV) & (weight_RV > 0))


@jax.jit
def three_ways(weight_RV, settings):
    """(candidates' mask, which rows they decide, mask of whole rows, mask of both together)."""
    by_few, decided_R = keep_by_candidates(weight_RV, settings, CANDIDATES)
    by_all = keep_by_whole_rows(weight_RV, settings)
    both = keep(weight_RV, settings, CANDIDATES)
    masks = (kept_mask(k, weight_RV) & (weight_RV > 0) for k in (by_few, by_all, both))
    few_RV, all_RV, both_RV = masks
    return few_RV, decided_R, all_RV, both_RV


def sets(weights, min_p=0.0, top_k=0, top_p=1.0):
    """Kept ids of one row; every way must agree on them."""
    weight_RV = np.zeros((1, 12), np.float32)
    weight_RV[0, : len(weights)] = weights
    outcome = three_ways(jnp.asarray(weight_RV), settings_of([(min_p, top_k, top_p)]))
    few_V, decided, all_V, both_V = (np.asarray(x)[0] for x in outcome)
    if decided:
        np.testing.assert_array_equal(few_V, all_V)
    np.testing.assert_array_equal(both_V, all_V)
    return np.flatnonzero(both_V).tolist()


def test_b04_top_k_at_a_tie_keeps_exactly_k_lowest_ids_first():
    p = [0.4, 0.3, 0.3, 0.0]
    assert sets(np.array(p) / 0.4, top_k=2) == [0, 1]
    assert sets([0.5, 1.0, 0.5, 0.5, 1.0, 0.5], top_k=4) == [0, 1, 2, 4]
    assert sets([1.0] * 7, top_k=3) == [0, 1, 2]
    assert sets([1.0] * 7, top_k=6) == [0, 1, 2, 3, 4, 5]


def test_b05_top_p_keeps_the_shortest_prefix_that_reaches_p():
    weights = [1.0, 0.5, 0.25, 0.25]  # probabilities 0.5, 0.25, 0.125, 0.125
    assert sets(weights, top_p=0.75) == [0, 1]
    assert sets(weights, top_p=0.7501) == [0, 1, 2]
    assert sets(weights, top_p=0.5) == [0]
    assert sets(weights, top_p=0.875) == [0, 1, 2]
    assert sets(weights, top_p=1.0) == [0, 1, 2, 3]
    assert sets(weights, top_p=1e-9) == [0]


def test_top_p_at_a_tie_keeps_the_lowest_ids():
    assert sets([0.5, 1.0, 0.5, 0.5, 0.5], top_p=2 / 3) == [0, 1, 2]
    assert sets([1.0] * 8, top_p=0.5) == [0, 1, 2, 3]
    assert sets([1.0] * 8, top_p=0.76) == [0, 1, 2, 3, 4, 5, 6]


def test_b11_min_p_is_a_ratio_to_the_best_after_temperature():
    logits = np.array([2.0, 1.0, 0.0])
    for temperature, ids in ((1.0, [0, 1]), (0.5, [0]), (2.0, [0, 1, 2])):
        assert sets(np.exp((logits - 2) / temperature), min_p=0.3) == ids


def test_top_p_counts_the_mass_that_top_k_and_min_p_leave():
    weights = [1.0, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert sets(weights, top_p=0.75, top_k=3) == [0, 1]  # 1.5 of 1.75 reaches 0.75, 1 does not
    assert sets(weights, top_p=0.57, top_k=3) == [0]
    assert sets(weights, top_p=0.75, min_p=0.5) == [0, 1]
    assert sets(weights, top_p=0.66, min_p=0.5) == [0]


def test_filters_off_keep_everything_possible():
    assert sets([1.0, 0.0, 1e-30, 0.3]) == [0, 2, 3]
    assert sets([1.0, 0.0, 1e-30, 0.3], top_k=100) == [0, 2, 3]


weights_of_few_values = st.lists(st.sampled_from([0.0, 1e-6, 0.125, 0.25, 0.5, 1.0]), max_size=11)
weights_of_many_values = st.lists(st.floats(0.0, 1.0, width=32), max_size=11)
any_settings = st.tuples(
    st.sampled_from([0.0, 1e-6, 0.25, 0.4, 1.0]),
    st.integers(0, 14),
    st.one_of(st.sampled_from([0.25, 0.5, 0.75, 1.0]), st.floats(0.01, 1.0)),
)


@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.one_of(weights_of_few_values, weights_of_many_values), any_settings),
        min_size=1,
        max_size=8,
    )
)
def test_candidates_whole_rows_and_sorting_keep_the_same_sets(rows):
    weight_RV = np.zeros((8, 12), np.float32)
    weight_RV[:, 0] = 1.0  # the best weight is 1 by definition
    for r, (weights, _) in enumerate(rows):
        weight_RV[r, 1 : len(weights) + 1] = weights
    asked = [setting for _, setting in rows] + [(0.0, 0, 1.0)] * (8 - len(rows))
    outcome = three_ways(jnp.asarray(weight_RV), settings_of(asked))
    few_RV, decided_R, all_RV, both_RV = map(np.asarray, outcome)
    np.testing.assert_array_equal(few_RV[decided_R], all_RV[decided_R])
    np.testing.assert_array_equal(both_RV, all_RV)
    for r, (min_p, top_k, top_p) in enumerate(asked):
        row, p = weight_RV[r].tolist(), float(np.float32(top_p))
        min_p = float(np.float32(min_p))
        # Float32 sums may round across the edge; neighbouring edges bound the answer.
        sizes = [len(reference(row, min_p, top_k, p, slack)) for slack in (2e-6, 2e-7)]
        ids = np.flatnonzero(both_RV[r])
        assert sizes[0] <= len(ids) <= sizes[1]
        assert set(ids) == set(reference(row, min_p, top_k)[: len(ids)])


def test_large_rows_decided_and_undecided_side_by_side():
    vocab = 5_000
    rng = np.random.default_rng(0)
    spread = np.array([0.01, 6.0, 0.01, 6.0, 1.0, 0.0, 3.0, 6.0])[:, None]
    weight_RV = np.exp(rng.normal(size=(8, vocab)) * spread).astype(np.float32)
    weight_RV /= weight_RV.max(axis=1, keepdims=True)
    asked = [
        (0.0, 0, 0.9),
        (0.0, 0, 0.9),
        (0.0, 200, 1.0),
        (0.0, 20, 0.5),
        (0.0, 150, 0.7),
        (0.0, 0, 0.5),  # all weights equal: the tie is cut at half of the ids
        (0.01, 0, 0.99),
        (0.0, 200, 0.5),  # the candidates bound the mass of the 200 closely enough
    ]
    settings = settings_of(asked)
    by_few = jax.jit(keep_by_candidates, static_argnums=2)
    decided_R = np.asarray(by_few(jnp.asarray(weight_RV), settings, 64)[1])
    assert decided_R[[1, 3, 7]].all()
    assert not decided_R[[0, 2, 4, 5]].any()
    kept_RV = mask(jax.jit(keep)(jnp.asarray(weight_RV), settings), weight_RV)
    for r, (min_p, top_k, top_p) in enumerate(asked):
        wanted = reference(weight_RV[r].tolist(), min_p, top_k, top_p)
        assert set(np.flatnonzero(kept_RV[r])) == set(wanted)
    assert np.flatnonzero(kept_RV[5]).tolist() == list(range(vocab // 2))


def test_nothing_wider_than_the_candidates_is_sorted():
    # XLA's top-k is a pattern over a sort that a slice can break; the compiled program shows it.
    settings = settings_of([(0, 0, 0.9), (0, 5, 1)])
    hlo = jax.jit(keep).lower(jnp.ones((2, 49_152)), settings).compile().as_text()
    sorts = [line.partition(" sort(")[0] for line in hlo.splitlines() if " sort(" in line]
    assert sorts
    widths = [int(n) for line in sorts for shape in SHAPE.findall(line) for n in shape.split(",")]
    assert max(widths) <= 64
