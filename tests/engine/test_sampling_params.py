"""What a request may ask: every value out of range is refused before it reaches an array."""

import math

import numpy as np
import pytest

from engine.sampling_params import SamplingParams
from engine.sampling_rows import (
    RowFacts,
    SamplingLimits,
    bad_word_ids_of,
    empty_rows,
    fill_row,
    stop_ids_of,
)

NAN, INF = math.nan, math.inf
LIMITS = SamplingLimits(
    vocab_size=50,
    max_logprobs=5,
    max_logit_bias=2,
    max_allowed_ids=3,
    max_bad_words=2,
    max_bad_word_len=3,
)


def row(limits=LIMITS, seed=0, choice=0, bad_word_ids=(), **fields):
    """The one row of a request, as {field: value}."""
    rows = empty_rows(1, limits)
    facts = RowFacts(seed=seed, choice=choice, bad_word_ids=bad_word_ids)
    fill_row(rows, 0, SamplingParams(**fields), facts, limits)
    return {name: getattr(rows, name)[0] for name in rows.__dataclass_fields__}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, -1e-9, 1e6, INF, NAN]),
        ("top_p", [-1, 0, 1.5, NAN]),
        ("top_k", [-2]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, INF]),
        ("repetition_penalty", [0, -1, 1e3, NAN, INF]),
        ("n", [0, -1, 10**6]),
        ("seed", [-1, 2**64]),
        ("max_tokens", [0, -1]),
        ("min_tokens", [-1]),
        ("logprobs", [-1]),
        ("prompt_logprobs", [-1]),
        ("truncate_prompt_tokens", [0, -2]),
        ("logit_bias", [{0: 101}, {0: NAN}, {0: INF}, {-1: 5}, {2**63: 5}]),
        ("allowed_token_ids", [[], [-1], [2**63]]),
        ("stop_token_ids", [[-1]]),
        ("stop", ["", ["a", ""]]),
        ("bad_words", [[""]]),
        ("spaces_between_special_tokens", [False]),
    ],
)
def test_b97_values_out_of_range_are_refused(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_k", [0.01, "5", True, None]),
        ("temperature", ["1", None, True]),
        ("n", [1.0, True]),
        ("seed", [1.5, "7", True]),
        ("max_tokens", [2.5, True]),
        ("logprobs", [True, 1.0]),
        ("ignore_eos", [1, None]),
        ("detokenize", ["yes"]),
        ("stop", [3, [3]]),
        ("bad_words", ["word", [3]]),
        ("stop_token_ids", [3, [1.5], "12", [True]]),
        ("logit_bias", [[3], {"3": 1.0}, {3: "1"}, {3: True}]),
    ],
)
def test_b97_wrong_types_are_refused(field, values):
    for value in values:
        with pytest.raises(TypeError, match=field):
            SamplingParams(**{field: value})


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)


def test_refusals_name_value_limit_and_fix():
    with pytest.raises(ValueError, match=r"top_p must be above 0.* at most 1.*got 1\.5; 1 is off"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"min_tokens 9 exceeds max_tokens 4; raise max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=4)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(ValueError, match="temperature above 0"):
        SamplingParams(n=2, temperature=0)


def test_defaults_and_edges_are_accepted():
    SamplingParams()
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=2**64 - 1, max_tokens=None)
    SamplingParams(temperature=1e-8, top_p=1e-9, top_k=10**7, min_tokens=16, logit_bias={1: -INF})
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), truncate_prompt_tokens=-1)
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams(stop_token_ids=[3, 3, 2]).stop_token_ids == (3, 2)


def test_b01_any_top_k_becomes_a_count_or_off():
    stored = [int(row(top_k=k)["top_k"]) for k in (-1, 0, 1, 49, 50, 51, 10**7, 2**40)]
    assert stored == [0, 0, 1, 49, 0, 0, 0, 0]


