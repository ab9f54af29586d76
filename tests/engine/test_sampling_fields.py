"""Every field of `SamplingParams` changes what comes out; a field without a test fails here.

Each case below names the field it proves: with the field's default the outcome is another one.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from engine.sampling_params import SamplingParams
from engine.sampling_rows import bad_word_ids_of, stop_ids_of
from engine.stop_strings import StopStrings
from tests.engine.sampling_reference import LIMITS, Case, run

LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]
GREEDY = {"temperature": 0.0}

# Carried out by the engine around the sampler, and proven where the engine is.
ENGINE_TESTS = "test_llm_fields.py"
OF_THE_ENGINE = {
    "n",
    "max_tokens",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "truncate_prompt_tokens",
}


def tokens(logits=LOGITS, count=64, **fields):
    """Tokens of `count` seeds, 8 at a time."""
    out = []
    for first in range(0, count, 8):
        cases = [
            Case(logits, SamplingParams(**fields), (0,), (), seed)
            for seed in range(first, first + 8)
        ]
        out += run(cases).token_R.tolist()
    return out


def token(output=(), prompt=(7,), logits=LOGITS, **fields):
    return int(run([Case(logits, SamplingParams(**GREEDY, **fields), prompt, output)]).token_R[0])


def test_field_temperature():
    assert set(tokens(temperature=0.0)) == {0}
    assert len(set(tokens(temperature=1.0))) > 3
    assert len(set(tokens(temperature=0.05))) < 3


def test_field_top_k():
    assert set(tokens(top_k=2, temperature=5.0)) == {0, 1}


def test_field_top_p():
    assert set(tokens(top_p=0.35, temperature=5.0)) == {0, 1, 2}


def test_field_min_p():
    assert set(tokens(min_p=0.8, temperature=5.0)) == {0, 1, 2}


def test_field_seed():
    a, b = (
        [int(run([Case([0.0] * 12, SamplingParams(), seed=s)]).token_R[0]) for s in seeds]
        for seeds in (range(8), range(8, 16))
    )
    assert a != b


def test_field_presence_penalty():
    assert token(output=[0]) == 0
    assert token(output=[0], presence_penalty=0.6) == 1
    assert token(output=[0, 0, 0], presence_penalty=0.4) == 0  # once, however often


def test_field_frequency_penalty():
    assert token(output=[0], frequency_penalty=0.4) == 0
    assert token(output=[0, 0], frequency_penalty=0.4) == 1


def test_field_repetition_penalty():
    assert token(prompt=[0], repetition_penalty=1.5) == 1
    assert token(prompt=[7], output=[0], repetition_penalty=1.5) == 1


def test_field_logit_bias():
    assert token(logit_bias={6: 3.5}) == 6
    assert token(logit_bias={0: -np.inf}) == 1


def test_field_allowed_token_ids():
    assert token(allowed_token_ids=[4, 3, 6]) == 3
    assert set(tokens(allowed_token_ids=[4, 6], temperature=5.0)) == {4, 6}


def test_field_bad_words():
    params = SamplingParams(**GREEDY, bad_words=["x", "yz"])
    ids = {"x": [0], " x": [5, 0], "yz": [7, 1], " yz": [6, 7, 1]}
    words = bad_word_ids_of(params.bad_words, ids.__getitem__)[:3]
    cases = [
        Case(LOGITS, params, prompt, output, bad_word_ids=words)
        for prompt, output in (((3,), ()), ((3,), (7,)), ((7,), ()), ((7,), (3,)))
    ]
    assert run(cases).token_R.tolist() == [1, 2, 2, 1]


def test_field_min_tokens():
    params = SamplingParams(**GREEDY, min_tokens=2)
    cases = [Case(LOGITS, params, (7, 7), [3] * n, stop_ids=(0, 1)) for n in range(4)]
    assert run(cases).token_R.tolist() == [2, 2, 0, 0]


def test_field_logprobs():
    asked = [Case(LOGITS, SamplingParams(logprobs=2))]
    assert run(asked).extra.ids_RL[0, 1:3].tolist() == [0, 1]
    assert run([Case(LOGITS)]).extra.ids_RL[0].tolist() == [-1] * (LIMITS.max_logprobs + 1)


def test_field_stop_token_ids():
    assert stop_ids_of(SamplingParams(stop_token_ids=[5]), (), 12, 3) == [5]


def test_field_ignore_eos():
    assert stop_ids_of(SamplingParams(ignore_eos=True), (3,), 12, 3) == []


def test_field_stop():
    params = SamplingParams(stop=["b"])
    assert StopStrings(params.stop, params.include_stop_str_in_output).add("abc") == "a"


def test_field_include_stop_str_in_output():
    params = SamplingParams(stop=["b"], include_stop_str_in_output=True)
    assert StopStrings(params.stop, params.include_stop_str_in_output).add("abc") == "ab"


def test_field_spaces_between_special_tokens():
    with pytest.raises(ValueError, match="not supported"):
        SamplingParams(spaces_between_special_tokens=False)


def test_b18_every_field_has_a_test():
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    here = {name.removeprefix("test_field_") for name in globals() if "test_field_" in name}
    assert here | OF_THE_ENGINE == fields
    assert not here & OF_THE_ENGINE
    engine_tests = Path(__file__).with_name(ENGINE_TESTS)
    if engine_tests.exists():
        text = engine_tests.read_text()
        assert [f for f in OF_THE_ENGINE if f"def test_field_{f}(" not in text] == []
