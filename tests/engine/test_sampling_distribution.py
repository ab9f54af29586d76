"""200,000 draws of each combination of settings against the float64 reference, by chi-square."""

import numpy as np
import pytest

from engine.sampling_params import SamplingParams
from tests.engine.sampling_reference import Case, distribution, draws

COUNT = 200_000
LOGITS = [2.0, 1.5, 1.5, 0.7, 0.0, -0.4, -1.0, 2.2, -3.0, 0.9, 0.3, -0.9]
HISTORY = {"prompt": (0, 3, 3), "output": (1, 7, 7)}

# The 0.9999 quantile of chi-square by degrees of freedom.
LIMIT = (0.0, 15.1, 18.4, 21.1, 23.5, 25.7, 27.9, 29.9, 31.8, 33.7, 35.6, 37.4)

COMBINATIONS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "top_k and top_p": {"top_k": 6, "top_p": 0.7, "temperature": 1.5},
    "min_p and top_k": {"min_p": 0.2, "top_k": 4, "temperature": 0.8},
    "all filters": {"min_p": 0.05, "top_k": 9, "top_p": 0.9, "temperature": 1.3},
    "bias": {"logit_bias": {8: 4.0, 0: -1.0, 7: -np.inf}},
    "allowed": {"allowed_token_ids": [2, 5, 8]},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.7,
        "temperature": 1.2,
    },
    "everything": {
        "temperature": 1.4,
        "min_p": 0.02,
        "top_k": 8,
        "top_p": 0.95,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 0.8,
        "logit_bias": {8: 3.0},
        "min_tokens": 9,
    },
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_draws_follow_the_reference(name):
    case = Case(
        LOGITS,
        SamplingParams(**COMBINATIONS[name]),
        stop_ids=(9,),
        bad_word_ids=((7, 7, 2), (7, 10)) if name == "everything" else (),
        **HISTORY,
    )
    p_V = distribution(case)
    seen_V = np.bincount(draws(case, COUNT), minlength=len(LOGITS))
    possible = p_V > 0
    assert possible.sum() > 1
    assert seen_V[~possible].sum() == 0
    expected_V = COUNT * p_V[possible]
    chi2 = ((seen_V[possible] - expected_V) ** 2 / expected_V).sum()
    assert chi2 < LIMIT[possible.sum() - 1]