def test_b21_token_ids_are_below_the_vocabulary():
    assert row(logit_bias={49: 5})["bias_ids"].tolist() == [49, -1]
    refused = (
        {"logit_bias": {50: 5}},
        {"allowed_token_ids": [3, 50]},
    )
    for fields in refused:
        with pytest.raises(ValueError, match=r"50, outside 0 \.\. 49"):
            row(**fields)
    with pytest.raises(ValueError, match=r"must be in 0 \.\. 49, got 50"):
        row(bad_word_ids=[[50]])
    with pytest.raises(ValueError, match=r"50, outside 0 \.\. 49"):
        stop_ids_of(SamplingParams(stop_token_ids=[50]), (), 50, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias asks for 3, .* 2; .* max_logit_bias"),
        ({"allowed_token_ids": [1, 2, 3, 4]}, "for 4, .* 3; .* max_allowed_ids"),
        ({"logprobs": 6}, "logprobs asks for 6, .* 5; .* max_logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs asks for 6"),
        ({"bad_word_ids": [[1], [2], [3]]}, "for 3, .* 2; .* max_bad_words"),
        ({"bad_word_ids": [[1, 2, 3, 4]]}, "for 4, .* 3; .* max_bad_word_len"),
    ],
)
def test_requests_beyond_a_capacity_are_refused_and_change_nothing(fields, message):
    rows = empty_rows(1, LIMITS)
    bad_word_ids = fields.pop("bad_word_ids", ())
    with pytest.raises(ValueError, match=message):
        fill_row(rows, 0, SamplingParams(**fields), RowFacts(0, 0, bad_word_ids), LIMITS)
    for name, values in vars(empty_rows(1, LIMITS)).items():
        np.testing.assert_array_equal(getattr(rows, name), values)


def test_b30_stop_ids_are_the_union_and_ignore_eos_leaves_the_requests_own():
    eos = (7, 9, 8)
    limits = 50, 4  # vocabulary, stop ids
    assert stop_ids_of(SamplingParams(), eos, *limits) == [7, 8, 9]
    assert stop_ids_of(SamplingParams(stop_token_ids=[5]), eos, *limits) == [5, 7, 8, 9]
    assert stop_ids_of(SamplingParams(ignore_eos=True), eos, *limits) == []
    assert stop_ids_of(SamplingParams(ignore_eos=True, stop_token_ids=[5]), eos, *limits) == [5]
    with pytest.raises(ValueError, match="5 together, the engine holds 4"):
        stop_ids_of(SamplingParams(stop_token_ids=[1, 2]), eos, *limits)


def test_seed_keeps_64_bits():
    assert row(seed=2**40 + 5)["seed"].tolist() == [2**8, 5]
    assert row(seed=2**64 - 1)["seed"].tolist() == [2**32 - 1] * 2
    with pytest.raises(ValueError, match="seed"):
        row(seed=2**64)


def test_bad_words_are_right_aligned_and_spelled_with_and_without_a_space():
    ids = {"ab": [1, 2], " ab": [3], "c": [4], " c": [4]}
    assert bad_word_ids_of(["ab", "c"], ids.__getitem__) == ((1, 2), (3,), (4,))
    words = row(bad_word_ids=[(1, 2), (3,)])["bad_words"]
    assert words.tolist() == [[-1, 1, 2], [-1, -1, 3]]


def test_b10_empty_rows_ask_for_nothing():
    rows = empty_rows(3, LIMITS)
    assert {name: np.unique(values).tolist() for name, values in vars(rows).items()} == {
        "temperature": [0],
        "top_p": [1],
        "min_p": [0],
        "top_k": [0],
        "presence": [0],
        "frequency": [0],
        "repetition": [1],
        "min_tokens": [0],
        "num_logprobs": [-1],
        "seed": [0],
        "choice": [0],
        "bias_ids": [-1],
        "bias": [0],
        "allowed_ids": [-1],
        "bad_words": [-1],
    }
