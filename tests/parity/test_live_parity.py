"""Every family against transformers, live: the tiny models with other random weights than the
stored ones, written by transformers, read by the loader. Attention is the default one for families
that ask most of it, and elsewhere by definition, which compiles fast."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint.load import load_model
from tests.models.paged_run import run, run_rotated_to
from tests.parity.make_tiny import VARIANTS, build, expected, save, sequence

GOLDENS = Path(__file__).parent / "goldens"
DEFAULT_ATTENTION = ("gemma2", "gemma3", "llama_biased_mqa", "mistral")
TOLERANCE = 1e-4  # of the largest logit; see tests/models/test_family_parity.py


def relative_error(logits_TV, expected_TV):
    return float(np.abs(logits_TV - expected_TV).max() / np.abs(expected_TV).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_chunks_decode_and_far_positions(name, tmp_path):
    model = build(name, seed=1)
    golden = expected(model)
    save(model, tmp_path)
    config, params = load_model(tmp_path, "float32")
    tokens = golden["tokens"]
    settings = {"width": 23, "attention_impl": "auto" if name in DEFAULT_ATTENTION else "reference"}
    for key, chunks in (
        ("logits", [23, *[1] * 5]),
        ("logits", [3, 14, 6, *[1] * 5]),
        ("crossing_logits", [12, *[1] * 16]),
    ):
        prompt_len = 23 if key == "logits" else 12
        (logits_TV,) = run(config, params, [tokens], [chunks], prompt_lens=[prompt_len], **settings)
        assert relative_error(logits_TV, golden[key]) < TOLERANCE, (key, chunks)
    if "far_tokens" in golden:
        far_TV = run_rotated_to(config, params, golden["far_tokens"], golden["far_positions"], 12)
        assert relative_error(far_TV, golden["far_logits"]) < TOLERANCE


def test_twenty_thousand_tokens_in_chunks():
    """A true history of 20,008 tokens: one pass there, ten chunks here."""
    model = build("llama_llama3")
    model.set_attn_implementation("sdpa")  # does not hold tokens x tokens
    tokens = sequence(20_008)
    with torch.no_grad():
        expected_TV = model(torch.as_tensor(tokens)[None], logits_to_keep=8).logits[0].numpy()
    directory = GOLDENS / "llama_llama3"
    config, params = load_model(directory, "float32")
    chunks = [2048] * 9 + [20_008 - 9 * 2048]
    (logits_TV,) = run(config, params, [tokens], [chunks], page_size=64, width=2048)
    assert relative_error(logits_TV[-8:], expected_TV) < TOLERANCE
