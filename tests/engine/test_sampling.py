"""Sampling against closed forms and exact counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.sampling import argmax_rows, sample_rows


def draw(logits_V, temperature, count, first_seed=0):
    """`count` draws with seeds first_seed, first_seed + 1, ..."""
    logits_SV = jnp.broadcast_to(jnp.asarray(logits_V), (count, len(logits_V)))
    return np.asarray(
        sample_rows(
            logits_SV,
            jnp.full(count, temperature, jnp.float32),
            jnp.arange(first_seed, first_seed + count, dtype=jnp.uint32),
            jnp.zeros(count, jnp.int32),
        )
    )


def test_b07_temperature_zero_is_argmax_and_tiny_temperature_is_finite():
    logits_V = [0.5, -1.2, 3.1, 0.8]
    assert draw(logits_V, 0.0, 4).tolist() == [2, 2, 2, 2]
    assert draw(logits_V, 1e-8, 50).tolist() == [2] * 50


def test_ties_take_the_lowest_id():
    x_SV = jnp.asarray([[0.0, 3, 3, 1], [5, 5, 5, 5], [-np.inf, -2, -1, -1]])
    assert argmax_rows(x_SV).tolist() == [1, 0, 2]


def test_argmax_of_a_large_vocabulary_equals_numpy():
    x_SV = np.random.default_rng(0).normal(size=(5, 49_153)).astype(np.float32)
    assert argmax_rows(jnp.asarray(x_SV)).tolist() == x_SV.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits_V = np.array([2.0, 1.0, 0.0, -1.0, -np.inf, 1.5], np.float32)
    count = 40_000
    seen_V = np.bincount(draw(logits_V, temperature, count), minlength=6)
    p_V = np.exp(logits_V.astype(np.float64) / temperature)
    p_V /= p_V.sum()
    assert seen_V[4] == 0
    likely = p_V > 0
    chi2 = (((seen_V - count * p_V) ** 2)[likely] / (count * p_V)[likely]).sum()
    assert chi2 < 20.5  # 0.999 quantile at 4 degrees of freedom is 18.5


def test_b25_near_flat_logits_reach_the_whole_vocabulary():
    # Uniform over 10,000 ids: 2,000 draws hit 10,000 * (1 - (1 - 1e-4)**2000) = 1,813 on average.
    logits_V = np.random.default_rng(0).normal(size=10_000) * 1e-3
    distinct = len(set(draw(jnp.asarray(logits_V, jnp.bfloat16), 1.0, 2_000).tolist()))
    assert 1_750 < distinct < 1_880


def test_last_and_only_possible_id_of_a_padded_block():
    # 700 entries are padded to 768; only the last real one is possible.
    logits_V = np.full(700, -np.inf, np.float32)
    logits_V[699] = 1.0
    assert set(draw(logits_V, 1.0, 200).tolist()) == {699}


def test_a_row_does_not_depend_on_its_neighbours_or_its_place():
    rng = np.random.default_rng(1)
    logits_SV = jnp.asarray(rng.normal(size=(4, 300)).astype(np.float32))
    seed_S = jnp.asarray([7, 8, 9, 10], jnp.uint32)
    temperature_S = jnp.asarray([0.8, 0.0, 1.3, 0.8])
    index_S = jnp.asarray([5, 6, 7, 8], jnp.int32)
    whole = sample_rows(logits_SV, temperature_S, seed_S, index_S).tolist()
    order = jnp.asarray([2, 0, 3, 1])
    moved = sample_rows(logits_SV[order], temperature_S[order], seed_S[order], index_S[order])
    assert moved.tolist() == [whole[i] for i in order]


def test_successive_outputs_of_one_seed_differ():
    logits_SV = jnp.zeros((16, 5_000))
    seed_S = jnp.full(16, 3, jnp.uint32)
    tokens = sample_rows(logits_SV, jnp.ones(16), seed_S, jnp.arange(16, dtype=jnp.int32))
    assert len(set(tokens.tolist())) >= 15


def test_greedy_batch_runs_no_random_code():
    hlo = (
        jax.jit(sample_rows)
        .lower(jnp.zeros((2, 512)), jnp.zeros(2), jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32))
        .as_text()
    )
    before_branch = hlo.split("stablehlo.case")[0] if "stablehlo.case" in hlo else hlo
    main = before_branch[before_branch.index("@main") :]
    assert "threefry" not in main
    assert "exponential" not in main
