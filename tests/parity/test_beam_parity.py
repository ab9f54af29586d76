"""Beam search and prompt log-probabilities against transformers, on tiny random models."""

import numpy as np
import pytest
import torch

from engine import LLM, BeamSearchParams, SamplingParams
from models.checkpoint.load import load_model
from tests.parity.make_tiny import build, save, sequence

NEW, WIDTH = 12, 4
PROMPTS = [list(map(int, sequence(21)))[start:] for start in (0, 9, 18)]
# Logits agree to 1e-4 of the largest (see test_live_parity); these have magnitudes of about 10.
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["smollm2", "gemma2"])
def both(request, tmp_path_factory):
    model = build(request.param, seed=1)
    directory = tmp_path_factory.mktemp(request.param)
    save(model, directory)
    config, params = load_model(directory, "float32")
    settings = {"max_num_seqs": 2 * WIDTH, "max_model_len": 48, "page_size": 4}
    return model, LLM.from_params(config, params, max_num_batched_tokens=16, **settings)


def test_beams_that_do_not_end(both):
    """transformers divides by the generated tokens, vLLM (and we) by all: compare the sums."""
    model, llm = both
    model.generation_config.eos_token_id = None
    search = BeamSearchParams(WIDTH, NEW, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, search), strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.as_tensor([prompt]),
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                do_sample=False,
                max_new_tokens=NEW,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        assert [s.tokens for s in output.sequences] == expected.sequences.tolist()
        np.testing.assert_allclose(
            [s.cum_logprob for s in output.sequences],
            expected.sequences_scores.numpy() * NEW,
            rtol=0,
            atol=NEW * LOGPROB_TOLERANCE,
        )


def test_prompt_logprobs(both):
    model, llm = both
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        with torch.no_grad():
            logits_TV = model(torch.as_tensor([prompt])).logits[0].double()
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1).numpy()
        for position, found in enumerate(output.prompt_logprobs[1:], start=1):
            expected_V = logprobs_TV[position - 1]
            best = np.argsort(-expected_V, kind="stable")[:3].tolist()
            assert list(found) == list(dict.fromkeys([prompt[position], *best]))
            np.testing.assert_allclose(
                [entry.logprob for entry in found.values()],
                expected_V[list(found)],
                rtol=0,
                atol=LOGPROB_TOLERANCE,
            )
