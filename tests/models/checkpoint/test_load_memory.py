"""Peak host memory of loading, measured in a process of its own: below 1.6 times the float32 model
whatever the dtype and the format."""

import json
import subprocess
import sys

import numpy as np
import pytest

from models.checkpoint.load import load_model
from models.checkpoint.orbax import save
from models.checkpoint.registry import fetch
from tests.models.checkpoint.files import (
    BFLOAT16,
    LLAMA,
    SMALL_GGUF,
    as_gguf,
    hf_tensors,
    write_gguf,
    write_hf,
)

LIMIT = 1.6


def _measure(path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.models.checkpoint.loading", str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# 50 million parameters, 200 MB in float32; the embedding is two fifths of it.
BIG = {
    **LLAMA,
    "vocab_size": 40_000,
    "hidden_size": 512,
    "intermediate_size": 2_048,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
BIG_GGUF = {
    **SMALL_GGUF,
    "embedding_length": 512,
    "feed_forward_length": 2_048,
    "block_count": 7,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "attention.key_length": 64,
    "attention.value_length": 64,
}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The same model as safetensors in two dtypes, GGUF and orbax."""
    directory = tmp_path_factory.mktemp("big")
    config, tensors = hf_tensors(BIG)
    write_hf(directory / "float32", BIG, tensors, np.float32)
    write_hf(directory / "bfloat16", BIG, tensors, BFLOAT16, shards=2)
    write_gguf(directory / "gguf", "llama", BIG_GGUF, as_gguf("llama", config, tensors))
    save(directory / "orbax", *load_model(directory / "float32", "float32", progress=False))
    return directory


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("gguf", "float32"),
        ("orbax", "float32"),
    ],
)
def test_peak_memory_of_a_synthetic_model(big, stored, dtype):
    cost = _measure(big / stored, dtype)
    assert cost["float32_bytes"] > 180e6
    assert cost["peak_bytes"] < LIMIT * cost["float32_bytes"]
    assert cost["left_bytes"] > 0.4 * cost["float32_bytes"]  # it measures the model at all


@pytest.mark.real_model
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_peak_memory_of_a_real_model(model):
    cost = _measure(fetch(model), "float32")
    assert cost["left_bytes"] > 0.9 * cost["float32_bytes"]
    assert cost["peak_bytes"] < LIMIT * cost["float32_bytes"]
