"""The registry's real models against transformers, live: logits at every position.

transformers reads the same GGUF file with its own reader. Both sides are float32. Of the long
prompt the last positions are compared: some before them are so ill-conditioned that transformers'
own float32 and float64 results are 8e-4 apart.
"""

import gc
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from models.checkpoint.load import load_model
from models.checkpoint.registry import fetch
from tests.models.paged_run import run
from tests.parity.make_real import load_reference

GOLDENS = Path(__file__).parent / "goldens"
WIDTH = 128
KEEP = 20  # positions compared, the last ones


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_logits_at_every_position(name):
    """An English sentence, Chinese (both whole), and 700 tokens, beyond Gemma's window of 512."""
    rows = json.loads((GOLDENS / f"real_{name}.json").read_text(encoding="utf-8"))
    prompts = [np.array(rows[i]["ids"]) for i in (6, 2, 9)]
    model = load_reference(fetch(name))
    with torch.no_grad():
        expected = [
            model(torch.as_tensor(ids)[None], logits_to_keep=KEEP).logits[0].numpy()
            for ids in prompts
        ]
    del model
    gc.collect()
    config, params = load_model(fetch(name), "float32", progress=False)
    for ids, expected_TV in zip(prompts, expected, strict=True):
        chunks = [WIDTH] * (len(ids) // WIDTH) + [len(ids) % WIDTH]
        (logits_TV,) = run(
            config, params, [ids], [chunks], page_size=16, max_len=len(prompts[-1]), width=WIDTH
        )
        error = float(np.abs(logits_TV[-KEEP:] - expected_TV).max())
        print(f"{name}: {len(ids)} tokens, largest error {error:.1e}")
        assert error < 2e-3
    jax.clear_caches()
