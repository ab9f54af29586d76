"""`prompt_logprobs` of `LLM` against float64 log-softmax of a forward pass without an engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from models.batch import ragged_batch
from models.kv_cache import init_cache
from models.model import cache_specs, forward, unembed
from tests.engine.test_llm import (
    CONFIG,
    DEFAULTS,
    MAX_LEN,
    PARAMS,
    PREEMPTING,
    PROMPTS,
    TOKEN_BY_TOKEN,
    expected,
    fresh_llm,
    shared_llm,
)
from tests.tiny import VOCAB

SOFTCAP = CONFIG.__class__(**{**vars(CONFIG), "final_softcap": 2.0})
# Float32 logits of up to about 10 in magnitude, and a sum of 97 terms: 1e-5 is some 10 ulps.
TOLERANCE = 2e-5


@jax.jit
def _logits(tokens_T, length):
    ones = jnp.ones((1, 1), jnp.int32)
    start = jnp.zeros(1, jnp.int32)
    batch = ragged_batch(
        tokens_T, start, length[None], length[None], length[None], ones, max_q_len=MAX_LEN
    )
    cache = init_cache(cache_specs(CONFIG), 2, MAX_LEN, jnp.float32)
    hidden_TD, _ = forward(CONFIG, PARAMS, cache, batch, attention_impl="reference")
    return unembed(CONFIG, PARAMS, hidden_TD)


def reference(prompt, softcap=None) -> np.ndarray:
    """Log-probabilities of every token after every prefix, float64 [length, V]."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(prompt)] = prompt
    x = np.asarray(_logits(jnp.asarray(padded), len(prompt)), np.float64)[: len(prompt)]
    x = x if softcap is None else softcap * np.tanh(x / softcap)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def ask(llm, prompts, count, **fields):
    fields = {"temperature": 0, "max_tokens": 4, "prompt_logprobs": count} | fields
    return llm.generate(prompts, SamplingParams(**fields), use_tqdm=False)


def assert_right(output, prompt, count, softcap=None):
    got = output.prompt_logprobs
    assert len(got) == len(prompt)
    assert got[0] is None
    for position in range(1, len(prompt)):
        token, found = prompt[position], got[position]
        expected_V = reference(prompt, softcap)[position - 1]
        order = np.argsort(-expected_V, kind="stable")
        assert found[token].rank == 1 + int(np.flatnonzero(order == token)[0])
        assert list(found) == list(dict.fromkeys([token, *order[:count].tolist()]))
        for rank, other in enumerate(order[:count].tolist(), start=1):
            assert found[other].rank == rank
        np.testing.assert_allclose(
            [e.logprob for e in found.values()], expected_V[list(found)], rtol=0, atol=TOLERANCE
        )


@pytest.fixture(scope="module")
def llm():
    return shared_llm()


def test_every_position_in_chunks_and_batches(llm):
    # A budget of 16 computes the prompt of 30 in chunks, beside others that do not ask.
    params = [
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3 if i % 2 == 0 else None)
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected(PROMPTS, 4)
    for i, (output, prompt) in enumerate(zip(outputs, PROMPTS, strict=True)):
        if i % 2 == 0:
            assert_right(output, prompt, 3)
        else:
            assert output.prompt_logprobs is None


def test_cached_prefixes_are_not_taken_by_those_who_ask(llm):
    prompt = PROMPTS[6][::-1]
    for count in (None, 0, None, 2):  # the third one takes the pages of the first
        before = llm.engine.counters()
        output = ask(llm, [prompt], count)[0]
        after = llm.engine.counters()
        assert output.outputs[0].token_ids == expected([prompt], 4)[0]
        if count is not None:
            assert after["prefix_hit_tokens"] == before["prefix_hit_tokens"]
            assert_right(output, prompt, count)
    assert after["prefix_hit_tokens"] > 0


def test_choices_share_the_prompt_and_its_scores(llm):
    before = llm.engine.counters()["prefill_tokens"]
    output = ask(llm, [PROMPTS[6]], 1, n=3, temperature=1.0, seed=2)[0]
    assert len(output.outputs) == 3
    assert_right(output, PROMPTS[6], 1)
    assert llm.engine.counters()["prefill_tokens"] - before <= len(PROMPTS[6])


def test_b46_preemption_neither_loses_nor_repeats_any():
    llm = fresh_llm(**PREEMPTING)
    outputs = ask(llm, PROMPTS, 2, max_tokens=12)
    assert llm.engine.counters()["preemptions"] > 0
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert_right(output, prompt, 2)
    assert [o.outputs[0].token_ids for o in outputs] == expected(PROMPTS, 12)


def test_a_budget_of_one_token_changes_nothing():
    llm = fresh_llm(**TOKEN_BY_TOKEN, overlap=False)
    for output, prompt in zip(ask(llm, PROMPTS[:6], 1), PROMPTS[:6], strict=True):
        assert_right(output, prompt, 1)


def test_the_final_softcap_counts_and_no_logits_of_a_whole_pass_exist():
    budget = 80
    llm = LLM.from_params(SOFTCAP, PARAMS, **DEFAULTS | {"max_num_batched_tokens": budget})
    prompt = (PROMPTS[6] * 2)[:50]  # two blocks of one pass
    assert_right(ask(llm, [prompt], 2)[0], prompt, 2, softcap=2.0)
    for program in llm.engine._programs.compiled.values():
        text = program.as_text()
        assert f"f32[32,{VOCAB}]" in text
        assert f"f32[{budget},{VOCAB}]" not in text


def test_b19_no_setting_touches_them(llm):
    params = {"temperature": 0.3, "top_k": 2, "logit_bias": {5: 50.0}, "repetition_penalty": 2.0}
    assert_right(ask(llm, [PROMPTS[4]], 4, seed=1, **params)[0], PROMPTS[4], 4)


def test_a_stream_brings_them_with_the_first_token(llm):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    first = next(iter(llm.stream([PROMPTS[6]], params)))[0]
    assert_right(first, PROMPTS[6], 1)


@pytest.mark.parametrize("count", [21, 10**6])
def test_more_than_the_engine_reports_are_refused(llm, count):
    with pytest.raises(ValueError, match=f"prompt_logprobs asks for {count}, the engine holds 20"):
        ask(llm, [[1]], count)
    assert not llm.engine.has_unfinished
