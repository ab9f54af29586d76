"""Presets against the parameter counts and cache sizes that the models' publishers give."""

import jax.numpy as jnp
import pytest

from models.kv_cache import kv_bytes_per_token
from models.model import cache_specs, declare
from models.params import num_params, size_bytes
from models.presets import PRESETS, preset

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini-4k": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
    "gpt2": 124_439_808,
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameter_count(name):
    assert num_params(declare(preset(name))) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "gib"), [("llama-2-7b", 2.0), ("llama-3.1-8b", 0.5), ("mistral-7b-v0.3", 0.5)]
)
def test_cache_of_4096_tokens(name, gib):
    """Two values of 2 bytes for 32 layers, 32 or 8 heads of 128 channels."""
    per_token = kv_bytes_per_token(cache_specs(preset(name)), jnp.float16)
    assert 4096 * per_token == gib * 2**30


def test_bytes_follow_the_dtype_except_for_norms():
    declaration = declare(preset("llama-3.1-8b"))
    norms = (2 * 32 + 1) * 4096
    assert size_bytes(declaration, jnp.bfloat16) == 2 * 8_030_261_248 + 2 * norms


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"llama-9.*llama-2-7b"):
        preset("llama-9")
