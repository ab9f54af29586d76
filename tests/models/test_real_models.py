"""The registry's real models against stored results of transformers (tests/parity/make_real.py).

Ten prompts as one ragged batch (English, code, Chinese, emoji, nearly empty, 700 tokens), prefilled
in chunks, then 64 greedy tokens each. Logits are within 2e-3 of transformers' (both are float32; a
logit is a sum of hundreds of products, in tens); the texts are identical, their closest call being
0.001 apart.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint.load import load_model
from models.checkpoint.registry import fetch
from tests.models.paged_run import poisoned_cache, step

GOLDENS = Path(__file__).parent.parent / "parity" / "goldens"
PAGE_SIZE = 16
WIDTH = 128  # rows of a prefill step
NUM_TOKENS = 64


def greedy(config, params, prompts):
    """(logits after each prompt [S, V], NUM_TOKENS greedy tokens of each [S, NUM_TOKENS])."""
    num_slots, lens = len(prompts), np.array([len(prompt) for prompt in prompts], np.int32)
    pages_S = -(-(lens + NUM_TOKENS) // PAGE_SIZE)
    first_S = 1 + np.cumsum(pages_S) - pages_S  # a row's later entries are the next slots' pages
    table_SM = jnp.asarray(first_S[:, None] + np.arange(pages_S.max()), jnp.int32)
    cache = poisoned_cache(config, 1 + int(pages_S.sum()), PAGE_SIZE)

    def advance(cache, tokens_T, q_len_S, kv_len_S):
        slots = (np.cumsum(q_len_S) - q_len_S, q_len_S, kv_len_S, lens)
        return step(
            config,
            params,
            cache,
            jnp.asarray(tokens_T, jnp.int32),
            tuple(jnp.asarray(x, jnp.int32) for x in slots),
            table_SM,
            max_q_len=1 if len(tokens_T) == num_slots else WIDTH,
            attention_impl="auto",
        )

    done_S, prompt_logits = np.zeros(num_slots, np.int32), {}
    while (done_S < lens).any():
        # Fill the rows of a step with what the prompts still lack, the first ones first.
        left_S = lens - done_S
        q_len_S = np.clip(WIDTH - (np.cumsum(left_S) - left_S), 0, left_S)
        new = [p[d : d + n] for p, d, n in zip(prompts, done_S, q_len_S, strict=True)]
        tokens_T = np.resize(np.concatenate(new), WIDTH)
        done_S = done_S + q_len_S
        logits_TV, cache = advance(cache, tokens_T, q_len_S, done_S)
        for s in np.flatnonzero((q_len_S > 0) & (done_S == lens)):
            prompt_logits[s] = np.asarray(logits_TV[q_len_S.cumsum()[s] - 1])
    first_SV = np.stack([prompt_logits[s] for s in range(num_slots)])
    tokens_KS = [first_SV.argmax(-1)]
    for k in range(1, NUM_TOKENS):
        ones_S = np.ones(num_slots, np.int32)
        logits_SV, cache = advance(cache, tokens_KS[-1], ones_S, lens + k)
        tokens_KS.append(np.asarray(jnp.argmax(logits_SV, -1)))
    return first_SV, np.stack(tokens_KS, axis=1)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_logits_and_greedy_text_of_ten_prompts(name):
    golden = json.loads((GOLDENS / f"real_{name}.json").read_text(encoding="utf-8"))
    config, params = load_model(fetch(name), "float32", progress=False)
    logits_SV, tokens_SK = greedy(config, params, [row["ids"] for row in golden])
    for row, logits_V, tokens_K in zip(golden, logits_SV, tokens_SK, strict=True):
        np.testing.assert_allclose(
            logits_V[row["top_ids"]], row["top_logits"], rtol=0, atol=2e-3, err_msg=row["text"]
        )
        assert tokens_K.tolist() == row["greedy"], row["text"]
    jax.clear_caches()  # the two models' programs and weights need not be held together
