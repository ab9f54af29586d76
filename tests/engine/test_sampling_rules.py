"""The sampler's rules at edges, and that rows do not touch each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import no_sample, sample
from engine.sampling_params import SamplingParams
from engine.sampling_rows import SamplingLimits, empty_rows
from engine.state import empty_requests
from engine.step import RowView
from tests.engine.sampling_reference import (
    LIMITS,
    MAX_STOP_IDS,
    ROWS,
    Case,
    arrays,
    compiled_sample,
    draws,
    edited,
    run,
    run_edits,
)

GREEDY = SamplingParams(temperature=0)


def params(**fields):
    return SamplingParams(**({"temperature": 0.0} | fields))


def tokens(cases, **kwargs):
    return run(cases, **kwargs).token_R.tolist()


def test_b01_every_top_k_at_and_beyond_the_edges():
    logits, count = [1.0, 0.5, 0.0, -0.5, -1.0], 2_000
    off = draws(Case(logits, SamplingParams()), count)
    for k in (-1, 0, 5, 6, 10**7):
        np.testing.assert_array_equal(draws(Case(logits, SamplingParams(top_k=k)), count), off)
    assert set(draws(Case(logits, SamplingParams(top_k=1)), count)) == {0}
    assert set(draws(Case(logits, SamplingParams(top_k=4)), count)) == {0, 1, 2, 3}


def test_b03_top_k_1_is_argmax_at_bfloat16_ties():
    cases = [Case([0, 3, 3, 1], SamplingParams(top_k=1), seed=s) for s in range(8)]
    assert tokens(cases, dtype=jnp.bfloat16) == [1] * 8
    assert set(draws(cases[0], 50)) == {1}


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}])
def test_b07_temperature_0_and_tiny_are_argmax_under_every_filter(fields):
    logits = [0.5, -1.2, 3.1, 0.8]
    cases = [Case(logits, params(temperature=t, **fields)) for t in (0, 1e-8, 1e-40, 1e-60)]
    out = run(cases)
    assert out.token_R.tolist() == [2] * 4
    assert out.ok_R.all()


def test_b09_greedy_and_masked_tokens_beside_a_random_row():
    logits = [3.0, 2.0, 1.0, 0.0]
    banned = [
        Case(logits, params(logit_bias={0: -np.inf})),
        Case(logits, params(), bad_word_ids=[(0,)]),
        Case(logits, SamplingParams(temperature=0.8, logit_bias={0: -np.inf}), seed=3),
        Case(logits, SamplingParams(temperature=0.8), seed=5),
    ]
    out = run(banned)
    assert out.ok_R.all()
    assert out.token_R[:2].tolist() == [1, 1]
    assert out.token_R[2] != 0


def test_b14_choices_differ_repeat_and_do_not_depend_on_n():
    flat = [0.0] * 12

    def sequence(choice):
        case = [Case(flat, SamplingParams(), (0,), [1] * t, 7, choice) for t in range(8)]
        return tokens(case)

    choices = [sequence(i) for i in range(4)]
    assert len({tuple(c) for c in choices}) == 4
    assert choices == [sequence(i) for i in range(4)]
    assert choices[0] == tokens([Case(flat, SamplingParams(), (0,), [1] * t, 7) for t in range(8)])


def test_b15_penalties_count_what_they_should():
    logits = [2.0, 2.0, 2.0, -1.0]
    cases = [
        Case(logits, params(repetition_penalty=2.0), (0, 3), (1,)),
        Case(logits, params(presence_penalty=1.0), (0, 3), (1,)),
        Case(logits, params(frequency_penalty=1.0), (0, 3), (1, 1)),
    ]
    wanted = [[1, 1, 2, -2], [2, 1, 2, -1], [2, 0, 2, -1]]
    assert [x.tolist() for x in run_edits(cases)] == wanted


ids = st.integers(0, 5)
cases = st.builds(
    Case,
    logits=st.lists(st.floats(-8, 8, width=16), min_size=6, max_size=6),
    params=st.builds(
        SamplingParams,
        presence_penalty=st.sampled_from([0, 0.5, -1.0]),
        frequency_penalty=st.sampled_from([0, 0.25, 2.0]),
        repetition_penalty=st.sampled_from([1, 1.5, 0.5]),
        min_tokens=st.integers(0, 3),
        logit_bias=st.none() | st.dictionaries(ids, st.sampled_from([1.5, -np.inf]), max_size=4),
        allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=4),
    ),
    prompt=st.lists(ids, min_size=1, max_size=4),
    output=st.lists(ids, max_size=4),
    stop_ids=st.lists(ids, max_size=3),
    bad_word_ids=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(cases, min_size=1, max_size=ROWS))
def test_edits_of_any_mix_of_requests_equal_the_reference(mix):
    for case, ours in zip(mix, run_edits(mix), strict=True):
        np.testing.assert_allclose(ours, edited(case), rtol=1e-6, atol=1e-6)


def test_b17_padding_is_not_history():
    # Slots are filled with id 5, and every row but the first asks for nothing.
    penalised = params(frequency_penalty=1.5, presence_penalty=1.5, repetition_penalty=1.5)
    logits = [0.0, 0.0, 0.0, 0.0, 0.0, 0.1]
    short = Case(logits, penalised, (1, 2), (3,))
    long = Case(logits, GREEDY, (1, 2, 3, 4, 5, 5, 5, 5, 5), (5, 5))
    assert tokens([short]) == tokens([short, long])[:1] == [5]
    assert tokens([short, long])[1] == 5


def test_b24_an_unsound_row_fails_alone():
    sound = [Case([1.0, 2.0, 0.5], SamplingParams(), seed=s) for s in (1, 2)]
    alone = tokens([sound[0], Case([0.0, 0.0, 0.0]), sound[1]])
    nan, inf = np.nan, np.inf
    for bad in ([nan, nan, nan], [0.0, nan, 1.0], [inf, 0.0, 0.0], [-inf, -inf, -inf]):
        for fields in ({}, {"temperature": 0.0}, {"logit_bias": {1: -inf}, "top_k": 2}):
            out = run([sound[0], Case(bad, SamplingParams(**fields)), sound[1]])
            assert out.ok_R.tolist() == [True, False, True]
            assert out.token_R[1] == -1
            assert out.token_R[[0, 2]].tolist() == [alone[0], alone[2]]


def test_a_row_with_nothing_left_to_choose_fails():
    nothing = Case([1.0, 2.0], params(allowed_token_ids=[1]), bad_word_ids=[(1,)])
    everything_stops = Case([1.0, 2.0], params(min_tokens=1), stop_ids=(0, 1))
    assert run([nothing, everything_stops]).ok_R.tolist() == [False, False]


def test_b25_near_flat_bfloat16_logits_reach_the_whole_vocabulary():
    # Uniform over 10,000 ids: 2,000 draws hit 10,000 * (1 - (1 - 1e-4)**2000) = 1,813 on average.
    vocab, count = 10_000, 2_000
    limits = SamplingLimits(vocab, 0, 1, 1, 1, 1)
    rows = jax.tree.map(jnp.asarray, empty_rows(count, limits))
    seed = jnp.stack([jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1)
    view = RowView(
        requests_R=empty_requests(count, 0, rows.replace(temperature=jnp.ones(count), seed=seed)),
        slot_R=jnp.zeros(count, jnp.int32),
        num_tokens_R=jnp.zeros(count, jnp.int32),
        tokens_SX=jnp.zeros((1, 4), jnp.int32),
    )
    logits_V = jnp.asarray(np.random.default_rng(0).normal(size=vocab) * 1e-3, jnp.bfloat16)
    logits_RV = jnp.broadcast_to(logits_V, (count, vocab))
    out = jax.jit(sample, static_argnums=0)(limits, view, logits_RV, jnp.ones(count, bool))
    assert 1_750 < len(set(out.token_R.tolist())) < 1_880


def test_successive_outputs_of_one_seed_differ():
    cases = [Case([0.0] * 12, SamplingParams(), (0,), [1] * t, 3) for t in range(8)]
    assert len(set(tokens(cases))) >= 4


def test_b26_the_first_token_obeys_and_no_step_sees_a_stale_history():
    assert tokens([Case([3.0, 0, 0, 0, 0, 0], params(logit_bias={5: 50}))]) == [5]
    output = []
    for _ in range(6):  # a model that always wants id 3, then 1
        case = Case([0.0, 5.0, 0.0, 9.0], params(frequency_penalty=2.0), (3,), output)
        output += tokens([case])
    assert output == [3, 3, 1, 3, 1, 3]  # 9 7 5 5 3 3 against 5 5 5 3 3 1


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_b31_min_tokens_holds_back_every_stop_until_so_many_exist(min_tokens):
    output, stops = [], (2, 4)
    wanted = params(logit_bias={2: 100.0, 4: 99.0}, min_tokens=min_tokens)
    while not output or output[-1] not in stops:
        output += tokens([Case([0.0, 1.0, 0.0, 0.0, 0.0], wanted, (2, 2), output, stop_ids=stops)])
    assert output == [1] * min_tokens + [2]


def test_bad_words_end_exactly_where_the_history_says():
    logits = [0.0, 0.0, 0.0, 4.0, 3.0]
    words = [(1, 2, 3), (2, 4)]
    histories = [(1, 2), (9, 2), (2,), (1, 1, 2), (2, 1), (1, 2, 9)]
    wanted = [0, 3, 3, 0, 3, 3]  # ids 3 and 4 both banned, only 4 banned, ... , nothing banned
    cases = [Case(logits, GREEDY, (0,), h, bad_word_ids=words) for h in histories]
    assert tokens(cases) == wanted


def test_a_bad_word_may_begin_in_the_prompt_and_before_it_is_nothing():
    cases = [
        Case([0.0, 5.0], GREEDY, (3,), (), bad_word_ids=[(2, 3, 1)]),
        Case([0.0, 5.0], GREEDY, (2, 3), (), bad_word_ids=[(2, 3, 1)]),
        Case([0.0, 5.0], GREEDY, (2,), (3,), bad_word_ids=[(2, 3, 1)]),
    ]
    assert tokens(cases) == [1, 0, 0]


def test_b19_logprobs_are_raw_whatever_else_is_asked():
    logits = [1.0, 0.0, -1.0, -2.0]
    asked = [
        SamplingParams(logprobs=4),
        SamplingParams(logprobs=4, temperature=0.5, top_p=0.9),
        SamplingParams(logprobs=4, logit_bias={0: -np.inf}, top_k=2),
        params(logprobs=4, repetition_penalty=2.0),
    ]
    out = run([Case(logits, p, (0, 1), (2,)) for p in asked])
    wanted = np.array(logits) - np.log(np.sum(np.exp(logits)))
    for r in range(len(asked)):
        token = out.token_R[r]
        assert out.extra.ids_RL[r].tolist() == [token, 0, 1, 2, 3]
        np.testing.assert_allclose(out.extra.logprobs_RL[r, 1:], wanted, rtol=0, atol=5e-7)
        assert out.extra.logprobs_RL[r, 0] == out.extra.logprobs_RL[r, 1 + token]
        assert out.extra.rank_R[r] == token + 1
    assert np.isfinite(out.extra.logprobs_RL).all()


def test_logprobs_rank_equals_by_id_and_leave_impossible_tokens_out():
    cases = [
        Case([1.0, 3.0, 3.0, 3.0], params(logprobs=4, allowed_token_ids=[3])),
        Case([5.0, -np.inf, 4.0], params(logprobs=4)),
    ]
    out = run(cases).extra
    assert out.rank_R.tolist() == [3, 1]
    assert out.ids_RL.tolist() == [[3, 1, 2, 3, 0], [0, 0, 2, -1, -1]]
    assert np.isfinite(out.logprobs_RL).all()


def test_b23_padded_columns_are_no_tokens():
    limits = SamplingLimits(vocab_size=3, max_logprobs=4)
    rows = jax.tree.map(jnp.asarray, empty_rows(2, limits))
    rows = rows.replace(
        temperature=jnp.array([0.0, 1.0]), num_logprobs=jnp.array([4, 4], jnp.int32)
    )
    view = RowView(
        requests_R=empty_requests(2, 1, rows),
        slot_R=jnp.arange(2),
        num_tokens_R=jnp.zeros(2, jnp.int32),
        tokens_SX=jnp.zeros((2, 4), jnp.int32),
    )
    logits_RV = jnp.array([[-3.0, -1, -2, 0, 0, 0, 0, 0]] * 2)
    out = sample(limits, view, logits_RV, jnp.ones(2, bool))
    assert out.token_R[0] == 1
    assert out.token_R[1] < 3
    assert out.extra.ids_RL[0].tolist() == [1, 1, 2, 0, -1]
    p = np.exp(np.asarray(out.extra.logprobs_RL[0, 1:4]))
    np.testing.assert_allclose(p.sum(), 1.0, atol=1e-6)
    with pytest.raises(ValueError, match="vocab_size 9 exceeds the logits' width 8"):
        sample(SamplingLimits(vocab_size=9), view, logits_RV, jnp.ones(2, bool))


def mixed_cases():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 12)).round(1)  # with ties
    asked = [
        SamplingParams(temperature=0.8, top_p=0.7),
        GREEDY,
        SamplingParams(top_k=3, repetition_penalty=1.3),
        SamplingParams(temperature=2.0, logit_bias={3: 2.0}, min_p=0.1),
        SamplingParams(presence_penalty=1.0, allowed_token_ids=[1, 2, 3]),
        SamplingParams(temperature=0.5, min_tokens=5, logprobs=3),
    ]
    return [
        Case(logits[i], asked[i], (1, 2), (3, 3), seed=i, stop_ids=(0,), bad_word_ids=((3, 4),))
        for i in range(6)
    ]


def test_b12_b103_a_row_is_the_same_in_any_company_order_and_slot():
    cases = mixed_cases()
    together = run(cases)
    for i, case in enumerate(cases):
        alone = run([case])
        assert alone.token_R[0] == together.token_R[i]
    order, slots = [3, 1, 5, 0, 4, 2], [7, 0, 3, 2, 6, 5]
    moved = run([cases[i] for i in order], slots=slots)
    assert moved.token_R.tolist() == together.token_R[order].tolist()
    np.testing.assert_array_equal(moved.extra.logprobs_RL, together.extra.logprobs_RL[order])


def test_rows_that_sample_nothing_yield_nothing_and_are_no_error():
    everything = SamplingParams(top_k=3, presence_penalty=1.0, logprobs=2, allowed_token_ids=[1])
    view, _, _ = arrays([Case([0.0, 1.0], everything)] * 3)
    samples_R = np.arange(ROWS) == 1
    logits_RV = np.full((ROWS, LIMITS.vocab_size), np.nan, np.float32)
    logits_RV[1] = 0.0
    out = compiled_sample(LIMITS, view, logits_RV, samples_R)
    assert out.token_R.tolist() == [-1, 1] + [-1] * 6
    assert out.ok_R.all()
    none = compiled_sample(LIMITS, view, logits_RV, np.zeros(ROWS, bool))
    assert none.token_R.tolist() == no_sample(LIMITS, ROWS).token_R.tolist()
    assert (none.extra.ids_RL == -1).all()


def equations(jaxpr):
    """Equations that always run: those of conditional branches are left out."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in ("cond", "while"):
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_what_no_row_asks_for_does_not_run():
    view, logits_RV, samples_R = arrays([Case([0.0, 1.0])])
    jaxpr = jax.make_jaxpr(sample, static_argnums=0)(LIMITS, view, logits_RV, samples_R)
    always = {equation.primitive.name for equation in equations(jaxpr.jaxpr)}
    assert {"reduce_max", "reduce_min", "cond"} <= always
    assert not {name for name in always if "scatter" in name or "random" in name}
    assert not always & {"exp", "log", "top_k", "sort", "cumsum", "gather", "dot_general"}


def test_sample_runs_inside_a_loop_and_has_the_structure_of_no_sample():
    rows = jax.tree.map(jnp.asarray, empty_rows(2, LIMITS))
    view = RowView(
        requests_R=empty_requests(2, MAX_STOP_IDS, rows),
        slot_R=jnp.arange(2),
        num_tokens_R=jnp.ones(2, jnp.int32),
        tokens_SX=jnp.zeros((2, 4), jnp.int32),
    )

    @jax.jit
    def loop(logits_RV):
        def body(_, out):
            return jax.tree.map(
                lambda new, old: new.astype(old.dtype),
                sample(LIMITS, view, logits_RV, jnp.array([True, False])),
                out,
            )

        return jax.lax.fori_loop(0, 2, body, no_sample(LIMITS, 2))

    out = loop(jnp.eye(12)[jnp.array([4, 6])])
    assert out.token_R.tolist() == [4, -1]
    assert out.ok_R.tolist() == [True, True]
