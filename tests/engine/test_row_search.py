"""Searches in large rows against numpy's sort, argmax and counting."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.row_search import argmax_rows, draw_rows, nth_true, shortest_prefix, top_rows


def test_argmax_takes_the_lowest_id_and_names_rows_without_one():
    inf, nan = np.inf, np.nan
    x_RV = [
        [0.0, 3, 3, 1],
        [-inf, -2, -1, -1],
        [-inf, -inf, -inf, -inf],
        [0, nan, 5, 1],
        [nan, nan, nan, nan],
        [0, inf, 1, 1],
        [-3e38, -inf, -3e38, -inf],
    ]
    assert argmax_rows(jnp.asarray(x_RV)).tolist() == [1, 2, -1, -1, -1, -1, 0]


def test_argmax_of_a_large_vocabulary_equals_numpy():
    x_RV = np.random.default_rng(0).normal(size=(5, 49_153)).astype(np.float32)
    assert argmax_rows(jnp.asarray(x_RV)).tolist() == x_RV.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [40, 2_561, 20_001])
@pytest.mark.parametrize("count", [1, 20])
def test_top_rows_equals_a_stable_sort_with_many_ties(vocab, count):
    rng = np.random.default_rng(vocab)
    ties_RV = rng.integers(0, 5, (3, vocab)).astype(np.float32)
    spread_RV = rng.normal(size=(3, vocab)).astype(np.float32)
    x_RV = np.concatenate([ties_RV, spread_RV])
    value_RJ, id_RJ = jax.jit(top_rows, static_argnums=1)(jnp.asarray(x_RV), count)
    wanted_RJ = np.argsort(-x_RV, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(id_RJ, wanted_RJ)
    np.testing.assert_array_equal(value_RJ, np.take_along_axis(x_RV, wanted_RJ, axis=1))


def test_top_rows_finds_what_is_crowded_into_one_block():
    x_RV = np.zeros((2, 10_000), np.float32)
    x_RV[0, 640:704] = np.arange(64) + 1  # exactly one block
    x_RV[1, ::500] = 1 + np.arange(20)  # one per block
    _, id_RJ = top_rows(jnp.asarray(x_RV), 64)
    assert id_RJ[0].tolist() == list(range(703, 639, -1))
    assert id_RJ[1, :20].tolist() == list(range(9_500, -1, -500))
    assert id_RJ[1, 20:].tolist() == [v for v in range(46) if v % 500][:44]


def ends_of_prefixes(weight_RV, target_R, value):
    """As `shortest_prefix`, by a stable sort. Sums must be exact."""
    ends = []
    for row, target in zip(weight_RV, target_R, strict=True):
        order = np.argsort(-row, kind="stable")
        reached = np.cumsum(value(row[order].astype(np.float64))) >= target
        last = order[np.argmax(reached)] if reached.any() else order[-1]
        ends.append((row[last], last))
    return [tuple(x) for x in zip(*ends, strict=True)]


@partial(jax.jit, static_argnums=2)
def find_prefix(weight_RV, target_R, value):
    return shortest_prefix(weight_RV, jnp.zeros_like(target_R), target_R, value)


def itself(x):
    return x


@pytest.mark.parametrize("vocab", [5, 300, 20_000])
def test_shortest_prefix_equals_a_stable_sort(vocab):
    """Weights are multiples of 2^-9, so that float32 sums are exact; rows have no ties, some, and
    nothing else, and some of their entries are 0."""
    rng = np.random.default_rng(vocab)
    most = 512 if vocab > 5 else 8
    weight_RV = np.stack(
        [
            rng.integers(0, most + 1, vocab),
            rng.permutation(vocab) % (most + 1),
            np.full(vocab, most),
            np.full(vocab, 1),
            np.where(np.arange(vocab) == 3, most, 1),
            np.where(rng.random(vocab) < 0.5, 0, most // 2),
        ]
    ).astype(np.float32) / np.float32(512)
    weight_RV[:, vocab // 2] = 1.0
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        for value in (itself, np.ones_like):
            total_R = value(weight_RV.astype(np.float64)).sum(axis=1)
            target_R = (share * total_R).astype(np.float32)
            jax_value = itself if value is itself else jnp.ones_like
            found = find_prefix(jnp.asarray(weight_RV), jnp.asarray(target_R), jax_value)
            wanted = ends_of_prefixes(weight_RV, target_R, value)
            np.testing.assert_array_equal(np.asarray(found[0]), wanted[0])
            np.testing.assert_array_equal(np.asarray(found[1]), wanted[1])


def test_the_end_of_a_prefix_does_not_depend_on_the_other_rows():
    rng = np.random.default_rng(1)
    weight_RV = np.exp(-rng.exponential(3, (4, 20_000))).astype(np.float32)
    weight_RV[2] = 0.25
    target_R = 0.9 * weight_RV.sum(axis=1)
    together = find_prefix(jnp.asarray(weight_RV), jnp.asarray(target_R), itself)
    for r in range(4):
        others = np.where(np.arange(4) == r, 0, 2)
        others[r] = r
        alone = find_prefix(jnp.asarray(weight_RV[others]), jnp.asarray(target_R[others]), itself)
        assert [x[r].item() for x in alone] == [x[r].item() for x in together]


def test_a_search_ends_beside_a_row_of_nan():
    weight_RV = np.full((2, 300), 0.5, np.float32)
    weight_RV[1, 7] = np.nan
    found = find_prefix(jnp.asarray(weight_RV), jnp.asarray([50.0, np.nan]), itself)
    assert [x[0].item() for x in found] == [0.5, 99]


def test_nth_true_counts_across_blocks():
    rng = np.random.default_rng(3)
    mask_RV = rng.random((6, 1_000)) < 0.05
    n_R = np.array([1, 2, 10, 30, 40, 10_000])
    wanted = [np.flatnonzero(row)[min(n, row.sum()) - 1] for row, n in zip(mask_RV, n_R)]  # noqa: B905
    assert nth_true(jnp.asarray(mask_RV), jnp.asarray(n_R)).tolist() == wanted


@pytest.mark.parametrize("vocab", [300, 262_144])
def test_draws_never_meet_an_entry_without_weight(vocab):
    weight_RV = np.zeros((64, vocab), np.float32)
    weight_RV[:, [5, vocab - 1]] = 1e-30, 1e-30
    edges = [0.0, 0.25, 0.5, 0.75, 1 - 2.0**-24]
    u_R2 = np.array([(a, b) for a in edges for b in edges] * 3, np.float32)[:64]
    drawn = np.asarray(draw_rows(jnp.asarray(weight_RV), jnp.asarray(u_R2)))
    assert set(drawn) == {5, vocab - 1}
    np.testing.assert_array_equal(drawn == 5, u_R2[:, 0] < 0.5)


def test_draws_resolve_a_large_flat_vocabulary():
    # One 23-bit uniform cannot weigh 262,144 entries equally; two can. Counts per 4,096 ids:
    # 64 cells of 1,000 draws expected, chi-square 0.9999 quantile at 63 degrees is 112.
    rng = np.random.default_rng(0)
    weight_RV = jnp.ones((1_000, 262_144), jnp.float32)
    cells = np.zeros(64)
    inside = np.zeros(64)
    step = jax.jit(draw_rows)
    for _ in range(4):
        drawn = np.asarray(step(weight_RV, rng.random((1_000, 2), np.float32)))
        cells += np.bincount(drawn // 4_096, minlength=64)
        inside += np.bincount(drawn % 64, minlength=64)
    for counts in (cells, inside):
        assert ((counts - 62.5) ** 2 / 62.5).sum() < 112
