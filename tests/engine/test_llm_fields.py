"""Text in and out of `LLM`, with the fields of `SamplingParams` that the engine carries out itself.

The tokenizer has one token per printable character, and one special token.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from engine.beam_search import BeamSearchParams
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.tokenizer import load_tokenizer
from tests.engine.test_llm import (
    CONFIG,
    DEFAULTS,
    PARAMS,
    PROMPTS,
    _logits_of_last,
    expected,
)
from tests.tiny import SPECIAL, VOCAB, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def llm(tokenizer):
    return LLM.from_params(CONFIG, PARAMS, tokenizer, **DEFAULTS)


def one(llm, prompt, **fields):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12} | fields)
    return llm.generate(prompt, params, use_tqdm=False)[0]


def test_text_is_the_decoded_tokens(llm, tokenizer):
    prompt = "hello, world"
    output = one(llm, prompt)
    assert output.prompt == prompt
    assert output.prompt_token_ids == tokenizer.encode(prompt)
    assert output.outputs[0].token_ids == expected([output.prompt_token_ids], 12)[0]
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)


def test_streamed_text_is_the_whole_text(llm):
    whole = [one(llm, text).outputs[0].text for text in ("abc", "xyz and more")]
    pieces = {}
    params = SamplingParams(temperature=0, max_tokens=12)
    for output, deltas in llm.stream(["abc", "xyz and more"], params):
        pieces[output.prompt] = pieces.get(output.prompt, "") + deltas[0]
    assert list(pieces.values()) == whole


def test_field_n(llm):
    outputs = one(llm, "abc", n=3, temperature=1.0, seed=1).outputs
    assert [o.index for o in outputs] == [0, 1, 2]
    assert len({o.text for o in outputs}) == 3


def test_best_of_n_is_the_choice_with_the_largest_cumulative_logprob(llm):
    outputs = one(llm, "abc", n=4, temperature=1.5, seed=1, logprobs=0, max_tokens=6).outputs
    for output in outputs:
        found = [e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(found))
    best = max(outputs, key=lambda choice: choice.cumulative_logprob)
    assert best.cumulative_logprob > min(o.cumulative_logprob for o in outputs)
    assert one(llm, "abc").outputs[0].cumulative_logprob is None
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(n=2, best_of=4)


def test_field_max_tokens(llm):
    assert len(one(llm, "abc", max_tokens=5).outputs[0].token_ids) == 5
    everything = one(llm, "abc", max_tokens=None).outputs[0]
    assert len(everything.token_ids) == DEFAULTS["max_model_len"] - 3
    assert everything.finish_reason == "length"


def test_field_prompt_logprobs(llm):
    assert one(llm, "abc").prompt_logprobs is None
    first, *rest = one(llm, "abc", prompt_logprobs=1).prompt_logprobs
    assert first is None
    for letter, entries in zip("bc", rest, strict=True):
        asked, *best = entries.values()
        assert asked.decoded_token == letter
        assert [entry.rank for entry in best] == ([] if asked.rank == 1 else [1])


def test_an_error_names_the_settings_that_may_have_caused_it(llm):
    nothing = {"allowed_token_ids": [7], "logit_bias": {7: -math.inf}}
    failed, other = llm.generate(
        ["abc", "abc"],
        [SamplingParams(temperature=0, **fields) for fields in (nothing, {"min_tokens": 2})],
        use_tqdm=False,
    )
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].error == (
        "allowed_token_ids, logit_bias left no token to choose, or the network gave NaN or infinity"
    )
    assert other.outputs[0].error is None


def test_field_detokenize(llm):
    silent, spoken = (one(llm, "abc", detokenize=d).outputs[0] for d in (False, True))
    assert silent.token_ids == spoken.token_ids
    assert (silent.text, bool(spoken.text)) == ("", True)


def test_field_skip_special_tokens(llm):
    fields = {"allowed_token_ids": [SPECIAL], "max_tokens": 2}
    assert one(llm, "abc", **fields).outputs[0].text == ""
    shown = one(llm, "abc", skip_special_tokens=False, **fields).outputs[0].text
    assert shown == "<special><special>"


def test_field_truncate_prompt_tokens(llm, tokenizer):
    output = one(llm, "a long prompt", truncate_prompt_tokens=4)
    assert output.prompt_token_ids == tokenizer.encode("a long prompt")[-4:]


def test_b27_stop_strings_end_text_tokens_and_logprobs_together(llm):
    whole = one(llm, "abc", logprobs=0).outputs[0]
    stop = whole.text[3:5]
    cut = whole.text.index(stop)
    for include in (False, True):
        output = one(llm, "abc", stop=[stop], include_stop_str_in_output=include, logprobs=0)
        stopped = output.outputs[0]
        assert stopped.text == whole.text[: cut + 2 * include]
        assert stopped.token_ids == whole.token_ids[: cut + 2]
        assert len(stopped.logprobs) == cut + 2
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert not llm.engine.has_unfinished


def test_a_stop_token_is_not_part_of_the_text(llm):
    whole = one(llm, "abc").outputs[0]
    token = whole.token_ids[3]
    cut = whole.token_ids.index(token)
    stopped = one(llm, "abc", stop_token_ids=[token]).outputs[0]
    assert stopped.token_ids == whole.token_ids[: cut + 1]
    assert stopped.text == whole.text[:cut]
    kept = one(llm, "abc", stop_token_ids=[token], include_stop_str_in_output=True).outputs[0]
    assert kept.text == whole.text[: cut + 1]


def test_logprobs_are_those_of_the_model(llm):
    output = one(llm, PROMPTS[3], logprobs=2, max_tokens=3).outputs[0]
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert entries[token].rank == 1
        assert len(entries) == 2
        assert entries[token].logprob == max(e.logprob for e in entries.values()) < 0
    total = sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_beam_search_equals_recomputation(llm, tokenizer):
    width, count = 3, 5
    prompt = tokenizer.encode("abc")
    beams = [((), 0.0)]
    for _ in range(count):
        grown = []
        for tokens, total in beams:
            known = [*prompt, *tokens]
            padded = np.zeros(DEFAULTS["max_model_len"], np.int32)
            padded[: len(known)] = known
            logits_V = np.asarray(_logits_of_last(padded, jnp.int32(len(known))), np.float64)
            logprob_V = logits_V - np.log(np.sum(np.exp(logits_V)))
            grown += [((*tokens, v), total + logprob_V[v]) for v in range(VOCAB)]
        beams = sorted(grown, key=lambda b: -b[1])[:width]
    (output,) = llm.beam_search("abc", BeamSearchParams(width, count))
    assert [s.tokens for s in output.sequences] == [[*prompt, *tokens] for tokens, _ in beams]
    assert [s.cum_logprob for s in output.sequences] == pytest.approx([t for _, t in beams], 1e-5)
    for sequence in output.sequences:
        assert sequence.text == tokenizer.decode(sequence.tokens, False)
        assert sequence.score == sequence.cum_logprob / len(sequence.tokens)
        assert sequence.finish_reason == "length"


def test_beam_search_takes_prompts_as_generate_does(llm):
    params = BeamSearchParams(1, 4)
    outputs = llm.beam_search([PROMPTS[3], {"prompt_token_ids": PROMPTS[4]}], params)
    found = [o.sequences[0].tokens for o in outputs]
    tails = expected([PROMPTS[3], PROMPTS[4]], 4)
    assert found == [PROMPTS[3] + tails[0], PROMPTS[4] + tails[1]]
    assert llm.beam_search([], params) == []
    with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is empty"):
        llm.beam_search([[1], []], params)
    with pytest.raises(ValueError, match="beam_width 4 needs max_num_seqs 4, the engine has 3"):
        llm.beam_search([[1]], BeamSearchParams(4, 2))
    assert not llm.engine.has_unfinished


def test_b93_chat_is_the_template_and_nothing_else(llm, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
    assert output.prompt_token_ids == tokenizer.encode("<u>hi:")
    both = llm.chat([messages, messages], SamplingParams(temperature=0), use_tqdm=False)
    assert len(both) == 2


def test_bad_words_do_not_come_about(llm):
    whole = one(llm, "abc").outputs[0].text
    word = whole[2:4]
    assert word not in one(llm, "abc", bad_words=[word]).outputs[0].text
